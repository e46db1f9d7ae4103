// The k largest of every group of consecutive elements, out of an accumulator.
//
// Source: Renggli et al., "SparCML" (SC '19), section 8: k out of every 512 elements.
//
// A group moves out what is above its k-th key, and of what is equal to it the lowest indices. One
// of up to 1024 elements belongs to a warp, which keeps its sums in registers: they are made once,
// and 8 bytes per element are read and 4 written (with momentum 12, and 8; what is read twice is in
// the L1 cache). A larger one belongs to a block, which makes the sums anew in each of its passes.
#define BLOCKS_PER_PROCESSOR 3
#include "accumulate.cuh"

// A k-th largest key, and how many of the entries that have it are among the k largest.
struct Kth {
  u32 key;
  u32 ties;
};

// -- A warp for each group
// ---------------------------------------------------------------------------------

constexpr u32 kRowNumel = kLanes * kQuad;
constexpr u32 kFewRows = 4, kMostRows = 8;
constexpr u32 kMostDistinct = 16;  // keys that are looked for one by one

// A lane's sums: row * kRowNumel + lane * 4 + i is the place of an item in the group.
template <bool kMomentum, u32 kRows>
struct Group {
  f32 sum[kRows][kQuad];
  i64 begin;
  u32 numel;
  bool is_whole;  // in one segment
  bool is_wide;   // in one segment, aligned, and made of whole quads

  __device__ __forceinline__ u32 PlaceOf(u32 row) const { return row * kRowNumel + Lane() * kQuad; }

  // How many items of a row's quad exist.
  __device__ __forceinline__ u32 Left(u32 row) const {
    return PlaceOf(row) >= numel ? 0u : Min(numel - PlaceOf(row), kQuad);
  }

  // Items that do not exist become zero, which is never taken.
  __device__ __forceinline__ void Load(const f32* before, const f32* residual,
                                       const Momentum& momentum, const Segment* segments,
                                       i32 segment_count) {
    const Segment* segment = &FindSegment(segments, segment_count, &Segment::begin, begin);
    Tile tile = TileOf(*segment, begin - segment->begin);
    is_whole = begin + numel <= segment->begin + segment->numel;
    tile.numel = kTile;  // a group is wide where a tile at its place would be
    is_wide =
        is_whole && numel % kQuad == 0 && IsWideIn<kMomentum>(before, residual, momentum, tile);
    if (is_wide) {
      LoadRows(before, momentum, tile, [](const f32* from, u32 left, f32(&x)[kQuad]) {
        if (left != 0) LoadWide(from, x);
      });
    } else if (is_whole) {
      LoadRows(before, momentum, tile, LoadQuad);
    } else {
      LoadOneByOne(before, momentum, segment);
    }
  }

  // Out of one segment. Four rows are in flight together.
  template <typename LoadFour>
  __device__ __forceinline__ void LoadRows(const f32* before, const Momentum& momentum,
                                           const Tile& tile, LoadFour load) {
#pragma unroll
    for (u32 first = 0; first < kRows; first += kFewRows) {
      f32 gradient[kFewRows][kQuad] = {}, u[kMomentum ? kFewRows : 1][kQuad] = {};
#pragma unroll
      for (u32 i = 0; i < kFewRows; ++i) {
        const u32 row = first + i;
        const i64 at = begin + PlaceOf(row);
#pragma unroll
        for (u32 item = 0; item < kQuad; ++item) sum[row][item] = 0.0f;
        load(before + at, Left(row), sum[row]);
        if (kMomentum) load(momentum.before + at, Left(row), u[kMomentum ? i : 0]);
      }
      LoadGradients(tile, first, gradient);
#pragma unroll
      for (u32 i = 0; i < kFewRows; ++i) {
#pragma unroll
        for (u32 item = 0; item < kQuad; ++item) {
          f32& total = sum[first + i][item];
          total = SumOf<kMomentum>(total, gradient[i][item], u[kMomentum ? i : 0][item], momentum);
        }
      }
    }
  }

