// The element-wise parts of a layer. The residual stream is float in both modes.

#if BF16
__device__ __forceinline__ void spread(float* out, uint4 v) {
  const u32* p = &v.x;
#pragma unroll
  for (int i = 0; i < 4; i++) { out[2 * i] = __uint_as_float(p[i] << 16); out[2 * i + 1] = __uint_as_float(p[i] & 0xffff0000u); }
}
__device__ __forceinline__ uint4 gather(const float* v) {
  return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}
#endif

// embed fills the stream with the rows of the embedding.
extern "C" __global__ void embed(const int* meta, const T* table, const int* last, float* stream) {
  BEGIN;
  int r = blockIdx.x;
  if (r >= meta[H_ROWS]) return;
  const Row* row = rowAt(meta, r);
  int token = row->token < 0 ? last[row->slot] : row->token;
  const T* from = table + (size_t)token * HIDDEN;
  float* to = stream + (size_t)r * HIDDEN;
  for (int i = threadIdx.x; i < HIDDEN; i += blockDim.x) to[i] = widen(from[i]);
}

// rmsNorm is x / sqrt(mean(x^2) + eps) * weight. With picked, row i of out is the wanted row i of the step.
extern "C" __global__ void rmsNorm(const int* meta, const float* stream, const T* weight, T* out, int picked) {
  BEGIN;
  __shared__ float shared[33];
  int r = blockIdx.x;
  if (r >= meta[picked ? H_WANTED : H_ROWS]) return;
  int from = picked ? meta[meta[H_WANTED_AT] + r] : r;
  const float* x = stream + (size_t)from * HIDDEN;
  float sum = 0.f;
#if BF16 && HIDDEN % 4 == 0
  const int n = (HIDDEN / 4 + 255) / 256;
  float4 v[n];
#pragma unroll
  for (int j = 0; j < n; j++) {
    int i = threadIdx.x + 256 * j;
    v[j] = i < HIDDEN / 4 ? ((const float4*)x)[i] : make_float4(0.f, 0.f, 0.f, 0.f);
  }
#pragma unroll
  for (int j = 0; j < n; j++) sum = fmaf(v[j].x, v[j].x, fmaf(v[j].y, v[j].y, fmaf(v[j].z, v[j].z, fmaf(v[j].w, v[j].w, sum))));
  float scale = rsqrtf(blockSum(sum, shared) / HIDDEN + (float)(EPS));
#pragma unroll
  for (int j = 0; j < n; j++) {
    int i = threadIdx.x + 256 * j;
    if (i >= HIDDEN / 4) continue;
    uint2 w = ((const uint2*)weight)[i];
    float a = __uint_as_float(w.x << 16), b = __uint_as_float(w.x & 0xffff0000u);
    float c = __uint_as_float(w.y << 16), d = __uint_as_float(w.y & 0xffff0000u);
    ((uint2*)(out + (size_t)r * HIDDEN))[i] = make_uint2(pack(v[j].x * scale * a, v[j].y * scale * b), pack(v[j].z * scale * c, v[j].w * scale * d));
  }
#else
  for (int i = threadIdx.x; i < HIDDEN; i += blockDim.x) sum = fmaf(x[i], x[i], sum);
  float scale = 1.f / sqrtf(blockSum(sum, shared) / HIDDEN + (float)(EPS));
  for (int i = threadIdx.x; i < HIDDEN; i += blockDim.x)
    out[(size_t)r * HIDDEN + i] = narrow(__fmul_rn(x[i], scale) * widen(weight[i]));
#endif
}

// kvScales sets the scales of one layer from its weights: grid (2 * KVHEADS), 256 threads. It takes the elements of the norm's output
// for uncorrelated and of variance 1: then the mean square of K or V is that of the rows of its matrix, times the norm's weight. That
// becomes about 8, by a power of two: a number may be 40 times as large, and keeps its three bits down to a 500th.
#if KV8
extern "C" __global__ void kvScales(const void* qkv, const float* rows, const T* norm, const T* bias, const T* knorm, float* scales) {
  __shared__ float shared[33];
  float sum = 0.f;
  const size_t first = (size_t)HEADS * HS + blockIdx.x * HS;
  for (size_t i = threadIdx.x; i < (size_t)HS * HIDDEN; i += 256) {
    size_t at = first * HIDDEN + i;
    float w = rows ? widened(((const u8*)qkv)[at]) * rows[at / HIDDEN] : widen(((const T*)qkv)[at]);
    w *= widen(norm[i % HIDDEN]);
    sum = fmaf(w, w, sum);
  }
  for (int i = threadIdx.x; i < HS; i += 256) {
    float b = bias ? widen(bias[first + i]) : 0.f;
    sum = fmaf(b, b, sum);
  }
  if (knorm && blockIdx.x < KVHEADS) {  // it makes the mean square 1
    sum = 0.f;
    for (int i = threadIdx.x; i < HS; i += 256) sum += widen(knorm[i]) * widen(knorm[i]);
  }
  sum = blockSum(sum, shared);
  if (threadIdx.x == 0) scales[blockIdx.x] = sum > 0.f ? exp2f(rintf(log2f(sum / HS) / 2.f) - 3.f) : 1.f;
}
#endif

