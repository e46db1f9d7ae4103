// Gradients that lie side by side over a flat vector, read tile by tile.
//
// A tile is up to kTile consecutive elements of one segment, so that a block reads one tensor only.
// A thread has kRounds quads of four consecutive elements, at round * kRoundNumel + thread * 4. In
// a wide tile, which is whole and aligned, no load or store has a test of its own, and the loads of
// all rounds are in flight together.
#pragma once

#include "common.cuh"

constexpr u32 kQuad = 4;
constexpr u32 kRounds = 4;
constexpr u32 kItems = kQuad * kRounds;  // of a thread
constexpr u32 kRoundNumel = kThreads * kQuad;
constexpr u32 kTile = kThreads * kItems;

// One row of the segments' table, which the host writes (hvd_sparse/ops/cuda/_workspace.py).
struct Segment {
  u64 data;        // address of the first element; unused for kNoGradient
  i64 begin;       // flat position of the first element
  i64 numel;       // at least 1
  i64 first_tile;  // number of the segment's first tile
  i64 dtype;
};

// A tile's place in the flat vector, and where its gradient lies.
struct Tile {
  i64 begin;
  u32 numel;
  i32 dtype;
  const u8* gradient;
};

__device__ __forceinline__ u32 ItemBytes(i32 dtype) { return dtype == kFloat32 ? 4u : 2u; }

// The tile of a segment that begins `offset` elements into it.
__device__ __forceinline__ Tile TileOf(const Segment& segment, i64 offset) {
  Tile tile;
  tile.begin = segment.begin + offset;
  tile.numel = static_cast<u32>(Min<i64>(segment.numel - offset, kTile));
  tile.dtype = static_cast<i32>(segment.dtype);
  tile.gradient = reinterpret_cast<const u8*>(segment.data);
  if (tile.dtype != kNoGradient) tile.gradient += offset * ItemBytes(tile.dtype);
  return tile;
}

