// AVX2: eight elements to a register, selections as bit masks walked by count-trailing-zeros.
#include "kernels.h"

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

template <Dtype kDtype>
float GradientAt(const void* gradient, size_t i) {
  if constexpr (kDtype == kFloat32) return static_cast<const float*>(gradient)[i];
  if constexpr (kDtype == kFloat16) return WidenFloat16(static_cast<const uint16_t*>(gradient)[i]);
  return WidenBFloat16(static_cast<const uint16_t*>(gradient)[i]);
}

// Keys have no sign bit, so that a signed comparison orders them; `below` is the key less one.
HVDS_AVX2_INLINE __m256 AtLeast(__m256 x, __m256i below) {
  const __m256i magnitude =
      _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(kMagnitudeMask));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(magnitude, below));
}

// Four registers at a time with one branch on whether any of them has a hit, then the tail by
// element.
template <Dtype kDtype, bool kTake>
HVDS_AVX2 size_t Pass(float* residual, const void* gradient, size_t n, int32_t first_index,
                      uint32_t key, int32_t* indices, float* values, SpoiledList* spoiled) {
  const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(key - 1));
  size_t count = 0;
  size_t i = 0;
  const auto emit = [&](size_t at, float before, float sum) {
    const int32_t index = first_index + static_cast<int32_t>(at);
    if (__builtin_expect(KeyOf(sum) >= kNonFiniteKey && spoiled != nullptr, 0)) {
      spoiled->Add(index, before);
    }
    indices[count] = index;
    values[count++] = sum;
  };

  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    __m256 before[4], sum[4], hit[4];
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      const size_t at = i + j * kLanes;
      before[j] = _mm256_loadu_ps(residual + at);
      sum[j] = before[j];
      if constexpr (kDtype != kNoGradient) {
        sum[j] = _mm256_add_ps(before[j], Gradient<kDtype>(gradient, at));
      }
      hit[j] = AtLeast(sum[j], below);
      if constexpr (kDtype != kNoGradient) {
        _mm256_storeu_ps(residual + at, kTake ? _mm256_andnot_ps(hit[j], sum[j]) : sum[j]);
      }
    }
    const __m256 any = _mm256_or_ps(_mm256_or_ps(hit[0], hit[1]), _mm256_or_ps(hit[2], hit[3]));
    if (_mm256_movemask_ps(any) != 0) {
      alignas(32) float before_lanes[4 * kLanes], sum_lanes[4 * kLanes];
      uint32_t hits = 0;
#pragma GCC unroll 4
      for (size_t j = 0; j < 4; ++j) {
        _mm256_store_ps(before_lanes + j * kLanes, before[j]);
        _mm256_store_ps(sum_lanes + j * kLanes, sum[j]);
        hits |= static_cast<uint32_t>(_mm256_movemask_ps(hit[j])) << (j * kLanes);
      }
      for (; hits != 0; hits &= hits - 1) {
        const size_t lane = static_cast<size_t>(__builtin_ctz(hits));
        emit(i + lane, before_lanes[lane], sum_lanes[lane]);
        if constexpr (kDtype == kNoGradient && kTake) residual[i + lane] = 0.0f;
      }
    }
  }
  for (; i < n; ++i) {
    const float before = residual[i];
    float sum = before;
    if constexpr (kDtype != kNoGradient) sum += GradientAt<kDtype>(gradient, i);
    const bool hit = KeyOf(sum) >= key;
    if (kDtype != kNoGradient || (kTake && hit)) residual[i] = kTake && hit ? 0.0f : sum;
    if (hit) emit(i, before, sum);
  }
  return count;
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
