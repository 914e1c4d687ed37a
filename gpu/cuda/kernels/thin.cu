// The products of a decode step of few rows, each with what surrounds it: norm before, rotation, gate or residual behind.
// They are bound by reading weights. A block makes 16 outputs of all rows at a time and goes on to the next 16; its eight
// warps take parts of k in turn, and each keeps a ring of weights under way in shared memory. Weights never change, so
// where launches overlap the ring is filled before the kernel before has ended.
//
// The norm is split: who writes the stream also writes it times the norm's weight (x), and sums of its squares over 16
// elements each (squares: (row, HIDDEN / 16)); who multiplies x scales the result by the root of their mean.
#if BF16 && HS % 16 == 0 && HIDDEN % 16 == 0 && INTER % 8 == 0
#define WARPS 8
#define STAGES 5                              // of the ring of a warp
#define STAGE 2048                            // bytes: 16 outputs x 64 of k
#define RING (WARPS * STAGES * STAGE)         // also known to the host
enum { ROTATE, GATE, ADD, PLAIN };

// sourceRow is the row of w behind row r of a tile. Rows 8 to 15 are the partners of 0 to 7 where there are pairs.
template <int KIND> __device__ __forceinline__ int sourceRow(int tile, int r, int n) {
  if (KIND == ROTATE) return tile / (HS / 16) * HS + tile % (HS / 16) * 8 + (r & 7) + (r >> 3) * (HS / 2);
  if (KIND == GATE) return tile * 8 + (r & 7) + (r >> 3) * INTER;
  return min(tile * 16 + r, n - 1);
}

// ring is where a warp stands in the weights that it loads: chunks of 64 of k, of tile after tile.
template <int KIND> struct Ring {
  const T* w;
  int n, k, tiles, tile, chunk, slot, lane, warp;
  u32 base;
  __device__ __forceinline__ void next() {
    if (tile < tiles) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int r = (lane >> 3) + 4 * j, c = lane & 7, at = chunk * 64 + c * 8;
        const T* from = w + (size_t)sourceRow<KIND>(tile, r, n) * k;
        copy16(base + slot * STAGE + r * 128 + ((c ^ (r & 1) << 2) << 4), at < k ? from + at : from, at < k ? 16 : 0);
      }
      chunk += WARPS;
      if (chunk * 64 >= k) { chunk = warp; tile += gridDim.x; }
      if (chunk * 64 >= k) tile = tiles;  // k has no part for this warp
    }
    commit();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
};

// inputs are a warp's operands of x for one chunk: MT groups of eight rows.
template <int MT> __device__ __forceinline__ void inputs(uint4 (*v)[2], const T* x, int rows, int k, int chunk, int g, int t) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int s = 0; s < 2; s++) {
      int row = m * 8 + g, at = chunk * 64 + s * 32 + t * 8;
      v[m][s] = row < rows && at < k ? *(const uint4*)(x + (size_t)row * k + at) : make_uint4(0, 0, 0, 0);
    }
}

// chunkProduct multiplies 16 outputs by MT * 8 rows over 64 of k. The order of k is permuted equally in both operands, so
// that a lane reads 16 bytes at a time.
template <int MT> __device__ __forceinline__ void chunkProduct(float (*acc)[2][4], const char* stage, uint4 (*v)[2], int g, int t) {
#pragma unroll
  for (int s = 0; s < 2; s++) {
    int c = (s * 4 + t) ^ (g & 1) << 2;
    uint4 lo = *(const uint4*)(stage + g * 128 + c * 16), hi = *(const uint4*)(stage + (g + 8) * 128 + c * 16);
    u32 a[4] = {lo.x, hi.x, lo.y, hi.y}, b[4] = {lo.z, hi.z, lo.w, hi.w};
#pragma unroll
    for (int m = 0; m < MT; m++) {
      multiply(acc[m][0], a, v[m][s].x, v[m][s].y);
      multiply(acc[m][1], b, v[m][s].z, v[m][s].w);
    }
  }
}

// Thin are the arguments of all kinds; each uses some of them.
struct Thin {
  const int* meta;
  const T *x, *w;
  int n, k, rows;
  float* squares;
  const T *a, *b;  // ROTATE: bias, KV; ADD: weight of the next norm, next x; GATE, PLAIN: output
  void* out;
  const float2* turns;
  int layer;
};

