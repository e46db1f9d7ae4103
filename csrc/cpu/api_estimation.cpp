// The C interface to what a threshold is estimated from.
#include "api.h"
#include "estimate.h"
#include "topk.h"

using hvds::AccumulationOf;
using hvds::BadArgument;
using hvds::Guarded;
using hvds::ThreadWorkspace;
using hvds::Workspace;

// 1 <= k <= n.
HVDS_API int32_t hvds_kth_magnitude(const float* x, int64_t n, int64_t k, int32_t threads,
                                    float* magnitude) {
  return Guarded([&] {
    if (k < 1 || k > n) throw BadArgument();
    Workspace& workspace = ThreadWorkspace();
    *magnitude = hvds::FloatOf(
        hvds::KthKey(workspace, x, static_cast<size_t>(n), static_cast<size_t>(k), threads));
    workspace.Trim();
  });
}

// `sample_numel` is how many elements there are to sample; 0 <= start, 1 <= run <= stride.
HVDS_API int32_t hvds_sample_accumulator(const HvdsAccumulation* accumulation, int64_t start,
                                         int64_t stride, int64_t run, int32_t threads,
                                         float* sample, int64_t sample_numel) {
  return Guarded([&] {
    if (start < 0 || run < 1 || run > stride) throw BadArgument();
    const auto from = static_cast<size_t>(start), step = static_cast<size_t>(stride);
    const auto length = static_cast<size_t>(run);
    const hvds::Accumulation checked = AccumulationOf(*accumulation);
    if (hvds::SampleNumel(checked.numel(), from, step, length) !=
        static_cast<size_t>(sample_numel)) {
      throw BadArgument();
    }
    hvds::Sample(checked, from, step, length, threads, sample);
  });
}
