// Hopper's products of a decode step of up to 64 rows, each with what surrounds it, as in kernels/thin.cu: norm before, gate or residual
// behind, and the norm split in two. The copy engine brings weights and inputs into a ring in shared memory, and groups of four warps
// multiply 64 outputs by all rows. They need few registers, so blocks of the next kernel find room beside them; weights never change, and are
// asked for before the kernel before has ended.
#if HOPPER && BF16 && HIDDEN % 64 == 0 && HEADS * HS % 64 == 0 && INTER % 64 == 0
#define SPLIT 4                                           // blocks that share k; also known to the host
#define SPLIT_STAGES(N) (N == 16 ? 10 : N == 32 ? 8 : 5)  // of the ring, likewise
#define PAIR_STAGES(N) (N == 16 ? 10 : N == 32 ? 6 : 5)   // likewise

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

// multiply is the work of four warps: d are the sums of the 64 outputs of a box, in the order of the matrix instructions.
template <int N, int SLOTS, int BOXES> __device__ __forceinline__ void multiply(const Feed<N, SLOTS, BOXES, 1>& ring, float* d, int box, int chunks) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) d[i] = 0.f;  // there may be no chunk
  for (int i = 0; i < chunks; i++) {
    const u32 a = operand(ring.stage(i) + box * ring.W, 16), b = operand(ring.stage(i) + BOXES * ring.W, 16);
    barrierWait(ring.full + i % SLOTS * 8, i / SLOTS & 1);
    wgFence();
#pragma unroll
    for (int j = 0; j < 4; j++) mmaRows<N>(d, matrix(a + 2 * j), matrix(b + 2 * j), i > 0 || j > 0);
    wgCommit();
    if (i == 0) continue;
    wgWait<1>();
    if ((threadIdx.x & 31) == 0) barrierArrive(ring.empty + (i - 1) % SLOTS * 8);
  }
  wgWait<0>();
}

