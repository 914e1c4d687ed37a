// Attention of single query tokens on the tensor cores: the query heads that share a KV head are the rows of a matrix of
// 16, so KV is read once for all of them. Each of the four warps of a block walks over tokens of its own, with a ring of
// KV under way in shared memory. Where the KV of a row is cut into splits, the block that ends last merges them.
#if BF16 && (HS == 64 || HS == 128) && GROUP <= 16
#define WT 16                    // tokens that a warp takes at a time
#define WARP_TILE (4 * WT * HS)  // bytes of their K and V
#define RAW_TILE (2 * WT * HS * (int)sizeof(KV))  // bytes of them as they are stored

struct Walk {
  u32 ring;
  const KV* kv;
  const int* table;
  int layer, kvHead, from, end, lane;
  // fetch begins to copy K and V of the tokens from at on; those outside of [from, end) are zero.
  __device__ __forceinline__ void fetch(int at, int slot) {
    u32 ks = ring + slot * RAW_TILE, vs = ks + RAW_TILE / 2;
#if KV8
#pragma unroll
    for (int i = 0; i < WT * HS / 16 / 32; i++) {
      int t = (lane + 32 * i) / (HS / 16), c = (lane + 32 * i) % (HS / 16), p = at + t, n = p >= from && p < end ? 16 : 0, q = n ? p : from;
      const KV* k = kv + kvAt(table[q / BLOCK_TOKENS], layer, 0, q % BLOCK_TOKENS, kvHead) + c * 16;
      copy16(ks + t * HS + c * 16, k, n);
      copy16(vs + t * HS + c * 16, k + (size_t)BLOCK_TOKENS * KVHEADS * HS, n);
    }
#else
#pragma unroll
    for (int i = 0; i < WT * CHUNKS / 32; i++) {
      int t = (lane + 32 * i) / CHUNKS, c = (lane + 32 * i) % CHUNKS, p = at + t, n = p >= from && p < end ? 16 : 0, q = n ? p : from;
      const T* k = kv + kvAt(table[q / BLOCK_TOKENS], layer, 0, q % BLOCK_TOKENS, kvHead) + c * 8;
      copy16(ks + place(t, c), k, n);
      copy16(vs + place(t, c), k + (size_t)BLOCK_TOKENS * KVHEADS * HS, n);
    }
#endif
  }
};

#if KV8
// widenTile makes bfloat16 of a warp's tile, in the places that the tensor cores read.
__device__ __forceinline__ void widenTile(char* to, const char* raw, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * WT * HS / 8 / 32; i++) {
    int piece = lane + 32 * i, kv = piece / (WT * HS / 8), t = piece % (WT * HS / 8) / CHUNKS, c = piece % CHUNKS;
    *(uint4*)(to + kv * (WARP_TILE / 2) + place(t, c)) = widen8x8(*(const uint2*)(raw + piece * 8));
  }
}
#endif

// Online is a running softmax of the rows g and g + 8: sums of weighted V, maxima and sums of weights.
struct Online {
  float o[HS / 8][4], top[2], sum[2];
};

// step takes one tile of keys. s are the scores, to base 2.
__device__ __forceinline__ void online(Online& a, float (*s)[4], u32 vb, int lane) {
#pragma unroll
  for (int h = 0; h < (GROUP > 8 ? 2 : 1); h++) {
    float top = a.top[h];
#pragma unroll
    for (int n = 0; n < WT / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float base = top == -INF ? 0.f : top, f = power(a.top[h] - base);
    a.top[h] = top;
    a.sum[h] *= f;
#pragma unroll
    for (int n = 0; n < HS / 8; n++) { a.o[n][2 * h] *= f; a.o[n][2 * h + 1] *= f; }
#pragma unroll
    for (int n = 0; n < WT / 8; n++)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; i++) {
        s[n][i] = power(s[n][i] - base);
        a.sum[h] += s[n][i];
      }
  }
#pragma unroll
  for (int k = 0; k < WT / 16; k++) {
    u32 p[4] = {pack(s[2 * k][0], s[2 * k][1]), 0, pack(s[2 * k + 1][0], s[2 * k + 1][1]), 0};
    if (GROUP > 8) { p[1] = pack(s[2 * k][2], s[2 * k][3]); p[3] = pack(s[2 * k + 1][2], s[2 * k + 1][3]); }
#pragma unroll
    for (int n = 0; n < HS / 16; n++) {
      u32 b[4];
      load4t(b, vb + place(k * 16 + (lane & 15), n * 2 + (lane >> 4)));
      multiply(a.o[2 * n], p, b[0], b[1]);
      multiply(a.o[2 * n + 1], p, b[2], b[3]);
    }
  }
}