  // Of four rows; raw words come first, as in LoadWideGradients.
  __device__ __forceinline__ void LoadGradients(const Tile& tile, u32 first,
                                                f32 (&x)[kFewRows][kQuad]) const {
    if (is_wide && tile.dtype == kFloat32) {
#pragma unroll
      for (u32 i = 0; i < kFewRows; ++i) {
        if (Left(first + i) == 0) continue;
        LoadWide(reinterpret_cast<const f32*>(tile.gradient) + PlaceOf(first + i), x[i]);
      }
    } else if (is_wide && tile.dtype != kNoGradient) {
      uint2 bits[kFewRows];
#pragma unroll
      for (u32 i = 0; i < kFewRows; ++i) {
        bits[i] = uint2{0, 0};
        if (Left(first + i) == 0) continue;
        bits[i] = *reinterpret_cast<const uint2*>(tile.gradient +
                                                  2 * static_cast<u64>(PlaceOf(first + i)));
      }
#pragma unroll
      for (u32 i = 0; i < kFewRows; ++i) WidenQuad(tile.dtype, bits[i], x[i]);
    } else {
#pragma unroll
      for (u32 i = 0; i < kFewRows; ++i) {
        LoadGradient(tile, PlaceOf(first + i), Left(first + i), x[i]);
      }
    }
  }

  // Across segments, which is rare: short code, and no loads in flight together.
  __device__ __forceinline__ void LoadOneByOne(const f32* before, const Momentum& momentum,
                                               const Segment* segment) {
#pragma unroll
    for (u32 row = 0; row < kRows; ++row) {
#pragma unroll
      for (u32 i = 0; i < kQuad; ++i) sum[row][i] = 0.0f;
    }
#pragma unroll 1
    for (u32 item = 0; item < kRows * kQuad; ++item) {
      const u32 place = PlaceOf(item / kQuad) + item % kQuad;
      if (place >= numel) break;
      const i64 at = begin + place;
      while (at >= segment->begin + segment->numel) ++segment;
      const Tile whole = TileOf(*segment, 0);
      const f32 g = GradientAt(whole, static_cast<u32>(at - whole.begin));
      f32 u = kMomentum ? momentum.before[at] : 0.0f;
      const f32 total = SumOf<kMomentum>(before[at], g, u, momentum);
#pragma unroll
      for (u32 row = 0; row < kRows; ++row) {  // indexing the sums would move them to memory
#pragma unroll
        for (u32 i = 0; i < kQuad; ++i) sum[row][i] = item == row * kQuad + i ? total : sum[row][i];
      }
    }
  }

  // A bit per item, row * 4 + i.
  template <typename Predicate>
  __device__ __forceinline__ u32 Where(Predicate predicate) const {
    u32 bits = 0;
#pragma unroll
    for (u32 row = 0; row < kRows; ++row) {
#pragma unroll
      for (u32 i = 0; i < kQuad; ++i) {
        if (predicate(KeyOf(sum[row][i]))) bits |= 1u << (row * kQuad + i);
      }
    }
    return bits;
  }

  // The largest key below `limit`, 0 where there is none.
  __device__ __forceinline__ u32 LargestBelow(u32 limit) const {
    u32 largest = 0;
#pragma unroll
    for (u32 row = 0; row < kRows; ++row) {
#pragma unroll
      for (u32 i = 0; i < kQuad; ++i) {
        const u32 key = KeyOf(sum[row][i]);
        largest = key < limit && key > largest ? key : largest;
      }
    }
    return WarpMax(largest);
  }

  template <typename Predicate>
  __device__ __forceinline__ u32 Count(Predicate predicate) const {
    return WarpSum(static_cast<u32>(__popc(Where(predicate))));
  }

