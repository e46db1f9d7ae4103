// What every kernel builds on. No CUDA or standard header is included: NVRTC then compiles the
// sources as they are, whichever toolkit it came with. With HVDS_SHIM defined they compile as C++
// for the tests, which run them on a CPU.
//
// Arithmetic that has to agree with the CPU bit for bit is spelt in PTX: CuPy compiles with
// -ftz=true, and the compiler contracts a * b + c, neither of which touches an explicit
// instruction.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using f32 = float;

#ifdef HVDS_SHIM
#include "shim.h"
#define CALLED inline
#else
#ifndef BLOCKS_PER_PROCESSOR  // at least; more leave each thread fewer registers
#define BLOCKS_PER_PROCESSOR 4
#endif
#define KERNEL extern "C" __global__ void __launch_bounds__(256, BLOCKS_PER_PROCESSOR)
#define SHARED(T, name, count) __shared__ T name[count]
#define CALLED __noinline__
#endif

constexpr u32 kThreads = 256;  // of a block, for every kernel
constexpr u32 kLanes = 32;
constexpr u32 kWarps = kThreads / kLanes;
constexpr u32 kAllLanes = 0xffffffffu;

constexpr u32 kMagnitudeMask = 0x7fffffffu;
// The key of infinity: every non-finite value has at least this key, every finite one less.
constexpr u32 kNonFiniteKey = 0x7f800000u;

__device__ __forceinline__ u32 Lane() { return threadIdx.x % kLanes; }
__device__ __forceinline__ u32 WarpInBlock() { return threadIdx.x / kLanes; }
__device__ __forceinline__ u32 LanesBelow() { return (1u << Lane()) - 1u; }

template <typename T>
__device__ __forceinline__ T Min(T a, T b) {
  return a < b ? a : b;
}

__device__ __forceinline__ i64 ThreadInGrid() {
  return static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
}

#ifdef HVDS_SHIM

inline u32 BitsOf(f32 x) { return hvds::BitsOf(x); }
inline f32 FloatOf(u32 bits) { return hvds::FloatOf(bits); }
inline f32 Add(f32 a, f32 b) { return shim::Add(a, b); }
inline f32 Multiply(f32 a, f32 b) { return shim::Multiply(a, b); }
inline f32 WidenFloat16(u16 h) { return shim::WidenFloat16(h); }
inline u16 NarrowFloat16(f32 x) { return shim::NarrowFloat16(x); }
HVDS_UNTRACED inline u64 LoadRelaxed(const u64* at) {
  shim::SpinYield();
  return *at;
}
HVDS_UNTRACED inline void StoreRelaxed(u64* at, u64 value) {
  shim::MaybeYield();
  *at = value;
  shim::NoteProgress();
}
HVDS_UNTRACED inline u32 LoadRelaxed(const u32* at) {
  shim::SpinYield();
  return *at;
}
HVDS_UNTRACED inline void StoreToHost(u64* at, u64 value) { *at = value; }
template <typename T>
inline T LoadOnce(const void* at) {
  return *static_cast<const T*>(at);
}

#else

__device__ __forceinline__ u32 BitsOf(f32 x) { return __float_as_uint(x); }
__device__ __forceinline__ f32 FloatOf(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ f32 Add(f32 a, f32 b) {
  f32 sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ __forceinline__ f32 Multiply(f32 a, f32 b) {
  f32 product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

__device__ __forceinline__ f32 WidenFloat16(u16 h) {
  f32 x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
__device__ __forceinline__ u16 NarrowFloat16(f32 x) {  // to nearest, ties to even
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

// Past the L1 cache, whole, and in no order with other accesses.
__device__ __forceinline__ u64 LoadRelaxed(const u64* at) {
  u64 value;
  asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void StoreRelaxed(u64* at, u64 value) {
  asm volatile("st.relaxed.gpu.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ u32 LoadRelaxed(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// What nobody writes while the kernel runs, and no thread reads again: it takes no place in the L1
// cache. An address out of a table is a generic one to the compiler; these are always global.
template <typename T>
__device__ __forceinline__ T LoadOnce(const void* at);
template <>
__device__ __forceinline__ uint4 LoadOnce<uint4>(const void* at) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(__cvta_generic_to_global(at)));
  return x;
}
template <>
__device__ __forceinline__ uint2 LoadOnce<uint2>(const void* at) {
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "l"(__cvta_generic_to_global(at)));
  return x;
}
// Whole; the host sees it once it has waited for the kernel.
__device__ __forceinline__ void StoreToHost(u64* at, u64 value) {
  asm volatile("st.relaxed.sys.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}

#endif

// Over the lanes of a warp, all of which call it and get the same. Instructions for it come with
// sm_80; the shim has both ways, by a launch's seed.
#if defined(HVDS_SHIM) || __CUDA_ARCH__ < 800
#define HVDS_SHUFFLES
#endif

__device__ __forceinline__ u32 WarpMax(u32 x) {
#ifdef HVDS_SHIM
  if (shim::HasReductions()) return __reduce_max_sync(kAllLanes, x);
#endif
#ifdef HVDS_SHUFFLES
  for (u32 by = kLanes / 2; by > 0; by /= 2) {
    const u32 other = __shfl_xor_sync(kAllLanes, x, by);
    x = x < other ? other : x;
  }
  return x;
#else
  return __reduce_max_sync(kAllLanes, x);
#endif
}
__device__ __forceinline__ u32 WarpSum(u32 x) {
#ifdef HVDS_SHIM
  if (shim::HasReductions()) return __reduce_add_sync(kAllLanes, x);
#endif
#ifdef HVDS_SHUFFLES
  for (u32 by = kLanes / 2; by > 0; by /= 2) x += __shfl_xor_sync(kAllLanes, x, by);
  return x;
#else
  return __reduce_add_sync(kAllLanes, x);
#endif
}

// Orders magnitudes as integers: NaN > inf > finite > 0 == -0.
__device__ __forceinline__ u32 KeyOf(f32 x) { return BitsOf(x) & kMagnitudeMask; }
__device__ __forceinline__ bool IsFinite(f32 x) { return KeyOf(x) < kNonFiniteKey; }

// 32 random bits that depend on a position and a seed: the lowbias32 mixer, as in csrc/cpu/bits.h.
__device__ __forceinline__ u32 Mixed(u32 position, u64 seed) {
  u32 h = position * 0x9e3779b9u + static_cast<u32>(seed);
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15 ^ static_cast<u32>(seed >> 32)) * 0x846ca68bu;
  return h ^ h >> 16;
}

// One of `count` < 2^32 places, by 32 random bits.
__device__ __forceinline__ u64 Scaled(u32 random, u64 count) { return random * count >> 32; }

__device__ __forceinline__ f32 WidenBFloat16(u16 h) { return FloatOf(static_cast<u32>(h) << 16); }
__device__ __forceinline__ u16 NarrowBFloat16(f32 x) {  // to nearest, ties to even
  const u32 bits = BitsOf(x);
  if (KeyOf(x) > kNonFiniteKey) return 0x7fc0u;
  return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The dtype codes of csrc/cpu/bits.h.
enum Dtype : i32 { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kNoGradient = 3 };
