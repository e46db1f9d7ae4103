// What CUDA gives a kernel, on a CPU: csrc/cuda/common.cuh includes this where HVDS_SHIM is
// defined.
//
// Every CUDA thread is a fiber. A fiber runs until it has to wait (at a barrier, or for the other
// lanes of its warp), and gives way at random at every atomic and volatile access; in a build with
// -fsanitize=thread, at any access to memory. Which fiber goes on, and which blocks are resident at
// the same time, follows from the launch's seed. Shared memory is filled with garbage, and each
// shared array is an allocation of its own, so that AddressSanitizer sees its bounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../../../csrc/cpu/bits.h"

#define HVDS_UNTRACED __attribute__((no_sanitize_thread))

namespace shim {

struct Index {
  unsigned x = 0;
};

// Of the fiber that runs.
unsigned ThreadX();
unsigned BlockX();
unsigned GridX();

void Barrier(int line);
void MaybeYield();    // gives way at random
void SpinYield();     // gives way; the launch fails when nobody but spinning threads is left
void NoteProgress();  // what a spinning thread may wait for has happened
void* SharedArray(const void* key, size_t bytes);
[[noreturn]] void Fail(const char* what);

// Arithmetic as IEEE 754 has it. All other arithmetic takes denormal numbers for zeros, and makes
// zeros of them, as under -ftz=true.
float Add(float a, float b);
float Multiply(float a, float b);
float WidenFloat16(uint16_t h);
uint16_t NarrowFloat16(float x);

// Whether this process runs with that mutation, of those that are built in (test_mutations.py).
bool IsMutated(int mutation);

// Whether the device of this launch has sm_80's reductions over a warp.
bool HasReductions();

enum class Collective { kBallot, kShuffle, kShuffleUp, kShuffleDown, kMatch, kMax, kSum };

// Every lane of the warp brings a value; what a lane gets depends on the collective.
uint64_t OfWarp(Collective collective, unsigned mask, uint64_t value, unsigned parameter, int line);

using Entry = void (*)(const uint64_t* arguments);

// A kernel by name, with the bytes of each of its parameters, by which a launch is checked.
struct Kernel {
  Kernel(const char* name, Entry entry, std::initializer_list<size_t> parameter_bytes);
};

template <auto kKernel>
struct Caller;

template <typename... Parameters, void (*kKernel)(Parameters...)>
struct Caller<kKernel> {
  static void Call(const uint64_t* arguments) {
    CallWith(arguments, std::index_sequence_for<Parameters...>());
  }
  static Kernel Register(const char* name) { return Kernel(name, &Call, {sizeof(Parameters)...}); }

 private:
  template <typename T>
  static T Read(uint64_t argument) {
    T value;
    std::memcpy(&value, &argument, sizeof value);
    return value;
  }
  template <size_t... kAt>
  static void CallWith(const uint64_t* arguments, std::index_sequence<kAt...>) {
    kKernel(Read<Parameters>(arguments[kAt])...);
  }
};

// At namespace scope: launches by that name reach the kernel.
#define HVDS_SERVE(kernel) \
  static const shim::Kernel served_##kernel = shim::Caller<&kernel>::Register(#kernel);

template <typename T>
HVDS_UNTRACED T Fetch(T* at, T (*change)(T, T), T operand) {
  MaybeYield();
  const T old = *at;
  *at = change(old, operand);
  NoteProgress();
  MaybeYield();
  return old;
}

template <typename T>
uint64_t Pack(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <typename T>
T Unpack(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace shim

#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define KERNEL static void
#define SHARED(T, name, count)                       \
  T* const name = static_cast<T*>(shim::SharedArray( \
      []() -> const void* {                          \
        static const char key = 0;                   \
        return &key;                                 \
      }(),                                           \
      sizeof(T) * static_cast<size_t>(count)))

#define threadIdx (shim::Index{shim::ThreadX()})
#define blockIdx (shim::Index{shim::BlockX()})
#define gridDim (shim::Index{shim::GridX()})

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

#define __syncthreads() shim::Barrier(__LINE__)
#define __syncwarp() \
  static_cast<void>(shim::OfWarp(shim::Collective::kBallot, 0xffffffffu, 0, 0, __LINE__))
#define __ballot_sync(mask, predicate) \
  static_cast<unsigned>(               \
      shim::OfWarp(shim::Collective::kBallot, mask, (predicate) ? 1 : 0, 0, __LINE__))
#define __any_sync(mask, predicate) (__ballot_sync(mask, predicate) != 0)
#define __match_any_sync(mask, value) \
  static_cast<unsigned>(shim::OfWarp(shim::Collective::kMatch, mask, value, 0, __LINE__))
#define __reduce_max_sync(mask, value) \
  static_cast<unsigned>(shim::OfWarp(shim::Collective::kMax, mask, value, 0, __LINE__))
#define __reduce_add_sync(mask, value) \
  static_cast<unsigned>(shim::OfWarp(shim::Collective::kSum, mask, value, 0, __LINE__))
#define __shfl_sync(mask, value, lane)         \
  shim::Unpack<std::decay_t<decltype(value)>>( \
      shim::OfWarp(shim::Collective::kShuffle, mask, shim::Pack(value), lane, __LINE__))
#define __shfl_xor_sync(mask, value, by) __shfl_sync(mask, value, (threadIdx.x % 32) ^ (by))
#define __shfl_up_sync(mask, value, by)        \
  shim::Unpack<std::decay_t<decltype(value)>>( \
      shim::OfWarp(shim::Collective::kShuffleUp, mask, shim::Pack(value), by, __LINE__))
#define __shfl_down_sync(mask, value, by)      \
  shim::Unpack<std::decay_t<decltype(value)>>( \
      shim::OfWarp(shim::Collective::kShuffleDown, mask, shim::Pack(value), by, __LINE__))

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline void __threadfence() { shim::MaybeYield(); }

template <typename T>
T atomicAdd(T* at, T operand) {
  return shim::Fetch<T>(at, [](T old, T by) { return static_cast<T>(old + by); }, operand);
}
template <typename T>
T atomicMax(T* at, T operand) {
  return shim::Fetch<T>(at, [](T old, T by) { return old < by ? by : old; }, operand);
}
// What mutations put in the places of atomicAdd and atomicMax.
template <typename T>
T NonAtomicAdd(T* at, T operand) {
  const T old = *at;
  *at = old + operand;
  return old;
}
template <typename T>
T NonAtomicMax(T* at, T operand) {
  const T old = *at;
  if (old < operand) *at = operand;
  return old;
}
template <typename T>
T atomicOr(T* at, T operand) {
  return shim::Fetch<T>(at, [](T old, T by) { return static_cast<T>(old | by); }, operand);
}
