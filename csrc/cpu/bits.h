// Magnitude keys and half-precision conversions, in plain C++.
#pragma once

#include <cstdint>
#include <cstring>

namespace hvds {

constexpr uint32_t kMagnitudeMask = 0x7fffffffu;
// The key of infinity: every non-finite value has at least this key, every finite one less.
constexpr uint32_t kNonFiniteKey = 0x7f800000u;

enum Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kNoGradient = 3, kDtypes = 4 };

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Orders magnitudes as integers: NaN > inf > finite > 0 == -0.
inline uint32_t KeyOf(float x) { return BitsOf(x) & kMagnitudeMask; }

// 32 random bits that depend on a position and a seed: the lowbias32 mixer. Unlike a product, it
// leaves no trace of order in places that lie a constant distance apart.
inline __attribute__((always_inline)) uint32_t Mixed(uint32_t position, uint64_t seed) {
  uint32_t h = position * 0x9e3779b9u + static_cast<uint32_t>(seed);
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15 ^ static_cast<uint32_t>(seed >> 32)) * 0x846ca68bu;
  return h ^ h >> 16;
}

// One of `count` < 2^32 places, by 32 random bits.
inline __attribute__((always_inline)) uint64_t Scaled(uint32_t random, uint64_t count) {
  return uint64_t{random} * count >> 32;
}

inline float WidenBFloat16(uint16_t h) { return FloatOf(static_cast<uint32_t>(h) << 16); }

inline float WidenFloat16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, or NaN made quiet
    const uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
    return FloatOf(sign | kNonFiniteKey | quiet | (magnitude & 0x3ffu) << 13);
  }
  if (magnitude < 0x400u) {  // below 2^-14; no operand is a denormal, which a process may flush
    return FloatOf(sign | BitsOf(FloatOf(BitsOf(0.5f) | magnitude) - 0.5f));
  }
  return FloatOf(sign | ((magnitude << 13) + (112u << 23)));
}

// Both narrow to nearest, ties to even.
inline uint16_t NarrowBFloat16(float x) {
  const uint32_t bits = BitsOf(x);
  if ((bits & kMagnitudeMask) > kNonFiniteKey) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline uint16_t NarrowFloat16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & kMagnitudeMask;
  if (magnitude > kNonFiniteKey) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: the sum's last bit weighs 2^-24, and it rounds
    const uint32_t rounded = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t rebased = magnitude - (112u << 23);
  return static_cast<uint16_t>(sign | (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13);
}

}  // namespace hvds
