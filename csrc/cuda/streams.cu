// Streams: merging, filtering, and the way back to a dense vector.
//
// Sums are taken stream by stream, in the order of the list, without atomics: every rank has the
// same bits. An entry whose index is out of range is left out, and the host is told.
#include "compact.cuh"

// Whether an index is one of a vector of `numel` elements, fewer than 2**31. `fault` is a word of
// the host's memory, zero at first: an index out of range, numel and a 1 behind it.
__device__ __forceinline__ bool IsIndex(i32 index, i64 numel, u64* fault) {
  if (index >= 0 && index < numel) return true;
  StoreToHost(fault, u64{static_cast<u32>(index)} << 32 | static_cast<u64>(numel) << 1 | 1);
  return false;
}

// -- Merging: a bitmap of the union tells every index its place --------------------------------

// One thread per entry. `bitmap` has a bit per index, zero at first.
KERNEL mark_indices(const i32* indices, i64 count, i64 numel, u32* bitmap, u64* fault) {
  const i64 i = ThreadInGrid();
  if (i >= count) return;
  const i32 index = indices[i];
  if (!IsIndex(index, numel, fault)) return;
  atomicOr(&bitmap[index / 32], 1u << (index % 32));
}

// before[w] = bits set in the words before w. One block per kRoundNumel words, and four words per
// thread; the header's total is the number of bits.
KERNEL rank_words(const u32* bitmap, i64 words, Header* header, u32* before) {
  const u32 tile = TakeTicket(header);
  const i64 first = static_cast<i64>(tile) * kRoundNumel + threadIdx.x * kQuad;
  u32 counts[kQuad];
  u32 own = 0;
  for (u32 i = 0; i < kQuad; ++i) {
    counts[i] = first + i < words ? static_cast<u32>(__popc(bitmap[first + i])) : 0u;
    own += counts[i];
  }
  u32 in_block;
  u32 sum = SumOfThreadsBefore(own, in_block);
  sum += static_cast<u32>(SumBefore(header, tile, in_block));
  for (u32 i = 0; i < kQuad; ++i) {
    if (first + i < words) before[first + i] = sum;
    sum += counts[i];
  }
}

// Adds one stream to the merged one, whose values are -0.0 at first. One thread per entry.
KERNEL add_stream(const i32* indices, const f32* values, i64 count, i64 numel, const u32* bitmap,
                  const u32* before, i32* out_indices, f32* out_values) {
  const i64 i = ThreadInGrid();
  if (i >= count) return;
  const i32 index = indices[i];
  if (index < 0 || index >= numel) return;  // mark_indices has told of it
  const u32 below = bitmap[index / 32] & ((1u << (index % 32)) - 1u);
  const u32 to = before[index / 32] + static_cast<u32>(__popc(below));
  out_indices[to] = index;
  out_values[to] = Add(out_values[to], values[i]);
}

// -- What tiles have claimed room for, in the order of the tiles ---------------------------------

constexpr u32 kAtOnce = 4;  // entries that a thread has on their way