// Fresh is what is needed to finish the product of Q, K and V; bias, qnorm and knorm may be null.
struct Fresh {
  int rotate;
  const T *bias, *qnorm, *knorm;
  const float2* turns;
};

__device__ __forceinline__ float2 pairOf(const T* p) {
  u32 v = *(const u32*)p;
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

// rotateQ finishes the query heads first + g and first + g + 8 in the lanes' operands.
__device__ __forceinline__ void rotateQ(const Fresh& f, u32 (*q)[4], int pos, int first) {
  int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int h = 0; h < (GROUP > 8 ? 2 : 1); h++) {
    float2 v[HS / 16][2];
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < HS / 16; k++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 w = q[k][2 * i + h];
        v[k][i] = make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
        if (f.bias && g + 8 * h < GROUP) {
          float2 b = pairOf(f.bias + (first + g + 8 * h) * HS + k * 16 + 8 * i + 2 * t);
          v[k][i].x += b.x;
          v[k][i].y += b.y;
        }
        sum = fmaf(v[k][i].x, v[k][i].x, fmaf(v[k][i].y, v[k][i].y, sum));
      }
    if (f.qnorm) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float scale = rsqrtf(sum / HS + (float)(EPS));
#pragma unroll
      for (int k = 0; k < HS / 16; k++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float2 w = pairOf(f.qnorm + k * 16 + 8 * i + 2 * t);
          v[k][i].x *= scale * w.x;
          v[k][i].y *= scale * w.y;
        }
    }
#pragma unroll
    for (int k = 0; k < HS / 32; k++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float4 turn = *(const float4*)(f.turns + (size_t)pos * (HS / 2) + k * 16 + 8 * i + 2 * t);
        float2 lo = v[k][i], hi = v[k + HS / 32][i];
        q[k][2 * i + h] = pack(__fmul_rn(lo.x, turn.x) - __fmul_rn(hi.x, turn.y), __fmul_rn(lo.y, turn.z) - __fmul_rn(hi.y, turn.w));
        q[k + HS / 32][2 * i + h] = pack(__fmul_rn(hi.x, turn.x) + __fmul_rn(lo.x, turn.y), __fmul_rn(hi.y, turn.z) + __fmul_rn(lo.y, turn.w));
      }
  }
}

// writeKV finishes one KV head of the row and puts it into its block: warp 0 K, warp 1 V.
__device__ __forceinline__ void writeKV(const Fresh& f, const Row* row, const int* meta, const T* qkv, KV* kv, const float* scales, int layer, int kvHead) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (warp > 1) return;
  int head = HEADS + warp * KVHEADS + kvHead;
  float lo[HS / 64], hi[HS / 64], sum = 0.f;
#pragma unroll
  for (int j = 0; j < HS / 64; j++) {
    int e = j * 32 + lane;
    lo[j] = widen(qkv[head * HS + e]);
    hi[j] = widen(qkv[head * HS + e + HS / 2]);
    if (f.bias) { lo[j] += widen(f.bias[head * HS + e]); hi[j] += widen(f.bias[head * HS + e + HS / 2]); }
    sum = fmaf(lo[j], lo[j], fmaf(hi[j], hi[j], sum));
  }
  float scale = warp == 0 && f.knorm ? rsqrtf(warpSum(sum) / HS + (float)(EPS)) : 1.f;
  KV* to = kv + kvAt(tableOf(meta, row, layer)[row->pos / BLOCK_TOKENS], layer, warp, row->pos % BLOCK_TOKENS, kvHead);
