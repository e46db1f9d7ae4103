#include "api.h"

namespace hvds {
namespace {

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

Accumulation AccumulationOf(const HvdsAccumulation& accumulation) {
  Accumulation checked{
      accumulation.residual,
      GradientsOf(accumulation.segments, accumulation.segment_count, accumulation.n)};
  if (accumulation.buffer != nullptr) {
    if (accumulation.segment_count == 0) throw BadArgument();
    checked.rule = accumulation.nesterov ? kNesterov : kMomentum;
    checked.buffer = accumulation.buffer;
    checked.factor = accumulation.factor;
  }
  if (accumulation.before_residual != nullptr && accumulation.n > 0) {
    if (accumulation.segment_count == 0) throw BadArgument();
    if ((accumulation.buffer == nullptr) != (accumulation.before_buffer == nullptr)) {
      throw BadArgument();
    }
    checked.before = accumulation.before_residual;
    checked.buffer_before = accumulation.before_buffer;
  }
  return checked;
}

}  // namespace hvds

// Rises with every change of a function's arguments.
HVDS_API int32_t hvds_abi_version() { return 10; }

// 0 portable, 1 AVX2, 2 AVX-512: what is live, and a switch for tests. Setting what the processor
// lacks is kHvdsBadArgument.
HVDS_API int32_t hvds_isa() { return hvds::ActiveIsa(); }
HVDS_API int32_t hvds_set_isa(int32_t isa) {
  return hvds::SetIsa(isa) ? kHvdsOk : kHvdsBadArgument;
}
