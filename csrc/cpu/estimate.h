// What a threshold is estimated from: looks at what an accumulation would come to, and changes
// nothing.
#pragma once

#include <cstddef>

#include "passes.h"

namespace hvds {

// Runs of `run_numel` consecutive elements, at multiples of that: one from each of `runs` equal
// stretches of a vector, at a place that the seed and the run's number tell.
struct Sampling {
  size_t runs, run_numel;
  uint64_t seed;
};

// Writes the runs' magnitudes to `sample`, in order; runs * run_numel <= n.
void Sample(const Accumulation& accumulation, const Sampling& sampling, int threads, float* sample);

}  // namespace hvds
