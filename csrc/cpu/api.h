// The library's C interface, loaded with ctypes: what its functions, api_<family>.cpp, share.
//
// Every function returns a Status and throws nothing. The caller has checked types and lengths;
// indices are checked here, as far as memory safety needs it. Pointers may be null where their
// length is zero. `threads` is the largest number of threads that a call may use, its own included.
// Calls may come from several threads at once. No call keeps a pointer after it returns. Dtype
// codes are those of bits.h.
#pragma once

#include <cstdint>

#include "passes.h"
#include "streams.h"

#define HVDS_API extern "C" __attribute__((visibility("default")))

enum HvdsStatus : int32_t {
  kHvdsOk = 0,
  kHvdsOutOfMemory = 1,
  kHvdsBadIndex = 2,     // an index outside [0, n), or out of order
  kHvdsBadArgument = 3,  // a length or a code that no caller of ours gives
};

// What is accumulated. `segments`: `segment_count` triples (address, numel, dtype code) whose
// numels add up to n; none: there is nothing to add. `buffer`: that of a momentum with factor
// `factor`, or null. `before_residual` and, with a buffer, `before_buffer` are what
// there was before, which is only read: what `residual` and `buffer` hold then is overwritten.
// Null: the call works in place.
struct HvdsAccumulation {
  float* residual;
  int64_t n;
  const int64_t* segments;
  int64_t segment_count;
  float* buffer;
  float factor;
  int32_t nesterov;
  const float* before_residual;
  const float* before_buffer;
};

namespace hvds {

struct BadArgument {};

// Runs `body` and turns what it throws into a status.
template <typename Body>
int32_t Guarded(Body body) {
  try {
    body();
  } catch (const BadIndex&) {
    return kHvdsBadIndex;
  } catch (const BadArgument&) {
    return kHvdsBadArgument;
  } catch (...) {
    return kHvdsOutOfMemory;
  }
  return kHvdsOk;
}

// Throws BadArgument unless the segments add up to n and, with a buffer or what was before, are
// there, and what was before is there for the buffer, too.
Accumulation AccumulationOf(const HvdsAccumulation& accumulation);

}  // namespace hvds
