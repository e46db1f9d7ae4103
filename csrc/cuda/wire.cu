// What goes over the wire: bit-packed gaps between indices, and values of a few bits.
//
// The formats, and every bit of them, are those of hvd_sparse/ops/wire.py. A block has 1024 entries
// at a time, a quad per thread, and so a warp has the 128 gaps that share a width.
#include "compact.cuh"

constexpr u32 kGapBlock = kLanes * kQuad;

__device__ __forceinline__ u32 GapBytes(u32 gaps, u32 width) { return (gaps * width + 7) / 8; }

// Packs indices, 1024 per block. The code is a width per 128 gaps, then their bits; there is room
// for four bytes per index behind the widths. The header's total is the number of bytes behind the
// widths; `stopped` is not 0 where the indices were not ascending.
KERNEL gap_encode(const i32* indices, i64 count, i64 start, Header* header, u8* code) {
  SHARED(u32, gaps, kRoundNumel);
  const u32 tile = TakeTicket(header);
  const i64 first = static_cast<i64>(tile) * kRoundNumel + threadIdx.x * kQuad;
  u32 largest = 0;
  for (u32 i = 0; i < kQuad; ++i) {
    const i64 at = first + i;
    i64 gap = 0;
    if (at < count) gap = indices[at] - (at == 0 ? start - 1 : i64{indices[at - 1]}) - 1;
    if (gap < 0) header->stopped = 1;
    gaps[threadIdx.x * kQuad + i] = static_cast<u32>(gap);
    largest = static_cast<u32>(gap) > largest ? static_cast<u32>(gap) : largest;
  }
  const u32 width = kLanes - static_cast<u32>(__clz(static_cast<int>(WarpMax(largest))));

  const i64 widths = (count + kGapBlock - 1) / kGapBlock;
  const i64 number = static_cast<i64>(tile) * kWarps + WarpInBlock();  // of the warp's gaps
  const i64 left = count - number * kGapBlock;
  const u32 own = left <= 0 ? 0u : static_cast<u32>(Min<i64>(left, kGapBlock));
  const u32 bytes = GapBytes(own, width);
  u32 in_block;
  const u32 before = SumOfThreadsBefore(Lane() == 0 ? bytes : 0u, in_block);
  u8* const to =
      code + widths + SumBefore(header, tile, in_block) + __shfl_sync(kAllLanes, before, 0);
  if (own > 0 && Lane() == 0) code[number] = static_cast<u8>(width);
  const u32* const from = gaps + WarpInBlock() * kGapBlock;
  for (u32 byte = Lane(); byte < bytes; byte += kLanes) {
    u32 gap = byte * 8 / width;  // the first one that has bits in this byte
    const u32 skipped = byte * 8 - gap * width;
    u32 bits = from[gap] >> skipped;
    for (u32 filled = width - skipped; filled < 8 && ++gap < own; filled += width) {
      bits |= from[gap] << filled;
    }
    to[byte] = static_cast<u8>(bits);
  }
}

// Reads packed indices, 1024 per block. `bytes_header` ends with the bytes that the widths ask for
// as its total, `index_header` with the last index less `start` plus 1; `stopped` of the former is
// not 0 where a width is impossible. Nothing outside of the code is read.
KERNEL gap_decode(const u8* code, i64 code_bytes, i64 count, i64 start, Header* bytes_header,
                  Header* index_header, i32* indices) {
  const u32 tile = TakeTicket(bytes_header);
  const i64 widths = (count + kGapBlock - 1) / kGapBlock;
  const i64 number = static_cast<i64>(tile) * kWarps + WarpInBlock();  // of the warp's gaps
  const i64 left = count - number * kGapBlock;
  const u32 own = left <= 0 ? 0u : static_cast<u32>(Min<i64>(left, kGapBlock));
  u32 width = own > 0 ? code[number] : 0u;
  if (width > 31) {
    bytes_header->stopped = 1;
    width = 0;
  }
  u32 bytes_in_block;
  const u32 bytes_before =
      SumOfThreadsBefore(Lane() == 0 ? GapBytes(own, width) : 0u, bytes_in_block);
  const i64 from = widths + static_cast<i64>(SumBefore(bytes_header, tile, bytes_in_block)) +
                   __shfl_sync(kAllLanes, bytes_before, 0);

  u64 steps[kQuad];  // from each index to the next
  u64 sum = 0;
  for (u32 i = 0; i < kQuad; ++i) {
    const u32 place = Lane() * kQuad + i;
    steps[i] = 0;
    if (place < own) {
      const u32 bit = place * width;
      u64 bits = 0;
      for (u32 byte = 0; byte * 8 < bit % 8 + width; ++byte) {
        const i64 at = from + bit / 8 + byte;
        if (at < code_bytes) bits |= u64{code[at]} << (byte * 8);
      }
      steps[i] = (bits >> (bit % 8) & ((u64{1} << width) - 1)) + 1;
    }
    sum += steps[i];
  }
  u64 in_block;
  const u64 before = SumOfThreadsBefore(sum, in_block);
  u64 index = SumBefore(index_header, tile, in_block) + before;
  for (u32 i = 0; i < kQuad; ++i) {
    index += steps[i];
    const i64 at = static_cast<i64>(tile) * kRoundNumel + threadIdx.x * kQuad + i;
    if (at < count) indices[at] = static_cast<i32>(start - 1 + static_cast<i64>(index));
  }
}

