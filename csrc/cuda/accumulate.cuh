// The accumulator: a residual v to which gradients g are added, with or without momentum u.
//
//   plain     v = v + g
//   momentum  u = m u + g     v = v + u          (Deep Gradient Compression, section 3.2)
//   Nesterov  u = m (u + g)   v = v + u + g
//
// A sum that is not finite spoils its element: the sum comes out, v and u stay as they were, or
// become zero if they were not finite themselves.
#pragma once

#include "compact.cuh"

// Where u is read, and where it is written: in place, or in another vector. Unused without
// momentum.
struct Momentum {
  const f32* before;
  f32* buffer;
  f32 factor;
  bool nesterov;
};

// One element's sum; with momentum, u becomes the new one.
template <bool kMomentum>
__device__ __forceinline__ f32 SumOf(f32 v, f32 g, f32& u, const Momentum& momentum) {
  if (!kMomentum) return Add(v, g);
  if (momentum.nesterov) {
    u = Multiply(Add(u, g), momentum.factor);
    return Add(Add(v, u), g);
  }
  u = Add(Multiply(u, momentum.factor), g);
  return Add(v, u);
}

// Whether a tile is wide, and with it its places in all the flat vectors.
template <bool kMomentum>
__device__ __forceinline__ bool IsWideIn(const f32* before, const f32* residual,
                                         const Momentum& momentum, const Tile& tile) {
  return IsWide(tile) && IsAligned(before + tile.begin, 16) &&
         IsAligned(residual + tile.begin, 16) &&
         (!kMomentum || (IsAligned(momentum.before + tile.begin, 16) &&
                         IsAligned(momentum.buffer + tile.begin, 16)));
}

// A thread's share of a tile: sums, and the new u.
template <bool kMomentum>
struct Sums {
  f32 sum[kRounds][kQuad];
  f32 u[kMomentum ? kRounds : 1][kQuad];

  __device__ __forceinline__ f32& MomentumOf(u32 round, u32 i) {
    return u[kMomentum ? round : 0][i];
  }

  // All loads come before the first use of any. Items that do not exist become zero.
  __device__ __forceinline__ void Load(const f32* before, const Momentum& momentum,
                                       const Tile& tile, bool is_wide) {
    f32 gradient[kRounds][kQuad];
    if (is_wide) {
#pragma unroll
      for (u32 round = 0; round < kRounds; ++round) {
        LoadWide(before + tile.begin + PlaceOf(round, 0), sum[round]);
        if (kMomentum) LoadWide(momentum.before + tile.begin + PlaceOf(round, 0), u[round]);
      }
      LoadWideGradients(tile, gradient);
    } else {
#pragma unroll
      for (u32 round = 0; round < kRounds; ++round) {
        const u32 place = PlaceOf(round, 0), left = LeftOf(tile, place);
        LoadQuad(before + tile.begin + place, left, sum[round]);
        LoadGradient(tile, place, left, gradient[round]);
        if (kMomentum) LoadQuad(momentum.before + tile.begin + place, left, u[round]);
      }
    }
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) {
#pragma unroll
      for (u32 i = 0; i < kQuad; ++i) {
        sum[round][i] =
            SumOf<kMomentum>(sum[round][i], gradient[round][i], MomentumOf(round, i), momentum);
      }
    }
  }

  // The sums, and the new u, to their places.
  __device__ __forceinline__ void Store(f32* residual, const Momentum& momentum, const Tile& tile,
                                        bool is_wide) const {
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) {
      const u32 place = PlaceOf(round, 0);
      f32* const v = residual + tile.begin + place;
      f32* const to = kMomentum ? momentum.buffer + tile.begin + place : nullptr;
      if (is_wide) {
        StoreWide(v, sum[round]);
        if (kMomentum) StoreWide(to, u[round]);
      } else {
        StoreQuad(v, LeftOf(tile, place), sum[round]);
        if (kMomentum) StoreQuad(to, LeftOf(tile, place), u[round]);
      }
    }
  }

  // A bit per item, round * 4 + i, by its key and place. No predicate holds for key 0, which items
  // have that do not exist.
  template <typename Predicate>
  __device__ __forceinline__ u32 Where(const Tile& tile, Predicate predicate) const {
    u32 bits = 0;
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) {
#pragma unroll
      for (u32 i = 0; i < kQuad; ++i) {
        if (predicate(KeyOf(sum[round][i]), tile.begin + PlaceOf(round, i))) {
          bits |= 1u << (round * kQuad + i);
        }
      }
    }
    return bits;
  }

  // The magnitude's key of one item, round * 4 + i; indexing the sums would move them to memory.
  __device__ __forceinline__ u32 KeyAt(u32 item) const {
    u32 key = 0;
#pragma unroll
    for (u32 round = 0; round < kRounds; ++round) {
#pragma unroll
      for (u32 i = 0; i < kQuad; ++i) {
        key = item == round * kQuad + i ? KeyOf(sum[round][i]) : key;
      }
    }
    return key;
  }
};

__device__ __forceinline__ bool Has(u32 bits, u32 round, u32 i) {
  return bits >> (round * kQuad + i) & 1u;
}

// What a spoiled element keeps.
__device__ __forceinline__ f32 Kept(f32 old) { return IsFinite(old) ? old : 0.0f; }

// The hits of a tile, in order, to their places in the output.
__device__ inline void Emit(const Tile& tile, u32 hits, const u32 (&rank)[kRounds], u32 place,
                            const f32 (&values)[kRounds][kQuad], i32* indices, f32* out) {
#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
    u32 to = place + rank[round];
#pragma unroll
    for (u32 i = 0; i < kQuad; ++i) {
      if (!Has(hits, round, i)) continue;
      indices[to] = static_cast<i32>(tile.begin + PlaceOf(round, i));
      out[to] = values[round][i];
      ++to;
    }
  }
}
