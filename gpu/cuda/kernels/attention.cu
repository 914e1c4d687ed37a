// Attention of one query token over its KV blocks, with a running maximum. A token of KV is read by LPT lanes that hold
// VEC elements each; a warp reads 32 / LPT tokens at a time, the four warps of a block take turns. Scores are to base 2.
#if HS % 8 == 0
#define VEC 8
#elif HS % 4 == 0
#define VEC 4
#else
#define VEC 2
#endif
#define PARTS (HS / VEC)
#define LPT (PARTS <= 1 ? 1 : PARTS <= 2 ? 2 : PARTS <= 4 ? 4 : PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32)
#define TPW (32 / LPT)
#define GQ (GROUP < 4 ? GROUP : GROUP % 4 == 0 ? 4 : GROUP % 3 == 0 ? 3 : GROUP % 2 == 0 ? 2 : 1)

#define DEEP 4                 // tokens that a lane has under way
#define STEP (4 * TPW * DEEP)  // tokens that a block takes at a time

// Vec is what a lane holds of one token, as it lies in memory.
#if BF16 && VEC == 8
typedef uint4 Vec;
#else
struct Vec { T v[VEC]; };
#endif

// unpack widens; zeros if there is nothing.
__device__ __forceinline__ void unpack(const Vec& p, float* out, bool there) {
#pragma unroll
  for (int i = 0; i < VEC; i++) {
#if BF16 && VEC == 8
    u32 w = i < 2 ? p.x : i < 4 ? p.y : i < 6 ? p.z : p.w;
    out[i] = __uint_as_float(i % 2 ? w & 0xffff0000u : w << 16);
#else
    out[i] = widen(p.v[i]);
#endif
    if (!there) out[i] = 0.f;
  }
}

__device__ __forceinline__ void loadVec(const T* p, float* v) { unpack(*(const Vec*)p, v, true); }

// KVVec is the same of K and V.
#if KV8
struct __align__(VEC) KVVec { KV v[VEC]; };
__device__ __forceinline__ void unpack(const KVVec& p, float* out, bool there) {
#pragma unroll
  for (int i = 0; i < VEC; i++) out[i] = there ? widened(p.v[i]) : 0.f;
}
#else
typedef Vec KVVec;
#endif

// merge adds a part (maximum m2, sum l2, weight of acc2 to come) to (m, l); it gives the factors of both accumulators.
__device__ __forceinline__ void merge(float& m, float& l, float m2, float l2, float& f, float& f2) {
  float top = fmaxf(m, m2);
  f = m == -INF ? 0.f : power(m - top);
  f2 = m2 == -INF ? 0.f : power(m2 - top);
  l = __fmul_rn(l, f) + __fmul_rn(l2, f2);
  m = top;
}

