// The choice of tokens, by the rules and with the noise of the package sample, one block an entry. Sums of probabilities
// are kept in integers, so that their order does not matter.
#define SAMPLERS 1024

__device__ __forceinline__ u64 mix(u64 x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

__device__ __forceinline__ double gumbel(u64 key, int token) {
  double u = ((double)(mix(key ^ (u64)(u32)token) >> 32) + 0.5) / 4294967296.0;
  return -log(-log(u));
}

// rank maps a float to an integer of the same order; 0 is what must never be chosen: NaN and minus infinity.
__device__ __forceinline__ u32 rank(float v) {
  if (!(v > -INF)) return 0;
  u32 b = __float_as_uint(v == 0.f ? 0.f : v);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// best reduces (rank, lowest id) over the block; every thread gets the result. The id is inverted in the low half.
__device__ u64 best(u64 v) {
  __shared__ u64 shared[33];
  for (int o = 16; o > 0; o >>= 1) {
    u64 w = __shfl_xor_sync(~0u, v, o);
    v = w > v ? w : v;
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x >> 5 ? shared[threadIdx.x] : 0;
    for (int o = 16; o > 0; o >>= 1) {
      u64 w = __shfl_xor_sync(~0u, v, o);
      v = w > v ? w : v;
    }
    if (threadIdx.x == 0) shared[32] = v;
  }
  __syncthreads();
  return shared[32];
}

__device__ __forceinline__ u64 candidate(u32 r, int id) { return r == 0 ? 0 : (u64)r << 32 | (u32)~id; }
__device__ __forceinline__ int idOf(u64 c) { return (int)~(u32)c; }

// below gives the best candidate that comes after limit.
__device__ u64 below(const float* row, u64 limit) {
  u64 v = 0;
  for (int i = threadIdx.x; i < VOCAB; i += SAMPLERS) {
    u64 c = candidate(rank(row[i]), i);
    if (c < limit && c > v) v = c;
  }
  return best(v);
}

// total adds integers over the block.
__device__ u64 total(u64 v) {
  __shared__ u64 sum;
  __syncthreads();
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  if ((threadIdx.x & 31) == 0) atomicAdd(&sum, v);
  __syncthreads();
  return sum;
}

#define UNIT 1099511627776.0 /* 2^40: the mass of the most likely token */
struct Scale { double top, temperature; };
__device__ __forceinline__ double weight(Scale s, float v) { return ((double)v - s.top) / s.temperature; }
__device__ __forceinline__ u64 mass(Scale s, float v) { return (u64)(exp(weight(s, v)) * UNIT); }

// cut finds the last candidate that is needed until the sum over the candidates from the best on (of 1 each, or of their
// mass) reaches want, looking at those not before limit only: the digits of the rank first, then those of the id.
__device__ u64 cut(const float* row, Scale s, bool byMass, u64 want, u64 limit) {
  __shared__ u64 bins[256];
  __shared__ u64 state[2];
  u64 prefix = 0, above = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += SAMPLERS) bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < VOCAB; i += SAMPLERS) {
      float v = row[i];
      u64 c = candidate(rank(v), i);
      if (c == 0 || c < limit || (shift < 56 && c >> (shift + 8) != prefix)) continue;
      u64 add = byMass ? mass(s, v) : 1;
      if (add) atomicAdd(&bins[c >> shift & 255], add);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u64 sum = above;
      int b = 255;
      for (; b > 0 && sum + bins[b] < want; b--) sum += bins[b];
      state[0] = prefix << 8 | b;
      state[1] = sum;
    }
    __syncthreads();
    prefix = state[0];
    above = state[1];
    __syncthreads();
  }
  return prefix;
}