  // The k-th largest key; 0, and no ties, where fewer than k are not zero.
  __device__ __forceinline__ Kth FindKth(u32 k) const {
    if (k <= kMostDistinct) {  // from one key to the next lower one
      u32 key = kMagnitudeMask + 1u;
      for (;;) {
        key = LargestBelow(key);
        if (key == 0) return {0, 0};
        const u32 found = Count([=](u32 other) { return other == key; });
        if (found >= k) return {key, k};
        k -= found;
      }
    }
    u32 key = 0;  // bit by bit
    for (u32 bit = (kMagnitudeMask + 1u) >> 1; bit != 0; bit >>= 1) {
      const u32 tried = key | bit;
      if (Count([=](u32 other) { return other >= tried; }) >= k) key = tried;
    }
    if (key == 0) return {0, 0};
    return {key, k - Count([=](u32 other) { return other > key; })};
  }

  __device__ __forceinline__ bool IsSpoiled(u32 row, u32 i) const { return !IsFinite(sum[row][i]); }

  // The sums but of what was taken, to their places.
  __device__ __forceinline__ void Store(const f32* before, f32* residual, u32 taken) const {
#pragma unroll
    for (u32 row = 0; row < kRows; ++row) {
      const u32 left = Left(row);
      if (left == 0) continue;
      const i64 first = begin + PlaceOf(row);
      f32 v[kQuad];
#pragma unroll
      for (u32 i = 0; i < kQuad; ++i) {
        v[i] = taken >> (row * kQuad + i) & 1u ? 0.0f : sum[row][i];
        if (i < left && IsSpoiled(row, i)) v[i] = Kept(before[first + i]);
      }
      StoreQuad(residual + first, left, v);
    }
  }

  // The new u to its places. It is made again from what the cache has: kept, it would take as many
  // registers as the sums.
  __device__ __forceinline__ void StoreMomentum(const Momentum& momentum, const Segment* segments,
                                                i32 segment_count) const {
    const u32 spoiled = Where([](u32 key) { return key >= kNonFiniteKey; });
    const Segment* segment = &FindSegment(segments, segment_count, &Segment::begin, begin);
    const Tile tile = TileOf(*segment, begin - segment->begin);
#pragma unroll 2
    for (u32 row = 0; row < kRows; ++row) {
      const u32 left = Left(row);
      if (left == 0) continue;
      const i64 first = begin + PlaceOf(row);
      f32 g[kQuad], u[kQuad];
      LoadQuad(momentum.before + first, left, u);
      if (is_whole) {
        LoadGradient(tile, PlaceOf(row), left, g);
      } else {
        for (u32 i = 0; i < kQuad; ++i) {
          g[i] = 0.0f;
          if (i >= left) continue;
          while (first + i >= segment->begin + segment->numel) ++segment;
          const Tile whole = TileOf(*segment, 0);
          g[i] = GradientAt(whole, static_cast<u32>(first + i - whole.begin));
        }
      }
#pragma unroll
      for (u32 i = 0; i < kQuad; ++i) {
        const f32 old = u[i];
        SumOf<true>(0.0f, g[i], u[i], momentum);
        if (spoiled >> (row * kQuad + i) & 1u) u[i] = Kept(old);
      }
      StoreQuad(momentum.buffer + first, left, u);
    }
  }
};

// Ranks a group's hits in the order of their places: rank[row] becomes the number of hits before
// the lane's first one of the row. Returns the number of hits in the group. All lanes call it.
template <u32 kRows>
__device__ __forceinline__ u32 RankInGroup(u32 hits, u32 (&rank)[kRows]) {
  u64 own = 0;  // by row, 8 bits each: a row has 128 hits at most
#pragma unroll
  for (u32 row = 0; row < kRows; ++row) {
    own |= static_cast<u64>(__popc(hits >> (row * kQuad) & 15u)) << (row * 8);
  }
  u64 upto = own;
  for (u32 by = 1; by < kLanes; by *= 2) {
    const u64 other = __shfl_up_sync(kAllLanes, upto, by);
    if (Lane() >= by) upto += other;
  }
  const u64 all = __shfl_sync(kAllLanes, upto, kLanes - 1);
  u32 before = 0;
#pragma unroll
  for (u32 row = 0; row < kRows; ++row) {
    rank[row] = before + (static_cast<u32>((upto - own) >> (row * 8)) & 255u);
    before += static_cast<u32>(all >> (row * 8)) & 255u;
  }
  return before;
}