// finish* get the sums of one output (or pair) of one row.
__device__ __forceinline__ void finishRotate(const Thin& p, int tile, int m, int i, float lo, float hi) {
  const Row* row = rowAt(p.meta, m);
  int head = tile / (HS / 16), e = tile % (HS / 16) * 8 + i;
  if (p.a) { lo += widen(p.a[head * HS + e]); hi += widen(p.a[head * HS + e + HS / 2]); }
  T* to = (T*)p.out + (size_t)m * QKV + head * HS;
  if (head < HEADS + KVHEADS) {
    float2 t = p.turns[(size_t)row->pos * (HS / 2) + e];
    float c = __fmul_rn(lo, t.x) - __fmul_rn(hi, t.y), d = __fmul_rn(hi, t.x) + __fmul_rn(lo, t.y);
    lo = c;
    hi = d;
  }
  if (head >= HEADS) {
    int block = tableOf(p.meta, row, p.layer)[row->pos / BLOCK_TOKENS], v = head >= HEADS + KVHEADS;
    to = (T*)p.b + kvAt(block, p.layer, v, row->pos % BLOCK_TOKENS, (head - HEADS) % KVHEADS);
  }
  to[e] = narrow(lo);
  to[e + HS / 2] = narrow(hi);
}

template <int MT, int KIND> __device__ __forceinline__ void thin(const Thin& p) {
  // A warp holds the inputs of one batch of chunks while it asks for the next batch. If all that it has are one batch, they are read
  // once for all tiles.
  constexpr bool STAYS = KIND != ADD && HIDDEN % 64 == 0 && (HIDDEN / 64 + WARPS - 1) / WARPS * MT <= 8;
  constexpr int BATCH = STAYS ? (HIDDEN / 64 + WARPS - 1) / WARPS : 2 / MT;
  extern __shared__ __align__(128) char ring[];
  __shared__ float sums[WARPS][MT * 8][17], scales[MT * 8];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tiles = KIND == ROTATE ? p.n / 16 : KIND == GATE ? INTER / 8 : (p.n + 15) / 16;
  FIRST;
  char* mine = ring + warp * STAGES * STAGE;
  Ring<KIND> r = {p.w, p.n, p.k, tiles, (int)blockIdx.x, warp, 0, lane, warp, sharedAt(mine)};
  if (warp * 64 >= p.k) r.tile = tiles;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) r.next();
  AFTER;
  int live = min(p.meta[H_ROWS], p.rows);
  const int pairs = KIND == ROTATE || KIND == GATE, each = pairs ? 8 : 16;
  int slot = 0;
  uint4 v[STAYS ? 1 : 2][BATCH][MT][2];
  auto ask = [&](uint4 (*to)[MT][2], int from) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) inputs<MT>(to[j], p.x, live, p.k, from + j * WARPS, g, t);
  };
  ask(v[0], warp);
  if (KIND != ADD && p.squares) {
    for (int m = warp; m < live; m += WARPS) {
      float s = 0.f;
      for (int i = lane; i < HIDDEN / 16; i += 32) s += p.squares[(size_t)m * (HIDDEN / 16) + i];
      s = warpSum(s);
      if (lane == 0) scales[m] = rsqrtf(s / HIDDEN + (float)(EPS));
    }
  }
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float held = 0.f;  // of the stream, read early
    int i = threadIdx.x % each, row = threadIdx.x / each, at = tile * 16 + i;
    if (KIND == ADD && row < live && at < p.n) held = ((const float*)p.out)[(size_t)row * p.n + at];
    float acc[MT][2][4] = {};
    auto take = [&](uint4 (*from)[MT][2], int chunk) {
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        if ((chunk + j * WARPS) * 64 >= p.k) break;
        r.next();
        arrived<STAGES - 1>();
        __syncwarp();
        chunkProduct<MT>(acc, mine + slot * STAGE, from[j], g, t);
        __syncwarp();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
      }
    };
    if (STAYS) {
      take(v[0], warp);
    } else {
      constexpr int SPAN = BATCH * WARPS;
      if (tile != blockIdx.x) ask(v[0], warp);
      for (int from = warp; from * 64 < p.k; from += 2 * SPAN) {
        ask(v[STAYS ? 0 : 1], from + SPAN);
        take(v[0], from);
        ask(v[0], from + 2 * SPAN);
        take(v[STAYS ? 0 : 1], from + SPAN);
      }
    }
    __syncthreads();  // the sums of the tile before have been read
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[warp][m * 8 + 2 * t + (j & 1)][g + (j >> 1) * 8] = acc[m][0][j] + acc[m][1][j];
    __syncthreads();
    if (row >= MT * 8) continue;
    float lo = 0.f, hi = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      lo += sums[w][row][i];
      if (pairs) hi += sums[w][row][i + 8];
    }
    if (KIND == ADD) {
      float h = held + lo, s = row < live && at < p.n ? h * h : 0.f;
#pragma unroll
      for (int o = 8; o > 0; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
      if (row >= live || at >= p.n) continue;
      ((float*)p.out)[(size_t)row * p.n + at] = h;
      ((T*)p.b)[(size_t)row * p.n + at] = narrow(h * widen(p.a[at]));
      if (i == 0) p.squares[(size_t)row * (HIDDEN / 16) + tile] = s;
      continue;
    }
    if (row >= live) continue;
    float scale = p.squares ? scales[row] : 1.f;
    lo *= scale;
    hi *= scale;
    if (KIND == ROTATE) finishRotate(p, tile, row, i, lo, hi);
    if (KIND == GATE) ((T*)p.out)[(size_t)row * INTER + tile * 8 + i] = narrow(lo / (1.f + __expf(-lo)) * hi);
    if (KIND == PLAIN && at < p.n) {
      if (p.layer) ((float*)p.out)[(size_t)row * p.n + at] = lo;
      else ((T*)p.out)[(size_t)row * p.n + at] = narrow(lo);
    }
  }
  arrived<0>();
}