// rowScale is the factor of the norm of a row, of which 16 threads beside each other ask.
__device__ __forceinline__ float rowScale(const float* squares, int row) {
  float s = 0.f;
#pragma unroll
  for (int i = threadIdx.x % 16; i < HIDDEN / 16; i += 16) s += squares[(size_t)row * (HIDDEN / 16) + i];
#pragma unroll
  for (int o = 8; o > 0; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
  return rsqrtf(s / HIDDEN + (float)(EPS));
}

// split: grid (n / 64 * SPLIT), clusters of SPLIT blocks, 160 threads: four warps multiply, the fifth asks for what they need. k is split over
// the blocks of a cluster; each gives what it has for 16 of the 64 outputs to the block that adds these. weights is (k, outputs), inputs
// (k, rows). Without ADDS, out is the product of the inputs' norm, of which squares is known; with it, it is the stream, to which the product
// is added, next gets it times the weight of the norm, and squares its squares.
template <int N, bool ADDS> __device__ __forceinline__ void split(const Map* weights, const Map* inputs, const int* meta, int n, int k, int rows, float* squares, const T* norm, T* next, void* out) {
  extern __shared__ __align__(1024) char feeds[];
  __shared__ u64 barriers[2 * SPLIT_STAGES(N)];
  __shared__ __align__(8) float parts[SPLIT][16][N + 2];  // of each block: outputs, rows, and a shift of banks
  FIRST;
  const int lane = threadIdx.x & 31, warp = together(threadIdx.x / 32), rank = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT * 64;
  const int chunks = (k / 64 - rank + SPLIT - 1) / SPLIT;
  Feed<N, SPLIT_STAGES(N), 1, 1> ring;
  ring.begin(feeds, barriers, 4);
  clusterArrive();
  float held[N / 8];  // of the stream, or the factors of the rows; read early
  const int m = threadIdx.x % 16, at = tile + rank * 16 + m;
  int live = 0;
  if (warp == 4) {
    if (lane == 0) ring.bring(weights, inputs, rank, SPLIT, chunks, &tile, 0);
    __syncwarp();
  } else {
    AFTER;
    live = min(meta[H_ROWS], rows);
#pragma unroll
    for (int q = 0; q < N / 8; q++) {
      int row = min((int)threadIdx.x / 16 + 8 * q, live - 1);
      held[q] = ADDS ? ((const float*)out)[(size_t)row * n + at] : rowScale(squares, row);
    }
    float d[N / 2];
    multiply(ring, d, 0, chunks);
    clusterWait();  // all blocks are there
    const u32 to = atBlock(sharedAt(&parts[rank][lane >> 2][2 * (lane & 3)]), warp);
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) give(to + ((i & 2) * 4 * (N + 2) + i / 4 * 8) * 4, d[i], d[i + 1]);
  }
  if (warp == 4) clusterWait();
  clusterArrive();
  clusterWait();
  if (warp < 4) {
#pragma unroll
    for (int q = 0; q < N / 8; q++) {
      int row = threadIdx.x / 16 + 8 * q;
      float h = ADDS ? held[q] : 0.f;
#pragma unroll
      for (int block = 0; block < SPLIT; block++) h += parts[block][m][row];
      if (!ADDS) {
        if (row < live) ((T*)out)[(size_t)row * n + at] = narrow(h * held[q]);
        continue;
      }
      float s = h * h;
#pragma unroll
      for (int o = 8; o > 0; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
      if (row >= live) continue;
      ((float*)out)[(size_t)row * n + at] = h;
      next[(size_t)row * n + at] = narrow(h * widen(norm[at]));
      if (m == 0) squares[(size_t)row * (HIDDEN / 16) + at / 16] = s;
    }
  }
}

// pair is silu(gate) * up: grid (INTER / 64), 288 threads. Four warps multiply with gates and four with ups; the ninth asks for what they
// need.
template <int N> __device__ __forceinline__ void pair(const Map* weights, const Map* inputs, const int* meta, int rows, const float* squares, T* out) {
  extern __shared__ __align__(1024) char feeds[];
  __shared__ u64 barriers[2 * PAIR_STAGES(N)];
  __shared__ float scales[N];
  FIRST;
  const int lane = threadIdx.x & 31, warp = together(threadIdx.x / 32), chunks = HIDDEN / 64;
  const int outputs[2] = {(int)blockIdx.x * 64, INTER + (int)blockIdx.x * 64};
  Feed<N, PAIR_STAGES(N), 2, 1> ring;
  ring.begin(feeds, barriers, 8);
  if (warp == 8) {
    if (lane == 0) ring.bring(weights, inputs, 0, 1, chunks, outputs, 0);
    return;
  }
  AFTER;
  const int live = min(meta[H_ROWS], rows);
#pragma unroll
  for (int q = 0; q < N / 16; q++) {
    int row = threadIdx.x / 16 + 16 * q;
    float s = rowScale(squares, min(row, live - 1));
    if (threadIdx.x % 16 == 0) scales[row] = s;
  }
  float d[N / 2];
  multiply(ring, d, warp / 4, chunks);
  asm volatile("bar.sync 1, 256;" ::: "memory");  // all have read the ring
  float* ups = (float*)(feeds + (ring.at - sharedAt(feeds))) + threadIdx.x % 128;
  if (warp >= 4)
#pragma unroll
    for (int i = 0; i < N / 2; i++) ups[i * 128] = d[i];
  asm volatile("bar.sync 1, 256;" ::: "memory");
  if (warp >= 4) return;
  T* to = out + outputs[0] + warp * 16 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    int row = i / 4 * 8 + 2 * (lane & 3) + (i & 1);
    float g = d[i] * scales[row];
    if (row < live) to[(size_t)row * INTER + (i & 2) * 4] = narrow(g / (1.f + __expf(-g)) * (ups[i * 128] * scales[row]));
  }
}

#define PRODUCTS(N)                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(160, 2) splitAdd##N(const __grid_constant__ Map weights, const __grid_constant__ Map inputs,        \
                                                                   const int* meta, int n, int k, int rows, float* squares, const T* norm,        \
                                                                   T* next, float* out) {                                                         \
    split<N, true>(&weights, &inputs, meta, n, k, rows, squares, norm, next, out);                                                                \
  }                                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(160, 2) splitPlain##N(const __grid_constant__ Map weights, const __grid_constant__ Map inputs,      \
                                                                     const int* meta, int n, int k, int rows, float* squares, const T*, T*,       \
                                                                     T* out) {                                                                    \
    split<N, false>(&weights, &inputs, meta, n, k, rows, squares, (const T*)0, (T*)0, out);                                                       \
  }                                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(288, 1) pair##N(const __grid_constant__ Map weights, const __grid_constant__ Map inputs,            \
                                                               const int* meta, int n, int k, int rows, float* squares, const T*, T*, T* out) {   \
    pair<N>(&weights, &inputs, meta, rows, squares, out);                                                                                         \
  }
PRODUCTS(16)
PRODUCTS(32)
PRODUCTS(64)
#endif
