// The C interface to what a threshold is estimated from.
#include "api.h"
#include "estimate.h"

using hvds::AccumulationOf;
using hvds::BadArgument;
using hvds::Guarded;

// 1 <= run_numel; `sample` has room for runs * run_numel <= n elements.
HVDS_API int32_t hvds_sample_accumulator(const HvdsAccumulation* accumulation, int64_t runs,
                                         int64_t run_numel, uint64_t seed, int32_t threads,
                                         float* sample) {
  return Guarded([&] {
    const hvds::Accumulation checked = AccumulationOf(*accumulation);
    const auto numel = static_cast<int64_t>(checked.numel());
    if (run_numel < 1 || runs < 0 || runs > numel / run_numel) throw BadArgument();
    hvds::Sample(checked, {static_cast<size_t>(runs), static_cast<size_t>(run_numel), seed},
                 threads, sample);
  });
}
