// Ordered compaction: where the hits of a tile go, before the other tiles are known.
//
// In one pass, for what is short: a block takes its tile's number from a counter (a ticket), so
// that every tile before its own has been taken by a block that already runs: waiting for it ends.
// By block index it may never end. The block counts its hits, publishes the count, and adds up the
// tiles before it by looking back at what they have published: their own count, or the sum up to
// and including them, which ends the search. (Merrill and Garland, "Single-pass Parallel Prefix
// Scan with Decoupled Look-back", 2016.)
//
// In two, for all elements of a residual, where many blocks would wait for few: a block claims room
// in an output of `capacity` entries by adding its count to the total, notes where, and adds to the
// count of its group of tiles. `order_tiles` (streams.cu) then brings the claims into the order of
// the tiles. Where more was claimed than there is room, some tiles leave everything as they found
// it. The host sees that, makes room, and launches the same kernel again, which takes those.
#pragma once

#include "gradients.cuh"

// Zero at first; the host reads it when the pass is done. Followed by one status word per tile and,
// where tiles claim room, one count per group of them.
struct Header {
  u64 ticket;
  u64 total;    // of all tiles, whether they fit or not
  u64 written;  // entries that were written, where they did not all fit
  u64 reserved[5];
};

// A published word: what it is, and a sum of 62 bits.
constexpr u32 kStateShift = 62;
constexpr u64 kOwnCount = u64{1} << kStateShift;
constexpr u64 kSumSoFar = u64{2} << kStateShift;
constexpr u64 kSumMask = kOwnCount - 1;

__device__ inline u64* StatusOf(Header* header) { return reinterpret_cast<u64*>(header + 1); }

// The number of this block's tile. All threads call it.
__device__ inline u32 TakeTicket(Header* header) {
  SHARED(u32, ticket, 1);
  if (threadIdx.x == 0) ticket[0] = static_cast<u32>(atomicAdd(&header->ticket, u64{1}));
  __syncthreads();
  return ticket[0];
}

// Ranks the hits of a block in the order of their places: bit round * 4 + i of `hits` is the item i
// of that round. rank[round] becomes the number of hits before the thread's first one of the round.
// Returns what `use`, which one thread calls, makes of their number. All threads call it.
template <typename Use>
__device__ inline u32 RankHits(u32 hits, u32 (&rank)[kRounds], Use use) {
  SHARED(u32, counts, kRounds * kWarps);  // by round, then warp: in the order of the places
  SHARED(u32, used, 1);
  static_assert(kRounds * kWarps == kLanes, "one warp adds them up");
  for (u32 round = 0; round < kRounds; ++round) {
    u32 before = 0, in_warp = 0;
    for (u32 i = 0; i < kQuad; ++i) {
      const u32 ballot = __ballot_sync(kAllLanes, hits >> (round * kQuad + i) & 1u);
      before += __popc(ballot & LanesBelow());
      in_warp += __popc(ballot);
    }
    rank[round] = before;
    if (Lane() == 0) counts[round * kWarps + WarpInBlock()] = in_warp;
  }
  __syncthreads();
  if (WarpInBlock() == 0) {
    const u32 own = counts[Lane()];
    u32 sum = own;
    for (u32 by = 1; by < kLanes; by *= 2) {
      const u32 other = __shfl_up_sync(kAllLanes, sum, by);
      if (Lane() >= by) sum += other;
    }
    counts[Lane()] = sum - own;
    if (Lane() == kLanes - 1) used[0] = use(sum);
  }
  __syncthreads();
  for (u32 round = 0; round < kRounds; ++round) {
    rank[round] += counts[round * kWarps + WarpInBlock()];
  }
  // The arrays may be used again: a warp's entries are its own until the next call's first barrier.
  __syncwarp();
  return used[0];
}

// The same; returns the number of hits in the block.
__device__ inline u32 RankHits(u32 hits, u32 (&rank)[kRounds]) {
  return RankHits(hits, rank, [](u32 count) { return count; });
}

