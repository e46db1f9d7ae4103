// AVX-512 (F, BW, DQ, VL): sixteen elements to a register, selections as mask registers.
#include <type_traits>

#include "kernels.h"
#include "pivot_loop.h"

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

// By value, so that the caller's registers stay registers.
HVDS_AVX512 __attribute__((noinline, cold)) void Note(__mmask16 lanes, int32_t first_index,
                                                      __m512 residual_before, __m512 buffer_before,
                                                      SpoiledList* spoiled) {
  alignas(64) float residual_lanes[kLanes], buffer_lanes[kLanes];
  _mm512_store_ps(residual_lanes, residual_before);
  _mm512_store_ps(buffer_lanes, buffer_before);
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    spoiled->Add(first_index + lane, residual_lanes[lane], buffer_lanes[lane]);
  }
}

// One register's worth of an accumulator, before and after the gradient has come in. The lanes
// that are not named are zero.
template <Rule kRule, Dtype kDtype>
struct Line {
  __m512 before, sum;
  __m512 buffer_before, buffer;  // unless kPlain

  HVDS_AVX512_INLINE void Load(const Span& span, size_t i, __mmask16 lanes) {
    before = _mm512_maskz_loadu_ps(lanes, span.before + i);
    sum = before;
    if constexpr (kDtype != kNoGradient) {
      const __m512 g = Gradient<kDtype>(span.gradient, i, lanes);
      if constexpr (kRule == kPlain) {
        sum = _mm512_add_ps(before, g);
      } else {
        const __m512 m = _mm512_set1_ps(span.factor);
        buffer_before = _mm512_maskz_loadu_ps(lanes, span.buffer_before + i);
        if constexpr (kRule == kMomentum) {
          buffer = _mm512_add_ps(_mm512_mul_ps(m, buffer_before), g);
          sum = _mm512_add_ps(before, buffer);
        } else {
          buffer = _mm512_mul_ps(m, _mm512_add_ps(buffer_before, g));
          sum = _mm512_add_ps(_mm512_add_ps(before, buffer), g);
        }
      }
    }
  }

  // Stores what the accumulator keeps; a streamed line is whole and aligned.
  template <bool kTake, bool kStreamed = false>
  HVDS_AVX512_INLINE void Store(const Span& span, size_t i, __mmask16 lanes, __mmask16 hits) const {
    if constexpr (kDtype != kNoGradient) {
      const __m512 kept = kTake ? _mm512_maskz_mov_ps(_knot_mask16(hits), sum) : sum;
      if constexpr (kStreamed) {
        _mm512_stream_ps(span.residual + i, kept);
        if constexpr (kRule != kPlain) _mm512_stream_ps(span.buffer + i, buffer);
        return;
      }
      _mm512_mask_storeu_ps(span.residual + i, lanes, kept);
    } else if constexpr (kTake) {
      if (hits) _mm512_mask_storeu_ps(span.residual + i, hits, _mm512_setzero_ps());
    }
    if constexpr (kRule != kPlain) _mm512_mask_storeu_ps(span.buffer + i, lanes, buffer);
  }

  HVDS_AVX512_INLINE size_t EmitHits(__mmask16 hits, int32_t first_index, int32_t* indices,
                                     float* values, SpoiledList* spoiled) const {
    const __mmask16 non_finite =
        _mm512_mask_cmpge_epu32_mask(hits, Keys(sum), _mm512_set1_epi32(kNonFiniteKey));
    if (__builtin_expect(non_finite != 0 && spoiled != nullptr, 0)) {
      Note(non_finite, first_index, before, kRule == kPlain ? _mm512_setzero_ps() : buffer_before,
           spoiled);
    }
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return Emit(hits, _mm512_add_epi32(_mm512_set1_epi32(first_index), lane), sum, indices, values);
  }
};

// A masked head brings the residual to a cache line, then four lines at a time with one branch on
// whether any of them has a hit, then a masked tail.
template <Rule kRule, Dtype kDtype, bool kTake>
HVDS_AVX512 size_t Pass(const Span& span_in, uint32_t key, int32_t* indices, float* values,
                        SpoiledList* spoiled) {
  const Span span = span_in;  // so that stores do not seem to change it
  const __m512i key_lanes = _mm512_set1_epi32(static_cast<int32_t>(key));
  size_t count = 0;
  size_t i = 0;
  const auto hits_of = [&](const Line<kRule, kDtype>& line) HVDS_AVX512 {
    return _mm512_cmpge_epu32_mask(Keys(line.sum), key_lanes);
  };
  const auto emit = [&](const Line<kRule, kDtype>& line, __mmask16 hits, size_t at) HVDS_AVX512 {
    count += line.EmitHits(hits, span.first_index + static_cast<int32_t>(at), indices + count,
                           values + count, spoiled);
  };
  const auto partial_line = [&](size_t length) HVDS_AVX512 {
    const __mmask16 lanes = FirstLanes(length);
    Line<kRule, kDtype> line;
    line.Load(span, i, lanes);
    const __mmask16 hits = hits_of(line);
    line.template Store<kTake>(span, i, lanes, hits);
    emit(line, hits, i);
    i += length;
  };

  const size_t misaligned = reinterpret_cast<uintptr_t>(span.residual) / sizeof(float) % kLanes;
  if (misaligned != 0) partial_line(span.n < kLanes - misaligned ? span.n : kLanes - misaligned);
  const auto four_lines = [&](auto streamed) HVDS_AVX512 {
    Line<kRule, kDtype> line[4];
    __mmask16 hits[4];
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      line[j].Load(span, i + j * kLanes, FirstLanes(kLanes));
      hits[j] = hits_of(line[j]);
      line[j].template Store<kTake, streamed.value>(span, i + j * kLanes, FirstLanes(kLanes),
                                                    hits[j]);
    }
    if (hits[0] | hits[1] | hits[2] | hits[3]) {
#pragma GCC unroll 4
      for (size_t j = 0; j < 4; ++j) emit(line[j], hits[j], i + j * kLanes);
    }
    i += 4 * kLanes;
  };
  if (span.streamed) {
    while (i + 4 * kLanes <= span.n) four_lines(std::true_type());
  } else {
    while (i + 4 * kLanes <= span.n) four_lines(std::false_type());
  }
  while (i < span.n) partial_line(span.n - i < kLanes ? span.n - i : kLanes);
  return count;
}

template <Rule kRule, Dtype kDtype>
HVDS_AVX512 void Sums(const Span& span, float* sums) {
  for (size_t i = 0; i < span.n; i += kLanes) {
    const __mmask16 lanes = FirstLanes(span.n - i < kLanes ? span.n - i : kLanes);
    Line<kRule, kDtype> line;
    line.Load(span, i, lanes);
    _mm512_mask_storeu_ps(sums + i, lanes, line.sum);
  }
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

HVDS_AVX512 uint32_t Pivot(const float* sums, size_t n, size_t k) { return PivotLoop(sums, n, k); }

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
    HVDS_BY_RULE_AND_DTYPE(HVDS_TAKE),
    Pass<kPlain, kNoGradient, false>,
    HVDS_BY_RULE_AND_DTYPE(HVDS_SUMS),
    Filter<true>,
    Filter<false>,
    Pivot,
    StreamOut,
    StreamFence,
    {nullptr, NarrowToFloat16, NarrowToBFloat16, nullptr},
};

}  // namespace hvds
#endif