// A scale above this could make the top level infinite when it is multiplied out.
constexpr u32 kMostScaleKey = 0x7f7fff00u;

// Buckets have a power of two of elements: places in them take shifts, and no division.
__device__ __forceinline__ u32 ShiftOf(u32 bucket_numel) {
  return kLanes - 1 - static_cast<u32>(__clz(static_cast<int>(bucket_numel)));
}

// The code of x: its level, whose fraction goes up by chance, above or below kLevels by its sign.
//
// The level is in [0, kLevels]; `per_unit` is finite. Integers of floats are slow to get: the
// whole part comes by rounding towards zero where an ulp is 1, and the random bits are compared
// with the fraction as a float, which holds as many.
template <u32 kLevels>
__device__ __forceinline__ u32 CodeOf(f32 x, f32 per_unit, u32 random) {
  constexpr f32 kUnit = 8388608.0f;  // 2^23
  const f32 level = Min(Multiply(FloatOf(KeyOf(x)), per_unit), static_cast<f32>(kLevels));
  const f32 whole = AddTowardsZero(level, kUnit);
  const f32 fraction = Subtract(level, Subtract(whole, kUnit));
  const f32 above = Subtract(Multiply(fraction, 2 * kUnit), static_cast<f32>((random >> 8) + 1));
  const u32 rounded = BitsOf(whole) - (BitsOf(kUnit) - 1) - (BitsOf(above) >> 31);
  const u32 sign = static_cast<u32>(static_cast<i32>(BitsOf(x)) >> 31);  // all ones, or none
  return kLevels + (rounded ^ sign) - sign;
}

// A bucket's scale and levels for each 1 of magnitude, by its largest key. NaN is the scale of what
// is not finite, and 0 of what is zero, or too small for its levels.
template <u32 kLevels>
__device__ __forceinline__ f32 LevelsPerUnit(u32 key, f32& scale) {
  scale = FloatOf(Min(key, kMostScaleKey));
  f32 levels = Divide(static_cast<f32>(kLevels), scale);
  if (key >= kNonFiniteKey) {
    scale = levels = FloatOf(0x7fc00000u);
  } else if (!IsFinite(levels)) {
    scale = levels = 0.0f;
  }
  return levels;
}

template <u32 kBits>
__device__ __forceinline__ void QuantizeTile(const f32* x, i64 n, u32 bucket_numel, u64 seed,
                                             u8* codes, f32* scales) {
  SHARED(u32, largest, kRounds * kWarps);  // by round, then warp: in the order of the places
  SHARED(f32, levels, kRounds * kWarps);
  static_assert(kRounds * kWarps == kLanes, "one warp finds the levels");
  constexpr u32 kLevels = (1u << (kBits - 1)) - 1;
  constexpr u32 kOnes = ~0u / ((1u << kBits) - 1);  // a 1 in each code
  const i64 begin = static_cast<i64>(blockIdx.x) * kTile;
  const u32 numel = static_cast<u32>(Min<i64>(n - begin, kTile));
  f32 values[kRounds][kQuad];
#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
    const u32 place = PlaceOf(round, 0);
    LoadQuad(x + begin + place, place >= numel ? 0u : Min(numel - place, kQuad), values[round]);
  }
