// AVX-512 (F, BW, DQ, VL): sixteen elements to a register, selections as mask registers.
#include "kernels.h"

#if HVDS_X86
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own intrinsics
#endif
#include <immintrin.h>

#define HVDS_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,popcnt,f16c")))
#define HVDS_AVX512_INLINE HVDS_AVX512 inline __attribute__((always_inline))

namespace hvds {
namespace {

constexpr size_t kLanes = 16;

HVDS_AVX512_INLINE __mmask16 FirstLanes(size_t count) {
  return static_cast<__mmask16>((1u << count) - 1u);
}

HVDS_AVX512_INLINE __m512i Keys(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(kMagnitudeMask));
}

// The lanes of the gradient at `i` that `lanes` names, as float32; the others are zero.
template <Dtype kDtype>
HVDS_AVX512_INLINE __m512 Gradient(const void* gradient, size_t i, __mmask16 lanes) {
  if constexpr (kDtype == kFloat32) {
    return _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(gradient) + i);
  } else {
    const __m256i half =
        _mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(gradient) + i);
    if constexpr (kDtype == kFloat16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
}

// Packs the lanes of `hits` together and stores just those: a compress in registers and a masked
// store, as compressing to memory is microcoded on some processors.
HVDS_AVX512_INLINE size_t Emit(__mmask16 hits, __m512i index, __m512 value, int32_t* indices,
                               float* values) {
  const size_t count = static_cast<size_t>(_mm_popcnt_u32(hits));
  const __mmask16 packed = FirstLanes(count);
  _mm512_mask_storeu_epi32(indices, packed, _mm512_maskz_compress_epi32(hits, index));
  _mm512_mask_storeu_ps(values, packed, _mm512_maskz_compress_ps(hits, value));
  return count;
}

HVDS_AVX512 __attribute__((noinline, cold)) void Note(__mmask16 lanes, int32_t first_index,
                                                      __m512 before, SpoiledList* spoiled) {
  alignas(64) float lane_values[kLanes];
  _mm512_store_ps(lane_values, before);
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    spoiled->Add(first_index + lane, lane_values[lane]);
  }
}

// One register's worth: sums, compares, and stores what the residual keeps of it.
template <Dtype kDtype, bool kTake>
struct Lanes {
  __m512 before, sum;
  __mmask16 hits;

  HVDS_AVX512_INLINE void Accumulate(float* residual, const void* gradient, size_t i,
                                     __mmask16 lanes, __m512i key) {
    before = _mm512_maskz_loadu_ps(lanes, residual + i);
    sum = before;
    if constexpr (kDtype != kNoGradient) {
      sum = _mm512_add_ps(before, Gradient<kDtype>(gradient, i, lanes));
    }
    hits = _mm512_cmpge_epu32_mask(Keys(sum), key);
    if constexpr (kDtype != kNoGradient) {
      const __m512 kept = kTake ? _mm512_maskz_mov_ps(_knot_mask16(hits), sum) : sum;
      _mm512_mask_storeu_ps(residual + i, lanes, kept);
    } else if constexpr (kTake) {
      if (hits) _mm512_mask_storeu_ps(residual + i, hits, _mm512_setzero_ps());
    }
  }

  HVDS_AVX512_INLINE size_t EmitHits(int32_t first_index, int32_t* indices, float* values,
                                     SpoiledList* spoiled) const {
    const __mmask16 non_finite =
        _mm512_mask_cmpge_epu32_mask(hits, Keys(sum), _mm512_set1_epi32(kNonFiniteKey));
    if (__builtin_expect(non_finite != 0 && spoiled != nullptr, 0)) {
      Note(non_finite, first_index, before, spoiled);
    }
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return Emit(hits, _mm512_add_epi32(_mm512_set1_epi32(first_index), lane), sum, indices, values);
  }
};

// A masked head brings the residual to a cache line, then four lines at a time with one branch on
// whether any of them has a hit, then a masked tail.
template <Dtype kDtype, bool kTake>
HVDS_AVX512 size_t Pass(float* residual, const void* gradient, size_t n, int32_t first_index,
                        uint32_t key, int32_t* indices, float* values, SpoiledList* spoiled) {
  const __m512i key_lanes = _mm512_set1_epi32(static_cast<int32_t>(key));
  size_t count = 0;
  size_t i = 0;

  const auto partial_line = [&](size_t length) HVDS_AVX512 {
    Lanes<kDtype, kTake> line;
    line.Accumulate(residual, gradient, i, FirstLanes(length), key_lanes);
    count += line.EmitHits(first_index + static_cast<int32_t>(i), indices + count, values + count,
                           spoiled);
    i += length;
  };

  const size_t misaligned = reinterpret_cast<uintptr_t>(residual) / sizeof(float) % kLanes;
  if (misaligned != 0) partial_line(n < kLanes - misaligned ? n : kLanes - misaligned);
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    Lanes<kDtype, kTake> line[4];
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      line[j].Accumulate(residual, gradient, i + j * kLanes, FirstLanes(kLanes), key_lanes);
    }
    if (line[0].hits | line[1].hits | line[2].hits | line[3].hits) {
#pragma GCC unroll 4
      for (size_t j = 0; j < 4; ++j) {
        count += line[j].EmitHits(first_index + static_cast<int32_t>(i + j * kLanes),
                                  indices + count, values + count, spoiled);
      }
    }
  }
  while (i < n) partial_line(n - i < kLanes ? n - i : kLanes);
  return count;
}

template <bool kAtLeast>
HVDS_AVX512 size_t Filter(const int32_t* indices, const float* values, size_t n, uint32_t key,
                          int32_t* out_indices, float* out_values) {
  const __m512i key_lanes = _mm512_set1_epi32(static_cast<int32_t>(key));
  size_t count = 0;
  for (size_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = n - i < kLanes ? FirstLanes(n - i) : static_cast<__mmask16>(0xffff);
    const __m512i index = _mm512_maskz_loadu_epi32(lanes, indices + i);
    const __m512 value = _mm512_maskz_loadu_ps(lanes, values + i);
    const __mmask16 hits = kAtLeast ? _mm512_mask_cmpge_epu32_mask(lanes, Keys(value), key_lanes)
                                    : _mm512_mask_cmplt_epu32_mask(lanes, Keys(value), key_lanes);
    count += Emit(hits, index, value, out_indices + count, out_values + count);
  }
  return count;
}

HVDS_AVX512 void StreamOut(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  for (size_t i = 0; i < bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_load_si512(source + i));
  }
}

void StreamFence() { _mm_sfence(); }

HVDS_AVX512 void NarrowToFloat16(const float* from, size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = n - i < kLanes ? FirstLanes(n - i) : static_cast<__mmask16>(0xffff);
    const __m512 wide = _mm512_maskz_loadu_ps(lanes, from + i);
    _mm256_mask_storeu_epi16(to + i, lanes, _mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
  }
}

HVDS_AVX512 void NarrowToBFloat16(const float* from, size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; ++i) to[i] = NarrowBFloat16(from[i]);
}

}  // namespace

const Kernels kAvx512Kernels = {
    {Pass<kFloat32, true>, Pass<kFloat16, true>, Pass<kBFloat16, true>, Pass<kNoGradient, true>},
    {Pass<kFloat32, false>, Pass<kFloat16, false>, Pass<kBFloat16, false>,
     Pass<kNoGradient, false>},
    Filter<true>,
    Filter<false>,
    StreamOut,
    StreamFence,
    {nullptr, NarrowToFloat16, NarrowToBFloat16, nullptr},
};

}  // namespace hvds
#endif
