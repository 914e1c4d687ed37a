// Attention of many query tokens of one entry on the tensor cores: a tile of 128 query tokens of one head walks over the
// keys in steps of KT. And the product of one row with a matrix, which is bound by memory alone.
#if BF16 && (HS == 64 || HS == 128) && !HOPPER
#define KT (4096 / HS)
// fetch begins to copy KT tokens of K and V from position at into shared memory; those from end on are zero.
__device__ __forceinline__ void fetch(u32 ks, u32 vs, const KV* kv, const int* table, int layer, int kvHead, int at, int end) {
  for (int i = threadIdx.x; i < KT * CHUNKS; i += 256) {
    int t = i / CHUNKS, c = i % CHUNKS, p = at + t, n = p < end ? 16 : 0, q = n ? p : 0;
    const KV* k = kv + kvAt(table[q / BLOCK_TOKENS], layer, 0, q % BLOCK_TOKENS, kvHead) + c * 8;
    const KV* v = k + (size_t)BLOCK_TOKENS * KVHEADS * HS;
#if KV8
    const uint2 none = {0, 0};
    store16(ks + place(t, c), widen8x8(n ? *(const uint2*)k : none));
    store16(vs + place(t, c), widen8x8(n ? *(const uint2*)v : none));
#else
    copy16(ks + place(t, c), k, n);
    copy16(vs + place(t, c), v, n);
#endif
  }
  commit();
}

// prefill: grid (head, tile), 256 threads. A tile is (first row, rows).
extern "C" __global__ void __launch_bounds__(256) prefill(const int* meta, const T* qkv, const KV* kv, const float* scales, T* out, int layer, int window) {
  BEGIN;
  __shared__ __align__(128) T ks[2][KT * HS], vs[2][KT * HS];
  const int* tile = meta + meta[H_TILES_AT] + 2 * (gridDim.y - 1 - blockIdx.y);  // long ones first
  int head = blockIdx.x, kvHead = head / GROUP, first = tile[0], rows = tile[1];
  const Row* row = rowAt(meta, first);
  const int *table = tableOf(meta, row, layer), pos0 = row->pos, end = pos0 + rows;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int lowest = window > 0 ? max(pos0 - window + 1, 0) / KT * KT : 0;
  u32 kAt = sharedAt(ks), vAt = sharedAt(vs);
  int r0 = warp * 16 + g, r1 = r0 + 8;
  u32 q[HS / 16][4];
#pragma unroll
  for (int k = 0; k < HS / 16; k++) {
    const T* p = qkv + (size_t)first * QKV + head * HS + k * 16 + 2 * t;
    q[k][0] = r0 < rows ? *(const u32*)(p + (size_t)r0 * QKV) : 0;
    q[k][1] = r1 < rows ? *(const u32*)(p + (size_t)r1 * QKV) : 0;
    q[k][2] = r0 < rows ? *(const u32*)(p + (size_t)r0 * QKV + 8) : 0;
    q[k][3] = r1 < rows ? *(const u32*)(p + (size_t)r1 * QKV + 8) : 0;
  }
  const float scale = 1.4426950408889634f * rsqrtf((float)HS) * kvScale(scales, 0, kvHead);
  float o[HS / 8][4] = {}, m0 = -INF, m1 = -INF, l0 = 0.f, l1 = 0.f;
  fetch(kAt, vAt, kv, table, layer, kvHead, lowest, end);
  for (int at = lowest, stage = 0; at < end; at += KT, stage ^= 1) {
    arrived<0>();
    __syncthreads();
    if (at + KT < end) fetch(kAt + (stage ^ 1) * KT * HS * 2, vAt + (stage ^ 1) * KT * HS * 2, kv, table, layer, kvHead, at + KT, end);
    if (at > pos0 + warp * 16 + 15) continue;  // wholly in the future of this warp
    u32 kb = kAt + stage * KT * HS * 2, vb = vAt + stage * KT * HS * 2;
    float s[KT / 8][4] = {};
#pragma unroll
    for (int n = 0; n < KT / 8; n++)
#pragma unroll
      for (int k = 0; k < HS / 32; k++) {
        u32 b[4];
        load4(b, kb + place(n * 8 + (lane & 7), k * 4 + (lane >> 3)));
        multiply(s[n], q[2 * k], b[0], b[1]);
        multiply(s[n], q[2 * k + 1], b[2], b[3]);
      }
    int p0 = pos0 + r0, p1 = pos0 + r1;
    if (at + KT - 1 > pos0 + warp * 16 || window > 0) {
#pragma unroll
      for (int n = 0; n < KT / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int k = at + n * 8 + 2 * t + (i & 1), p = i < 2 ? p0 : p1;
          if (k > p || (window > 0 && p - k >= window)) s[n][i] = -INF;
        }
    }
    float top0 = m0, top1 = m1;
#pragma unroll
    for (int n = 0; n < KT / 8; n++) {
      top0 = fmaxf(top0, fmaxf(s[n][0], s[n][1]));
      top1 = fmaxf(top1, fmaxf(s[n][2], s[n][3]));
    }
#pragma unroll
    for (int x = 1; x < 4; x <<= 1) {
      top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, x));
      top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, x));
    }
    float b0 = top0 == -INF ? 0.f : top0 * scale, b1 = top1 == -INF ? 0.f : top1 * scale;
    float f0 = power(m0 * scale - b0), f1 = power(m1 * scale - b1);
    m0 = top0;
    m1 = top1;
    l0 *= f0;
    l1 *= f1;
