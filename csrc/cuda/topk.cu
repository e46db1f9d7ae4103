// The k-th largest key by radix descent, and the k largest of some candidates.
//
// The keys' 31 bits are three digits, from the top: 11, 10 and 10 bits. Each launch of count_digits
// counts one digit among the keys that share the digits found so far; its last block descends into
// the digit that holds rank k. Four bytes are read per element and launch.
#include "compact.cuh"

constexpr u32 kDigits = 3;
constexpr u32 kBins = 2048;
constexpr u32 kBinsOfThread = kBins / kThreads;

__device__ __forceinline__ u32 ShiftOf(u32 digit) { return digit == 0 ? 20 : digit == 1 ? 10 : 0; }

// Zero before the first launch. Afterwards `key` is the k-th largest key, and `wanted` says how
// many of the entries that have this key are among the k largest.
struct Descent {
  u64 wanted;
  u32 key;
  u32 reserved;
  u32 finished[4];  // blocks, by digit
  u32 counts[kDigits][kBins];
};

// How many entries to look at: `count`, or what an earlier pass left; none where that pass has
// found more than there is room for, or less than k.
__device__ __forceinline__ i64 CountOf(i64 count, const Header* passed, u64 k) {
  if (passed == nullptr) return count;
  const i64 total = static_cast<i64>(passed->total);
  return total > count || passed->total < k ? 0 : total;
}

// Descends into the bin that holds the wanted rank, counted from the top. One block calls it.
__device__ inline void Descend(Descent* descent, u32 digit, u64 wanted) {
  SHARED(u32, of_warp, kWarps);
  u32 counts[kBinsOfThread];
  u32 own = 0;
#pragma unroll
  for (u32 i = 0; i < kBinsOfThread; ++i) {
    counts[i] = LoadRelaxed(&descent->counts[digit][threadIdx.x * kBinsOfThread + i]);
    own += counts[i];
  }
  u32 from = own;  // the sum over this thread's bins and all above them
  for (u32 by = 1; by < kLanes; by *= 2) {
    const u32 other = __shfl_down_sync(kAllLanes, from, by);
    if (Lane() + by < kLanes) from += other;
  }
  if (Lane() == 0) of_warp[WarpInBlock()] = from;
  __syncthreads();
  for (u32 warp = WarpInBlock() + 1; warp < kWarps; ++warp) from += of_warp[warp];

  u64 above = from - own;
  if (above >= wanted || from < wanted) return;
  u32 bin = kBinsOfThread - 1;
#pragma unroll  // with a place known only at run time the counts would lie in memory
  for (u32 each = kBinsOfThread - 1; each > 0; --each) {
    if (bin != each || above + counts[each] >= wanted) continue;
    above += counts[each];
    --bin;
  }
  descent->key |= (threadIdx.x * kBinsOfThread + bin) << ShiftOf(digit);
  descent->wanted = wanted - above;
}