// One block per group of tiles. Does nothing where the claims of `header`, which has `tiles` status
// words, did not all fit.
KERNEL order_tiles(Header* header, i64 tiles, u64 capacity, const i32* indices, const f32* values,
                   i32* out_indices, f32* out_values) {
  SHARED(u64, claims, kOrderedTiles);
  SHARED(u32, places, kOrderedTiles);
  if (header->total > capacity) return;
  const i64 own_tile = static_cast<i64>(blockIdx.x) * kOrderedTiles + threadIdx.x;
  const bool has_tile = threadIdx.x < kOrderedTiles && own_tile < tiles;
  const u64 own = has_tile ? StatusOf(header)[own_tile] : 0;
  u64 sums = 0;  // of the groups before this one in the upper half, of the tiles in the lower
  for (u32 group = threadIdx.x; group < blockIdx.x; group += kThreads) {
    sums += GroupsOf(header, tiles)[group];
  }
  u64 in_block;
  const u64 place = SumOfThreadsBefore(sums << 32 | CountOfClaim(own), in_block);
  if (threadIdx.x < kOrderedTiles) {
    claims[threadIdx.x] = own;
    places[threadIdx.x] = static_cast<u32>(in_block >> 32) + static_cast<u32>(place);
  }
  __syncthreads();
  const u32 first = places[0], count = static_cast<u32>(in_block);
  for (u32 begin = threadIdx.x; begin < count; begin += kAtOnce * kThreads) {
    i32 index[kAtOnce];
    f32 value[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 to = first + begin + i * kThreads;
      if (to - first >= count) continue;
      u32 tile = 0;  // the last that begins at or before this place
      for (u32 by = kOrderedTiles / 2; by > 0; by /= 2) tile += places[tile + by] <= to ? by : 0;
      const u64 from = PlaceOfClaim(claims[tile]) + (to - places[tile]);
      index[i] = indices[from];
      value[i] = values[from];
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) {
      const u32 to = first + begin + i * kThreads;
      if (to - first >= count) continue;
      out_indices[to] = index[i];
      out_values[to] = value[i];
    }
  }
}

// -- Filters
// ---------------------------------------------------------------------------------------

// What of a tile of entries is a hit, to its place in the output.
__device__ inline void KeepHits(u32 tile, u32 hits, const i32* indices, const f32* values,
                                Header* header, i32* out_indices, f32* out_values) {
  u32 rank[kRounds];
  const u32 count = RankHits(hits, rank);
  const u64 before = SumBefore(header, tile, count);
  for (u32 round = 0; round < kRounds; ++round) {
    u64 to = before + rank[round];
    for (u32 i = 0; i < kQuad; ++i) {
      if (!(hits >> (round * kQuad + i) & 1u)) continue;
      const i64 from = static_cast<i64>(tile) * kTile + PlaceOf(round, i);
      out_indices[to] = indices[from];
      out_values[to] = values[from];
      ++to;
    }
  }
}

// The entries that reach a key, which is at least 1. One block per tile of entries.
KERNEL keep_large(const i32* indices, const f32* values, i64 count, u32 key, Header* header,
                  i32* out_indices, f32* out_values) {
  const u32 tile = TakeTicket(header);
  u32 hits = 0;
  for (u32 item = 0; item < kItems; ++item) {
    const i64 at = static_cast<i64>(tile) * kTile + PlaceOf(item / kQuad, item % kQuad);
    if (at < count && KeyOf(values[at]) >= key) hits |= 1u << item;
  }
  KeepHits(tile, hits, indices, values, header, out_indices, out_values);
}

__device__ inline bool Contains(const i32* sorted, i64 count, i32 index) {
  i64 low = 0, high = count;  // the first element >= index is in [low, high]
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (sorted[middle] < index) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < count && sorted[low] == index;
}

// The entries whose index is not in `other`, which is ascending. One block per tile of entries.
KERNEL keep_absent(const i32* indices, const f32* values, i64 count, const i32* other,
                   i64 other_count, Header* header, i32* out_indices, f32* out_values) {
  const u32 tile = TakeTicket(header);
  u32 hits = 0;
  for (u32 item = 0; item < kItems; ++item) {
    const i64 at = static_cast<i64>(tile) * kTile + PlaceOf(item / kQuad, item % kQuad);
    if (at < count && !Contains(other, other_count, indices[at])) hits |= 1u << item;
  }
  KeepHits(tile, hits, indices, values, header, out_indices, out_values);
}

// -- A dense vector at a stream's indices, one thread per entry
// ------------------------------------

KERNEL scatter_add(f32* x, i64 numel, const i32* indices, const f32* values, i64 count,
                   u64* fault) {
  const i64 i = ThreadInGrid();
  if (i >= count) return;
  const i32 index = indices[i];
  if (!IsIndex(index, numel, fault)) return;
  x[index] = Add(x[index], values[i]);
}

