// What a threshold is estimated from: looks at what a source would accumulate to, and changes
// nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "passes.h"

namespace hvds {

// How many elements a sample of `run` from every `stride`, the first at `start`, has.
size_t SampleNumel(size_t n, size_t start, size_t stride, size_t run);

// Writes their magnitudes to `sample`, in order; 1 <= run <= stride.
void Sample(const Source& source, size_t start, size_t stride, size_t run, int threads,
            float* sample);

// The moments of the finite sums that reach the key >= 1; the same for any number of threads.
MomentSums Moments(const Source& source, uint32_t key, int threads);

// counts[t] = how many of the sums reach keys[t] >= 1.
void CountAtLeast(const Source& source, const uint32_t* keys, size_t key_count, int threads,
                  uint64_t* counts);

}  // namespace hvds