// One digit of the k-th largest key of x. A block takes every gridDim.x-th tile.
KERNEL count_digits(const f32* x, i64 count, const Header* passed, u64 k, u32 digit,
                    Descent* descent) {
  SHARED(u32, counts, kBins);
  SHARED(u32, is_last, 1);
  count = CountOf(count, passed, k);
  if (count == 0) return;
  const u64 wanted = digit == 0 ? k : descent->wanted;
  const u32 prefix = descent->key;
  const u32 shift = ShiftOf(digit);
  const u32 digit_mask = digit == 0 ? 0x7ffu : 0x3ffu;
  const u32 prefix_mask = digit == 0 ? 0u : ~((digit_mask << shift) | ((1u << shift) - 1u));

  for (u32 bin = threadIdx.x; bin < kBins; bin += kThreads) counts[bin] = 0;
  __syncthreads();
  for (i64 begin = static_cast<i64>(blockIdx.x) * kTile; begin < count;
       begin += static_cast<i64>(gridDim.x) * kTile) {
    const u32 numel = static_cast<u32>(Min<i64>(count - begin, kTile));
    f32 values[kRounds][kQuad];
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) {
      const u32 place = PlaceOf(round, 0);
      LoadQuad(x + begin + place, place >= numel ? 0u : Min(numel - place, kQuad), values[round]);
    }
#pragma unroll
    for (u32 item = 0; item < kItems; ++item) {
      const u32 key = KeyOf(values[item / kQuad][item % kQuad]);
      const bool counts_in = PlaceOf(item / kQuad, item % kQuad) < numel &&
                             (key & prefix_mask & kMagnitudeMask) == prefix;
      // Magnitudes crowd in few bins: the lanes of one bin add together.
      const u32 bin = counts_in ? key >> shift & digit_mask : kBins;
      const u32 peers = __match_any_sync(kAllLanes, bin);
      if (counts_in && (peers & LanesBelow()) == 0) {
        atomicAdd(&counts[bin], static_cast<u32>(__popc(peers)));
      }
    }
  }
  __syncthreads();
  for (u32 bin = threadIdx.x; bin < kBins; bin += kThreads) {
    if (counts[bin] != 0) atomicAdd(&descent->counts[digit][bin], counts[bin]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last[0] = atomicAdd(&descent->finished[digit], 1u) + 1 == gridDim.x ? 1u : 0u;
  }
  __syncthreads();
  if (is_last[0] != 0) Descend(descent, digit, wanted);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200  // where 64 registers would spill
#undef BLOCKS_PER_PROCESSOR
#define BLOCKS_PER_PROCESSOR 3
#endif

// The k largest of the candidates, ties to the earlier one, in order; the finite others go back to
// the residual, which has zeros there. Does nothing where there are not enough candidates.
//
// The grid has one block per tile of `count`, the room that the candidates have. The output has
// room for k entries.
KERNEL take_largest(const i32* indices, const f32* values, i64 count, const Header* passed,
                    const Descent* descent, u64 k, f32* residual, Header* header, i32* out_indices,
                    f32* out_values) {
  count = CountOf(count, passed, k);
  const u32 tile = TakeTicket(header);
  const i64 begin = static_cast<i64>(tile) * kTile;
  if (begin >= count) return;
  const u32 numel = static_cast<u32>(Min<i64>(count - begin, kTile));
  const u32 kth_key = descent->key;
  const u64 ties_wanted = descent->wanted;

  f32 own[kRounds][kQuad];
  u32 above = 0, ties = 0;
#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
    const u32 place = PlaceOf(round, 0);
    const u32 left = place >= numel ? 0u : Min(numel - place, kQuad);
    LoadQuad(values + begin + place, left, own[round]);
#pragma unroll
    for (u32 i = 0; i < kQuad; ++i) {
      const u32 key = KeyOf(own[round][i]);
      const u32 bit = 1u << (round * kQuad + i);
      if (i < left && key > kth_key) above |= bit;
      if (i < left && key == kth_key) ties |= bit;
    }
  }
  u32 above_rank[kRounds], ties_rank[kRounds];
  const u32 above_count = RankHits(above, above_rank);
  const u32 ties_count = RankHits(ties, ties_rank);
  // Both counts in one word; neither reaches 2**31.
  const u64 before = SumBefore(header, tile, u64{above_count} << 31 | ties_count);
#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
    const u32 place = PlaceOf(round, 0);
    u64 above_before = (before >> 31) + above_rank[round];
    u64 ties_before = (before & 0x7fffffffu) + ties_rank[round];
#pragma unroll
    for (u32 i = 0; i < kQuad; ++i) {
      if (place + i >= numel) continue;
      const bool is_above = above >> (round * kQuad + i) & 1u;
      const bool is_tie = ties >> (round * kQuad + i) & 1u;
      const i32 index = indices[begin + place + i];
      if (is_above || (is_tie && ties_before < ties_wanted)) {
        const u64 to = above_before + Min(ties_before, ties_wanted);
        out_indices[to] = index;
        out_values[to] = own[round][i];
      } else if (IsFinite(own[round][i])) {
        residual[index] = own[round][i];
      }
      above_before += is_above;
      ties_before += is_tie;
    }
  }
}
