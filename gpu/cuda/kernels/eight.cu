// Products with weights of eight bits (E4M3) that have a scale for each output: (n, k) bytes, (n) floats; k is a multiple of 16.
#if BF16

// narrowWeights makes them of rows of k bfloat16: grid (row), 256 threads.
extern "C" __global__ void narrowWeights(const T* w, u8* out, float* scales, int k) {
  __shared__ float tops[9];
  w += (size_t)blockIdx.x * k;
  out += (size_t)blockIdx.x * k;
  float top = 0.f;
  for (int i = threadIdx.x; i < k; i += 256) top = fmaxf(top, fabsf(widen(w[i])));
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = top;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 8; i++) top = fmaxf(top, tops[i]);
    tops[8] = top > 0.f ? top / 448.f : 1.f;
    scales[blockIdx.x] = tops[8];
  }
  __syncthreads();
  float scale = tops[8];
  for (int i = threadIdx.x; i < k; i += 256) out[i] = (u8)narrow8(widen(w[i]) / scale);
}

// widenWeights makes bfloat16 of them again, for products of many rows: grid (row), 256 threads.
extern "C" __global__ void widenWeights(const u8* w, const float* scales, T* out, int k) {
  BEGIN;
  const uint4* from = (const uint4*)(w + (size_t)blockIdx.x * k);
  uint4* to = (uint4*)(out + (size_t)blockIdx.x * k);
  float s = scales[blockIdx.x];
  for (int i = threadIdx.x; i < k / 16; i += 256) {
    uint4 v = from[i], wide[2];
    const u32* in = &v.x;
    u32* o = &wide[0].x;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 lo, hi;
      widen8(in[j / 2], lo, hi);
      o[j] = pack(__uint_as_float(lo << 16) * s, __uint_as_float(lo & 0xffff0000u) * s);
      o[j + 1] = pack(__uint_as_float(hi << 16) * s, __uint_as_float(hi & 0xffff0000u) * s);
    }
    to[2 * i] = wide[0];
    to[2 * i + 1] = wide[1];
  }
}

#define EIGHT_WARPS 8
#define EIGHT_STAGE 2048  // bytes: 16 outputs x 128 of k

// stages8 is how many stages the ring of a warp has; more rows need room for their sums.
__device__ constexpr int stages8(int mt) { return mt <= 2 ? 6 : 4; }

// Ring8 is where a warp stands in the weights that it loads: chunks of 128 of k, of tile after tile of 16 outputs.
template <int STAGES8> struct Ring8 {
  const u8* w;
  int n, k, tiles, tile, chunk, slot, lane, warp;
  u32 base;
  __device__ __forceinline__ void next() {
    if (tile < tiles) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int r = (lane >> 3) + 4 * j, c = lane & 7, at = chunk * 128 + c * 16;
        const u8* from = w + (size_t)min(tile * 16 + r, n - 1) * k;
        copy16(base + slot * EIGHT_STAGE + r * 128 + ((c ^ (r & 1) << 2) << 4), at < k ? from + at : from, at < k ? 16 : 0);
      }
      chunk += EIGHT_WARPS;
      if (chunk * 128 >= k) { chunk = warp; tile += gridDim.x; }
      if (chunk * 128 >= k) tile = tiles;  // k has no part for this warp
    }
    commit();
    slot = slot + 1 == STAGES8 ? 0 : slot + 1;
  }
};

// put8 stores an element of a product. kind: 1 adds, 2 writes float (else T).
__device__ __forceinline__ void put8(void* out, float v, size_t at, int kind) {
  if (kind & 2) {
    float* to = (float*)out + at;
    *to = kind & 1 ? *to + v : v;
  } else {
    ((T*)out)[at] = narrow(v);
  }
}

