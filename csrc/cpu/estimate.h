// What a threshold is estimated from: looks at what an accumulation would come to, and changes
// nothing.
#pragma once

#include <cstddef>

#include "passes.h"

namespace hvds {

// How many elements a sample of `run` from every `stride`, the first at `start`, has.
size_t SampleNumel(size_t n, size_t start, size_t stride, size_t run);

// Writes their magnitudes to `sample`, in order; 1 <= run <= stride.
void Sample(const Accumulation& accumulation, size_t start, size_t stride, size_t run, int threads,
            float* sample);

}  // namespace hvds
