// Gradients into a residual, and what passes a threshold out of it, in one pass.
//
// One block per tile. Reads 8 bytes per element and writes 4 (6 and 4 for 16-bit gradients); with
// momentum it reads 12 and writes 8. The entries of a tile come out in ascending order.
#include "accumulate.cuh"

// The least key that passes: one given by the host, or left on the device by an earlier kernel.
__device__ __forceinline__ u32 LeastKey(u32 key, const u32* key_at) {
  if (key_at != nullptr) key = *key_at;
  return Min(key < 1u ? 1u : key, kNonFiniteKey);
}

template <bool kMomentum>
__device__ __forceinline__ void SelectTile(const f32* before, f32* residual,
                                           const Momentum& momentum, const Segment* segments,
                                           i32 segment_count, u32 least, i64 start, i64 stop,
                                           u32 launch, u64 capacity, Header* header, i32* indices,
                                           f32* values) {
  const Tile tile = FindTile(segments, segment_count, blockIdx.x);
  if (IsTaken(header, launch)) return;
  const bool is_wide = IsWideIn<kMomentum>(before, residual, momentum, tile);
  Sums<kMomentum> sums;
  sums.Load(before, momentum, tile, is_wide);
  u32 hits;
  if (start <= tile.begin && tile.begin + tile.numel <= stop) {
    hits = sums.Where(tile, [=](u32 key, i64) { return key >= least; });
  } else {
    hits = sums.Where(tile, [=](u32 key, i64 at) {
      return key >= kNonFiniteKey || (key >= least && at >= start && at < stop);
    });
  }
  u32 rank[kRounds];
  const u32 place =
      RankHits(hits, rank, [=](u32 count) { return ClaimRoom(header, count, capacity); });
  if (place == kNoRoom) return;

  Emit(tile, hits, rank, place, sums.sum, indices, values);
#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
#pragma unroll
    for (u32 i = 0; i < kQuad; ++i) {
      if (!Has(hits, round, i)) continue;
      if (IsFinite(sums.sum[round][i])) {
        sums.sum[round][i] = 0.0f;
      } else {
        const i64 at = tile.begin + PlaceOf(round, i);
        sums.sum[round][i] = Kept(before[at]);
        if (kMomentum) sums.MomentumOf(round, i) = Kept(momentum.before[at]);
      }
    }
  }
  sums.Store(residual, momentum, tile, is_wide);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200  // where 64 registers would spill
#undef BLOCKS_PER_PROCESSOR
#define BLOCKS_PER_PROCESSOR 3
#endif

// Adds the gradients, over all elements; entries in [start, stop) that reach the key leave, and
// non-finite ones wherever they are. Sums go from `before` to `residual`, which may be the same.
//
// The grid has one block per tile. `indices` and `values` have room for `capacity` entries;
// compact.cuh says what happens where that is too little, and then in `launch` 1.
KERNEL accumulate_select(const f32* before, f32* residual, const Segment* segments,
                         i32 segment_count, u32 key, const u32* key_at, i64 start, i64 stop,
                         u32 launch, u64 capacity, Header* header, i32* indices, f32* values) {
  SelectTile<false>(before, residual, Momentum{}, segments, segment_count, LeastKey(key, key_at),
                    start, stop, launch, capacity, header, indices, values);
}

// The same with momentum. u is not masked where entries leave. Only on sm_90 are the 64 registers
// that four blocks leave a thread enough.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#undef BLOCKS_PER_PROCESSOR
#define BLOCKS_PER_PROCESSOR 3
#endif
KERNEL accumulate_momentum_select(const f32* before, const f32* buffer_before, f32* residual,
                                  f32* buffer, f32 factor, i32 nesterov, const Segment* segments,
                                  i32 segment_count, u32 key, const u32* key_at, i64 start,
                                  i64 stop, u32 launch, u64 capacity, Header* header, i32* indices,
                                  f32* values) {
  SelectTile<true>(before, residual, Momentum{buffer_before, buffer, factor, nesterov != 0},
                   segments, segment_count, LeastKey(key, key_at), start, stop, launch, capacity,
                   header, indices, values);
}

// Magnitudes of the sums in `runs` runs of `run_numel` elements, one thread per element; nothing is
// changed. Each run is at a random place of its part of `places`, which is the elements over
// `run_numel`. `buffer` is null without momentum.
KERNEL sample_accumulator(const f32* residual, const f32* buffer, f32 factor, i32 nesterov,
                          const Segment* segments, i32 segment_count, i64 places, i64 runs,
                          i64 run_numel, u64 seed, f32* magnitudes) {
  const i64 sample = ThreadInGrid();
  if (sample >= runs * run_numel) return;
  const i64 run = sample / run_numel;
  const i64 first = run * places / runs, after = (run + 1) * places / runs;
  const u32 random = Mixed(static_cast<u32>(run), seed);
  const i64 place = first + static_cast<i64>(Scaled(random, static_cast<u64>(after - first)));
  const i64 at = place * run_numel + sample % run_numel;
  const Tile whole = TileOf(FindSegment(segments, segment_count, &Segment::begin, at), 0);
  const f32 g = GradientAt(whole, static_cast<u32>(at - whole.begin));
  const Momentum momentum{buffer, nullptr, factor, nesterov != 0};
  f32 u = buffer == nullptr ? 0.0f : buffer[at];
  const f32 sum = buffer == nullptr ? SumOf<false>(residual[at], g, u, momentum)
                                    : SumOf<true>(residual[at], g, u, momentum);
  magnitudes[sample] = FloatOf(KeyOf(sum));
}