// The last segment whose `first`, its begin or its first tile, is not above `number`.
__device__ inline const Segment& FindSegment(const Segment* segments, i32 segment_count,
                                             i64 Segment::* first, i64 number) {
  i32 low = 0, high = segment_count;  // the segment is in [low, high)
  while (high - low > 1) {
    const i32 middle = (low + high) / 2;
    if (segments[middle].*first <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return segments[low];
}

// The tile of a number below the count of tiles.
__device__ inline Tile FindTile(const Segment* segments, i32 segment_count, i64 number) {
  const Segment& segment = FindSegment(segments, segment_count, &Segment::first_tile, number);
  return TileOf(segment, (number - segment.first_tile) * kTile);
}

// Where in its tile a thread's item lies.
__device__ __forceinline__ u32 PlaceOf(u32 round, u32 item) {
  return round * kRoundNumel + threadIdx.x * kQuad + item;
}

// How many of the four elements at `place` exist.
__device__ __forceinline__ u32 LeftOf(const Tile& tile, u32 place) {
  return place >= tile.numel ? 0u : Min(tile.numel - place, kQuad);
}

__device__ __forceinline__ bool IsAligned(const void* address, u32 bytes) {
  return reinterpret_cast<u64>(address) % bytes == 0;
}

// Whether the four elements of every quad exist, and the gradient's are aligned; the same for all
// threads of a block.
__device__ __forceinline__ bool IsWide(const Tile& tile) {
  return tile.numel == kTile &&
         (tile.dtype == kNoGradient || IsAligned(tile.gradient, kQuad * ItemBytes(tile.dtype)));
}

__device__ __forceinline__ void FloatsOf(uint4 bits, f32 (&x)[kQuad]) {
  x[0] = FloatOf(bits.x);
  x[1] = FloatOf(bits.y);
  x[2] = FloatOf(bits.z);
  x[3] = FloatOf(bits.w);
}

// Four floats at an aligned place.
__device__ __forceinline__ void LoadWide(const f32* from, f32 (&x)[kQuad]) {
  FloatsOf(*reinterpret_cast<const uint4*>(from), x);
}

// Four floats, of which the first `left` exist; the others are zero.
__device__ __forceinline__ void LoadQuad(const f32* from, u32 left, f32 (&x)[kQuad]) {
  if (left == kQuad && IsAligned(from, 16)) {
    LoadWide(from, x);
  } else {
    for (u32 i = 0; i < kQuad; ++i) x[i] = i < left ? from[i] : 0.0f;
  }
}

__device__ __forceinline__ void StoreWide(f32* to, const f32 (&x)[kQuad]) {
  const uint4 bits = {BitsOf(x[0]), BitsOf(x[1]), BitsOf(x[2]), BitsOf(x[3])};
  *reinterpret_cast<uint4*>(to) = bits;
}

__device__ __forceinline__ void StoreQuad(f32* to, u32 left, const f32 (&x)[kQuad]) {
  if (left == kQuad && IsAligned(to, 16)) {
    StoreWide(to, x);
  } else {
    for (u32 i = 0; i < kQuad; ++i) {
      if (i < left) to[i] = x[i];
    }
  }
}

__device__ __forceinline__ f32 WidenHalf(i32 dtype, u16 h) {
  return dtype == kFloat16 ? WidenFloat16(h) : WidenBFloat16(h);
}

__device__ __forceinline__ void WidenQuad(i32 dtype, uint2 bits, f32 (&x)[kQuad]) {
  x[0] = WidenHalf(dtype, static_cast<u16>(bits.x));
  x[1] = WidenHalf(dtype, static_cast<u16>(bits.x >> 16));
  x[2] = WidenHalf(dtype, static_cast<u16>(bits.y));
  x[3] = WidenHalf(dtype, static_cast<u16>(bits.y >> 16));
}

// The gradient of a thread's elements in a wide tile. Raw words are loaded for all rounds before
// the first is widened, lest each round wait for the one before.
__device__ __forceinline__ void LoadWideGradients(const Tile& tile, f32 (&x)[kRounds][kQuad]) {
  if (tile.dtype == kFloat32) {
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) {
      const u8* const from = tile.gradient + 4 * static_cast<u64>(PlaceOf(round, 0));
      FloatsOf(LoadOnce<uint4>(from), x[round]);
    }
  } else if (tile.dtype == kNoGradient) {
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) {
      for (u32 i = 0; i < kQuad; ++i) x[round][i] = -0.0f;
    }
  } else {
    uint2 bits[kRounds];
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) {
      bits[round] = LoadOnce<uint2>(tile.gradient + 2 * static_cast<u64>(PlaceOf(round, 0)));
    }
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) WidenQuad(tile.dtype, bits[round], x[round]);
  }
}

// The gradient of four elements, of which the first `left` exist. Where there is none, it is -0.0:
// adding that leaves the sign of a zero alone.
__device__ __forceinline__ void LoadGradient(const Tile& tile, u32 place, u32 left,
                                             f32 (&x)[kQuad]) {
  if (tile.dtype == kFloat32) {
    LoadQuad(reinterpret_cast<const f32*>(tile.gradient) + place, left, x);
    return;
  }
  if (tile.dtype == kNoGradient) {
    for (u32 i = 0; i < kQuad; ++i) x[i] = -0.0f;
    return;
  }
  const u16* const from = reinterpret_cast<const u16*>(tile.gradient) + place;
  if (left == kQuad && IsAligned(from, 8)) {
    WidenQuad(tile.dtype, *reinterpret_cast<const uint2*>(from), x);
  } else {
    for (u32 i = 0; i < kQuad; ++i) x[i] = i < left ? WidenHalf(tile.dtype, from[i]) : 0.0f;
  }
}

// The gradient of one element.
__device__ __forceinline__ f32 GradientAt(const Tile& tile, u32 place) {
  if (tile.dtype == kNoGradient) return -0.0f;
  if (tile.dtype == kFloat32) return reinterpret_cast<const f32*>(tile.gradient)[place];
  return WidenHalf(tile.dtype, reinterpret_cast<const u16*>(tile.gradient)[place]);
}
