// The C interface to accumulation and selection.
//
// Where the size of a selection is not known beforehand, it stays with the calling thread until its
// next call, and hvds_take copies it out.
#include "api.h"
#include "estimate.h"
#include "extract.h"
#include "passes.h"
#include "topk.h"

using hvds::AccumulationOf;
using hvds::BadArgument;
using hvds::Guarded;
using hvds::ThreadWorkspace;
using hvds::Workspace;

namespace {

// A key above infinity's would leave non-finite sums unnoticed.
void CheckKey(uint32_t key) {
  if (key < 1 || key > hvds::kNonFiniteKey) throw BadArgument();
}

}  // namespace

// Selects in [begin, end); what becomes non-finite goes out everywhere.
HVDS_API int32_t hvds_accumulate_select(const HvdsAccumulation* accumulation, uint32_t key,
                                        int64_t begin, int64_t end, int32_t threads, int64_t* nnz) {
  return Guarded([&] {
    CheckKey(key);
    if (begin < 0 || end < begin || end > accumulation->n) throw BadArgument();
    Workspace& workspace = ThreadWorkspace();
    const hvds::Accumulation checked = AccumulationOf(*accumulation);
    hvds::Search search{key};
    search.begin = static_cast<size_t>(begin);
    search.end = static_cast<size_t>(end);
    hvds::Accumulate(workspace, checked, search, hvds::Mode::kTake, threads);
    hvds::RestoreSpoiled(workspace, checked);
    *nnz = static_cast<int64_t>(workspace.TotalCount());
  });
}

// 1 <= slots_per_bucket <= 255; 1 <= buckets < 2^31.
HVDS_API int32_t hvds_hash_select(const HvdsAccumulation* accumulation, uint32_t key,
                                  int64_t buckets, int32_t slots_per_bucket, uint64_t seed,
                                  int32_t threads, int64_t* nnz) {
  return Guarded([&] {
    CheckKey(key);
    if (slots_per_bucket < 1 || slots_per_bucket > 255) throw BadArgument();
    if (buckets < 1 || buckets > INT32_MAX) throw BadArgument();
    Workspace& workspace = ThreadWorkspace();
    hvds::HashSelect(workspace, AccumulationOf(*accumulation), key,
                     {seed, static_cast<uint64_t>(buckets)},
                     static_cast<uint32_t>(slots_per_bucket), threads);
    *nnz = static_cast<int64_t>(workspace.TotalCount());
  });
}

// 1 <= k <= group_numel.
HVDS_API int32_t hvds_accumulate_group_topk(const HvdsAccumulation* accumulation, int64_t k,
                                            int64_t group_numel, int32_t threads, int64_t* nnz) {
  return Guarded([&] {
    if (k < 1 || k > group_numel) throw BadArgument();
    Workspace& workspace = ThreadWorkspace();
    hvds::GroupTopk(workspace, AccumulationOf(*accumulation), static_cast<size_t>(k),
                    static_cast<size_t>(group_numel), threads);
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

// `indices` and `values` have room for min(k, n).
HVDS_API int32_t hvds_accumulate_topk(const HvdsAccumulation* accumulation, int64_t k,
                                      int32_t threads, int32_t* indices, float* values,
                                      int64_t* nnz, float* threshold) {
  return Guarded([&] {
    if (k < 0) throw BadArgument();
    Workspace& workspace = ThreadWorkspace();
    uint32_t kth_key;
    *nnz = static_cast<int64_t>(hvds::AccumulateTopk(workspace, AccumulationOf(*accumulation),
                                                     static_cast<size_t>(k), threads, indices,
                                                     values, &kth_key));
    *threshold = hvds::FloatOf(kth_key);
    workspace.Trim();
  });
}

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