// rope finishes the product of Q, K and V: bias, norm of the head, rotation; K and V go into their blocks. bias (QKV),
// qnorm and knorm (HS) may be null; turns is (position, HS / 2) of (cos, sin).
#if BF16 && (HS == 32 || HS == 64 || HS == 128 || HS == 256)
// A thread turns eight pairs; grid (row, pieces of 256 threads).
#define TURNERS (HS / 16)  // threads of a head

__device__ __forceinline__ uint2 gather8(const float* v, float scale) {
  u32 w[2] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) w[i / 4] |= narrow8(v[i] / scale) << 8 * (i % 4);
  return make_uint2(w[0], w[1]);
}

extern "C" __global__ void rope(const int* meta, T* qkv, const T* bias, const T* qnorm, const T* knorm, const float2* turns,
                                KV* kv, const float* scales, int layer) {
  BEGIN;
  int r = blockIdx.x, unit = blockIdx.y * blockDim.x + threadIdx.x, head = unit / TURNERS, e = unit % TURNERS * 8;
  if (r >= meta[H_ROWS]) return;
  bool there = head < HEADS + 2 * KVHEADS;
  if (!there) head = HEADS;
  const Row* row = rowAt(meta, r);
  T* x = qkv + (size_t)r * QKV + head * HS + e;
  float lo[8], hi[8], w[8];
  spread(lo, *(const uint4*)x);
  spread(hi, *(const uint4*)(x + HS / 2));
  if (bias) {
    spread(w, *(const uint4*)(bias + head * HS + e));
#pragma unroll
    for (int i = 0; i < 8; i++) lo[i] += w[i];
    spread(w, *(const uint4*)(bias + head * HS + e + HS / 2));
#pragma unroll
    for (int i = 0; i < 8; i++) hi[i] += w[i];
  }
  const T* norm = head < HEADS ? qnorm : head < HEADS + KVHEADS ? knorm : (const T*)0;
  if (qnorm) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(lo[i], lo[i], fmaf(hi[i], hi[i], sum));
#pragma unroll
    for (int o = TURNERS / 2; o > 0; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    float scale = norm ? rsqrtf(sum / HS + (float)(EPS)) : 1.f;
    if (norm) {
      spread(w, *(const uint4*)(norm + e));
#pragma unroll
      for (int i = 0; i < 8; i++) lo[i] *= scale * w[i];
      spread(w, *(const uint4*)(norm + e + HS / 2));
#pragma unroll
      for (int i = 0; i < 8; i++) hi[i] *= scale * w[i];
    }
  }
  if (!there) return;
  if (head < HEADS + KVHEADS) {
    const float4* turn = (const float4*)(turns + (size_t)row->pos * (HS / 2) + e);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float4 t = turn[i];
      float a = lo[2 * i], b = hi[2 * i], c = lo[2 * i + 1], d = hi[2 * i + 1];
      lo[2 * i] = __fmul_rn(a, t.x) - __fmul_rn(b, t.y);
      hi[2 * i] = __fmul_rn(b, t.x) + __fmul_rn(a, t.y);
      lo[2 * i + 1] = __fmul_rn(c, t.z) - __fmul_rn(d, t.w);
      hi[2 * i + 1] = __fmul_rn(d, t.z) + __fmul_rn(c, t.w);
    }
  }
  if (head < HEADS) {
    *(uint4*)x = gather(lo);
    *(uint4*)(x + HS / 2) = gather(hi);
    return;
  }
  int block = tableOf(meta, row, layer)[row->pos / BLOCK_TOKENS], v = head >= HEADS + KVHEADS, kvHead = (head - HEADS) % KVHEADS;
  KV* to = kv + kvAt(block, layer, v, row->pos % BLOCK_TOKENS, kvHead) + e;
