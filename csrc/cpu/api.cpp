#include "api.h"

#include <new>
#include <vector>

#include "passes.h"
#include "streams.h"
#include "topk.h"

namespace hvds {
namespace {

struct BadArgument {};

// Runs `body` and turns what it throws into a status.
template <typename Body>
int32_t Guarded(Body body) {
  int32_t status = kHvdsOk;
  try {
    body();
  } catch (const BadIndex&) {
    status = kHvdsBadIndex;
  } catch (const BadArgument&) {
    status = kHvdsBadArgument;
  } catch (...) {
    status = kHvdsOutOfMemory;
  }
  return status;
}

Gradients GradientsOf(const int64_t* segments, int64_t count, int64_t n) {
  Gradients gradients;
  if (count == 0) return Gradients::None(static_cast<size_t>(n));
  gradients.segments.reserve(static_cast<size_t>(count));
  for (int64_t s = 0; s < count; ++s) {
    const int64_t address = segments[3 * s], numel = segments[3 * s + 1];
    const int64_t dtype = segments[3 * s + 2];
    if (numel < 0 || dtype < kFloat32 || dtype > kBFloat16) throw BadArgument();
    if (numel == 0) continue;
    gradients.segments.push_back({reinterpret_cast<const void*>(address), gradients.numel,
                                  static_cast<size_t>(numel), static_cast<Dtype>(dtype)});
    gradients.numel += static_cast<size_t>(numel);
  }
  if (gradients.numel != static_cast<size_t>(n)) throw BadArgument();
  return gradients;
}

}  // namespace
}  // namespace hvds

using hvds::BadArgument;
using hvds::Guarded;
using hvds::Stream;
using hvds::ThreadWorkspace;
using hvds::Workspace;

int32_t hvds_abi_version() { return 1; }

int32_t hvds_isa() { return hvds::ActiveIsa(); }

int32_t hvds_set_isa(int32_t isa) { return hvds::SetIsa(isa) ? kHvdsOk : kHvdsBadArgument; }

int32_t hvds_accumulate_select(float* residual, int64_t n, const int64_t* segments,
                               int64_t segment_count, uint32_t key, int32_t threads, int64_t* nnz) {
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

int32_t hvds_take(int32_t* indices, float* values, int64_t nnz, int32_t threads) {
  return Guarded([&] {
    Workspace& workspace = ThreadWorkspace();
    if (nnz != static_cast<int64_t>(workspace.TotalCount())) throw BadArgument();
    hvds::CopyOut(workspace, indices, values, threads);
    workspace.Trim();
  });
}

int32_t hvds_accumulate_topk(float* residual, int64_t n, const int64_t* segments,
                             int64_t segment_count, int64_t k, uint32_t pivot_key, int32_t threads,
                             int32_t* indices, float* values, int64_t* nnz, float* threshold) {
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

int32_t hvds_kth_magnitude(const float* x, int64_t n, int64_t k, int32_t threads,
                           float* magnitude) {
  return Guarded([&] {
    if (k < 1 || k > n) throw BadArgument();
    Workspace& workspace = ThreadWorkspace();
    *magnitude = hvds::FloatOf(
        hvds::KthKey(workspace, x, static_cast<size_t>(n), static_cast<size_t>(k), threads));
    workspace.Trim();
  });
}

int32_t hvds_merge_sum(const int64_t* streams, int64_t stream_count, int64_t numel, int32_t threads,
                       int32_t* indices, float* values, int64_t* nnz) {
  return Guarded([&] {
    std::vector<Stream> list;
    for (int64_t s = 0; s < stream_count; ++s) {
      list.push_back({reinterpret_cast<const int32_t*>(streams[3 * s]),
                      reinterpret_cast<const float*>(streams[3 * s + 1]),
                      static_cast<size_t>(streams[3 * s + 2])});
    }
    Workspace& workspace = ThreadWorkspace();
    *nnz = static_cast<int64_t>(hvds::MergeSum(
        workspace, list.data(), list.size(), static_cast<size_t>(numel), threads, indices, values));
    workspace.Trim();
  });
}

int32_t hvds_difference(const int32_t* indices, const float* values, int64_t nnz_in,
                        const int32_t* other, int64_t other_count, int32_t* out_indices,
                        float* out_values, int64_t* nnz) {
  return Guarded([&] {
    *nnz = static_cast<int64_t>(hvds::Difference({indices, values, static_cast<size_t>(nnz_in)},
                                                 other, static_cast<size_t>(other_count),
                                                 out_indices, out_values));
  });
}

int32_t hvds_threshold_stream(const int32_t* indices, const float* values, int64_t nnz_in,
                              uint32_t key, int32_t* out_indices, float* out_values, int64_t* nnz) {
  return Guarded([&] {
    *nnz = static_cast<int64_t>(hvds::ActiveKernels().at_least(
        indices, values, static_cast<size_t>(nnz_in), key, out_indices, out_values));
  });
}

int32_t hvds_scatter_add(float* x, int64_t n, const int32_t* indices, const float* values,
                         int64_t nnz, int32_t threads) {
  return Guarded([&] {
    hvds::ScatterAdd(x, static_cast<size_t>(n), {indices, values, static_cast<size_t>(nnz)},
                     threads);
  });
}

int32_t hvds_decode(void* out, int32_t dtype, int64_t n, const int32_t* indices,
                    const float* values, int64_t nnz, int32_t threads) {
  return Guarded([&] {
    if (dtype < hvds::kFloat32 || dtype > hvds::kBFloat16) throw BadArgument();
    hvds::Decode(out, static_cast<hvds::Dtype>(dtype), static_cast<size_t>(n),
                 {indices, values, static_cast<size_t>(nnz)}, threads);
  });
}
