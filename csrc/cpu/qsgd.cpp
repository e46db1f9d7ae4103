#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "bits.h"
#include "kernels.h"
#include "pool.h"
#include "wire.h"

#define HVDS_ALWAYS_INLINE inline __attribute__((always_inline))

namespace hvds {
namespace {

// A scale above this could make the top level infinite when it is multiplied out.
constexpr uint32_t kMostScaleKey = 0x7f7fff00u;
constexpr size_t kMostBucket = 4096;  // codes of one bucket fit on the stack

// Loops that the compiler vectorises for whatever instruction set they are inlined into. The sums
// and products are not contracted (-ffp-contract=off): all sets give the same bits.
HVDS_ALWAYS_INLINE uint32_t LargestKey(const float* x, size_t n) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, KeyOf(x[i]));
  return largest;
}

HVDS_ALWAYS_INLINE void Round(const float* x, size_t n, float per_level, int32_t levels,
                              uint32_t position, uint64_t seed, uint8_t* codes) {
  const float most = static_cast<float>(levels);
  for (size_t i = 0; i < n; ++i) {
    const float level = std::min(std::fabs(x[i]) * per_level, most);
    const int32_t whole = static_cast<int32_t>(level);
    const float fraction = level - static_cast<float>(whole);
    const int32_t odds = static_cast<int32_t>(fraction * 16777216.0f);
    const int32_t draw =
        static_cast<int32_t>(Mixed(position + static_cast<uint32_t>(i), seed) >> 8);
    const int32_t rounded = whole + (draw < odds ? 1 : 0);
    const int32_t code = levels + (x[i] < 0.0f ? -rounded : rounded);
    codes[i] = static_cast<uint8_t>(code);
  }
}

HVDS_ALWAYS_INLINE void Scale(const uint8_t* codes, size_t n, float step, int32_t levels,
                              float* x) {
  for (size_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>(static_cast<int32_t>(codes[i]) - levels) * step;
  }
}

struct Loops {
  uint32_t (*largest_key)(const float*, size_t);
  void (*round)(const float*, size_t, float, int32_t, uint32_t, uint64_t, uint8_t*);
  void (*scale)(const uint8_t*, size_t, float, int32_t, float*);
};

// One set of the loops, compiled for one instruction set.
#define HVDS_QSGD_LOOPS(NAME, TARGET)                                                             \
  TARGET uint32_t LargestKey##NAME(const float* x, size_t n) { return LargestKey(x, n); }         \
  TARGET void Round##NAME(const float* x, size_t n, float per_level, int32_t levels,              \
                          uint32_t position, uint64_t seed, uint8_t* codes) {                     \
    Round(x, n, per_level, levels, position, seed, codes);                                        \
  }                                                                                               \
  TARGET void Scale##NAME(const uint8_t* codes, size_t n, float step, int32_t levels, float* x) { \
    Scale(codes, n, step, levels, x);                                                             \
  }                                                                                               \
  constexpr Loops k##NAME##Loops = {LargestKey##NAME, Round##NAME, Scale##NAME};

HVDS_QSGD_LOOPS(Portable, )
#if HVDS_X86
HVDS_QSGD_LOOPS(Avx2, __attribute__((target("avx2"))))
HVDS_QSGD_LOOPS(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

const Loops& ActiveLoops() {
  switch (ActiveIsa()) {
#if HVDS_X86
    case kAvx512:
      return kAvx512Loops;
    case kAvx2:
      return kAvx2Loops;
#endif
    default:
      return kPortableLoops;
  }
}

// `n` codes in `bits` bits each; the last byte is filled up with zeros.
void Pack(const uint8_t* codes, size_t n, int bits, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, codes, n);
    return;
  }
  const size_t per_byte = 8u / static_cast<size_t>(bits);
  const size_t whole = n / per_byte;
  if (bits == 4) {
    for (size_t j = 0; j < whole; ++j) {
      out[j] = static_cast<uint8_t>(codes[2 * j] | codes[2 * j + 1] << 4);
    }
  } else {
    for (size_t j = 0; j < whole; ++j) {
      out[j] = static_cast<uint8_t>(codes[4 * j] | codes[4 * j + 1] << 2 | codes[4 * j + 2] << 4 |
                                    codes[4 * j + 3] << 6);
    }
  }
  if (whole * per_byte < n) {
    uint32_t last = 0;
    for (size_t i = whole * per_byte; i < n; ++i) {
      last |= static_cast<uint32_t>(codes[i]) << (i % per_byte * static_cast<size_t>(bits));
    }
    out[whole] = static_cast<uint8_t>(last);
  }
}

