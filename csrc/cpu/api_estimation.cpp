// The C interface to what a threshold is estimated from.
#include "api.h"
#include "topk.h"

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
