// The C interface to what a threshold is estimated from.
#include "api.h"
#include "estimate.h"
#include "topk.h"

using hvds::BadArgument;
using hvds::Guarded;
using hvds::SourceOf;
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
HVDS_API int32_t hvds_sample_accumulator(const HvdsSource* source, int64_t start, int64_t stride,
                                         int64_t run, int32_t threads, float* sample,
                                         int64_t sample_numel) {
  return Guarded([&] {
    if (start < 0 || run < 1 || run > stride) throw BadArgument();
    const auto from = static_cast<size_t>(start), step = static_cast<size_t>(stride);
    const auto length = static_cast<size_t>(run);
    const hvds::Source checked = SourceOf(*source);
    if (hvds::SampleNumel(checked.numel(), from, step, length) !=
        static_cast<size_t>(sample_numel)) {
      throw BadArgument();
    }
    hvds::Sample(checked, from, step, length, threads, sample);
  });
}

// `sums`: Σ x, Σ x², Σ |x|, Σ ln |x|, max |x|.
HVDS_API int32_t hvds_accumulator_moments(const HvdsSource* source, uint32_t key, int32_t threads,
                                          int64_t* count, double* sums) {
  return Guarded([&] {
    if (key < 1) throw BadArgument();
    const hvds::MomentSums moments = hvds::Moments(SourceOf(*source), key, threads);
    *count = moments.count;
    sums[0] = moments.sum;
    sums[1] = moments.of_squares;
    sums[2] = moments.of_magnitudes;
    sums[3] = moments.of_logs;
    sums[4] = static_cast<double>(moments.largest);
  });
}

HVDS_API int32_t hvds_count_at_least(const HvdsSource* source, const uint32_t* keys,
                                     int64_t key_count, int32_t threads, uint64_t* counts) {
  return Guarded([&] {
    for (int64_t k = 0; k < key_count; ++k) {
      if (keys[k] < 1) throw BadArgument();
    }
    hvds::CountAtLeast(SourceOf(*source), keys, static_cast<size_t>(key_count), threads, counts);
  });
}