#if KV8
  float scale = kvScale(scales, v, kvHead);
  *(uint2*)to = gather8(lo, scale);
  *(uint2*)(to + HS / 2) = gather8(hi, scale);
#else
  *(uint4*)to = gather(lo);
  *(uint4*)(to + HS / 2) = gather(hi);
#endif
}
#else
// One warp a head.
extern "C" __global__ void rope(const int* meta, T* qkv, const T* bias, const T* qnorm, const T* knorm, const float2* turns,
                                KV* kv, const float* scales, int layer) {
  BEGIN;
  int r = blockIdx.x, head = blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (r >= meta[H_ROWS] || head >= HEADS + 2 * KVHEADS) return;
  const Row* row = rowAt(meta, r);
  T* x = qkv + (size_t)r * QKV + head * HS;
  const int half = HS / 2, n = (half + 31) / 32;
  float lo[n], hi[n], sum = 0.f;
#pragma unroll
  for (int j = 0; j < n; j++) {
    int i = j * 32 + lane;
    lo[j] = hi[j] = 0.f;
    if (i >= half) continue;
    lo[j] = widen(x[i]);
    hi[j] = widen(x[i + half]);
    if (bias) { lo[j] += widen(bias[head * HS + i]); hi[j] += widen(bias[head * HS + i + half]); }
    sum = fmaf(lo[j], lo[j], fmaf(hi[j], hi[j], sum));
  }
  const T* w = head < HEADS ? qnorm : head < HEADS + KVHEADS ? knorm : (const T*)0;
  float scale = w ? 1.f / sqrtf(warpSum(sum) / HS + (float)(EPS)) : 1.f;
  KV* to = kv;
  float kvs = 1.f;
  if (head >= HEADS) {
    int block = tableOf(meta, row, layer)[row->pos / BLOCK_TOKENS], v = head >= HEADS + KVHEADS, kvHead = (head - HEADS) % KVHEADS;
    to += kvAt(block, layer, v, row->pos % BLOCK_TOKENS, kvHead);
    kvs = kvScale(scales, v, kvHead);
  }
#pragma unroll
  for (int j = 0; j < n; j++) {
    int i = j * 32 + lane;
    if (i >= half) continue;
    float a = lo[j], b = hi[j];
    if (w) { a = a * scale * widen(w[i]); b = b * scale * widen(w[i + half]); }
    if (head < HEADS + KVHEADS) {
      float2 t = turns[(size_t)row->pos * half + i];
      float c = __fmul_rn(a, t.x) - __fmul_rn(b, t.y), d = __fmul_rn(b, t.x) + __fmul_rn(a, t.y);
      a = c;
      b = d;
    }
    if (head < HEADS) {
      x[i] = narrow(a);
      x[i + half] = narrow(b);
    } else {
      put(to + i, a, kvs);
      put(to + i + half, b, kvs);
    }
  }
}
#endif

// gated is silu(gate) * up; in is (row, gate then up).
extern "C" __global__ void gated(const int* meta, const T* in, T* out) {
  BEGIN;
  int r = blockIdx.x;
  if (r >= meta[H_ROWS]) return;
  const T* gate = in + (size_t)r * 2 * INTER;
#if BF16 && INTER % 8 == 0
  for (int i = (blockIdx.y * blockDim.x + threadIdx.x) * 8; i < INTER; i += gridDim.y * blockDim.x * 8) {
    uint4 g = *(const uint4*)(gate + i), u = *(const uint4*)(gate + INTER + i), o;
    const u32 *gp = &g.x, *up = &u.x;
    u32* op = &o.x;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float a = __uint_as_float(gp[j] << 16), b = __uint_as_float(gp[j] & 0xffff0000u);
      float c = __uint_as_float(up[j] << 16), d = __uint_as_float(up[j] & 0xffff0000u);
      op[j] = pack(a / (1.f + __expf(-a)) * c, b / (1.f + __expf(-b)) * d);
    }
    *(uint4*)(out + (size_t)r * INTER + i) = o;
  }
#else
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < INTER; i += gridDim.y * blockDim.x) {
    float g = widen(gate[i]), u = widen(gate[INTER + i]);
    out[(size_t)r * INTER + i] = narrow(g / (1.f + expf(-g)) * u);
  }
#endif
}

