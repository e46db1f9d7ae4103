// Loops over sums, in the compiler's vector types: each instruction set's kernels inline them and
// so compile them anew, to registers as wide as they have. All get the same results, bit for bit.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"

#define HVDS_INLINE inline __attribute__((always_inline))

namespace hvds {

template <typename T, size_t kLanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
};

// Eight lanes of sums, whatever the registers' width, so that the order of additions is always the
// same; kRegister doubles to a register. The logarithm of a product of mantissas stands for a sum
// of logarithms: there are 512 to a lane, each below 2, so that their product stays below 2^512.
template <size_t kRegister>
HVDS_INLINE void MomentsLoop(const float* sums, size_t n, uint32_t key, MomentSums* result) {
  constexpr size_t kLanes = 8, kRegisters = kLanes / kRegister;
  static_assert(kMomentsNumel / kLanes <= 512, "products of mantissas must not overflow");
  using Ints = typename VectorOf<int32_t, kRegister>::Type;
  using Floats = typename VectorOf<float, kRegister>::Type;
  using Longs = typename VectorOf<uint64_t, kRegister>::Type;
  using Doubles = typename VectorOf<double, kRegister>::Type;
  Doubles sum[kRegisters] = {}, of_squares[kRegisters] = {}, of_magnitudes[kRegisters] = {};
  Doubles mantissas[kRegisters];
  Longs exponents[kRegisters] = {};
  Ints count[kRegisters] = {}, largest[kRegisters] = {};
  for (Doubles& product : mantissas) product = Doubles{} + 1.0;
  const auto add = [&](const float* eight) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (size_t r = 0; r < kRegisters; ++r) {
      Ints bits;
      std::memcpy(&bits, eight + r * kRegister, sizeof bits);
      const Ints magnitude_key = bits & static_cast<int32_t>(kMagnitudeMask);
      const Ints used = (magnitude_key >= static_cast<int32_t>(key)) &
                        (magnitude_key < static_cast<int32_t>(kNonFiniteKey));
      const Ints used_key = magnitude_key & used;
      const Doubles value = __builtin_convertvector((Floats)(bits & used), Doubles);
      const Doubles magnitude = __builtin_convertvector((Floats)used_key, Doubles);
      const Longs magnitude_bits = (Longs)magnitude;
      sum[r] += value;
      of_squares[r] += magnitude * magnitude;
      of_magnitudes[r] += magnitude;
      // Of a zero, mantissa 1 and exponent field 0: it leaves no trace.
      mantissas[r] *= (Doubles)((magnitude_bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
      exponents[r] += magnitude_bits >> 52;
      count[r] -= used;
      const Ints larger = used_key > largest[r];
      largest[r] = (used_key & larger) | (largest[r] & ~larger);
    }
  };
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(sums + i);
  if (i < n) {
    float rest[kLanes] = {};
    std::copy(sums + i, sums + n, rest);
    add(rest);
  }
  for (size_t r = 0; r < kRegisters; ++r) {
    for (size_t lane = 0; lane < kRegister; ++lane) {
      constexpr double kLn2 = 0.693147180559945309417;
      const int64_t used = count[r][lane];
      const int64_t exponent = static_cast<int64_t>(exponents[r][lane]) - 1023 * used;
      result->count += used;
      result->sum += sum[r][lane];
      result->of_squares += of_squares[r][lane];
      result->of_magnitudes += of_magnitudes[r][lane];
      result->of_logs += std::log(mantissas[r][lane]) + kLn2 * static_cast<double>(exponent);
      result->largest = std::max(result->largest, FloatOf(static_cast<uint32_t>(largest[r][lane])));
    }
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
