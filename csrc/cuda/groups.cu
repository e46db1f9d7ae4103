// The k largest of every group of consecutive elements, out of an accumulator.
//
// Source: Renggli et al., "SparCML" (SC '19), section 8: k out of every 512 elements.
//
// One block per group. It finds its k-th key by radix descent, four digits of 8 bits from the top,
// and moves out what is above it, and of what is equal to it the lowest indices. The sums are made
// anew in each of the five passes over the group: one of 512 elements stays in the L1 cache, so
// that 8 bytes per element are read from memory, and 4 written (with momentum 12, and 8).
#include "accumulate.cuh"

constexpr u32 kDigitBits = 8;
constexpr u32 kDigitBins = 1u << kDigitBits;
static_assert(kDigitBins == kThreads, "a bin for each thread");

// Reads sums of one thread, whose positions ascend.
template <bool kMomentum>
struct SumReader {
  const f32* residual;
  Momentum momentum;
  const Segment* segment;  // the last one that was read from

  __device__ SumReader(const f32* residual, const Momentum& momentum, const Segment* segments,
                       i32 segment_count, i64 begin)
      : residual(residual),
        momentum(momentum),
        segment(&FindSegment(segments, segment_count, &Segment::begin, begin)) {}

  // The sum at a position; `u` becomes the new momentum.
  __device__ __forceinline__ f32 At(i64 at, f32& u) {
    while (at >= segment->begin + segment->numel) ++segment;
    const Tile whole = TileOf(*segment, 0);
    u = kMomentum ? momentum.buffer[at] : 0.0f;
    const f32 g = GradientAt(whole, static_cast<u32>(at - whole.begin));
    return SumOf<kMomentum>(residual[at], g, u, momentum);
  }
};

// A k-th largest key, and how many of the entries that have it are among the k largest.
struct Kth {
  u32 key;
  u32 ties;
};

// The k-th largest key of the elements [begin, stop); there are as many. All threads call it.
template <bool kMomentum>
__device__ inline Kth FindKth(const SumReader<kMomentum>& first, i64 begin, i64 stop, u32 k) {
  SHARED(u32, counts, kDigitBins);
  SHARED(u32, found, 2);  // the digit, and the rank that is wanted among those that have it
  u32 prefix = 0, prefix_mask = 0, wanted = k;
  for (u32 shift = 4 * kDigitBits; shift > 0;) {
    shift -= kDigitBits;
    counts[threadIdx.x] = 0;
    __syncthreads();
    SumReader<kMomentum> reader = first;
    for (i64 from = begin; from < stop; from += kThreads) {
      const i64 at = from + threadIdx.x;
      f32 u;
      const u32 key = at < stop ? KeyOf(reader.At(at, u)) : 0;
      const bool counts_in = at < stop && (key & prefix_mask) == prefix;
      // Magnitudes crowd in few bins: the lanes of one bin add together.
      const u32 bin = counts_in ? key >> shift & (kDigitBins - 1) : kDigitBins;
      const u32 peers = __match_any_sync(kAllLanes, bin);
      if (counts_in && (peers & LanesBelow()) == 0) {
        atomicAdd(&counts[bin], static_cast<u32>(__popc(peers)));
      }
    }
    __syncthreads();
    const u32 bin = kDigitBins - 1 - threadIdx.x;  // from the top
    const u32 own = counts[bin];
    u32 in_block;
    const u32 above = SumOfThreadsBefore(own, in_block);
    if (above < wanted && wanted <= above + own) {
      found[0] = bin;
      found[1] = wanted - above;
    }
    __syncthreads();
    prefix |= found[0] << shift;
    prefix_mask |= (kDigitBins - 1) << shift;
    wanted = found[1];
  }
  return {prefix, wanted};
}

template <bool kMomentum>
__device__ __forceinline__ void TakeOfGroup(f32* residual, const Momentum& momentum,
                                            const Segment* segments, i32 segment_count, i64 numel,
                                            i64 group_numel, u32 k, Header* header, i32* indices,
                                            f32* values) {
  const u32 group = TakeTicket(header);
  const i64 begin = group * group_numel, stop = Min<i64>(begin + group_numel, numel);
  k = static_cast<u32>(Min<i64>(k, stop - begin));
  SumReader<kMomentum> reader(residual, momentum, segments, segment_count, begin);
  const Kth kth = FindKth(reader, begin, stop, k);
  const u32 ties_wanted = kth.key == 0 ? 0 : kth.ties;  // zeros are never taken
  const u32 count = k - kth.ties + ties_wanted;
  const u64 before = SumBefore(header, group, count);

  u32 above_before = 0, ties_before = 0;  // in the group
  for (i64 from = begin; from < stop; from += kThreads) {
    const i64 at = from + threadIdx.x;
    const bool exists = at < stop;
    f32 u = 0.0f;
    const f32 sum = exists ? reader.At(at, u) : 0.0f;
    const bool is_above = exists && KeyOf(sum) > kth.key;
    const bool is_tie = exists && KeyOf(sum) == kth.key;
    u32 in_block;  // both counts in one word
    const u32 rank = SumOfThreadsBefore((is_above ? 1u << 16 : 0u) | (is_tie ? 1u : 0u), in_block);
    const u32 ties_rank = ties_before + (rank & 0xffffu);
    const bool is_taken = is_above || (is_tie && ties_rank < ties_wanted);
    if (is_taken) {
      const u64 to = before + above_before + (rank >> 16) + Min(ties_rank, ties_wanted);
      indices[to] = static_cast<i32>(at);
      values[to] = sum;
    }
    if (exists) {
      const bool is_spoiled = !IsFinite(sum);
      residual[at] = is_spoiled ? Kept(residual[at]) : is_taken ? 0.0f : sum;
      if (kMomentum) momentum.buffer[at] = is_spoiled ? Kept(momentum.buffer[at]) : u;
    }
    above_before += in_block >> 16;
    ties_before += in_block & 0xffffu;
  }
}

// Adds the gradients; the k largest of every `group_numel` elements leave, in ascending order. The
// grid has one block per group; the output has room for all. `buffer` is null without momentum.
KERNEL accumulate_group_topk(f32* residual, f32* buffer, f32 factor, i32 nesterov,
                             const Segment* segments, i32 segment_count, i64 numel, i64 group_numel,
                             u32 k, Header* header, i32* indices, f32* values) {
  const Momentum momentum{buffer, buffer, factor, nesterov != 0};
  if (buffer == nullptr) {
    TakeOfGroup<false>(residual, momentum, segments, segment_count, numel, group_numel, k, header,
                       indices, values);
  } else {
    TakeOfGroup<true>(residual, momentum, segments, segment_count, numel, group_numel, k, header,
                      indices, values);
  }
}
