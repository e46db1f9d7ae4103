// DRAGONN's hashing: entries that pass a threshold compete for slots; losers stay where they are.
//
// Source: Wang et al., "DRAGONN: Distributed Randomized Approximate Gradients of Neural Networks"
// (ICML '22), section 4. h = ((a i + b) mod 2**64) >> 32 chooses one of `buckets` buckets,
// h * buckets >> 32, and a bucket has one slot, or eight.
//
// Departures: the largest magnitudes of a bucket win, of equal ones the lower indices, whatever the
// order in which the blocks run; winners come out in ascending order. Two launches: hash_claim adds
// the gradients and fills the slots, hash_take moves the winners out.
#define BLOCKS_PER_PROCESSOR 3
#include "accumulate.cuh"

constexpr u64 kEmpty = 0;  // below every rank: what reaches a key is not zero

// Orders the entries of a bucket: the larger magnitude first, of equal ones the lower index.
__device__ __forceinline__ u64 RankOf(u32 key, i64 index) {
  return u64{key} << 32 | ~static_cast<u32>(index);
}

__device__ __forceinline__ u64* BucketOf(u64* table, i64 index, u32 buckets, u32 slots_per_bucket,
                                         u64 a, u64 b) {
  const u64 h = (a * static_cast<u64>(index) + b) >> 32;
  return table + (h * buckets >> 32) * slots_per_bucket;
}

// Leaves the highest ranks of a bucket in its slots, descending: each slot keeps the higher of two,
// and the other goes on to the next slot.
__device__ inline void Claim(u64* bucket, u32 slots_per_bucket, u64 rank) {
  for (u32 slot = 0; slot < slots_per_bucket && rank != kEmpty; ++slot) {
    const u64 found = atomicMax(&bucket[slot], rank);
    rank = found < rank ? found : rank;
  }
}

__device__ inline bool Holds(const u64* bucket, u32 slots_per_bucket, i64 index) {
  for (u32 slot = 0; slot < slots_per_bucket; ++slot) {
    if (bucket[slot] != kEmpty && static_cast<u32>(bucket[slot]) == ~static_cast<u32>(index)) {
      return true;
    }
  }
  return false;
}

template <bool kMomentum>
__device__ __forceinline__ void ClaimTile(const f32* before, f32* residual,
                                          const Momentum& momentum, const Segment* segments,
                                          i32 segment_count, u32 key, u32 buckets,
                                          u32 slots_per_bucket, u64 a, u64 b, u64* table,
                                          u32* marks) {
  const Tile tile = FindTile(segments, segment_count, blockIdx.x);
  const bool is_wide = IsWideIn<kMomentum>(before, residual, momentum, tile);
  Sums<kMomentum> sums;
  sums.Load(before, momentum, tile, is_wide);
  const u32 hits =
      sums.Where(tile, [=](u32 found, i64) { return found >= key && found < kNonFiniteKey; });
  const u32 spoiled = sums.Where(tile, [=](u32 found, i64) { return found >= kNonFiniteKey; });
  marks[ThreadInGrid()] = hits | spoiled << kItems;
  for (u32 left = hits; left != 0; left &= left - 1) {
    const u32 item = static_cast<u32>(__ffs(static_cast<int>(left))) - 1;
    const i64 index = tile.begin + PlaceOf(item / kQuad, item % kQuad);
    Claim(BucketOf(table, index, buckets, slots_per_bucket, a, b), slots_per_bucket,
          RankOf(sums.KeyAt(item), index));
  }
#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
#pragma unroll
    for (u32 i = 0; i < kQuad; ++i) {
      // Hits and spoiled elements stay for hash_take to add up.
      const i64 at = tile.begin + PlaceOf(round, i);
      if (Has(hits | spoiled, round, i)) sums.sum[round][i] = before[at];
      if (kMomentum && Has(spoiled, round, i)) sums.MomentumOf(round, i) = momentum.before[at];
    }
  }
  sums.Store(residual, momentum, tile, is_wide);
}

// The sum of an element that hash_claim left alone; a finite one has its new u already.
template <bool kMomentum>
__device__ __forceinline__ f32 SumLeft(f32 v, f32 g, f32 u, bool is_spoiled,
                                       const Momentum& momentum) {
  if (!kMomentum || is_spoiled) return SumOf<kMomentum>(v, g, u, momentum);
  return momentum.nesterov ? Add(Add(v, u), g) : Add(v, u);
}