void Unpack(const uint8_t* in, size_t n, int bits, uint8_t* codes) {
  if (bits == 8) {
    std::memcpy(codes, in, n);
    return;
  }
  const size_t per_byte = 8u / static_cast<size_t>(bits);
  const uint32_t mask = (1u << bits) - 1u;
  const size_t whole = n / per_byte;
  if (bits == 4) {
    for (size_t j = 0; j < whole; ++j) {
      codes[2 * j] = in[j] & 0xf;
      codes[2 * j + 1] = static_cast<uint8_t>(in[j] >> 4);
    }
  } else {
    for (size_t j = 0; j < whole; ++j) {
      for (size_t i = 0; i < 4; ++i) {
        codes[4 * j + i] = static_cast<uint8_t>(in[j] >> (2 * i) & mask);
      }
    }
  }
  for (size_t i = whole * per_byte; i < n; ++i) {
    codes[i] = static_cast<uint8_t>(in[whole] >> (i % per_byte * static_cast<size_t>(bits)) & mask);
  }
}

int32_t Levels(const QsgdForm& form) { return (1 << (form.bits - 1)) - 1; }

// Calls body(first element, length, bucket) for every bucket, on several threads where it pays.
template <typename Body>
void ForBuckets(size_t n, size_t bucket_numel, int threads, const Body& body) {
  constexpr size_t kTaskNumel = size_t{1} << 15;
  const size_t buckets = (n + bucket_numel - 1) / bucket_numel;
  const size_t useful = std::max<size_t>(1, n / kTaskNumel);
  const int tasks =
      threads <= 1 ? 1 : static_cast<int>(std::min(useful, 4 * static_cast<size_t>(threads)));
  Run(tasks, threads, [&](int t) {
    const size_t end = buckets * (t + 1) / tasks;
    for (size_t b = buckets * t / tasks; b < end; ++b) {
      const size_t first = b * bucket_numel;
      body(first, std::min(bucket_numel, n - first), b);
    }
  });
}

}  // namespace

void QsgdQuantize(const float* x, size_t n, const QsgdForm& form, uint64_t seed, int threads,
                  uint8_t* codes, float* scales) {
  const Loops& loops = ActiveLoops();
  const int32_t levels = Levels(form);
  ForBuckets(n, form.bucket_numel, threads, [&](size_t first, size_t length, size_t bucket) {
    alignas(64) uint8_t unpacked[kMostBucket];
    const uint32_t key = loops.largest_key(x + first, length);
    float scale = FloatOf(std::min(key, kMostScaleKey));
    float per_level = static_cast<float>(levels) / scale;
    if (key >= kNonFiniteKey) {
      scale = std::numeric_limits<float>::quiet_NaN();
      per_level = 0.0f;
    } else if (!(per_level <= std::numeric_limits<float>::max())) {
      scale = per_level = 0.0f;
    }
    if (per_level == 0.0f) {
      std::memset(unpacked, levels, length);
    } else {
      loops.round(x + first, length, per_level, levels, static_cast<uint32_t>(first), seed,
                  unpacked);
    }
    scales[bucket] = scale;
    Pack(unpacked, length, form.bits, codes + first * static_cast<size_t>(form.bits) / 8);
  });
}

void QsgdDequantize(const uint8_t* codes, const float* scales, size_t n, const QsgdForm& form,
                    int threads, float* x) {
  const Loops& loops = ActiveLoops();
  const int32_t levels = Levels(form);
  ForBuckets(n, form.bucket_numel, threads, [&](size_t first, size_t length, size_t bucket) {
    alignas(64) uint8_t unpacked[kMostBucket];
    Unpack(codes + first * static_cast<size_t>(form.bits) / 8, length, form.bits, unpacked);
    loops.scale(unpacked, length, scales[bucket] / static_cast<float>(levels), levels, x + first);
  });
}

}  // namespace hvds
