# A node with the CUDA back end. The base has glibc, NVRTC and cuBLASLt; the driver's libcuda comes from the container
# runtime of the host. Build: docker build -f deploy/cuda.Dockerfile --build-arg NODE=ctxnode -t meridian/ctxnode-cuda bin
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04
ARG NODE
COPY --chmod=0755 ${NODE}-cuda /node
RUN ln -s /node /${NODE} && mkdir -p /data /kernel && chown 65532:65532 /data && chmod 0777 /kernel
USER 65532:65532
WORKDIR /data
ENV HOME=/data
ENTRYPOINT ["/node"]