// product8 is out = x w^T (+ out) for up to MT * 8 rows of x. The order of k is permuted
// equally in both operands, so that a lane reads 16 weights at a time. Few rows hold all their inputs of a chunk before they wait
// for the weights; many take a quarter at a time, which the first cache has.
template <int MT> __device__ __forceinline__ void product8(const T* x, const u8* w, const float* scales, void* out, int n, int k, int rows, int kind) {
  constexpr int STAGES8 = stages8(MT), HELD = MT <= 2 ? 4 : 1;
  extern __shared__ __align__(128) char ring8[];
  __shared__ float sums[EIGHT_WARPS][MT * 8][17];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tiles = (n + 15) / 16;
  FIRST;
  char* mine = ring8 + warp * STAGES8 * EIGHT_STAGE;
  Ring8<STAGES8> r = {w, n, k, tiles, (int)blockIdx.x, warp, 0, lane, warp, sharedAt(mine)};
  if (warp * 128 >= k) r.tile = tiles;
#pragma unroll
  for (int i = 0; i < STAGES8 - 1; i++) r.next();
  AFTER;
  int slot = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[MT][4] = {};
    for (int chunk = warp; chunk * 128 < k; chunk += EIGHT_WARPS) {
      uint4 v[HELD][MT];
      auto inputs = [&](int quarter) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
          int row = m * 8 + g, at = chunk * 128 + (quarter >> 1) * 64 + t * 16 + (quarter & 1) * 8;
          v[quarter % HELD][m] = row < rows && at < k ? *(const uint4*)(x + (row * k + at)) : make_uint4(0, 0, 0, 0);
        }
      };
#pragma unroll
      for (int quarter = 0; quarter < HELD; quarter++) inputs(quarter);
      r.next();
      arrived<STAGES8 - 1>();
      __syncwarp();
      const char* stage = mine + slot * EIGHT_STAGE;
      uint4 lo, hi;
#pragma unroll
      for (int quarter = 0; quarter < 4; quarter++) {
        if (quarter % 2 == 0) {
          int c = (quarter * 2 + t) ^ (g & 1) << 2;
          lo = *(const uint4*)(stage + g * 128 + c * 16);
          hi = *(const uint4*)(stage + (g + 8) * 128 + c * 16);
        }
        if (HELD == 1 && quarter > 0) inputs(quarter);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          u32 a[4];
          widen8((&lo.x)[quarter % 2 * 2 + j], a[0], a[2]);
          widen8((&hi.x)[quarter % 2 * 2 + j], a[1], a[3]);
#pragma unroll
          for (int m = 0; m < MT; m++) {
            const u32* b = &v[quarter % HELD][m].x + 2 * j;
            multiply(acc[m], a, b[0], b[1]);
          }
        }
      }
      __syncwarp();
      slot = slot + 1 == STAGES8 ? 0 : slot + 1;
    }
    __syncthreads();  // the sums of the tile before have been read
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[warp][m * 8 + 2 * t + (j & 1)][g + (j >> 1) * 8] = acc[m][j];
    __syncthreads();
    int i = threadIdx.x % 16, at = tile * 16 + i;
    for (int row = threadIdx.x / 16; row < min(rows, MT * 8) && at < n; row += 16) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < EIGHT_WARPS; j++) sum += sums[j][row][i];
      put8(out, sum * scales[at], (size_t)row * n + at, kind);
    }
  }
  arrived<0>();
}

#define EIGHT(name, MT)                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const T* x, const u8* w, const float* scales, void* out, int n, int k, int rows, int kind) { \
    product8<MT>(x, w, scales, out, n, k, rows, kind);                                                                                     \
  }
EIGHT(product8x8, 1)
EIGHT(product8x16, 2)
EIGHT(product8x32, 4)
EIGHT(product8x64, 8)

#if HOPPER
#define EIGHT_OUTPUTS 128                                // of a block of product8Split; also known to the host
#define EIGHT_SLOTS(N) (N == 16 ? 5 : N == 64 ? 3 : 4)  // of its ring, likewise

