// The products of a decode step whose sums are longest or whose outputs are fewest, O and down: k is split over a cluster of four
// blocks, each of which multiplies 64 outputs by all rows and has weights and inputs brought by the copy engine. Then each block adds
// what the four have for 16 of the outputs, and the residual. Weights never change: they are asked for before the kernel before has ended.
//
// With squares it leaves what kernels/thin.cu wants of a product that ends in the stream.
#if HOPPER && BF16 && HIDDEN % 64 == 0 && HEADS * HS % 64 == 0 && INTER % 64 == 0
#define SPLIT 4                                                 // blocks of a cluster; also known to the host
#define SPLIT_STAGES(N) (N == 16 ? 10 : N == 32 ? 8 : 6)  // likewise

// mmaRows adds a product of 16 of k, 64 outputs by N rows, to d, or sets d if add is 0.
template <int N> __device__ __forceinline__ void mmaRows(float* d, u64 a, u64 b, int add);
template <> __device__ __forceinline__ void mmaRows<16>(float* d, u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %10, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "r"(add));
}
template <> __device__ __forceinline__ void mmaRows<32>(float* d, u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(add));
}
template <> __device__ __forceinline__ void mmaRows<64>(float* d, u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(add));
}

// clusterBarrier waits for all threads of the cluster, and lets them see what the others wrote.
__device__ __forceinline__ void clusterBarrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// ofBlock reads the shared memory of a block of the cluster, at the place that `at` is in one's own.
__device__ __forceinline__ float ofBlock(u32 at, int block) {
  float v;
  asm volatile("{ .reg .u32 a; mapa.shared::cluster.u32 a, %1, %2; ld.shared::cluster.f32 %0, [a]; }" : "=f"(v) : "r"(at), "r"(block) : "memory");
  return v;
}

// splitAdd: grid (n / 64 * SPLIT), clusters of SPLIT blocks, 160 threads: four warps multiply, the fifth asks for what they need. weights is
// (k, outputs), inputs (k, rows); norm, next and squares may be null.
template <int N> __device__ __forceinline__ void splitAdd(const Map* weights, const Map* inputs, const int* meta, int n, int k, int rows, float* squares, const T* norm, T* next, float* out) {
  constexpr int SLOTS = SPLIT_STAGES(N), W = 64 * 128, BYTES = W + N * 128, PART = 68;  // PART: outputs of a row of sums, and a shift of banks
  extern __shared__ __align__(1024) char memory[];
  __shared__ u64 barriers[2 * SLOTS];
  FIRST;
  const int lane = threadIdx.x & 31, warp = together(threadIdx.x / 32), rank = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT;
  const u32 ring = together((sharedAt(memory) + 1023) & ~1023u), full = together(sharedAt(barriers)), empty = full + SLOTS * 8;
  const int chunks = (k / 64 - rank + SPLIT - 1) / SPLIT;  // of 64 of k: every SPLIT-th
  if (threadIdx.x < SLOTS) {
    barrierInit(full + threadIdx.x * 8, 1);
    barrierInit(empty + threadIdx.x * 8, 4);
    seen();
  }
  __syncthreads();
  float held[N / 8];  // of the stream, read early
  const int m = threadIdx.x % 16, at = tile * 64 + rank * 16 + m;
  int live = 0;
  if (warp == 4) {
    if (lane == 0) {
      auto weight = [&](int i) { bring2(ring + i % SLOTS * BYTES, weights, (rank + SPLIT * i) * 64, tile * 64, full + i % SLOTS * 8); };
      auto input = [&](int i) { bring2(ring + i % SLOTS * BYTES + W, inputs, (rank + SPLIT * i) * 64, 0, full + i % SLOTS * 8); };
      const int early = min(SLOTS, chunks);
      for (int i = 0; i < early; i++) {
        barrierExpect(full + i * 8, BYTES);
        weight(i);
      }
      AFTER;
      for (int i = 0; i < early; i++) input(i);
      for (int i = early; i < chunks; i++) {
        barrierWait(empty + i % SLOTS * 8, (i / SLOTS & 1) ^ 1);
        barrierExpect(full + i % SLOTS * 8, BYTES);
        weight(i);
        input(i);
      }
    }
    __syncwarp();
  } else {
    AFTER;
    live = min(meta[H_ROWS], rows);
#pragma unroll
    for (int q = 0; q < N / 8; q++) {
      int row = threadIdx.x / 16 + 8 * q;
      held[q] = row < live ? out[(size_t)row * n + at] : 0.f;
    }
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0.f;  // k may be too short for all blocks
    for (int i = 0; i < chunks; i++) {
      u32 a = operand(ring + i % SLOTS * BYTES, 16), b = operand(ring + i % SLOTS * BYTES + W, 16);
      barrierWait(full + i % SLOTS * 8, i / SLOTS & 1);
      wgFence();
#pragma unroll
      for (int j = 0; j < 4; j++) mmaRows<N>(d, matrix(a + 2 * j), matrix(b + 2 * j), i > 0 || j > 0);
      wgCommit();
      if (i == 0) continue;
      wgWait<1>();
      if (lane == 0) barrierArrive(empty + (i - 1) % SLOTS * 8);
    }
    wgWait<0>();
    asm volatile("bar.sync 1, 128;" ::: "memory");  // all have read the ring
    float* part = (float*)(memory + (ring - sharedAt(memory))) + warp * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < N / 2; i++) part[(i / 4 * 8 + 2 * (lane & 3) + (i & 1)) * PART + (i & 2) * 4] = d[i];
  }
  clusterBarrier();
  if (warp < 4) {
#pragma unroll
    for (int q = 0; q < N / 8; q++) {
      int row = threadIdx.x / 16 + 8 * q;
      float h = held[q];
#pragma unroll
      for (int block = 0; block < SPLIT; block++) h += ofBlock(ring + (row * PART + rank * 16 + m) * 4, block);
      float s = h * h;
#pragma unroll
      for (int o = 8; o > 0; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
      if (row >= live) continue;
      out[(size_t)row * n + at] = h;
      if (!squares) continue;
      next[(size_t)row * n + at] = narrow(h * widen(norm[at]));
      if (m == 0) squares[(size_t)row * (HIDDEN / 16) + at / 16] = s;
    }
  }
  clusterBarrier();  // the others have read
}

#define SPLIT_ADD(N)                                                                                                                              \
  extern "C" __global__ void __launch_bounds__(160, 2) splitAdd##N(const __grid_constant__ Map weights, const __grid_constant__ Map inputs,        \
                                                                   const int* meta, int n, int k, int rows, float* squares, const T* norm,        \
                                                                   T* next, float* out) {                                                         \
    splitAdd<N>(&weights, &inputs, meta, n, k, rows, squares, norm, next, out);                                                                   \
  }
SPLIT_ADD(16)
SPLIT_ADD(32)
SPLIT_ADD(64)
#endif
