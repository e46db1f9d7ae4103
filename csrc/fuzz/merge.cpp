// Sums of streams: those of ascending indices equal a simple sum, bit for bit; of any others the
// library takes what it likes, or refuses them, within the room that it has.
#include <utility>

#include "fuzz.h"

using namespace hvds::fuzz;

namespace {

struct OwnStream {
  std::vector<int32_t> indices;
  std::vector<float> values;
};

// In the order of the indices, and at one index in that of the streams.
std::vector<std::pair<int32_t, float>> SimpleSum(const std::vector<OwnStream>& streams) {
  std::vector<std::pair<int32_t, float>> entries;
  for (const OwnStream& stream : streams) {
    for (size_t i = 0; i < stream.indices.size(); ++i) {
      entries.emplace_back(stream.indices[i], stream.values[i]);
    }
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::pair<int32_t, float>> sums;
  for (const auto& [index, value] : entries) {
    if (!sums.empty() && sums.back().first == index) {
      sums.back().second += value;
    } else {
      sums.emplace_back(index, value);
    }
  }
  return sums;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  const int32_t threads = TakeThreads(input);
  const size_t count = 1 + input.Byte() % 6;
  const int64_t numel = input.Within(0, INT32_MAX);
  std::vector<OwnStream> streams(count);
  std::vector<int64_t> table;
  size_t room = 0;
  bool valid = true;
  for (OwnStream& stream : streams) {
    const auto seed = input.Take<uint16_t>();
    stream.indices = TakeIndices(input);
    stream.values = Values(seed, stream.indices.size());
    table.push_back(reinterpret_cast<int64_t>(stream.indices.data()));
    table.push_back(reinterpret_cast<int64_t>(stream.values.data()));
    table.push_back(Size(stream.indices.size()));
    room += stream.indices.size();
    valid = valid && Ascends(stream.indices, 0, numel);
  }
  std::vector<int32_t> indices(room);
  std::vector<float> values(room);
  int64_t nnz = -1;
  const int32_t status = hvds_merge_sum(table.data(), Size(count), numel, threads, indices.data(),
                                        values.data(), &nnz);
  HVDS_EXPECT(status == kHvdsOk || (status == kHvdsBadIndex && !valid));
  if (status != kHvdsOk) return 0;
  HVDS_EXPECT(nnz >= 0 && nnz <= Size(room));
  if (!valid) return 0;
  const auto expected = SimpleSum(streams);
  HVDS_EXPECT(nnz == Size(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) {
    HVDS_EXPECT(indices[i] == expected[i].first && Same(values[i], expected[i].second));
  }
  return 0;
}
