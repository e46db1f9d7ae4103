#include <algorithm>
#include <cstring>

#include "streams.h"
#include "wire.h"

namespace hvds {
namespace {

constexpr size_t kMostBlockBytes = kGapBlock * sizeof(uint32_t);

int WidthOf(uint32_t bits) { return bits == 0 ? 0 : 32 - __builtin_clz(bits); }

size_t BlockBytes(size_t length, int width) {
  return (length * static_cast<size_t>(width) + 7) / 8;
}

size_t BlockCount(size_t nnz) { return (nnz + kGapBlock - 1) / kGapBlock; }

// Bits gather in a 64-bit word, from which full 32-bit words go out.
uint8_t* PackBlock(const uint32_t* gaps, size_t length, int width, uint8_t* out) {
  uint8_t* const end = out + BlockBytes(length, width);
  uint64_t word = 0;
  int filled = 0;
  for (size_t i = 0; i < length; ++i) {
    word |= static_cast<uint64_t>(gaps[i]) << filled;
    filled += width;
    if (filled >= 32) {
      const uint32_t full = static_cast<uint32_t>(word);
      std::memcpy(out, &full, sizeof full);
      out += sizeof full;
      word >>= 32;
      filled -= 32;
    }
  }
  std::memcpy(out, &word, static_cast<size_t>(end - out));
  return end;
}

// Every gap lies in the eight bytes from the one it begins in; the caller sees to it that they can
// be read. Returns what the next index is counted from.
int64_t UnpackBlock(const uint8_t* in, size_t length, int width, int64_t next, int32_t* indices) {
  const uint64_t mask = (uint64_t{1} << width) - 1;
  size_t bit = 0;
  for (size_t i = 0; i < length; ++i) {
    uint64_t word;
    std::memcpy(&word, in + bit / 8, sizeof word);
    next += static_cast<int64_t>(word >> (bit % 8) & mask);
    indices[i] = static_cast<int32_t>(next);
    ++next;
    bit += static_cast<size_t>(width);
  }
  return next;
}

}  // namespace

size_t GapEncode(const int32_t* indices, size_t nnz, int32_t start, uint8_t* code) {
  uint8_t* widths = code;
  uint8_t* out = code + BlockCount(nnz);
  int64_t next = start;
  uint32_t gaps[kGapBlock];
  for (size_t first = 0; first < nnz; first += kGapBlock) {
    const size_t length = std::min(kGapBlock, nnz - first);
    const int32_t* const block = indices + first;
    // Unsigned arithmetic: among indices that are not negative, one out of order shows as a gap of
    // more than 31 bits. A negative one counts as such a gap itself.
    const auto sign_of = [](int32_t index) { return static_cast<uint32_t>(index) & 0x80000000u; };
    gaps[0] = static_cast<uint32_t>(block[0]) - static_cast<uint32_t>(next);
    uint32_t bits = gaps[0] | sign_of(block[0]);
    for (size_t i = 1; i < length; ++i) {
      gaps[i] = static_cast<uint32_t>(block[i]) - static_cast<uint32_t>(block[i - 1]) - 1u;
      bits |= gaps[i] | sign_of(block[i]);
    }
    const int width = WidthOf(bits);
    if (width > 31) throw BadIndex();
    *widths++ = static_cast<uint8_t>(width);
    out = PackBlock(gaps, length, width, out);
    next = static_cast<int64_t>(block[length - 1]) + 1;
  }
  return static_cast<size_t>(out - code);
}

void GapDecode(const uint8_t* code, size_t bytes, size_t nnz, int32_t start, int32_t stop,
               int32_t* indices) {
  const size_t blocks = BlockCount(nnz);
  if (bytes < blocks) throw BadIndex();
  const uint8_t* in = code + blocks;
  const uint8_t* const end = code + bytes;
  int64_t next = start;
  for (size_t b = 0; b < blocks; ++b) {
    const int width = code[b];
    const size_t first = b * kGapBlock, length = std::min(kGapBlock, nnz - first);
    const size_t block_bytes = BlockBytes(length, width);
    if (width > 31 || block_bytes > static_cast<size_t>(end - in)) throw BadIndex();
    if (static_cast<size_t>(end - in) >= block_bytes + sizeof(uint64_t)) {
      next = UnpackBlock(in, length, width, next, indices + first);
    } else {
      uint8_t copy[kMostBlockBytes + sizeof(uint64_t)] = {};
      std::memcpy(copy, in, block_bytes);
      next = UnpackBlock(copy, length, width, next, indices + first);
    }
    in += block_bytes;
  }
  if (in != end || next > stop) throw BadIndex();
}

}  // namespace hvds
