// From a stream to a vector: `decode`, `scatter_add` and `take_at` refuse an index outside of the
// vector wherever it stands, and touch nothing beyond the vector.
#include "fuzz.h"

using namespace hvds::fuzz;

namespace {

// Float values that fit every type of an output.
std::vector<float> SmallValues(uint32_t seed, size_t count) {
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(seed >> 25) - 64);
  }
  return values;
}

template <typename T>
T Narrowed(float value, int32_t dtype) {
  if constexpr (sizeof(T) == sizeof(float)) return value;
  return static_cast<T>(dtype == hvds::kFloat16 ? hvds::NarrowFloat16(value)
                                                : hvds::NarrowBFloat16(value));
}

template <typename T>
void Decode(size_t offset, size_t n, int32_t dtype, const std::vector<int32_t>& indices,
            const std::vector<float>& values, int32_t threads) {
  // Streamed stores want whole lines: begin anywhere. What is before is not to be touched.
  std::vector<T> out(offset + n, T{1}), expected(offset + n);
  std::fill_n(expected.begin(), offset, T{1});
  T* const begin = out.empty() ? nullptr : out.data() + offset;
  const int64_t numel = Size(n);
  const int32_t status = hvds_decode(begin, dtype, numel, indices.data(), values.data(),
                                     Size(indices.size()), threads);
  const bool ascends = Ascends(indices, 0, numel);
  HVDS_EXPECT(status == kHvdsOk || (status == kHvdsBadIndex && !ascends));
  HVDS_EXPECT(std::equal(out.begin(), out.begin() + Size(offset), expected.begin()));
  if (status != kHvdsOk) return;
  HVDS_EXPECT(AllWithin(indices, numel));
  if (!ascends) return;
  for (size_t i = 0; i < indices.size(); ++i) {
    expected[offset + static_cast<size_t>(indices[i])] = Narrowed<T>(values[i], dtype);
  }
  HVDS_EXPECT(out.empty() || std::memcmp(out.data(), expected.data(), out.size() * sizeof(T)) == 0);
}

void DecodeAny(Input& input, size_t n, const std::vector<int32_t>& indices, uint32_t seed,
               int32_t threads) {
  const auto dtype = static_cast<int32_t>(input.Byte() % 3);
  const size_t offset = input.Byte() % 32;
  const std::vector<float> values = SmallValues(seed, indices.size());
  if (dtype == hvds::kFloat32) {
    Decode<float>(offset, n, dtype, indices, values, threads);
  } else {
    Decode<uint16_t>(offset, n, dtype, indices, values, threads);
  }
}

// Several threads may not meet at one index: that is the caller's to see to.
bool AllDiffer(std::vector<int32_t> indices) {
  std::sort(indices.begin(), indices.end());
  return std::adjacent_find(indices.begin(), indices.end()) == indices.end();
}

void AddOrTake(Input& input, size_t n, const std::vector<int32_t>& indices, uint32_t seed,
               int32_t threads) {
  const bool adds = input.Byte() % 2 == 0;
  if (!AllDiffer(indices)) threads = 1;
  std::vector<float> x = SmallValues(~seed, n), expected = x;
  const std::vector<float> values = SmallValues(seed, indices.size());
  std::vector<float> taken(indices.size());
  const int64_t nnz = Size(indices.size());
  const int32_t status =
      adds ? hvds_scatter_add(x.data(), Size(n), indices.data(), values.data(), nnz, threads)
           : hvds_take_at(x.data(), Size(n), indices.data(), nnz, threads, taken.data());
  HVDS_EXPECT(status == (AllWithin(indices, Size(n)) ? kHvdsOk : kHvdsBadIndex));
  if (status != kHvdsOk) return;
  for (size_t i = 0; i < indices.size(); ++i) {
    float& at = expected[static_cast<size_t>(indices[i])];
    if (!adds) HVDS_EXPECT(taken[i] == at);
    at = adds ? at + values[i] : 0.0f;
  }
  HVDS_EXPECT(x == expected);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  TakeIsa(input);
  const bool decodes = input.Byte() % 2 == 0;
  const int32_t threads = TakeThreads(input);
  // Now and then so long that decode streams it past the caches, and shares it among threads.
  const bool is_long = input.Byte() == 255 && decodes;
  const size_t n = input.Take<uint16_t>() % 4096 + (is_long ? size_t{1} << 21 : 0);
  const auto seed = input.Take<uint32_t>();
  const std::vector<int32_t> indices = TakeIndices(input);
  if (decodes) {
    DecodeAny(input, n, indices, seed, threads);
  } else {
    AddOrTake(input, n, indices, seed, threads);
  }
  return 0;
}