// draw chooses by the Gumbel-max rule among the candidates that the filters leave.
__device__ int draw(const float* row, const Entry* e, u64 first, int position) {
  float topValue = row[idOf(first)];
  if (topValue == INF) return idOf(first);
  Scale s = {topValue, e->temperature};
  u64 limit = 0;
  if (e->topK > 0 && e->topK < VOCAB) limit = cut(row, s, false, e->topK, 0);
  if (e->topP > 0.f && e->topP < 1.f) {
    u64 sum = 0;
    for (int i = threadIdx.x; i < VOCAB; i += SAMPLERS) {
      u64 c = candidate(rank(row[i]), i);
      if (c != 0 && c >= limit) sum += mass(s, row[i]);
    }
    sum = total(sum);
    u64 want = (u64)((double)e->topP * (double)sum);
    limit = max(limit, cut(row, s, true, want > 0 ? want : 1, limit));
  }
  double floor = e->minP > 0.f ? min(log((double)e->minP), 0.0) : -1.7e308;
  u64 key = mix(mix((u64)e->seedHi << 32 | e->seedLo) ^ (u64)position);
  double score = gumbel(key, idOf(first));
  int token = idOf(first);
  for (int i = threadIdx.x; i < VOCAB; i += SAMPLERS) {
    u64 c = candidate(rank(row[i]), i);
    if (c == 0 || c < limit) continue;
    double w = weight(s, row[i]);
    if (w < floor || w + 23 < score) continue;
    double g = w + gumbel(key, i);
    if (g > score || (g == score && i < token)) { score = g; token = i; }
  }
  __shared__ double scores[32];
  __shared__ int tokens[33];
  for (int o = 16; o > 0; o >>= 1) {
    double g = __shfl_xor_sync(~0u, score, o);
    int t = __shfl_xor_sync(~0u, token, o);
    if (g > score || (g == score && t < token)) { score = g; token = t; }
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) { scores[threadIdx.x >> 5] = score; tokens[threadIdx.x >> 5] = token; }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 32; w++)
      if (scores[w] > score || (scores[w] == score && tokens[w] < token)) { score = scores[w]; token = tokens[w]; }
    tokens[32] = token;
  }
  __syncthreads();
  return tokens[32];
}

// adjust makes work from the logits: mask, bias, penalties. counts holds 1 for a token of the prompt, and 2 for each
// time that it stands in the output.
__device__ void adjust(const int* meta, const Entry* e, const float* logits, float* work, const int* counts) {
  const u32* mask = (const u32*)meta + e->mask;
  for (int i = threadIdx.x; i < VOCAB; i += SAMPLERS) {
    bool allowed = e->mask < 0 || (i / 32 < e->nmask && mask[i / 32] >> (i % 32) & 1);
    work[i] = allowed ? logits[i] : -INF;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < e->nbias; i += SAMPLERS) {
    int t = meta[e->bias + 2 * i];
    if (t >= 0 && t < VOCAB) work[t] += __int_as_float(meta[e->bias + 2 * i + 1]);
  }
  __syncthreads();
  if (!(e->flags & 1)) return;
  for (int i = threadIdx.x; i < VOCAB; i += SAMPLERS) {
    int n = counts[i];
    if (n == 0) continue;
    float v = work[i];
    if (e->repetition != 0.f && e->repetition != 1.f) v = v > 0.f ? v / e->repetition : v * e->repetition;
    if (n > 1) {
      v = __fadd_rn(v, -__fmul_rn(e->frequency, (float)(n >> 1)));
      v = __fadd_rn(v, -e->presence);
    }
    work[i] = v;
  }
  __syncthreads();
}

// report writes the log probability of the token and the most likely ones: lps is (token, probability) pairs, the chosen
// one first; a missing one has the token -1.
__device__ void report(const float* logits, const Entry* e, int token, int* lps) {
  __shared__ double parts[32];
  u64 first = below(logits, ~0ull);
  double top = first ? (double)logits[idOf(first)] : 0, sum = 0;
  bool sure = first == 0 || top == (double)INF;
  for (int i = threadIdx.x; i < VOCAB && !sure; i += SAMPLERS)
    if (logits[i] == logits[i]) sum += exp((double)logits[i] - top);
  for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < 32; w++) sum += parts[w];
  double norm = top + log(sum);
  if (threadIdx.x == 0) {
    lps[0] = token;
    lps[1] = __float_as_int(sure ? 0.f : (float)((double)logits[token] - norm));
  }
  u64 at = first;
  for (int n = 0; n < e->top; n++) {
    if (threadIdx.x == 0) {
      lps[2 + 2 * n] = at && !sure ? idOf(at) : -1;
      lps[3 + 2 * n] = at && !sure ? __float_as_int((float)((double)logits[idOf(at)] - norm)) : 0;
    }
    if (n + 1 < e->top) at = at ? below(logits, at) : 0;
  }
}