template <bool kMomentum, u32 kRows>
__device__ __forceinline__ void TakeOfWarps(const f32* before, f32* residual,
                                            const Momentum& momentum, const Segment* segments,
                                            i32 segment_count, i64 numel, i64 group_numel, u32 k,
                                            Header* header, i32* indices, f32* values) {
  const u32 ticket = TakeTicket(header);
  Group<kMomentum, kRows> group;
  group.begin = (static_cast<i64>(ticket) * kWarps + WarpInBlock()) * group_numel;
  group.numel = group.begin >= numel ? 0u : static_cast<u32>(Min(numel - group.begin, group_numel));
  u32 taken = 0, count = 0;
  u32 rank[kRows] = {};
  if (group.numel != 0) {  // the same in all lanes
    group.Load(before, residual, momentum, segments, segment_count);
    const Kth kth = group.FindKth(Min(k, group.numel));
    const u32 ties = kth.key == 0 ? 0u : group.Where([=](u32 key) { return key == kth.key; });
    taken = group.Where([=](u32 key) { return key > kth.key; }) | ties;
    if (WarpSum(static_cast<u32>(__popc(ties))) > kth.ties) {  // only the first ones
      RankInGroup(ties, rank);
#pragma unroll
      for (u32 row = 0; row < kRows; ++row) {
        u32 before_it = rank[row];
#pragma unroll
        for (u32 i = 0; i < kQuad; ++i) {
          const u32 bit = 1u << (row * kQuad + i);
          if (!(ties & bit)) continue;
          if (before_it++ >= kth.ties) taken &= ~bit;
        }
      }
    }
    count = RankInGroup(taken, rank);
    group.Store(before, residual, taken);
    if (kMomentum) group.StoreMomentum(momentum, segments, segment_count);
  }
  u32 in_block;
  const u32 of_warps = SumOfThreadsBefore(Lane() == 0 ? count : 0u, in_block);
  const u64 first = SumBefore(header, ticket, in_block) + __shfl_sync(kAllLanes, of_warps, 0);
#pragma unroll
  for (u32 row = 0; row < kRows; ++row) {
    u64 to = first + rank[row];
#pragma unroll
    for (u32 i = 0; i < kQuad; ++i) {
      if (!(taken >> (row * kQuad + i) & 1u)) continue;
      indices[to] = static_cast<i32>(group.begin + group.PlaceOf(row) + i);
      values[to] = group.sum[row][i];
      ++to;
    }
  }
}

// -- A block for each group
// --------------------------------------------------------------------------------

constexpr u32 kDigitBits = 8;
constexpr u32 kDigitBins = 1u << kDigitBits;
static_assert(kDigitBins == kThreads, "a bin for each thread");

// Reads sums of one thread, whose positions ascend.
template <bool kMomentum>
struct SumReader {
  const f32* before;
  Momentum momentum;
  const Segment* segment;  // the last one that was read from

  __device__ SumReader(const f32* before, const Momentum& momentum, const Segment* segments,
                       i32 segment_count, i64 begin)
      : before(before),
        momentum(momentum),
        segment(&FindSegment(segments, segment_count, &Segment::begin, begin)) {}

