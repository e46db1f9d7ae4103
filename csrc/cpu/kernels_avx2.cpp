// AVX2: eight elements to a register, selections as bit masks walked by count-trailing-zeros.
#include <type_traits>

#include "element.h"
#include "kernels.h"
#include "pivot_loop.h"

#if HVDS_X86
#include <immintrin.h>

#define HVDS_AVX2 __attribute__((target("avx2,f16c,bmi")))
#define HVDS_AVX2_INLINE HVDS_AVX2 inline __attribute__((always_inline))

namespace hvds {
namespace {

constexpr size_t kLanes = 8;

template <Dtype kDtype>
HVDS_AVX2_INLINE __m256 Gradient(const void* gradient, size_t i) {
  if constexpr (kDtype == kFloat32) {
    return _mm256_loadu_ps(static_cast<const float*>(gradient) + i);
  } else {
    const __m128i half = _mm_loadu_si128(
        reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(gradient) + i));
    if constexpr (kDtype == kFloat16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
}

// Keys have no sign bit, so that a signed comparison orders them; `below` is the key less one.
HVDS_AVX2_INLINE __m256 AtLeast(__m256 x, __m256i below) {
  const __m256i magnitude =
      _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(kMagnitudeMask));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(magnitude, below));
}

// Past the caches, to an aligned place, or not.
template <bool kStreamed>
HVDS_AVX2_INLINE void Store(float* to, __m256 x) {
  if constexpr (kStreamed) {
    _mm256_stream_ps(to, x);
  } else {
    _mm256_storeu_ps(to, x);
  }
}

// One register's worth of an accumulator, before and after the gradient has come in.
template <Rule kRule, Dtype kDtype>
struct Line {
  __m256 before, sum;
  __m256 buffer_before, buffer;  // unless kPlain

  HVDS_AVX2_INLINE void Load(const Span& span, size_t i) {
    before = _mm256_loadu_ps(span.before + i);
    sum = before;
    if constexpr (kDtype != kNoGradient) {
      const __m256 g = Gradient<kDtype>(span.gradient, i);
      if constexpr (kRule == kPlain) {
        sum = _mm256_add_ps(before, g);
      } else {
        const __m256 m = _mm256_set1_ps(span.factor);
        buffer_before = _mm256_loadu_ps(span.buffer_before + i);
        if constexpr (kRule == kMomentum) {
          buffer = _mm256_add_ps(_mm256_mul_ps(m, buffer_before), g);
          sum = _mm256_add_ps(before, buffer);
        } else {
          buffer = _mm256_mul_ps(m, _mm256_add_ps(buffer_before, g));
          sum = _mm256_add_ps(_mm256_add_ps(before, buffer), g);
        }
      }
    }
  }
};

// Four registers at a time with one branch on whether any of them has a hit, then the tail by
// element; where stores are streamed, a head by element brings the residual to a cache line.
template <Rule kRule, Dtype kDtype, bool kTake>
HVDS_AVX2 size_t Pass(const Span& span_in, uint32_t key, int32_t* indices, float* values,
                      SpoiledList* spoiled) {
  const Span span = span_in;  // so that stores do not seem to change it
  const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(key - 1));
  size_t count = 0;
  size_t i = 0;
  const auto emit = [&](size_t at, float sum, float before, float buffer_before) {
    const int32_t index = span.first_index + static_cast<int32_t>(at);
    if (__builtin_expect(KeyOf(sum) >= kNonFiniteKey && spoiled != nullptr, 0)) {
      spoiled->Add(index, before, buffer_before);
    }
    indices[count] = index;
    values[count++] = sum;
  };

