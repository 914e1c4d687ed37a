// What the products of few rows on Hopper share: clusters of blocks that write into each other's shared memory, and the ring that the copy
// engine fills.
#if HOPPER && BF16
// clusterArrive and clusterWait are the halves of a barrier of all threads of the cluster, behind which they see what the others wrote.
__device__ __forceinline__ void clusterArrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void clusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// atBlock is where `at` of one's own shared memory is in that of a block of the cluster, and give writes there.
__device__ __forceinline__ u32 atBlock(u32 at, int block) {
  u32 a;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(at), "r"(block));
  return a;
}
__device__ __forceinline__ void give(u32 at, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

// Feed is where a block's weights and inputs are: a ring of SLOTS stages, of BOXES times 64 outputs and INPUTS times N rows. A box has 128
// bytes of each: 64 of k, or 128 where weights have eight bits and there are two boxes of inputs.
template <int N, int SLOTS, int BOXES, int INPUTS> struct Feed {
  static constexpr u32 W = 64 * 128, BYTES = BOXES * W + INPUTS * N * 128;
  u32 at, full, empty;  // shared memory; barriers
  __device__ __forceinline__ u32 stage(int i) const { return at + i % SLOTS * BYTES; }

  // begin is for all threads of a block, of which `warps` warps read the ring.
  __device__ __forceinline__ void begin(char* memory, u64* barriers, int warps) {
    at = together((sharedAt(memory) + 1023) & ~1023u);
    full = together(sharedAt(barriers));
    empty = full + SLOTS * 8;
    if (threadIdx.x < SLOTS) {
      barrierInit(full + threadIdx.x * 8, 1);
      barrierInit(empty + threadIdx.x * 8, warps);
      seen();
    }
    __syncthreads();
  }

  // bring is the work of one thread: chunks of k, the first one and every step-th behind it; outputs are the first ones of each box, row
  // that of the inputs. The maps count weights in pairs of bytes.
  __device__ __forceinline__ void bring(const Map* weights, const Map* inputs, int first, int step, int chunks, const int* outputs, int row) const {
    auto weight = [&](int i) {
      barrierExpect(full + i % SLOTS * 8, BYTES);
#pragma unroll
      for (int b = 0; b < BOXES; b++) bring2(stage(i) + b * W, weights, (first + step * i) * 64, outputs[b], full + i % SLOTS * 8);
    };
    auto input = [&](int i) {
#pragma unroll
      for (int b = 0; b < INPUTS; b++)
        bring2(stage(i) + BOXES * W + b * N * 128, inputs, ((first + step * i) * INPUTS + b) * 64, row, full + i % SLOTS * 8);
    };
    prefetch(inputs);
    const int early = min(SLOTS, chunks);
    for (int i = 0; i < early; i++) weight(i);
    AFTER;
    for (int i = 0; i < early; i++) input(i);
    for (int i = early; i < chunks; i++) {
      barrierWait(empty + i % SLOTS * 8, (i / SLOTS & 1) ^ 1);
      weight(i);
      input(i);
    }
  }
};
#endif
