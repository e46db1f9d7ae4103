// The C interface to what the ranks of one host do in memory that they share.
#include "api.h"
#include "hosts.h"

using hvds::BadArgument;
using hvds::Guarded;

// `vectors`: the addresses of `count` vectors of `n` elements.
HVDS_API int32_t hvds_sum_vectors(float* out, int64_t n, const int64_t* vectors, int64_t count,
                                  int32_t dtype, int32_t threads) {
  return Guarded([&] {
    if (n < 0 || count < 1 || dtype < hvds::kFloat32 || dtype > hvds::kBFloat16) {
      throw BadArgument();
    }
    static_assert(sizeof(void*) == sizeof(int64_t));
    hvds::SumVectors(out, static_cast<size_t>(n), reinterpret_cast<const void* const*>(vectors),
                     static_cast<size_t>(count), static_cast<hvds::Dtype>(dtype), threads);
  });
}

// Makes all that this thread has written visible to whoever sees the number.
HVDS_API int32_t hvds_post(int64_t* place, int64_t number) {
  __atomic_store_n(place, number, __ATOMIC_RELEASE);
  return kHvdsOk;
}

// Whether every one of `count` places has a number of at least `number`; what was written before
// these can be read then.
HVDS_API int32_t hvds_posted(const int64_t* places, int64_t count, int64_t number, int32_t* all) {
  *all = 1;
  for (int64_t i = 0; i < count; ++i) {
    const auto* place = reinterpret_cast<const int64_t*>(places[i]);
    if (__atomic_load_n(place, __ATOMIC_ACQUIRE) < number) *all = 0;
  }
  return kHvdsOk;
}