  const auto one_element = [&]() HVDS_AVX2 {
    const Element<kRule, kDtype> element(span, i);
    const bool hit = KeyOf(element.sum) >= key;
    if (kDtype != kNoGradient || (kTake && hit)) {
      span.residual[i] = kTake && hit ? 0.0f : element.sum;
    }
    if (kRule != kPlain) span.buffer[i] = element.buffer;
    if (hit) emit(i, element.sum, element.before, element.buffer_before);
    ++i;
  };
  const auto four_lines = [&](auto streamed) HVDS_AVX2 {
    Line<kRule, kDtype> line[4];
    __m256 hit[4];
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      const size_t at = i + j * kLanes;
      line[j].Load(span, at);
      hit[j] = AtLeast(line[j].sum, below);
      if constexpr (kDtype != kNoGradient) {
        Store<streamed.value>(span.residual + at,
                              kTake ? _mm256_andnot_ps(hit[j], line[j].sum) : line[j].sum);
      }
      if constexpr (kRule != kPlain) Store<streamed.value>(span.buffer + at, line[j].buffer);
    }
    const __m256 any = _mm256_or_ps(_mm256_or_ps(hit[0], hit[1]), _mm256_or_ps(hit[2], hit[3]));
    if (_mm256_movemask_ps(any) != 0) {
      alignas(32) float before[4 * kLanes], sum[4 * kLanes], buffer_before[4 * kLanes];
      uint32_t hits = 0;
#pragma GCC unroll 4
      for (size_t j = 0; j < 4; ++j) {
        _mm256_store_ps(before + j * kLanes, line[j].before);
        _mm256_store_ps(sum + j * kLanes, line[j].sum);
        _mm256_store_ps(buffer_before + j * kLanes,
                        kRule == kPlain ? _mm256_setzero_ps() : line[j].buffer_before);
        hits |= static_cast<uint32_t>(_mm256_movemask_ps(hit[j])) << (j * kLanes);
      }
      for (; hits != 0; hits &= hits - 1) {
        const size_t lane = static_cast<size_t>(__builtin_ctz(hits));
        emit(i + lane, sum[lane], before[lane], buffer_before[lane]);
        if constexpr (kDtype == kNoGradient && kTake) span.residual[i + lane] = 0.0f;
      }
    }
    i += 4 * kLanes;
  };

  if (span.streamed) {
    while (i < span.n && reinterpret_cast<uintptr_t>(span.residual + i) % kLineBytes) one_element();
    while (i + 4 * kLanes <= span.n) four_lines(std::true_type());
  } else {
    while (i + 4 * kLanes <= span.n) four_lines(std::false_type());
  }
  while (i < span.n) one_element();
  return count;
}

template <Rule kRule, Dtype kDtype>
HVDS_AVX2 void Sums(const Span& span, float* sums) {
  size_t i = 0;
  for (; i + kLanes <= span.n; i += kLanes) {
    Line<kRule, kDtype> line;
    line.Load(span, i);
    _mm256_storeu_ps(sums + i, line.sum);
  }
  for (; i < span.n; ++i) sums[i] = Element<kRule, kDtype>(span, i).sum;
}

template <bool kAtLeast>
HVDS_AVX2 size_t Filter(const int32_t* indices, const float* values, size_t n, uint32_t key,
                        int32_t* out_indices, float* out_values) {
  const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(key - 1));
  size_t count = 0;
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256 hit = AtLeast(_mm256_loadu_ps(values + i), below);
    auto hits = static_cast<uint32_t>(_mm256_movemask_ps(hit));
    if constexpr (!kAtLeast) hits ^= 0xff;
    for (; hits != 0; hits &= hits - 1) {
      const size_t at = i + static_cast<size_t>(__builtin_ctz(hits));
      out_indices[count] = indices[at];
      out_values[count++] = values[at];
    }
  }
  for (; i < n; ++i) {
    if ((KeyOf(values[i]) >= key) != kAtLeast) continue;
    out_indices[count] = indices[i];
    out_values[count++] = values[i];
  }
  return count;
}

HVDS_AVX2 uint32_t Pivot(const float* sums, size_t n, size_t k) { return PivotLoop(sums, n, k); }

HVDS_AVX2 void StreamOut(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<__m256i*>(to);
  const auto* source = static_cast<const __m256i*>(from);
  for (size_t i = 0; i < bytes / 32; ++i) {
    _mm256_stream_si256(target + i, _mm256_load_si256(source + i));
  }
}

void StreamFence() { _mm_sfence(); }

HVDS_AVX2 void NarrowToFloat16(const float* from, size_t n, uint16_t* to) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < n; ++i) to[i] = NarrowFloat16(from[i]);
}

HVDS_AVX2 void NarrowToBFloat16(const float* from, size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; ++i) to[i] = NarrowBFloat16(from[i]);
}

}  // namespace

const Kernels kAvx2Kernels = {
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