#define THIN(name, MT, KIND)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const int* meta, const T* x, const T* w, int n, int k, int rows,   \
                                                            float* squares, const T* a, const T* b, void* out,                \
                                                            const float2* turns, int layer) {                                 \
    thin<MT, KIND>(Thin{meta, x, w, n, k, rows, squares, a, b, out, turns, layer});                                            \
  }
#if !KV8  // attention, or rope, puts KV of eight bits into its blocks
THIN(thinRotate8, 1, ROTATE)
THIN(thinRotate16, 2, ROTATE)
#endif
THIN(thinGate8, 1, GATE)
THIN(thinGate16, 2, GATE)
THIN(thinAdd8, 1, ADD)
THIN(thinAdd16, 2, ADD)
THIN(thinPlain8, 1, PLAIN)
THIN(thinPlain16, 2, PLAIN)

// embedThin fills the stream, x and squares. weight is that of the first norm. Without a table the stream is there: another stage
// has filled it.
extern "C" __global__ void embedThin(const int* meta, const T* table, const int* last, const T* weight, float* stream, T* x, float* squares) {
  BEGIN;
  int r = blockIdx.x;
  if (r >= meta[H_ROWS]) return;
  const Row* row = rowAt(meta, r);
  int token = row->token < 0 ? last[row->slot] : row->token;
  const T* from = table ? table + (size_t)token * HIDDEN : table;
  for (int i = threadIdx.x * 16; i < HIDDEN; i += blockDim.x * 16) {
    float v[16], w[16], s = 0.f;
    float4* own = (float4*)(stream + (size_t)r * HIDDEN + i);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      spread(w + 8 * j, ((const uint4*)(weight + i))[j]);
      if (from) spread(v + 8 * j, ((const uint4*)(from + i))[j]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float4 p = from ? make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]) : own[j];
      if (from) own[j] = p;
      v[4 * j] = p.x; v[4 * j + 1] = p.y; v[4 * j + 2] = p.z; v[4 * j + 3] = p.w;
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
      s = fmaf(v[j], v[j], s);
      v[j] *= w[j];
    }
#pragma unroll
    for (int j = 0; j < 2; j++) ((uint4*)(x + (size_t)r * HIDDEN + i))[j] = gather(v + 8 * j);
    squares[(size_t)r * (HIDDEN / 16) + i / 16] = s;
  }
}
#endif