// attend: grid (row, KV head * GROUP / GQ, split), 128 threads. With one split the result goes to out (row, HEADS * HS);
// otherwise to partial (row, head, split, HS + 2), for combine. window 0: all.
extern "C" __global__ void __launch_bounds__(128) attend(const int* meta, const T* qkv, const KV* kv, const float* scales, T* out, float* partial, int layer, int window) {
  BEGIN;
  __shared__ float shared[4][GQ][HS + 2];
  int r = blockIdx.x, kvHead = blockIdx.y / (GROUP / GQ), head0 = kvHead * GROUP + blockIdx.y % (GROUP / GQ) * GQ;
  if (r >= meta[H_ROWS]) return;
  const Row* row = rowAt(meta, r);
  if (row->tiled) return;
  const int* table = tableOf(meta, row, layer);
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, sub = lane / LPT, part = lane % LPT;
  bool holds = part < PARTS;
  int end = row->pos + 1, from = window > 0 && end > window ? end - window : 0;
  if (gridDim.z > 1) {
    int share = ((end - from + gridDim.z - 1) / gridDim.z + STEP - 1) / STEP * STEP;
    from += blockIdx.z * share;
    end = min(end, from + share);
  }
  float q[GQ][VEC], acc[GQ][VEC], m[GQ], l[GQ];
#pragma unroll
  for (int g = 0; g < GQ; g++) {
    m[g] = -INF;
    l[g] = 0.f;
#pragma unroll
    for (int i = 0; i < VEC; i++) acc[g][i] = q[g][i] = 0.f;
    if (holds) loadVec(qkv + (size_t)r * QKV + (head0 + g) * HS + part * VEC, q[g]);
#pragma unroll
    for (int i = 0; i < VEC; i++) q[g][i] *= rsqrtf((float)HS) * 1.4426950408889634f * kvScale(scales, 0, kvHead);  // scores are to base 2
  }
  // Which warp and lane takes a position depends on the position alone, so the result does not depend on the batch.
  for (int at = from / STEP * STEP + warp * TPW + sub; at - sub - warp * TPW < end; at += STEP) {
    KVVec k[DEEP], v[DEEP];
    bool sees[DEEP];
#pragma unroll
    for (int u = 0; u < DEEP; u++) {  // all the loads first
      int p = at + u * 4 * TPW;
      sees[u] = p >= from && p < end;
      if (!sees[u] || !holds) continue;
      const KV* t = kv + kvAt(table[p / BLOCK_TOKENS], layer, 0, p % BLOCK_TOKENS, kvHead) + part * VEC;
      k[u] = *(const KVVec*)t;
      v[u] = *(const KVVec*)(t + (size_t)BLOCK_TOKENS * KVHEADS * HS);
    }
    float s[DEEP][GQ];
#pragma unroll
    for (int u = 0; u < DEEP; u++) {
      float w[VEC];
      unpack(k[u], w, sees[u] && holds);
#pragma unroll
      for (int g = 0; g < GQ; g++) {
        s[u][g] = 0.f;
#pragma unroll
        for (int i = 0; i < VEC; i++) s[u][g] = fmaf(q[g][i], w[i], s[u][g]);
#pragma unroll
        for (int o = LPT / 2; o > 0; o >>= 1) s[u][g] += __shfl_xor_sync(~0u, s[u][g], o);
        if (!sees[u]) s[u][g] = -INF;
      }
    }
#pragma unroll
    for (int g = 0; g < GQ; g++) {
      float top = m[g];
#pragma unroll
      for (int u = 0; u < DEEP; u++) top = fmaxf(top, s[u][g]);
      float base = top == -INF ? 0.f : top, f = power(m[g] - base);
      m[g] = top;
      l[g] *= f;
#pragma unroll
      for (int i = 0; i < VEC; i++) acc[g][i] *= f;
#pragma unroll
      for (int u = 0; u < DEEP; u++) {
        s[u][g] = power(s[u][g] - base);
        l[g] += s[u][g];
      }
    }
#pragma unroll
    for (int u = 0; u < DEEP; u++) {
      float w[VEC];
      unpack(v[u], w, sees[u] && holds);
#pragma unroll
      for (int g = 0; g < GQ; g++)
#pragma unroll
        for (int i = 0; i < VEC; i++) acc[g][i] = fmaf(s[u][g], w[i], acc[g][i]);
    }
  }
#pragma unroll
  for (int g = 0; g < GQ; g++) {
#pragma unroll
    for (int o = LPT; o < 32; o <<= 1) {  // lanes of equal part, other tokens; the lower lane's part comes first
      float m2 = __shfl_xor_sync(~0u, m[g], o), l2 = __shfl_xor_sync(~0u, l[g], o), f, f2;
      merge(m[g], l[g], m2, l2, f, f2);
#pragma unroll
      for (int i = 0; i < VEC; i++) {
        float a2 = __shfl_xor_sync(~0u, acc[g][i], o);
        acc[g][i] = __fmul_rn(acc[g][i], f) + __fmul_rn(a2, f2);
      }
    }
    if (sub == 0 && holds) {
#pragma unroll
      for (int i = 0; i < VEC; i++) shared[warp][g][part * VEC + i] = acc[g][i];
      if (part == 0) { shared[warp][g][HS] = m[g]; shared[warp][g][HS + 1] = l[g]; }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GQ * HS; i += blockDim.x) {
    int g = i / HS, e = i % HS;
    float mm = -INF, ll = 0.f, a = 0.f, f, f2;
    for (int w = 0; w < 4; w++) {
      merge(mm, ll, shared[w][g][HS], shared[w][g][HS + 1], f, f2);
      a = __fmul_rn(a, f) + __fmul_rn(shared[w][g][e], f2);
    }
    a *= kvScale(scales, 1, kvHead);
    if (gridDim.z == 1) {
      out[(size_t)r * HEADS * HS + (head0 + g) * HS + e] = narrow(a / ll);
      continue;
    }
    float* to = partial + (((size_t)r * HEADS + head0 + g) * gridDim.z + blockIdx.z) * (HS + 2);
    to[e] = a;
    if (e == 0) { to[HS] = mm; to[HS + 1] = ll; }
  }
}

// combine merges the splits of attend: grid (row, head), HS threads at least.
extern "C" __global__ void combine(const int* meta, const float* partial, T* out, int splits) {
  BEGIN;
  int r = blockIdx.x, head = blockIdx.y, e = threadIdx.x;
  if (r >= meta[H_ROWS] || e >= HS) return;
  const float* from = partial + ((size_t)r * HEADS + head) * splits * (HS + 2);
  float m = -INF, l = 0.f, a = 0.f, f, f2;
  for (int s = 0; s < splits; s++, from += HS + 2) {
    merge(m, l, from[HS], from[HS + 1], f, f2);
    a = a * f + from[e] * f2;
  }
  out[(size_t)r * HEADS * HS + head * HS + e] = narrow(a / l);
}