  // The sum at a position; `u` becomes the new momentum.
  __device__ __forceinline__ f32 At(i64 at, f32& u) {
    while (at >= segment->begin + segment->numel) ++segment;
    const Tile whole = TileOf(*segment, 0);
    u = kMomentum ? momentum.before[at] : 0.0f;
    const f32 g = GradientAt(whole, static_cast<u32>(at - whole.begin));
    return SumOf<kMomentum>(before[at], g, u, momentum);
  }
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
__device__ __forceinline__ void TakeOfBlock(const f32* before, f32* residual,
                                            const Momentum& momentum, const Segment* segments,
                                            i32 segment_count, i64 numel, i64 group_numel, u32 k,
                                            Header* header, i32* indices, f32* values) {
  const u32 group = TakeTicket(header);
  const i64 begin = group * group_numel, stop = Min<i64>(begin + group_numel, numel);
  k = static_cast<u32>(Min<i64>(k, stop - begin));
  SumReader<kMomentum> reader(before, momentum, segments, segment_count, begin);
  const Kth kth = FindKth(reader, begin, stop, k);
  const u32 ties_wanted = kth.key == 0 ? 0 : kth.ties;  // zeros are never taken
  const u32 count = k - kth.ties + ties_wanted;
  const u64 first = SumBefore(header, group, count);

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
      const u64 to = first + above_before + (rank >> 16) + Min(ties_rank, ties_wanted);
      indices[to] = static_cast<i32>(at);
      values[to] = sum;
    }
    if (exists) {
      const bool is_spoiled = !IsFinite(sum);
      residual[at] = is_spoiled ? Kept(before[at]) : is_taken ? 0.0f : sum;
      if (kMomentum) momentum.buffer[at] = is_spoiled ? Kept(momentum.before[at]) : u;
    }
    above_before += in_block >> 16;
    ties_before += in_block & 0xffffu;
  }
}

// Adds the gradients; the k largest of every `group_numel` elements leave, in ascending order. Sums
// go from `before` to `residual`, which may be the same. `buffer` is null without momentum. The
// output has room for all.
//
// The grid has one warp per group, which has at most 512 elements.
KERNEL accumulate_group_topk(const f32* before, const f32* buffer_before, f32* residual,
                             f32* buffer, f32 factor, i32 nesterov, const Segment* segments,
                             i32 segment_count, i64 numel, i64 group_numel, u32 k, Header* header,
                             i32* indices, f32* values) {
  const Momentum momentum{buffer_before, buffer, factor, nesterov != 0};
  if (buffer == nullptr) {
    TakeOfWarps<false, kFewRows>(before, residual, momentum, segments, segment_count, numel,
                                 group_numel, k, header, indices, values);
  } else {
    TakeOfWarps<true, kFewRows>(before, residual, momentum, segments, segment_count, numel,
                                group_numel, k, header, indices, values);
  }
}

#undef BLOCKS_PER_PROCESSOR
#define BLOCKS_PER_PROCESSOR 2

// The same for groups of at most 1024 elements, which take twice as many registers.
KERNEL accumulate_long_group_topk(const f32* before, const f32* buffer_before, f32* residual,
                                  f32* buffer, f32 factor, i32 nesterov, const Segment* segments,
                                  i32 segment_count, i64 numel, i64 group_numel, u32 k,
                                  Header* header, i32* indices, f32* values) {
  const Momentum momentum{buffer_before, buffer, factor, nesterov != 0};
  if (buffer == nullptr) {
    TakeOfWarps<false, kMostRows>(before, residual, momentum, segments, segment_count, numel,
                                  group_numel, k, header, indices, values);
  } else {
    TakeOfWarps<true, kMostRows>(before, residual, momentum, segments, segment_count, numel,
                                 group_numel, k, header, indices, values);
  }
}

// The same for groups of any size, with one block per group.
KERNEL accumulate_large_group_topk(const f32* before, const f32* buffer_before, f32* residual,
                                   f32* buffer, f32 factor, i32 nesterov, const Segment* segments,
                                   i32 segment_count, i64 numel, i64 group_numel, u32 k,
                                   Header* header, i32* indices, f32* values) {
  const Momentum momentum{buffer_before, buffer, factor, nesterov != 0};
  if (buffer == nullptr) {
    TakeOfBlock<false>(before, residual, momentum, segments, segment_count, numel, group_numel, k,
                       header, indices, values);
  } else {
    TakeOfBlock<true>(before, residual, momentum, segments, segment_count, numel, group_numel, k,
                      header, indices, values);
  }
}
