// Ordered compaction in one pass: where the hits of a tile go, before the other tiles are known.
//
// A block takes its tile's number from a counter (a ticket), so that every tile before its own has
// been taken by a block that already runs: waiting for it ends. By block index it may never end.
// The block counts its hits, publishes the count, and adds up the tiles before it by looking back
// at what they have published: their own count, or the sum up to and including them, which ends the
// search. (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016.)
//
// The output has room for `capacity` entries. A tile whose hits do not all fit leaves everything as
// it found it, and so do all tiles after it; the host sees in the header where to go on.
#pragma once

#include "gradients.cuh"

// Zero at first; the host reads it when the pass is done. Followed by one status word per tile.
struct Header {
  u64 ticket;
  u64 total;    // of all tiles, whether they fit or not
  u64 stopped;  // 1 + the first tile that did not fit, counted from the launch's first; 0: all fit
  u64 written;  // entries that were written, where `stopped` is not 0
  u64 reserved[4];
};

// A published word: what it is, and a sum of 62 bits.
constexpr u32 kStateShift = 62;
constexpr u64 kOwnCount = u64{1} << kStateShift;
constexpr u64 kSumSoFar = u64{2} << kStateShift;
constexpr u64 kSumMask = kOwnCount - 1;

// Words that a lane reads at once when it looks back. All tiles pass through this chain of reads:
// on an H200 a pass that read 32 words at a time took 5 ps an element for it, more than for its
// memory.
#ifndef LOOKS
#define LOOKS 4
#endif
constexpr u32 kLooks = LOOKS;

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
// Returns the number of hits in the block. All threads call it.
__device__ inline u32 RankHits(u32 hits, u32 (&rank)[kRounds]) {
  SHARED(u32, counts, kRounds * kWarps);  // by round, then warp: in the order of the places
  SHARED(u32, total, 1);
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
    if (Lane() == kLanes - 1) total[0] = sum;
  }
  __syncthreads();
  for (u32 round = 0; round < kRounds; ++round) {
    rank[round] += counts[round * kWarps + WarpInBlock()];
  }
  // The arrays may be used again: a warp's entries are its own until the next call's first barrier.
  __syncwarp();
  return total[0];
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
  u64 part = 0;                           // a lane's, of the sum
  i64 last = static_cast<i64>(tile) - 1;  // the nearest tile that is not added yet
  while (last >= 0) {
    u64 words[kLooks];
    bool is_missing;
    do {  // lanes that have no tile to look at see an empty sum
      is_missing = false;
#pragma unroll
      for (u32 look = 0; look < kLooks; ++look) {
        const i64 at = last - look * kLanes - Lane();
        words[look] = at >= 0 ? LoadRelaxed(&status[at]) : kSumSoFar;
        is_missing |= words[look] >> kStateShift == 0;
      }
    } while (__any_sync(kAllLanes, is_missing));
    u32 sums = 0;  // lanes that see one; those of the looks after it do not count
#pragma unroll
    for (u32 look = 0; look < kLooks; ++look) {
      if (sums != 0) continue;
      sums = __ballot_sync(kAllLanes, words[look] >> kStateShift == kSumSoFar >> kStateShift);
      const u32 nearest = sums == 0 ? kLanes : static_cast<u32>(__ffs(static_cast<int>(sums))) - 1;
      if (Lane() <= nearest) part += words[look] & kSumMask;
    }
    if (sums != 0) break;
    last -= kLooks * kLanes;
  }
  for (u32 by = kLanes / 2; by > 0; by /= 2) part += __shfl_xor_sync(kAllLanes, part, by);
  if (Lane() == 0 && tile != 0) StoreRelaxed(&status[tile], kSumSoFar | (part + own));
  return part;
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

// Whether a tile's `count` entries fit behind the `before` of the tiles before it.
__device__ inline bool Fits(Header* header, u32 tile, u64 before, u64 count, u64 capacity) {
  if (before + count <= capacity) return true;
  if (before <= capacity && threadIdx.x == 0) {  // the first that does not: all before it did
    header->stopped = u64{tile} + 1;
    header->written = before;
  }
  return false;
}
