// Loops over sums, written so that compilers vectorise them: each instruction set's kernels inline
// them and so compile them anew. All get the same results, bit for bit.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"

#define HVDS_INLINE inline __attribute__((always_inline))

namespace hvds {

// Adds to counts[t] how many of the sums reach keys[t], for kKeys keys at a time.
template <size_t kKeys>
HVDS_INLINE void CountSome(const float* sums, size_t n, const uint32_t* keys, uint64_t* counts) {
  int32_t below[kKeys], found[kKeys] = {};
  for (size_t t = 0; t < kKeys; ++t) below[t] = static_cast<int32_t>(keys[t] - 1);
  for (size_t i = 0; i < n; ++i) {
    const auto key = static_cast<int32_t>(KeyOf(sums[i]));
    for (size_t t = 0; t < kKeys; ++t) found[t] += key > below[t];
  }
  for (size_t t = 0; t < kKeys; ++t) counts[t] += static_cast<uint64_t>(found[t]);
}

HVDS_INLINE void CountLoop(const float* sums, size_t n, const uint32_t* keys, size_t key_count,
                           uint64_t* counts) {
  size_t t = 0;
  for (; t + 8 <= key_count; t += 8) CountSome<8>(sums, n, keys + t, counts + t);
  for (; t < key_count; ++t) CountSome<1>(sums, n, keys + t, counts + t);
}

// Sixteen lanes, whatever the registers' width, so that the order of additions is always the same.
// The logarithm of a product of mantissas stands for a sum of logarithms: 256 of them, each below
// 2, stay below 2^256.
HVDS_INLINE void MomentsLoop(const float* sums, size_t n, uint32_t key, MomentSums* result) {
  constexpr size_t kLanes = 16;
  double sum[kLanes] = {}, of_squares[kLanes] = {}, of_magnitudes[kLanes] = {};
  double mantissas[kLanes];
  int64_t exponents[kLanes] = {}, count[kLanes] = {};
  float largest[kLanes] = {};
  std::fill_n(mantissas, kLanes, 1.0);
  const auto add = [&](float x, size_t lane) __attribute__((always_inline)) {
    const uint32_t magnitude_key = KeyOf(x);
    const bool used = magnitude_key >= key && magnitude_key < kNonFiniteKey;
    const double value = used ? x : 0.0;
    const double magnitude = used ? FloatOf(magnitude_key) : 1.0;
    uint64_t bits;
    std::memcpy(&bits, &magnitude, sizeof bits);
    const uint64_t mantissa_bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
    double mantissa;
    std::memcpy(&mantissa, &mantissa_bits, sizeof mantissa);
    sum[lane] += value;
    of_squares[lane] += value * value;
    of_magnitudes[lane] += value < 0.0 ? -value : value;
    mantissas[lane] *= mantissa;
    exponents[lane] += static_cast<int64_t>(bits >> 52) - 1023;
    count[lane] += used;
    const float candidate = used ? FloatOf(magnitude_key) : 0.0f;
    largest[lane] = candidate > largest[lane] ? candidate : largest[lane];
  };
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) add(sums[i + lane], lane);
  }
  for (size_t lane = 0; i + lane < n; ++lane) add(sums[i + lane], lane);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    result->count += count[lane];
    result->sum += sum[lane];
    result->of_squares += of_squares[lane];
    result->of_magnitudes += of_magnitudes[lane];
    result->of_logs +=
        std::log(mantissas[lane]) + 0.693147180559945309417 * static_cast<double>(exponents[lane]);
    result->largest = std::max(result->largest, largest[lane]);
  }
}

// maxima[lane] = the largest key of the sums lane, lane + kLanes, …; 0 where there is none.
template <size_t kLanes>
HVDS_INLINE void LaneMaximaLoop(const float* sums, size_t n, int32_t* maxima) {
  int32_t highest[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const auto key = static_cast<int32_t>(KeyOf(sums[i + lane]));
      highest[lane] = key > highest[lane] ? key : highest[lane];
    }
  }
  for (size_t lane = 0; i + lane < n; ++lane) {
    highest[lane] = std::max(highest[lane], static_cast<int32_t>(KeyOf(sums[i + lane])));
  }
  std::copy_n(highest, kLanes, maxima);
}

// A key that at least k of the sums reach and not many more, if there are k above 0; else 1. Takes
// the k-th largest of the lanes' maxima: each of the k lanes has one that reaches it.
template <size_t kLanes>
HVDS_INLINE uint32_t PivotOf(const float* sums, size_t n, size_t k) {
  int32_t maxima[kLanes], reached_by[kLanes] = {};
  LaneMaximaLoop<kLanes>(sums, n, maxima);
  for (size_t i = 0; i < kLanes; ++i) {
    for (size_t lane = 0; lane < kLanes; ++lane) reached_by[lane] += maxima[i] >= maxima[lane];
  }
  int32_t pivot = 1;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const int32_t candidate = reached_by[lane] >= static_cast<int32_t>(k) ? maxima[lane] : 1;
    pivot = candidate > pivot ? candidate : pivot;
  }
  return static_cast<uint32_t>(pivot);
}

HVDS_INLINE uint32_t PivotLoop(const float* sums, size_t n, size_t k) {
  if (k <= 8) return PivotOf<16>(sums, n, k);
  if (k <= 40) return PivotOf<64>(sums, n, k);
  return 1;
}

}  // namespace hvds
