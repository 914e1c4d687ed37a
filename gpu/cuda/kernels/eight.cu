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

// product8 is out = x w^T (+ out) for up to MT * 8 rows of x. kind: 1 adds, 2 writes float (else T). The order of k is permuted
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
      sum *= scales[at];
      if (kind & 2) {
        float* to = (float*)out + (size_t)row * n + at;
        *to = kind & 1 ? *to + sum : sum;
      } else {
        ((T*)out)[(size_t)row * n + at] = narrow(sum);
      }
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
#endif