#pragma unroll
    for (int n = 0; n < HS / 8; n++) { o[n][0] *= f0; o[n][1] *= f0; o[n][2] *= f1; o[n][3] *= f1; }
#pragma unroll
    for (int n = 0; n < KT / 8; n++) {
      s[n][0] = power(fmaf(s[n][0], scale, -b0));
      s[n][1] = power(fmaf(s[n][1], scale, -b0));
      s[n][2] = power(fmaf(s[n][2], scale, -b1));
      s[n][3] = power(fmaf(s[n][3], scale, -b1));
      l0 += s[n][0] + s[n][1];
      l1 += s[n][2] + s[n][3];
    }
#pragma unroll
    for (int k = 0; k < KT / 16; k++) {
      u32 a[4] = {pack(s[2 * k][0], s[2 * k][1]), pack(s[2 * k][2], s[2 * k][3]), pack(s[2 * k + 1][0], s[2 * k + 1][1]),
                  pack(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < HS / 16; n++) {
        u32 b[4];
        load4t(b, vb + place(k * 16 + (lane & 15), n * 2 + (lane >> 4)));
        multiply(o[2 * n], a, b[0], b[1]);
        multiply(o[2 * n + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int x = 1; x < 4; x <<= 1) {
    l0 += __shfl_xor_sync(~0u, l0, x);
    l1 += __shfl_xor_sync(~0u, l1, x);
  }
  float i0 = kvScale(scales, 1, kvHead) / l0, i1 = kvScale(scales, 1, kvHead) / l1;
  T* to = out + (size_t)first * HEADS * HS + head * HS + 2 * t;
#pragma unroll
  for (int n = 0; n < HS / 8; n++) {
    if (r0 < rows) *(u32*)(to + (size_t)r0 * HEADS * HS + n * 8) = pack(o[n][0] * i0, o[n][1] * i0);
    if (r1 < rows) *(u32*)(to + (size_t)r1 * HEADS * HS + n * 8) = pack(o[n][2] * i1, o[n][3] * i1);
  }
}
#endif

// vector is out = x w^T (+ out) for one row x, k a multiple of 8: a warp makes two results at a time. kind: 1 adds, 2
// writes float (else T).
extern "C" __global__ void __launch_bounds__(256) vector(const T* x, const T* w, void* out, int n, int k, int kind) {
#if BF16
  int row = (blockIdx.x * 8 + (threadIdx.x >> 5)) * 2, lane = threadIdx.x & 31, pieces = k / 8;
  FIRST;
  if (row >= n) {
    AFTER;
    return;
  }
  const uint4 *a = (const uint4*)(w + (size_t)row * k), *b = row + 1 < n ? (const uint4*)(w + (size_t)(row + 1) * k) : a;
  const uint4 *y = (const uint4*)x, none = {0, 0, 0, 0};
  float s0 = 0.f, s1 = 0.f;
  uint4 va[4], vb[4], na[4], nb[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {  // weights never change: they may come while x is still being made
    int i = lane + 32 * j;
    va[j] = i < pieces ? __ldcs(a + i) : none;
    vb[j] = i < pieces ? __ldcs(b + i) : none;
  }
  AFTER;
  for (int at = lane; at - lane < pieces; at += 128) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int i = at + 128 + 32 * j;
      na[j] = i < pieces ? __ldcs(a + i) : none;
      nb[j] = i < pieces ? __ldcs(b + i) : none;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int i = at + 32 * j;
      uint4 vy = i < pieces ? y[i] : none;
      const u32 *pa = &va[j].x, *pb = &vb[j].x, *py = &vy.x;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float lo = __uint_as_float(py[e] << 16), hi = __uint_as_float(py[e] & 0xffff0000u);
        s0 = fmaf(__uint_as_float(pa[e] << 16), lo, fmaf(__uint_as_float(pa[e] & 0xffff0000u), hi, s0));
        s1 = fmaf(__uint_as_float(pb[e] << 16), lo, fmaf(__uint_as_float(pb[e] & 0xffff0000u), hi, s1));
      }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) { va[j] = na[j]; vb[j] = nb[j]; }
  }
  s0 = warpSum(s0);
  s1 = warpSum(s1);
  if (lane > 1 || row + lane >= n) return;
  float s = lane == 0 ? s0 : s1;
  if (kind & 2) {
    float* to = (float*)out + row + lane;
    *to = kind & 1 ? *to + s : s;
  } else {
    ((T*)out)[row + lane] = narrow(s);
  }
#endif
}
