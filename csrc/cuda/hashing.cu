// DRAGONN's hashing: entries that pass a threshold compete for slots; losers stay where they are.
//
// Source: Wang et al., "DRAGONN: Distributed Randomized Approximate Gradients of Neural Networks"
// (ICML '22), section 4. A hash of the index (Mixed) chooses one of `buckets` buckets, and a bucket
// has one slot, or eight.
//
// Departures: the largest magnitudes of a bucket win, of equal ones the lower indices, whatever the
// order in which the blocks run; winners come out in ascending order. Two launches: hash_claim adds
// the gradients, fills the slots and marks in two bitmaps what competes, and what is not finite;
// hash_take reads the bitmaps, and moves the winners out. So the order costs half a bit per element
// to write and to read.
#define BLOCKS_PER_PROCESSOR 3
#include "accumulate.cuh"

constexpr u64 kEmpty = 0;  // below every rank: what reaches a key is not zero

// Orders the entries of a bucket: the larger magnitude first, of equal ones the lower index.
__device__ __forceinline__ u64 RankOf(u32 key, i64 index) {
  return u64{key} << 32 | ~static_cast<u32>(index);
}

__device__ __forceinline__ u64* BucketOf(u64* table, i64 index, u32 buckets, u32 slots_per_bucket,
                                         u64 seed) {
  return table + Scaled(Mixed(static_cast<u32>(index), seed), buckets) * slots_per_bucket;
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

// A tile's marks: a bit per place that competes for a slot, and a bit per place that is not finite.
constexpr u32 kBits = 32;
constexpr u32 kWordsOfTile = kTile / kBits;
constexpr u32 kMarksOfTile = 2 * kWordsOfTile;
static_assert(kMarksOfTile == kThreads, "a word for each thread");
constexpr u32 kTilesOfSpan = kThreads / kWordsOfTile;

// Sets a tile's marks in shared memory; `of` is 0 for what competes, 1 for what is not finite.
__device__ __forceinline__ void Mark(u32* marks, u32 of, u32 items) {
  for (u32 left = items; left != 0; left &= left - 1) {
    const u32 item = static_cast<u32>(__ffs(static_cast<int>(left))) - 1;
    const u32 place = PlaceOf(item / kQuad, item % kQuad);
    atomicOr(&marks[of * kWordsOfTile + place / kBits], 1u << (place % kBits));
  }
}

template <bool kMomentum>
__device__ __forceinline__ void ClaimTile(const f32* before, f32* residual,
                                          const Momentum& momentum, const Segment* segments,
                                          i32 segment_count, u32 key, u32 buckets,
                                          u32 slots_per_bucket, u64 seed, u64* table, u32* marks) {
  SHARED(u32, own_marks, kMarksOfTile);
  own_marks[threadIdx.x] = 0;
  __syncthreads();
  const Tile tile = FindTile(segments, segment_count, blockIdx.x);
  const bool is_wide = IsWideIn<kMomentum>(before, residual, momentum, tile);
  Sums<kMomentum> sums;
  sums.Load(before, momentum, tile, is_wide);
  const u32 hits =
      sums.Where(tile, [=](u32 found, i64) { return found >= key && found < kNonFiniteKey; });
  const u32 spoiled = sums.Where(tile, [=](u32 found, i64) { return found >= kNonFiniteKey; });
  Mark(own_marks, 0, hits);
  Mark(own_marks, 1, spoiled);
#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
#pragma unroll
    for (u32 i = 0; i < kQuad; ++i) {
      if (!Has(spoiled, round, i)) continue;  // it stays for hash_take to add up
      const i64 at = tile.begin + PlaceOf(round, i);
      sums.sum[round][i] = before[at];
      if (kMomentum) sums.MomentumOf(round, i) = momentum.before[at];
    }
  }
  sums.Store(residual, momentum, tile, is_wide);
  for (u32 left = hits; left != 0; left &= left - 1) {
    const u32 item = static_cast<u32>(__ffs(static_cast<int>(left))) - 1;
    const i64 index = tile.begin + PlaceOf(item / kQuad, item % kQuad);
    Claim(BucketOf(table, index, buckets, slots_per_bucket, seed), slots_per_bucket,
          RankOf(sums.KeyAt(item), index));
  }
  __syncthreads();
  marks[ThreadInGrid()] = own_marks[threadIdx.x];
}

// The place of the lowest mark.
__device__ __forceinline__ i64 LowestOf(u32 marks) { return __ffs(static_cast<int>(marks)) - 1; }

