// The C interface to accumulation and selection.
#include "api.h"
#include "passes.h"
#include "topk.h"

using hvds::BadArgument;
using hvds::Guarded;
using hvds::ThreadWorkspace;
using hvds::Workspace;

// `segments`: `segment_count` triples (address, numel, dtype code) whose numels add up to n; none:
// there is nothing to add. The selection stays with the calling thread until its next call;
// hvds_take copies it out.
HVDS_API int32_t hvds_accumulate_select(float* residual, int64_t n, const int64_t* segments,
                                        int64_t segment_count, uint32_t key, int32_t threads,
                                        int64_t* nnz) {
  return Guarded([&] {
    // A key above infinity's would leave non-finite sums unnoticed.
    if (key < 1 || key > hvds::kNonFiniteKey) throw BadArgument();
    const hvds::Gradients gradients = hvds::GradientsOf(segments, segment_count, n);
    Workspace& workspace = ThreadWorkspace();
    hvds::Accumulate(workspace, residual, gradients, {key}, hvds::Mode::kTake, threads);
    for (const hvds::SpoiledList& list : workspace.TakeSpoiled()) list.Restore(residual);
    *nnz = static_cast<int64_t>(workspace.TotalCount());
  });
}

HVDS_API int32_t hvds_take(int32_t* indices, float* values, int64_t nnz, int32_t threads) {
  return Guarded([&] {
    Workspace& workspace = ThreadWorkspace();
    if (nnz != static_cast<int64_t>(workspace.TotalCount())) throw BadArgument();
    hvds::CopyOut(workspace, indices, values, threads);
    workspace.Trim();
  });
}

// `indices` and `values` have room for min(k, n). `pivot_key` 0: no guess.
HVDS_API int32_t hvds_accumulate_topk(float* residual, int64_t n, const int64_t* segments,
                                      int64_t segment_count, int64_t k, uint32_t pivot_key,
                                      int32_t threads, int32_t* indices, float* values,
                                      int64_t* nnz, float* threshold) {
  return Guarded([&] {
    if (k < 0) throw BadArgument();
    const hvds::Gradients gradients = hvds::GradientsOf(segments, segment_count, n);
    Workspace& workspace = ThreadWorkspace();
    uint32_t kth_key;
    *nnz = static_cast<int64_t>(hvds::AccumulateTopk(workspace, residual, gradients,
                                                     static_cast<size_t>(k), pivot_key, threads,
                                                     indices, values, &kth_key));
    *threshold = hvds::FloatOf(kth_key);
    workspace.Trim();
  });
}
