// What all kernels share. The host compiles the files of this folder as one source for one model, with its shape as
// macros:
//   BF16 (0, 1)  element type of weights, activations and KV: bfloat16 or float
//   KV8 (0, 1)   with BF16: KV has eight bits (E4M3) instead, and scales (kv, head) for each layer
//   HIDDEN, HEADS, KVHEADS, HS, INTER, VOCAB, BLOCK_TOKENS, EPS
//   HOPPER (0, 1)  the card has the asynchronous matrix instructions of sm_90a
//   MAXTOP       log probabilities that one token may carry
#define GROUP (HEADS / KVHEADS)
#define QKV ((HEADS + 2 * KVHEADS) * HS)
#define INF __int_as_float(0x7f800000)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#if BF16
typedef u16 T;
__device__ __forceinline__ float widen(T v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ T narrow(float v) { return (T)(pack(v, 0.f) & 0xffff); }
#else
typedef float T;
__device__ __forceinline__ float widen(T v) { return v; }
__device__ __forceinline__ T narrow(float v) { return v; }
#endif

// The header of a step's description: all offsets in 4-byte words from its start.
enum { H_ROWS, H_WANTED, H_ENTRIES, H_ROWS_AT, H_WANTED_AT, H_ENTRIES_AT, H_TILES_AT, H_RESULTS, H_RESULTS_HI, H_TABLES, H_SIZE = 16 };

// Row is one query token.
// token < 0: the slot's last one; table: offset in words, of group 0; tiled: the kernel prefill does its attention.
struct Row { int token, pos, slot, table, tiled; };

// Entry is what the sampler knows of one sequence.
struct Entry {
  int slot, wantedFrom, wanted;
  float temperature, topP, minP, repetition, presence, frequency;
  int topK, flags;                             // flags: 1 penalized, 2 log probabilities
  int top, bias, nbias, mask, nmask;           // bias: offset of (token, float) pairs; mask: offset in words, -1: none
  u32 seedLo, seedHi;
};

__device__ __forceinline__ const Row* rowAt(const int* meta, int i) { return (const Row*)(meta + meta[H_ROWS_AT]) + i; }

// Where a layer's KV is, in one number `layer`: which layer of its group (12 bits), how many the group has (12 bits), and which group:
// layers that see everything are group 0, those of each window another. A group has memory and block tables of its own.
//
// kvAt is the place of K (kv 0) or V (kv 1) of one token of a KV block in the group's memory: (block, layer, kv, token, head, HS).
__device__ __forceinline__ size_t kvAt(int block, int layer, int kv, int token, int head) {
  return ((((size_t)block * (layer >> 12 & 0xfff) + (layer & 0xfff)) * 2 + kv) * BLOCK_TOKENS + token) * (KVHEADS * HS) + head * HS;
}

// tableOf is a row's block table for a layer.
__device__ __forceinline__ const int* tableOf(const int* meta, const Row* row, int layer) { return meta + row->table + (layer >> 24) * meta[H_TABLES]; }

__device__ __forceinline__ float warpSum(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// blockSum adds v over the block in a fixed order; every thread gets the sum. shared needs 33 floats.
__device__ __forceinline__ float blockSum(float v, float* shared) {
  v = warpSum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    float s = threadIdx.x < (blockDim.x >> 5) ? shared[threadIdx.x] : 0.f;
    s = warpSum(s);
    if (threadIdx.x == 0) shared[32] = s;
  }
  __syncthreads();
  return shared[32];
}

// BEGIN is the first thing that a kernel does: it lets the blocks of the next kernel come as soon as there is room, and
// waits for the kernel before. FIRST and AFTER are its halves, for what may be read while that kernel still runs.
#if __CUDA_ARCH__ >= 900
#define FIRST asm volatile("griddepcontrol.launch_dependents;")
#define AFTER asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define FIRST
#define AFTER
#endif
#define BEGIN \
  FIRST;      \
  AFTER

// power is 2^v, to 22 bits.
__device__ __forceinline__ float power(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ u64 timer() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// results is memory of the host: three stamps and a pad, then the tokens by wanted row.
__device__ __forceinline__ u64* results(const int* meta) { return (u64*)((u64)(u32)meta[H_RESULTS] | (u64)(u32)meta[H_RESULTS_HI] << 32); }

// stamp writes the card's clock into memory of the host.
extern "C" __global__ void stamp(const int* meta, int i) {
  BEGIN;
  results(meta)[i] = timer();
}

// mailbox answers questions about the card's clock until it has answered n or its time is over. box holds the number of the
// newest question, that of the newest answer, the time of that answer, and at the end the number of the first question; 64
// bytes apart, in memory of the host.
extern "C" __global__ void mailbox(volatile u32* box, u32 seq, int n, int limit) {
  u64 end = timer() + limit;
  u32 first = seq + 1;
  for (; n > 0; n--) {
    u32 newest; // one way to the host and back: it is not read once more when it is there
    do newest = box[0];
    while (newest != seq + 1 && timer() < end);
    if (newest != seq + 1) break;
    *(volatile u64*)(box + 32) = timer();
    __threadfence_system();
    box[16] = ++seq;
  }
  __threadfence_system();
  box[48] = first;
}