// The sum of `own` over the threads before this one, and over all of the block. All threads call
// it.
template <typename T>
__device__ inline T SumOfThreadsBefore(T own, T& in_block) {
  SHARED(T, of_warp, kWarps);
  T upto = own;
  for (u32 by = 1; by < kLanes; by *= 2) {
    const T other = __shfl_up_sync(kAllLanes, upto, by);
    if (Lane() >= by) upto += other;
  }
  if (Lane() == kLanes - 1) of_warp[WarpInBlock()] = upto;
  __syncthreads();
  T sum = upto - own;
  in_block = 0;
  for (u32 warp = 0; warp < kWarps; ++warp) {
    if (warp < WarpInBlock()) sum += of_warp[warp];
    in_block += of_warp[warp];
  }
  __syncthreads();  // the array may be used again
  return sum;
}

// The sum of `own` over all tiles before this one. One warp calls it.
__device__ inline u64 LookBack(u64* status, u32 tile, u64 own) {
  if (Lane() == 0) StoreRelaxed(&status[tile], (tile == 0 ? kSumSoFar : kOwnCount) | own);
  u64 before = 0;
  i64 last = static_cast<i64>(tile) - 1;  // the nearest tile that is not added yet
  while (last >= 0) {
    const i64 at = last - Lane();
    u64 word;
    do {  // lanes that have no tile to look at see an empty sum
      word = at >= 0 ? LoadRelaxed(&status[at]) : kSumSoFar;
    } while (__any_sync(kAllLanes, word >> kStateShift == 0));
    const u32 sums = __ballot_sync(kAllLanes, word >> kStateShift == kSumSoFar >> kStateShift);
    const u32 nearest = sums == 0 ? kLanes : static_cast<u32>(__ffs(static_cast<int>(sums))) - 1;
    u64 part = Lane() <= nearest ? word & kSumMask : 0;
    for (u32 by = kLanes / 2; by > 0; by /= 2) part += __shfl_down_sync(kAllLanes, part, by);
    before += __shfl_sync(kAllLanes, part, 0);
    if (sums != 0) break;
    last -= kLanes;
  }
  if (Lane() == 0 && tile != 0) StoreRelaxed(&status[tile], kSumSoFar | (before + own));
  return before;
}

// The sum of `own`, the same in all threads of a block, over all tiles before this one. The last
// tile leaves the total in the header. All threads call it, with a barrier between two calls.
__device__ inline u64 SumBefore(Header* header, u32 tile, u64 own) {
  SHARED(u64, before, 1);
  if (WarpInBlock() == 0) {
    const u64 sum = LookBack(StatusOf(header), tile, own);
    if (Lane() == 0) {
      before[0] = sum;
      if (tile + 1 == gridDim.x) header->total = sum + own;
    }
  }
  __syncthreads();
  return before[0];
}

// A claim, in the status word of its tile: a bit that says so, the place, and the count.
constexpr u64 kClaimed = u64{1} << 63;
constexpr u32 kCountBits = 16;
constexpr u32 kNoRoom = ~0u;  // no place: there are fewer than 2^31

__device__ __forceinline__ u64 PlaceOfClaim(u64 word) { return (word & ~kClaimed) >> kCountBits; }
__device__ __forceinline__ u32 CountOfClaim(u64 word) {
  return static_cast<u32>(word & ((u64{1} << kCountBits) - 1));
}

// Whether a pass's first launch has taken the hits of this block's tile; in that launch, nobody
// waits to know.
__device__ __forceinline__ bool IsTaken(Header* header, u32 launch) {
  return launch > 0 && StatusOf(header)[blockIdx.x] != 0;
}

constexpr u32 kOrderedTiles = 32;  // of a group

__device__ __forceinline__ u64* GroupsOf(Header* header, i64 tiles) {
  return StatusOf(header) + tiles;
}

// Room for the `count` hits of this block's tile: where it begins, or kNoRoom. One thread calls it:
// inlined, it would cost all of them registers.
__device__ CALLED u32 ClaimRoom(Header* header, u32 count, u64 capacity) {
  const u64 at = count == 0 ? 0 : atomicAdd(&header->total, u64{count});
  if (at + count > capacity) {
    if (at <= capacity) header->written = at;  // the first that does not fit: all before it did
    return kNoRoom;
  }
  StatusOf(header)[blockIdx.x] = kClaimed | at << kCountBits | count;
  atomicAdd(&GroupsOf(header, gridDim.x)[blockIdx.x / kOrderedTiles], u64{count});
  return static_cast<u32>(at);
}