template <bool kMomentum>
__device__ __forceinline__ void TakeTile(f32* residual, const Momentum& momentum,
                                         const Segment* segments, i32 segment_count, u32 buckets,
                                         u32 slots_per_bucket, u64 a, u64 b, u64* table,
                                         const u32* marks, i64 first_tile, u64 capacity,
                                         Header* header, i32* indices, f32* values) {
  const u32 ticket = TakeTicket(header);
  const Tile tile = FindTile(segments, segment_count, first_tile + ticket);
  const u32 mark = marks[(first_tile + ticket) * kThreads + threadIdx.x];
  const u32 hits = mark & 0xffffu, spoiled = mark >> kItems;
  u32 winners = spoiled;
  for (u32 left = hits; left != 0; left &= left - 1) {
    const u32 item = static_cast<u32>(__ffs(static_cast<int>(left))) - 1;
    const i64 index = tile.begin + PlaceOf(item / kQuad, item % kQuad);
    const u64* const bucket = BucketOf(table, index, buckets, slots_per_bucket, a, b);
    if (Holds(bucket, slots_per_bucket, index)) winners |= 1u << item;
  }
  u32 rank[kRounds];
  const u32 count = RankHits(winners, rank);
  const u64 before = SumBefore(header, ticket, count);
  if (!Fits(header, ticket, before, count, capacity)) return;

#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
    u64 to = before + rank[round];
    for (u32 i = 0; i < kQuad; ++i) {
      if (!Has(hits | spoiled, round, i)) continue;
      const u32 place = PlaceOf(round, i);
      const i64 index = tile.begin + place;
      const bool is_spoiled = Has(spoiled, round, i), is_winner = Has(winners, round, i);
      const f32 v = residual[index], u = kMomentum ? momentum.buffer[index] : 0.0f;
      const f32 sum = SumLeft<kMomentum>(v, GradientAt(tile, place), u, is_spoiled, momentum);
      if (is_winner) {
        indices[to] = static_cast<i32>(index);
        values[to] = sum;
        ++to;
      }
      residual[index] = is_spoiled ? Kept(v) : is_winner ? 0.0f : sum;
      if (kMomentum && is_spoiled) momentum.buffer[index] = Kept(u);
    }
  }
}

// Adds the gradients; what reaches `key` claims a slot. One block per tile. `table` has `buckets`
// times `slots_per_bucket` slots, kEmpty at first; `marks` a word per thread of the grid. Sums go
// from `before` to `residual`, which may be the same. `buffer` is null without momentum.
KERNEL hash_claim(const f32* before, const f32* buffer_before, f32* residual, f32* buffer,
                  f32 factor, i32 nesterov, const Segment* segments, i32 segment_count, u32 key,
                  u32 buckets, u32 slots_per_bucket, u64 a, u64 b, u64* table, u32* marks) {
  const Momentum momentum{buffer_before, buffer, factor, nesterov != 0};
  if (buffer == nullptr) {
    ClaimTile<false>(before, residual, momentum, segments, segment_count, key, buckets,
                     slots_per_bucket, a, b, table, marks);
  } else {
    ClaimTile<true>(before, residual, momentum, segments, segment_count, key, buckets,
                    slots_per_bucket, a, b, table, marks);
  }
}

// Moves out what hash_claim has marked, where it holds a slot or is not finite. One block per tile,
// from `first_tile` on; the output has room for `capacity` entries (compact.cuh).
KERNEL hash_take(f32* residual, f32* buffer, f32 factor, i32 nesterov, const Segment* segments,
                 i32 segment_count, u32 buckets, u32 slots_per_bucket, u64 a, u64 b, u64* table,
                 const u32* marks, i64 first_tile, u64 capacity, Header* header, i32* indices,
                 f32* values) {
  const Momentum momentum{buffer, buffer, factor, nesterov != 0};
  if (buffer == nullptr) {
    TakeTile<false>(residual, momentum, segments, segment_count, buckets, slots_per_bucket, a, b,
                    table, marks, first_tile, capacity, header, indices, values);
  } else {
    TakeTile<true>(residual, momentum, segments, segment_count, buckets, slots_per_bucket, a, b,
                   table, marks, first_tile, capacity, header, indices, values);
  }
}