// Zeroes entries, after copying them to `values`; 0 where there is no such entry.
KERNEL clear_at(f32* x, i64 numel, const i32* indices, i64 count, f32* values, u64* fault) {
  const i64 i = ThreadInGrid();
  if (i >= count) return;
  const i32 index = indices[i];
  const bool is_index = IsIndex(index, numel, fault);
  values[i] = is_index ? x[index] : 0.0f;
  if (!is_index) return;
  x[index] = 0.0f;
}

// -- The whole dense vector ----------------------------------------------------------------------

constexpr u32 kDecodedBytes = 1 << 15;  // of a block

// The first of ascending indices that is not below `key`: its place. A warp calls it, and looks at
// 32 places at a time.
__device__ inline i64 FirstFrom(const i32* indices, i64 count, i64 key) {
  i64 low = 0, left = count;  // the place is in [low, low + left]
  while (left > 0) {
    const i64 step = (left + kLanes - 1) / kLanes, end = low + left, at = low + Lane() * step;
    const u32 below = __popc(__ballot_sync(kAllLanes, at < end && indices[at] < key));
    if (below == 0) break;
    low += (below - 1) * step + 1;
    left = Min(step - 1, end - low);
  }
  return low;
}

// Writes a stream over `out`, of the given dtype, and zeros elsewhere. A block puts kDecodedBytes
// together in shared memory. An index out of range comes before all others or after them: the outer
// blocks tell of it. Where indices do not ascend, some entries are left out.
KERNEL decode(void* out, i32 dtype, i64 numel, const i32* indices, const f32* values, i64 count,
              u64* fault) {
  SHARED(uint4, quads, kDecodedBytes / sizeof(uint4));
  SHARED(i64, ends, 2);
  u16* const halfs = reinterpret_cast<u16*>(quads);
  const u32 item_bytes = ItemBytes(dtype), of_block = kDecodedBytes / item_bytes;
  const i64 begin = static_cast<i64>(blockIdx.x) * of_block;
  const i64 stop = Min<i64>(begin + of_block, numel);
  if (WarpInBlock() == 0) {
    const i64 first = blockIdx.x == 0 ? 0 : FirstFrom(indices, count, begin);
    if (Lane() == 0) ends[0] = first;
  } else if (WarpInBlock() == 1) {
    const i64 after = blockIdx.x + 1 == gridDim.x ? count : FirstFrom(indices, count, stop);
    if (Lane() == 0) ends[1] = after;
  }
  for (u32 quad = threadIdx.x; quad < kDecodedBytes / sizeof(uint4); quad += kThreads) {
    quads[quad] = uint4{0, 0, 0, 0};
  }
  __syncthreads();
  for (i64 at = ends[0] + threadIdx.x; at < ends[1]; at += kThreads) {
    const i32 index = indices[at];
    if (!IsIndex(index, numel, fault) || index < begin || index >= stop) continue;
    const f32 value = values[at];
    if (dtype == kFloat32) {
      reinterpret_cast<f32*>(quads)[index - begin] = value;
    } else {
      halfs[index - begin] = dtype == kFloat16 ? NarrowFloat16(value) : NarrowBFloat16(value);
    }
  }
  __syncthreads();
  u8* const to = static_cast<u8*>(out) + begin * item_bytes;
  const u32 bytes = static_cast<u32>(stop - begin) * item_bytes;
  const u32 wide_bytes = IsAligned(to, sizeof(uint4)) ? bytes / sizeof(uint4) * sizeof(uint4) : 0;
  for (u32 at = threadIdx.x * sizeof(uint4); at < wide_bytes; at += kThreads * sizeof(uint4)) {
    *reinterpret_cast<uint4*>(to + at) = quads[at / sizeof(uint4)];
  }
  for (u32 at = wide_bytes + threadIdx.x * sizeof(u16); at < bytes; at += kThreads * sizeof(u16)) {
    *reinterpret_cast<u16*>(to + at) = halfs[at / sizeof(u16)];
  }
}
