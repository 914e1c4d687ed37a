// Hopper's asynchronous instructions: barriers in shared memory, copies of tiles by the copy engine, and matrix products of a
// group of four warps, whose operands lie in shared memory in panels: rows of 128 bytes, with the swizzle of 128 bytes.
#if HOPPER && BF16
// Map describes a matrix in memory to the copy engine (CUtensorMap); the host makes it.
struct __align__(64) Map { u64 words[16]; };

// panel is where piece c (16 bytes) of row t lies, in panels of 64 elements with rows rows each.
__device__ __forceinline__ u32 panel(int t, int c, int rows) { return (c >> 3) * rows * 128 + t * 128 + ((c & 7) ^ (t & 7)) * 16; }

// operand describes a matrix in shared memory, lead bytes from panel to panel, in its low half; matrix completes it. Where a matrix
// begins some bytes later, the low half is greater by a 16th of them.
__device__ __forceinline__ u32 operand(u32 at, u32 lead) { return (at >> 4 & 0x3fff) | (lead >> 4) << 16; }
__device__ __forceinline__ u64 matrix(u32 low) { return (u64)(1024 >> 4 | 1u << 30) << 32 | low; }

// together says that a number is the same in all threads of a warp, so that it lies in a register that they share.
__device__ __forceinline__ u32 together(u32 v) { return __shfl_sync(~0u, v, 0); }

__device__ __forceinline__ void barrierInit(u32 b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void barrierArrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
// barrierExpect arrives and makes the barrier wait for so many bytes of the copy engine.
__device__ __forceinline__ void barrierExpect(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
// barrierCopies makes the barrier count this thread when its copies have arrived.
__device__ __forceinline__ void barrierCopies(u32 b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void barrierWait(u32 b, int parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done: }" ::"r"(b), "r"(parity) : "memory");
}
// seen lets the asynchronous instructions see what ordinary stores and copies wrote.
__device__ __forceinline__ void seen() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// prefetch has the copy engine read a map that it will soon need.
__device__ __forceinline__ void prefetch(const Map* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// bring* begin to copy the box of a map that begins at (x, y[, z]); b counts its bytes.
__device__ __forceinline__ void bring2(u32 to, const Map* map, int x, int y, u32 b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(b)
               : "memory");
}
__device__ __forceinline__ void bring3(u32 to, const Map* map, int x, int y, int z, u32 b) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(x), "r"(y),
               "r"(z), "r"(b)
               : "memory");
}

__device__ __forceinline__ void wgFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int KEEP> __device__ __forceinline__ void wgWait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(KEEP) : "memory"); }
#endif
