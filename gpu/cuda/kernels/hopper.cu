// Attention of many query tokens on Hopper: a block holds 64 query tokens of one head a consumer (a group of four warps),
// which multiply with the asynchronous matrix instructions; a fourth group brings the keys and values. While a consumer's
// product with V runs, it works on the next scores.
#if HOPPER && BF16 && (HS == 64 || HS == 128)
#define CONSUMERS (HS == 64 ? 3 : 2)
#define KEYS 128                     // tokens of a step
#define PANEL (KEYS * 128)           // bytes of 64 elements of all of them
#define KV_BYTES (KEYS * HS * 2)
#define KV_STAGES (HS == 64 ? 4 : 2)  // steps of K and of V that are on their way or in use; also known to the host
#define Q_BYTES (CONSUMERS * 64 * HS * 2)
#define PRODUCERS (BOX ? 1 : 128)    // threads that a step of keys waits for

// mma* add a product of 16 of k to d, or set d if add is 0.
__device__ __forceinline__ void mmaScores(float* d, u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
      "%59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(add));
}
#if HS == 64
__device__ __forceinline__ void mmaValues(float* d, const u32* a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
#else
__device__ __forceinline__ void mmaValues(float* d, const u32* a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %69, 0; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
      "%59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
#endif

// Keys is what the producer and the consumers of a block agree on.
struct Keys {
  u32 k, v, full, empty;  // shared memory; barriers: of the stages of K, then of those of V
  __device__ __forceinline__ u32 at(int isV, int j) const { return (isV ? v : k) + j % KV_STAGES * KV_BYTES; }
  __device__ __forceinline__ u32 barrier(u32 of, int isV, int j) const { return of + (isV * KV_STAGES + j % KV_STAGES) * 8; }
  __device__ __forceinline__ void wait(int isV, int j) const {
    barrierWait(barrier(full, isV, j), j / KV_STAGES & 1);
    if (!BOX) seen();
  }
  // release says that a warp has done with a step; it waits until the others have, too.
  __device__ __forceinline__ void release(int isV, int j) const {
    if ((threadIdx.x & 31) == 0) barrierArrive(barrier(empty, isV, j));
  }
  // await waits until the stage of step j is free.
  __device__ __forceinline__ void await(int isV, int j) const {
    if (j >= KV_STAGES) barrierWait(barrier(empty, isV, j), (j / KV_STAGES & 1) ^ 1);
  }
};

#if BOX
// produce brings K and V of the tokens [lowest, end), one warp; places beyond end become zeros. The copy engine brings boxes of BOX tokens
// of a KV block, the warp itself what the last box lacks.
__device__ __forceinline__ void produce(const Keys& s, const Map* map, const KV* kv, const int* table, int layer, int kvHead, int lowest, int end) {
  int lane = threadIdx.x & 31;
  for (int at = lowest, j = 0; at < end; at += KEYS, j++) {
    int boxes = min(KEYS, end - at) / BOX, p = at + min(lane, boxes - 1) * BOX;
    int z = boxes > 0 ? (int)(kvAt(table[p / BLOCK_TOKENS], layer, 0, p % BLOCK_TOKENS, 0) / (KVHEADS * HS)) : 0;
#pragma unroll
    for (int isV = 0; isV < 2; isV++) {
      s.await(isV, j);
      u32 to = s.at(isV, j), full = s.barrier(s.full, isV, j);
      if (boxes < KEYS / BOX) {
        for (int i = lane; i < (KEYS - boxes * BOX) * CHUNKS; i += 32) {
          int t = boxes * BOX + i / CHUNKS, c = i % CHUNKS, x = at + t;
          store16(to + panel(t, c, KEYS), x < end ? *(const uint4*)(kv + kvAt(table[x / BLOCK_TOKENS], layer, isV, x % BLOCK_TOKENS, kvHead) + c * 8) : make_uint4(0, 0, 0, 0));
        }
        seen();
      }
      __syncwarp();
      if (lane == 0) barrierExpect(full, boxes * BOX * HS * 2);
      __syncwarp();
      if (lane < boxes)
#pragma unroll
        for (int h = 0; h < HS / 64; h++) bring3(to + h * PANEL + lane * BOX * 128, map, h * 64, kvHead, z + isV * BLOCK_TOKENS, full);
    }
  }
}
#else
// produce brings K and V of the tokens [lowest, end), 128 threads together; places beyond end become zeros.
__device__ __forceinline__ void produce(const Keys& s, const Map*, const KV* kv, const int* table, int layer, int kvHead, int lowest, int end) {
  int thread = threadIdx.x & 127, c = thread % CHUNKS, row0 = thread / CHUNKS;
  for (int at = lowest, j = 0; at < end; at += KEYS, j++)
    for (int isV = 0; isV < 2; isV++) {
      s.await(isV, j);
      u32 to = s.at(isV, j);
#pragma unroll 4
      for (int t = row0; t < KEYS; t += 128 / CHUNKS) {
        int p = at + t, n = p < end ? 16 : 0, x = n ? p : lowest;
        const KV* from = kv + kvAt(table[x / BLOCK_TOKENS], layer, isV, x % BLOCK_TOKENS, kvHead) + c * 8;
#if KV8
        store16(to + panel(t, c, KEYS), n ? widen8x8(*(const uint2*)from) : make_uint4(0, 0, 0, 0));
#else
        copy16(to + panel(t, c, KEYS), from, n);
#endif
      }
#if KV8
      seen();
      barrierArrive(s.barrier(s.full, isV, j));
#else
      barrierCopies(s.barrier(s.full, isV, j));
#endif
    }
  arrived<0>();
}
#endif

// Softmax is the state of the query tokens g and g + 8 of a warp.
struct Softmax {
  float top[2], sum[2];
};

// weigh turns scores into weights and gives the factors for what was summed before. first is the position of the first key, p
// that of the query token g; masked says that some keys may not be seen.
__device__ __forceinline__ void weigh(float* s, Softmax& a, float* factor, bool masked, int first, int p, int window) {
  const float scale = 1.4426950408889634f * rsqrtf((float)HS);
  int t = threadIdx.x & 3;
  if (masked) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
      int k = first + (i >> 2) * 8 + 2 * t + (i & 1), at = p + (i & 2) * 4;
      if (k > at || (window > 0 && at - k >= window)) s[i] = -INF;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float top = a.top[h];
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) top = fmaxf(top, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float base = top == -INF ? 0.f : top * scale;
    factor[h] = power(a.top[h] * scale - base);
    a.top[h] = top;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
      for (int k = 4 * i + 2 * h; k < 4 * i + 2 * h + 2; k++) {
        s[k] = power(fmaf(s[k], scale, -base));
        sum += s[k];
      }
    a.sum[h] = fmaf(a.sum[h], factor[h], sum);
  }
}

// scores begins s = q k^T.
__device__ __forceinline__ void scores(float* s, u32 q, u32 k) {
  wgFence();
#pragma unroll
  for (int i = 0; i < HS / 16; i++)
    mmaScores(s, matrix(q + ((i >> 2) * CONSUMERS * 64 * 128 + (i & 3) * 32) / 16), matrix(k + ((i >> 2) * PANEL + (i & 3) * 32) / 16), i > 0);
  wgCommit();
}

// values begins o += p v.
__device__ __forceinline__ void values(float* o, u32 (*p)[4], u32 v) {
  wgFence();
#pragma unroll
  for (int i = 0; i < KEYS / 16; i++) mmaValues(o, p[i], matrix(v + i * 2048 / 16), 1);
  wgCommit();
}

__device__ __forceinline__ void packWeights(u32 (*p)[4], const float* s) {
#pragma unroll
  for (int i = 0; i < KEYS / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) p[i][j] = pack(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
}

// consume is the work of one group of four warps: query tokens [64 * group, 64 * group + 64) of the tile. mine of the
// steps of keys matter to it; it lets the others pass.
__device__ __forceinline__ void consume(const Keys& s, u32 queries, const T* qkv, const float* scales, T* out, int group, int first, int rows, int head, int pos0, int lowest, int end, int window) {
  int thread = threadIdx.x & 127, lane = thread & 31, g = lane >> 2, t = lane & 3;
  for (int i = thread; i < 64 * CHUNKS; i += 128) {
    int row = group * 64 + i / CHUNKS, c = i % CHUNKS;
    uint4 v = row < rows ? *(const uint4*)(qkv + (size_t)(first + row) * QKV + head * HS + c * 8) : make_uint4(0, 0, 0, 0);
#if KV8
    float q[8];  // takes the scale of K, a power of two
    spread(q, v);
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] *= kvScale(scales, 0, head / GROUP);
    v = gather(q);
#endif
    store16(queries + panel(row, c, CONSUMERS * 64), v);
  }
  seen();
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  const u32 q = operand(queries + group * 64 * 128, 16), k = operand(s.k, 16), v = operand(s.v, PANEL);
  auto keys = [&](int j) { return k + j % KV_STAGES * (KV_BYTES / 16); };
  auto vals = [&](int j) { return v + j % KV_STAGES * (KV_BYTES / 16); };
  int row = group * 64 + (thread >> 5) * 16 + g, p = pos0 + row, steps = (end - lowest + KEYS - 1) / KEYS;
  int mine = group * 64 < rows ? (pos0 + min(rows, group * 64 + 64) - lowest + KEYS - 1) / KEYS : 0;
  float w[KEYS / 2], o[HS / 2], factor[2];
  u32 weights[KEYS / 16][4];
  Softmax a = {{-INF, -INF}, {0.f, 0.f}};
#pragma unroll
  for (int i = 0; i < HS / 2; i++) o[i] = 0.f;
  auto masked = [&](int j) { return lowest + j * KEYS + KEYS - 1 > pos0 + group * 64 || window > 0; };
  if (mine > 0) {
    s.wait(0, 0);
    scores(w, q, keys(0));
    wgWait<0>();
    s.release(0, 0);
    weigh(w, a, factor, masked(0), lowest, p, window);
    packWeights(weights, w);
#pragma unroll 1
    for (int j = 1; j < mine; j++) {
      s.wait(0, j);
      scores(w, q, keys(j));
      s.wait(1, j - 1);
      values(o, weights, vals(j - 1));
      wgWait<1>();
      s.release(0, j);
      weigh(w, a, factor, masked(j), lowest + j * KEYS, p, window);
      wgWait<0>();
      s.release(1, j - 1);
#pragma unroll
      for (int i = 0; i < HS / 2; i++) o[i] *= factor[i >> 1 & 1];
      packWeights(weights, w);
    }
    s.wait(1, mine - 1);
    values(o, weights, vals(mine - 1));
    wgWait<0>();
    s.release(1, mine - 1);
  }
  for (int j = mine; j < steps; j++)
    for (int isV = 0; isV < 2; isV++) {
      s.wait(isV, j);
      s.release(isV, j);
    }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float l = a.sum[h];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    if (row + 8 * h >= rows) continue;
    float f = kvScale(scales, 1, head / GROUP) / l;
    T* to = out + (size_t)(first + row + 8 * h) * HEADS * HS + head * HS + 2 * t;
#pragma unroll
    for (int n = 0; n < HS / 8; n++) *(u32*)(to + n * 8) = pack(o[4 * n + 2 * h] * f, o[4 * n + 2 * h + 1] * f);
  }
}