// mmaHeld adds a product of 16 of k, 64 outputs, of whose weights each thread holds eight, by N rows, to d.
template <int N> __device__ __forceinline__ void mmaHeld(float* d, const u32* a, u64 b);
template <> __device__ __forceinline__ void mmaHeld<16>(float* d, const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <> __device__ __forceinline__ void mmaHeld<32>(float* d, const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <> __device__ __forceinline__ void mmaHeld<64>(float* d, const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
        "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <> __device__ __forceinline__ void mmaHeld<128>(float* d, const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "
      "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
        "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]),
        "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
        "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// multiply8 is the work of four warps: d are the sums of the 64 outputs of a box, in the order of the matrix instructions. Each thread widens
// the weights that it holds for these, half a chunk while the half before is multiplied.
template <int N, int SLOTS> __device__ __forceinline__ void multiply8(const Feed<N, SLOTS, 2, 2>& ring, const char* memory, float* d, int box, int chunks) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const char* mine = memory + box * ring.W + ((threadIdx.x / 32 & 3) * 16 + g) * 128 + 2 * t;
  u32 a[2][4][4];
#pragma unroll
  for (int i = 0; i < N / 2; i++) d[i] = 0.f;
  for (int i = 0; i < chunks; i++) {
    const char* weights = mine + i % SLOTS * ring.BYTES;
    const u32 b = operand(ring.stage(i) + 2 * ring.W, 16);
    barrierWait(ring.full + i % SLOTS * 8, i / SLOTS & 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      wgWait<1>();  // what this half held before has been multiplied
      if (half == 1 && i > 0 && lane == 0) barrierArrive(ring.empty + (i - 1) % SLOTS * 8);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const char* at = weights + (((half * 4 + j) ^ g) << 4);
#pragma unroll
        for (int i = 0; i < 4; i++) a[half][j][i] = widen8x2(__byte_perm(*(const u16*)(at + i % 2 * 8 * 128 + i / 2 * 8), 0, 0x1404));
      }
      wgFence();
#pragma unroll
      for (int j = 0; j < 4; j++) mmaHeld<N>(d, a[half][j], matrix(b + half * N * 128 / 16 + 2 * j));
      wgCommit();
    }
  }
  wgWait<0>();
}

// product8Split is product8 for N rows: grid (n / 128 * split, rows / N), clusters of split blocks, 288 threads: four warps multiply with 64
// outputs and four with the next ones; the ninth asks for what they need. k is split over the blocks of a cluster; each gives what it has for
// some of the outputs to the block that adds these. weights is (k / 2, outputs) pairs of bytes, inputs (k, rows).
template <int N> __device__ __forceinline__ void product8Split(const Map* weights, const Map* inputs, const float* scales, void* out, int n, int k, int rows, int split, int kind) {
  extern __shared__ __align__(1024) char feeds[];
  __shared__ u64 barriers[2 * EIGHT_SLOTS(N)];
  FIRST;
  const int lane = threadIdx.x & 31, warp = together(threadIdx.x / 32), rank = blockIdx.x % split, tile = blockIdx.x / split * EIGHT_OUTPUTS, first = blockIdx.y * N;
  const int chunks = ((k + 127) / 128 - rank + split - 1) / split, warps = 8 / split;  // whose outputs a block adds
  const int outputs[2] = {tile, tile + 64};
  Feed<N, EIGHT_SLOTS(N), 2, 2> ring;
  ring.begin(feeds, barriers, 8);
  char* memory = feeds + (ring.at - sharedAt(feeds));
  float d[N / 2];
  if (warp == 8) {
    if (lane == 0) ring.bring(weights, inputs, rank, split, chunks, outputs, first);
    __syncwarp();
  } else {
    AFTER;
    multiply8(ring, memory, d, warp / 4, chunks);
  }
  clusterArrive();
  clusterWait();  // all blocks have read their rings, which now take parts: of each block and warp, 16 outputs, rows, and a shift of banks
  if (warp < 8) {
    const u32 to = atBlock(ring.at + (((rank * warps + warp % warps) * 16 + (lane >> 2)) * (N + 2) + 2 * (lane & 3)) * 4, warp / warps);
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) give(to + ((i & 2) * 4 * (N + 2) + i / 4 * 8) * 4, d[i], d[i + 1]);
  }
  clusterArrive();
  clusterWait();
  if (warp == 8) return;
  const int m = threadIdx.x % 16;
  for (int w = 0; w < warps; w++) {
    int at = tile + (rank * warps + w) * 16 + m;
    for (int row = threadIdx.x / 16; row < min(rows - first, N) && at < n; row += 16) {
      float sum = 0.f;
      for (int block = 0; block < split; block++) sum += ((const float*)memory)[((block * warps + w) * 16 + m) * (N + 2) + row];
      put8(out, sum * scales[at], (size_t)(first + row) * n + at, kind);
    }
  }
}

#define EIGHT_SPLIT(N)                                                                                                                            \
  extern "C" __global__ void __launch_bounds__(288, N == 128 ? 1 : 2) product8Split##N(const __grid_constant__ Map weights, const __grid_constant__ Map inputs,  \
                                                                        const float* scales, void* out, int n, int k, int rows, int split,       \
                                                                        int kind) {                                                              \
    product8Split<N>(&weights, &inputs, scales, out, n, k, rows, split, kind);                                                                   \
  }
EIGHT_SPLIT(16)
EIGHT_SPLIT(32)
EIGHT_SPLIT(64)
EIGHT_SPLIT(128)
#endif
#endif
