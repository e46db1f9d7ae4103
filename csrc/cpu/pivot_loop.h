// The pivot of a group's sums: each instruction set's kernels inline these loops and so compile
// them anew, to registers as wide as they have. All get the same results, bit for bit.
#pragma once

#include <algorithm>

#include "kernels.h"

#define HVDS_INLINE inline __attribute__((always_inline))

namespace hvds {

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