// prefill: grid (head, tile), a group of 128 threads for each consumer and one more. A tile is (first row, rows). map is the KV of the
// layer's group as (element of a head, head, place of a token).
extern "C" __global__ void __launch_bounds__(CONSUMERS * 128 + 128, 1) prefill(const __grid_constant__ Map map, const int* meta, const T* qkv, const KV* kv, const float* scales,
                                                                               T* out, int layer, int window) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ u64 barriers[4 * KV_STAGES];
  const int* tile = meta + meta[H_TILES_AT] + 2 * (gridDim.y - 1 - blockIdx.y);  // long ones first
  const int head = blockIdx.x, group = together(threadIdx.x / 128);
  const u32 base = together((sharedAt(memory) + 1023) & ~1023u), at = together(sharedAt(barriers));
  const Keys s = {base + Q_BYTES, base + Q_BYTES + KV_STAGES * KV_BYTES, at, at + 2 * KV_STAGES * 8};
  if (threadIdx.x < 2 * KV_STAGES) {
    barrierInit(s.full + threadIdx.x * 8, PRODUCERS);
    barrierInit(s.empty + threadIdx.x * 8, CONSUMERS * 4);
    seen();
  }
  __syncthreads();
  BEGIN;
  const int first = tile[0], rows = tile[1];
  const Row* row = rowAt(meta, first);
  const int pos0 = row->pos, end = pos0 + rows, lowest = window > 0 ? max(pos0 - window + 1, 0) / KEYS * KEYS : 0;
  if (group == CONSUMERS) {  // together no more registers than the block was given
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CONSUMERS == 3 ? 32 : 40));
    if (!BOX || (threadIdx.x & 127) < 32) produce(s, &map, kv, tableOf(meta, row, layer), layer, head / GROUP, lowest, end);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMERS == 3 ? 160 : 232));
    consume(s, base, qkv, scales, out, group, first, rows, head, pos0, lowest, end, window);
  }
}
#endif