// peaks finds the most likely token of each slice of a row of logits: grid (wanted row, slice), so that the whole card
// reads what one block would take long for.
#define SLICES 32
extern "C" __global__ void __launch_bounds__(256) peaks(const int* meta, const float* logits, u64* out) {
  BEGIN;
  if (blockIdx.x >= meta[H_WANTED]) return;
  const float* row = logits + (size_t)blockIdx.x * VOCAB;
  const int share = (VOCAB + SLICES - 1) / SLICES;
  int end = min(VOCAB, (int)(blockIdx.y + 1) * share);
  u64 v = 0;
  for (int i = blockIdx.y * share + threadIdx.x; i < end; i += 256) v = max(v, candidate(rank(row[i]), i));
  v = best(v);
  if (threadIdx.x == 0) out[blockIdx.x * SLICES + blockIdx.y] = v;
}

// choose samples each wanted position of one entry in turn. The results and lps are by wanted row; a token -1 says that none
// may be chosen, and the positions behind it are -1 too. last is by slot, counts (slot, VOCAB), work (entry, VOCAB).
extern "C" __global__ void __launch_bounds__(SAMPLERS) choose(const int* meta, const float* logits, const u64* peaks, float* works, int* counts, int* last, int* lps) {
  BEGIN;
  if (blockIdx.x >= meta[H_ENTRIES]) return;
  const Entry* e = (const Entry*)(meta + meta[H_ENTRIES_AT]) + blockIdx.x;
  float* work = works + (size_t)blockIdx.x * VOCAB;
  int* tokens = (int*)(results(meta) + 4);
  int* count = counts + (size_t)e->slot * VOCAB;
  bool failed = false;
  for (int k = 0; k < e->wanted; k++) {
    int w = e->wantedFrom + k;
    const float *raw = logits + (size_t)w * VOCAB, *row = raw;
    if (e->mask >= 0 || e->nbias > 0 || e->flags & 1) {
      adjust(meta, e, raw, work, count);
      row = work;
    }
    u64 first = 0;
    if (!failed && row == raw) first = best(threadIdx.x < SLICES ? peaks[w * SLICES + threadIdx.x] : 0);
    if (!failed && row != raw) first = below(row, ~0ull);
    failed = first == 0;
    int token = failed ? -1 : idOf(first);
    if (!failed && e->temperature > 0.f && e->topK != 1)
      token = draw(row, e, first, rowAt(meta, meta[meta[H_WANTED_AT] + w])->pos + 1);
    if (!failed && e->flags & 2) report(raw, e, token, lps + (size_t)w * 2 * (1 + MAXTOP));
    __syncthreads();
    if (threadIdx.x == 0) {
      tokens[w] = token;
      last[e->slot] = failed ? 0 : token;
      if (!failed && e->flags & 1) count[token] += 2;
    }
    __syncthreads();
  }
}

// assign begins a sequence in a slot: list is (slot, history, its length, prompt length), history an offset in words or
// -1 if the slot's counts are not used. One block a slot.
extern "C" __global__ void assign(const int* meta, int list, int* counts, int* last) {
  BEGIN;
  const int* a = meta + list + 4 * blockIdx.x;
  int* count = counts + (size_t)a[0] * VOCAB;
  if (threadIdx.x == 0) last[a[0]] = 0;
  if (a[1] < 0) return;
  for (int i = threadIdx.x; i < VOCAB; i += blockDim.x) count[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < a[2]; i += blockDim.x) {
    int t = meta[a[1] + i];
    if (t < 0 || t >= VOCAB) continue;
    if (i < a[3]) atomicOr(&count[t], 1);
    else atomicAdd(&count[t], 2);
  }
}
