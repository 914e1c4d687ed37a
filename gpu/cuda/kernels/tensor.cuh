// Matrix instructions and copies into shared memory, for the kernels that use the tensor cores.
#if BF16
#define CHUNKS (HS / 8)  // pieces of 16 bytes of one token

// place is where piece c of token t lies in shared memory: shifted, so that eight tokens meet eight different banks.
__device__ __forceinline__ u32 place(int t, int c) { return (t * CHUNKS + (c ^ (t & 7))) * 16; }

__device__ __forceinline__ void load4(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void load4t(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void multiply(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// copy16 begins to copy 16 bytes into shared memory; with n 0 they are zeros. commit closes a group of such copies, and
// arrived waits until no more than KEEP groups are under way.
__device__ __forceinline__ void copy16(u32 to, const void* from, int n) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n));
}
__device__ __forceinline__ void store16(u32 to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int KEEP> __device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory"); }
__device__ __forceinline__ u32 sharedAt(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#endif