#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
    u32 key = 0;
    for (u32 i = 0; i < kQuad; ++i) {
      const u32 own = KeyOf(values[round][i]);
      key = key < own ? own : key;
    }
    key = WarpMax(key);
    if (Lane() == 0) largest[round * kWarps + WarpInBlock()] = key;
  }
  __syncthreads();
  if (WarpInBlock() == 0) {  // a lane for each warp and round
    u32 key = largest[Lane()];
    for (u32 by = 1; by < bucket_numel / kGapBlock; by *= 2) {
      const u32 other = __shfl_xor_sync(kAllLanes, key, by);
      key = key < other ? other : key;
    }
    f32 scale;
    levels[Lane()] = LevelsPerUnit<kLevels>(key, scale);
    const u32 place = Lane() * kGapBlock;
    if (place < numel && (place & (bucket_numel - 1)) == 0) {
      scales[(begin + place) >> ShiftOf(bucket_numel)] = scale;
    }
  }
  __syncthreads();
#pragma unroll
  for (u32 round = 0; round < kRounds; ++round) {
    const u32 place = PlaceOf(round, 0);
    if (place >= numel) continue;
    const f32 per_unit = levels[round * kWarps + WarpInBlock()];
    u32 packed = kLevels * kOnes;
    if (IsFinite(per_unit)) {
      packed = 0;
#pragma unroll
      for (u32 i = 0; i < kQuad; ++i) {
        const u32 random = Mixed(static_cast<u32>(begin + place + i), seed);
        packed |= CodeOf<kLevels>(values[round][i], per_unit, random) << (i * kBits);
      }
    }
    const u32 items = Min(numel - place, kQuad);
    u8* const to = codes + static_cast<u64>(begin + place) * kBits / 8;
    if (items == kQuad && kBits == 8) {
      *reinterpret_cast<u32*>(to) = packed;
    } else if (items == kQuad && kBits == 4) {
      *reinterpret_cast<u16*>(to) = static_cast<u16>(packed);
    } else {
      if (items < kQuad) packed &= (1u << items * kBits) - 1;
      for (u32 byte = 0; byte * 8 < items * kBits; ++byte)
        to[byte] = static_cast<u8>(packed >> byte * 8);
    }
  }
}

// Rounds values to levels: one block per tile, so that a round of a block is one bucket, or two.
// `bits` are 2, 4 or 8; `codes` is aligned to 4 bytes.
KERNEL qsgd_quantize(const f32* x, i64 n, u32 bits, u32 bucket_numel, u64 seed, u8* codes,
                     f32* scales) {
  if (bits == 2) {
    QuantizeTile<2>(x, n, bucket_numel, seed, codes, scales);
  } else if (bits == 4) {
    QuantizeTile<4>(x, n, bucket_numel, seed, codes, scales);
  } else {
    QuantizeTile<8>(x, n, bucket_numel, seed, codes, scales);
  }
}

template <u32 kBits>
__device__ __forceinline__ void DequantizeQuad(const u8* codes, const f32* scales, i64 n,
                                               u32 bucket_numel, f32* x) {
  constexpr i32 kLevels = (1 << (kBits - 1)) - 1;
  const i64 first = ThreadInGrid() * kQuad;
  if (first >= n) return;
  const u32 items = static_cast<u32>(Min<i64>(n - first, kQuad));
  const u8* const from = codes + static_cast<u64>(first) * kBits / 8;
  u32 packed = 0;
  if (items == kQuad && kBits == 8 && IsAligned(from, 4)) {
    packed = *reinterpret_cast<const u32*>(from);
  } else if (items == kQuad && kBits == 4 && IsAligned(from, 2)) {
    packed = *reinterpret_cast<const u16*>(from);
  } else {
    for (u32 byte = 0; byte * 8 < items * kBits; ++byte) packed |= u32{from[byte]} << (byte * 8);
  }
  const f32 step = Divide(scales[first >> ShiftOf(bucket_numel)], static_cast<f32>(kLevels));
  f32 values[kQuad];
#pragma unroll
  for (u32 i = 0; i < kQuad; ++i) {
    const i32 code = static_cast<i32>(packed >> (i * kBits) & ((1u << kBits) - 1u));
    values[i] = Multiply(static_cast<f32>(code - kLevels), step);
  }
  StoreQuad(x + first, items, values);
}

// The values of levels, a quad per thread.
KERNEL qsgd_dequantize(const u8* codes, const f32* scales, i64 n, u32 bits, u32 bucket_numel,
                       f32* x) {
  if (bits == 2) {
    DequantizeQuad<2>(codes, scales, n, bucket_numel, x);
  } else if (bits == 4) {
    DequantizeQuad<4>(codes, scales, n, bucket_numel, x);
  } else {
    DequantizeQuad<8>(codes, scales, n, bucket_numel, x);
  }
}