#pragma unroll
  for (int j = 0; j < HS / 64; j++) {
    int e = j * 32 + lane;
    float a = lo[j], b = hi[j];
    if (warp == 0) {
      if (f.knorm) { a *= scale * widen(f.knorm[e]); b *= scale * widen(f.knorm[e + HS / 2]); }
      float2 turn = f.turns[(size_t)row->pos * (HS / 2) + e];
      float c = __fmul_rn(a, turn.x) - __fmul_rn(b, turn.y), d = __fmul_rn(b, turn.x) + __fmul_rn(a, turn.y);
      a = c;
      b = d;
    }
    put(to + e, a, kvScale(scales, warp, kvHead));
    put(to + e + HS / 2, b, kvScale(scales, warp, kvHead));
  }
}

// attendRows: grid (KV head, row, split), 128 threads; a warp's ring has DEPTH tiles. partial is (row, head, split, HS + 2), done (row, KV
// head) of zeros, which stay zeros. With early, KV before the row's own position is there before the kernel before has ended. With
// rotate, this kernel also does what rope does, for entries of one row.
template <int DEPTH>
__device__ __forceinline__ void attendRows(const int* meta, const T* qkv, KV* kv, const float* scales, T* out, float* partial, int* done, int layer, int window, int early,
                                            int rotate, const T* bias, const T* qnorm, const T* knorm, const float2* turns) {
  Fresh fresh = {rotate, bias, qnorm, knorm, turns};
  extern __shared__ __align__(128) char tiles[];
  FIRST;
  int r = blockIdx.y, kvHead = blockIdx.x, splits = gridDim.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (!early) AFTER;
  const Row* row = rowAt(meta, r);
  if (r >= meta[H_ROWS] || row->tiled) {
    AFTER;
    return;
  }
  int end = row->pos + 1, from = window > 0 && end > window ? end - window : 0, used = 1;
  if (splits > 1) {
    int share = ((end - from + splits - 1) / splits + 4 * WT - 1) / (4 * WT) * (4 * WT);
    used = (end - from + share - 1) / share;
    if (blockIdx.z >= used) {
      AFTER;
      return;
    }
    from += blockIdx.z * share;
    end = min(end, from + share);
  }
  char* mine = tiles + warp * (DEPTH * RAW_TILE + (KV8 ? WARP_TILE : 0));
  Walk w = {sharedAt(mine), kv, tableOf(meta, row, layer), layer, kvHead, from, end, lane};
  int at = from + warp * WT, next = at, safe = early ? row->pos : 0, issued = 0;
  for (; issued < DEPTH - 1 && next + WT <= safe && next < end; issued++, next += 4 * WT) {
    w.fetch(next, issued);
    commit();
  }
  AFTER;
  if (fresh.rotate && end == row->pos + 1) {
    writeKV(fresh, row, meta, qkv + (size_t)r * QKV, kv, scales, layer, kvHead);
    __syncthreads();
  }
  for (; issued < DEPTH - 1; issued++, next += 4 * WT) {
    if (next < end) w.fetch(next, issued);
    commit();
  }
  u32 q[HS / 16][4];
#pragma unroll
  for (int k = 0; k < HS / 16; k++) {
    const T* p = qkv + (size_t)r * QKV + kvHead * GROUP * HS + k * 16 + 2 * t;
    q[k][0] = g < GROUP ? *(const u32*)(p + g * HS) : 0;
    q[k][1] = g + 8 < GROUP ? *(const u32*)(p + (g + 8) * HS) : 0;
    q[k][2] = g < GROUP ? *(const u32*)(p + g * HS + 8) : 0;
    q[k][3] = g + 8 < GROUP ? *(const u32*)(p + (g + 8) * HS + 8) : 0;
  }
  if (fresh.rotate) rotateQ(fresh, q, row->pos, kvHead * GROUP);
  const float scale = 1.4426950408889634f * rsqrtf((float)HS) * kvScale(scales, 0, kvHead);
  Online a = {};
  a.top[0] = a.top[1] = -INF;
  for (int slot = 0, fill = DEPTH - 1; at < end; at += 4 * WT, next += 4 * WT) {
    if (next < end) w.fetch(next, fill);
    commit();
    arrived<DEPTH - 1>();
    __syncwarp();
#if KV8
    widenTile(mine + DEPTH * RAW_TILE, mine + slot * RAW_TILE, lane);
    __syncwarp();
    u32 kb = sharedAt(mine) + DEPTH * RAW_TILE;
#else
    u32 kb = sharedAt(mine) + slot * RAW_TILE;
#endif
    float s[WT / 8][4] = {};
#pragma unroll
    for (int n = 0; n < WT / 8; n++)
#pragma unroll
      for (int k = 0; k < HS / 32; k++) {
        u32 b[4];
        load4(b, kb + place(n * 8 + (lane & 7), k * 4 + (lane >> 3)));
        multiply(s[n], q[2 * k], b[0], b[1]);
        multiply(s[n], q[2 * k + 1], b[2], b[3]);
      }
#pragma unroll
    for (int n = 0; n < WT / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int p = at + n * 8 + 2 * t + (i & 1);
        s[n][i] = p < end ? s[n][i] * scale : -INF;
      }
    online(a, s, kb + WARP_TILE / 2, lane);
    __syncwarp();
    slot = slot + 1 == DEPTH ? 0 : slot + 1;
    fill = fill + 1 == DEPTH ? 0 : fill + 1;
  }
  arrived<0>();
  __syncthreads();  // the rings are free
  float* merged = (float*)tiles;  // (warp, head, HS + 2)
#pragma unroll
  for (int h = 0; h < (GROUP > 8 ? 2 : 1); h++) {
    float l = a.sum[h];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    if (g + 8 * h >= GROUP) continue;
    float* to = merged + (warp * GROUP + g + 8 * h) * (HS + 2);
#pragma unroll
    for (int n = 0; n < HS / 8; n++) { to[n * 8 + 2 * t] = a.o[n][2 * h]; to[n * 8 + 2 * t + 1] = a.o[n][2 * h + 1]; }
    if (t == 0) { to[HS] = a.top[h]; to[HS + 1] = l; }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * HS; i += 128) {
    int head = i / HS, e = i % HS;
    float mm = -INF, ll = 0.f, v = 0.f, f, f2;
    for (int k = 0; k < 4; k++) {
      const float* m = merged + (k * GROUP + head) * (HS + 2);
      merge(mm, ll, m[HS], m[HS + 1], f, f2);
      v = v * f + m[e] * f2;
    }
    v *= kvScale(scales, 1, kvHead);
    if (used == 1) {
      out[(size_t)r * HEADS * HS + (kvHead * GROUP + head) * HS + e] = narrow(v / ll);
      continue;
    }
    float* to = partial + (((size_t)r * HEADS + kvHead * GROUP + head) * splits + blockIdx.z) * (HS + 2);
    to[e] = v;
    if (e == 0) { to[HS] = mm; to[HS + 1] = ll; }
  }
  if (used == 1) return;
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&done[r * KVHEADS + kvHead], 1) == used - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) done[r * KVHEADS + kvHead] = 0;
  for (int i = threadIdx.x; i < GROUP * HS; i += 128) {
    int head = i / HS, e = i % HS;
    const float* p = partial + ((size_t)r * HEADS + kvHead * GROUP + head) * splits * (HS + 2);
    float mm = -INF, ll = 0.f, v = 0.f, f, f2;
#pragma unroll 4
    for (int k = 0; k < used; k++, p += HS + 2) {
      merge(mm, ll, __ldcg(p + HS), __ldcg(p + HS + 1), f, f2);
      v = v * f + __ldcg(p + e) * f2;
    }
    out[(size_t)r * HEADS * HS + (kvHead * GROUP + head) * HS + e] = narrow(v / ll);
  }
}

#define ATTEND(name, RESIDENT, DEPTH)                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(128, RESIDENT) name(const int* meta, const T* qkv, KV* kv, const float* scales, T* out, float* partial,    \
                                                                   int* done, int layer, int window, int early, int rotate, const T* bias,               \
                                                                   const T* qnorm, const T* knorm, const float2* turns) {                                \
    attendRows<DEPTH>(meta, qkv, kv, scales, out, partial, done, layer, window, early, rotate, bias, qnorm, knorm, turns);                               \
  }
ATTEND(attendGroup, 256 / HS, 3)  // blocks that a multiprocessor holds, so that some read while others begin or end
ATTEND(attendFew, 1, 6)           // for no more blocks than there are multiprocessors; the depths are also known to the host
#endif
