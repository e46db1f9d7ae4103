// Streams without some of their entries: `difference` and `threshold_stream`.
#include <iterator>

#include "fuzz.h"

using namespace hvds::fuzz;

namespace {

struct Filtered {
  std::vector<int32_t> indices;
  std::vector<float> values;
};

void ExpectEqual(const Filtered& found, const Filtered& expected) {
  HVDS_EXPECT(found.indices == expected.indices);
  for (size_t i = 0; i < expected.values.size(); ++i) {
    HVDS_EXPECT(hvds::BitsOf(found.values[i]) == hvds::BitsOf(expected.values[i]));
  }
}

// Calls filter(indices, values, &nnz) with room for `most`, and returns what it wrote.
template <typename Filter>
Filtered Written(size_t most, Filter filter) {
  Filtered out{std::vector<int32_t>(most), std::vector<float>(most)};
  int64_t nnz = -1;
  HVDS_EXPECT(filter(out.indices.data(), out.values.data(), &nnz) == kHvdsOk);
  HVDS_EXPECT(nnz >= 0 && nnz <= Size(most));
  out.indices.resize(static_cast<size_t>(nnz));
  out.values.resize(static_cast<size_t>(nnz));
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  TakeIsa(input);
  const auto key = static_cast<uint32_t>(input.Within(1, 0x7f800000));
  const auto seed = input.Take<uint32_t>();
  const std::vector<int32_t> indices = TakeIndices(input);
  const std::vector<int32_t> other = TakeIndices(input);
  const std::vector<float> values = Values(seed, indices.size());
  const int64_t nnz = Size(indices.size());

  const Filtered large =
      Written(indices.size(), [&](int32_t* out_indices, float* out_values, int64_t* out_nnz) {
        return hvds_threshold_stream(indices.data(), values.data(), nnz, key, out_indices,
                                     out_values, out_nnz);
      });
  Filtered expected;
  for (size_t i = 0; i < indices.size(); ++i) {
    if (hvds::KeyOf(values[i]) < key) continue;
    expected.indices.push_back(indices[i]);
    expected.values.push_back(values[i]);
  }
  ExpectEqual(large, expected);

  const Filtered rest =
      Written(indices.size(), [&](int32_t* out_indices, float* out_values, int64_t* out_nnz) {
        return hvds_difference(indices.data(), values.data(), nnz, other.data(), Size(other.size()),
                               out_indices, out_values, out_nnz);
      });
  constexpr int64_t kAny = int64_t{INT32_MAX} + 1;
  if (!Ascends(indices, INT32_MIN, kAny) || !Ascends(other, INT32_MIN, kAny)) return 0;
  expected = Filtered();
  for (size_t i = 0; i < indices.size(); ++i) {
    if (std::binary_search(other.begin(), other.end(), indices[i])) continue;
    expected.indices.push_back(indices[i]);
    expected.values.push_back(values[i]);
  }
  ExpectEqual(rest, expected);
  return 0;
}