// product is out = x w^T (+ out), in float, each sum in rising order of k whatever the other rows are: the results do
// not depend on the batch. One block makes 64 x 64 results; 256 threads, 4 x 4 each.
extern "C" __global__ void product(const float* x, const float* w, float* out, int m, int n, int k, int add) {
  BEGIN;
  __shared__ float xs[16][65], ws[16][65];
  int m0 = blockIdx.y * 64, n0 = blockIdx.x * 64, tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  float sum[4][4] = {};
  for (int k0 = 0; k0 < k; k0 += 16) {
    for (int i = threadIdx.x; i < 1024; i += 256) {
      int c = i & 15, r = i >> 4;
      bool in = k0 + c < k;
      xs[c][r] = in && m0 + r < m ? x[(size_t)(m0 + r) * k + k0 + c] : 0.f;
      ws[c][r] = in && n0 + r < n ? w[(size_t)(n0 + r) * k + k0 + c] : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 16; c++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] = fmaf(xs[c][ty * 4 + i], ws[c][tx * 4 + j], sum[i][j]);
    __syncthreads();
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      int r = m0 + ty * 4 + i, c = n0 + tx * 4 + j;
      if (r >= m || c >= n) continue;
      float* to = out + (size_t)r * n + c;
      *to = add ? *to + sum[i][j] : sum[i][j];
    }
}

// moveKV copies one region between KV blocks and a packed buffer in the canonical layout; region is block, layers from
// and to (of the group), heads from and to, tokens from and to, and how many layers the group has; places are where the region
// is in the buffer and where its group's memory is; out says the direction.
extern "C" __global__ void moveKV(KV* packed, const int* regions, const u64* places, int out) {
  BEGIN;
  const int* g = regions + blockIdx.x * 8;
  int layers = g[2] - g[1], heads = g[4] - g[3], tokens = g[6] - g[5], of = g[7] << 12;
  KV *base = packed + places[2 * blockIdx.x], *kv = (KV*)places[2 * blockIdx.x + 1];
  size_t n = (size_t)layers * 2 * tokens * heads * HS;
  for (size_t i = blockIdx.y * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.y * blockDim.x) {
    size_t j = i;
    int e = j % HS; j /= HS;
    int h = j % heads; j /= heads;
    int t = j % tokens; j /= tokens;
    int v = j % 2; j /= 2;
    KV* at = kv + kvAt(g[0], of | (g[1] + (int)j), v, g[5] + t, g[3] + h) + e;
    if (out) base[i] = *at;
    else *at = base[i];
  }
}

// pullKV copies KV of tokens [tokenFrom, tokenFrom + tokens) of some layers out of another process's KV blocks, which have
// `per` tokens. of is how many layers there are, in their one group; to and source are the blocks here and there that hold
// these tokens. A warp copies one token's K or V.
extern "C" __global__ void pullKV(KV* kv, const KV* from, const int* to, const int* source, int layerFrom, int layers, int of, int tokenFrom,
                                  int tokens, int per) {
  BEGIN;
  constexpr int ROW = KVHEADS * HS;
  const int rows = layers * 2 * tokens, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  for (int r = blockIdx.x * warps + (threadIdx.x >> 5); r < rows; r += gridDim.x * warps) {
    int t = tokenFrom + r % tokens, v = r / tokens & 1, l = layerFrom + r / tokens / 2;
    KV* a = kv + kvAt(to[t / BLOCK_TOKENS - tokenFrom / BLOCK_TOKENS], of << 12 | l, v, t % BLOCK_TOKENS, 0);
    const KV* b = from + ((((size_t)source[t / per - tokenFrom / per] * of + l) * 2 + v) * per + t % per) * ROW;
    if constexpr (ROW * sizeof(KV) % 16 == 0) {
      for (int i = lane; i < (int)(ROW * sizeof(KV) / 16); i += 32) ((uint4*)a)[i] = ((const uint4*)b)[i];
    } else {
      for (int i = lane; i < ROW; i += 32) a[i] = b[i];
    }
  }
}

// copyBlocks copies whole KV blocks of a group of so many layers one after the other, as the list says; n pairs lie at list.
// A later copy may read what an earlier one wrote, so one thread of the grid handles the same elements of every pair.
extern "C" __global__ void copyBlocks(KV* kv, int layers, const int* list, int n) {
  BEGIN;
  const size_t size = (size_t)layers * 2 * BLOCK_TOKENS * KVHEADS * HS;
  for (int c = 0; c < n; c++)
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += (size_t)gridDim.x * blockDim.x)
      kv[list[2 * c + 1] * size + i] = kv[list[2 * c] * size + i];
}
