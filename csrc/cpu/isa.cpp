#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if HVDS_X86
#include <cpuid.h>
#endif

namespace hvds {
namespace {

#if HVDS_X86
// Clang 14 does not know "f16c" as a name.
bool SupportsF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

Isa Supported() {
#if HVDS_X86
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && SupportsF16c();
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("bmi2")) {
    return kAvx512;
  }
  if (avx2) return kAvx2;
#endif
  return kPortable;
}

Isa Initial() {
  const Isa best = Supported();
  const char* cap = std::getenv("HVD_SPARSE_ISA");
  if (cap == nullptr) return best;
  if (std::strcmp(cap, "portable") == 0) return kPortable;
  if (std::strcmp(cap, "avx2") == 0 && best > kAvx2) return kAvx2;
  return best;
}

std::atomic<Isa> active{Initial()};

}  // namespace

Isa ActiveIsa() { return active.load(std::memory_order_relaxed); }

bool SetIsa(int32_t isa) {
  if (isa < kPortable || isa > Supported()) return false;
  active.store(static_cast<Isa>(isa), std::memory_order_relaxed);
  return true;
}

const Kernels& ActiveKernels() {
  switch (ActiveIsa()) {
#if HVDS_X86
    case kAvx512:
      return kAvx512Kernels;
    case kAvx2:
      return kAvx2Kernels;
#endif
    default:
      return kPortableKernels;
  }
}

}  // namespace hvds