// A block has a span of tiles, and each of its threads 32 places, in order.
template <bool kMomentum>
__device__ __forceinline__ void TakeTiles(f32* residual, const Momentum& momentum,
                                          const Segment* segments, i32 segment_count, i64 tiles,
                                          u32 buckets, u32 slots_per_bucket, u64 seed, u64* table,
                                          const u32* marks, u32 launch, u64 capacity,
                                          Header* header, i32* indices, f32* values) {
  if (IsTaken(header, launch)) return;
  const i64 number = i64{blockIdx.x} * kTilesOfSpan + threadIdx.x / kWordsOfTile;
  u32 winners = 0, spoiled = 0;
  Tile tile{};
  i64 first = 0;  // index of the thread's first place
  if (number < tiles) {
    const u32 word = threadIdx.x % kWordsOfTile;
    tile = FindTile(segments, segment_count, number);
    first = tile.begin + word * kBits;
    winners = marks[number * kMarksOfTile + word];
    spoiled = marks[number * kMarksOfTile + kWordsOfTile + word];
    for (u32 left = winners; left != 0; left &= left - 1) {
      const i64 index = first + LowestOf(left);
      const u64* const bucket = BucketOf(table, index, buckets, slots_per_bucket, seed);
      if (!Holds(bucket, slots_per_bucket, index)) winners &= ~(left & (~left + 1u));
    }
    winners |= spoiled;
  }
  u32 in_block;
  const u32 in_block_before = SumOfThreadsBefore(static_cast<u32>(__popc(winners)), in_block);
  SHARED(u32, place, 1);
  if (threadIdx.x == 0) place[0] = ClaimRoom(header, in_block, capacity);
  __syncthreads();
  if (place[0] == kNoRoom) return;

  u32 to = place[0] + in_block_before;
  for (u32 left = winners; left != 0; left &= left - 1) {
    const i64 index = first + LowestOf(left);
    const f32 v = residual[index];
    f32 sum = v;
    residual[index] = 0.0f;
    if (spoiled >> LowestOf(left) & 1u) {
      f32 u = kMomentum ? momentum.buffer[index] : 0.0f;
      const f32 old = u;
      sum =
          SumOf<kMomentum>(v, GradientAt(tile, static_cast<u32>(index - tile.begin)), u, momentum);
      residual[index] = Kept(v);
      if (kMomentum) momentum.buffer[index] = Kept(old);
    }
    indices[to] = static_cast<i32>(index);
    values[to] = sum;
    ++to;
  }
}

// Adds the gradients; what reaches `key` claims a slot. One block per tile. `table` has `buckets`
// times `slots_per_bucket` slots, kEmpty at first; `marks` a word per thread of the grid. Sums go
// from `before` to `residual`, which may be the same. `buffer` is null without momentum.
KERNEL hash_claim(const f32* before, const f32* buffer_before, f32* residual, f32* buffer,
                  f32 factor, i32 nesterov, const Segment* segments, i32 segment_count, u32 key,
                  u32 buckets, u32 slots_per_bucket, u64 seed, u64* table, u32* marks) {
  const Momentum momentum{buffer_before, buffer, factor, nesterov != 0};
  if (buffer == nullptr) {
    ClaimTile<false>(before, residual, momentum, segments, segment_count, key, buckets,
                     slots_per_bucket, seed, table, marks);
  } else {
    ClaimTile<true>(before, residual, momentum, segments, segment_count, key, buckets,
                    slots_per_bucket, seed, table, marks);
  }
}

#undef BLOCKS_PER_PROCESSOR
#define BLOCKS_PER_PROCESSOR 8

// Moves out what hash_claim has marked, where it holds a slot or is not finite. One block per span
// of two tiles; the output has room for `capacity` entries (compact.cuh, where a tile is a span).
KERNEL hash_take(f32* residual, f32* buffer, f32 factor, i32 nesterov, const Segment* segments,
                 i32 segment_count, i64 tiles, u32 buckets, u32 slots_per_bucket, u64 seed,
                 u64* table, const u32* marks, u32 launch, u64 capacity, Header* header,
                 i32* indices, f32* values) {
  const Momentum momentum{buffer, buffer, factor, nesterov != 0};
  if (buffer == nullptr) {
    TakeTiles<false>(residual, momentum, segments, segment_count, tiles, buckets, slots_per_bucket,
                     seed, table, marks, launch, capacity, header, indices, values);
  } else {
    TakeTiles<true>(residual, momentum, segments, segment_count, tiles, buckets, slots_per_bucket,
                    seed, table, marks, launch, capacity, header, indices, values);
  }
}
