// Gap codes: one that is accepted is that of ascending indices in its range, and any indices that
// ascend come back as they were.
#include "fuzz.h"

using namespace hvds::fuzz;

namespace {

struct Encoded {
  int32_t status;
  std::vector<uint8_t> code;
};

Encoded Encode(const std::vector<int32_t>& indices, int32_t start) {
  std::vector<uint8_t> code((indices.size() + 127) / 128 + 4 * indices.size());
  int64_t bytes = 0;
  const int32_t status =
      hvds_gap_encode(indices.data(), Size(indices.size()), start, code.data(), &bytes);
  if (status == kHvdsOk) {
    HVDS_EXPECT(bytes >= 0 && bytes <= Size(code.size()));
    code = std::vector<uint8_t>(code.begin(), code.begin() + bytes);
  }
  return {status, code};
}

void ExpectReadsAs(const std::vector<uint8_t>& code, const std::vector<int32_t>& indices,
                   int32_t start, int32_t stop) {
  std::vector<int32_t> read(indices.size());
  HVDS_EXPECT(hvds_gap_decode(code.data(), Size(code.size()), Size(read.size()), start, stop,
                              read.data()) == kHvdsOk);
  HVDS_EXPECT(read == indices);
}

void DecodeAnything(Input& input) {
  const auto nnz = static_cast<size_t>(input.Within(0, 1 << 14));
  const auto start = static_cast<int32_t>(input.Within(0, INT32_MAX));
  const auto stop = static_cast<int32_t>(input.Within(start, INT32_MAX));
  const size_t offset = input.Byte() % 8;  // a code begins anywhere in a message
  std::vector<uint8_t> message(offset + input.left());
  for (size_t i = offset; i < message.size(); ++i) message[i] = static_cast<uint8_t>(input.Byte());
  std::vector<int32_t> indices(nnz);
  const int32_t status = hvds_gap_decode(message.data() + offset, Size(message.size() - offset),
                                         Size(nnz), start, stop, indices.data());
  HVDS_EXPECT(status == kHvdsOk || status == kHvdsBadIndex);
  if (status != kHvdsOk) return;
  HVDS_EXPECT(Ascends(indices, start, stop));
  const Encoded again = Encode(indices, start);
  HVDS_EXPECT(again.status == kHvdsOk);
  ExpectReadsAs(again.code, indices, start, stop);
}

void EncodeAnything(Input& input) {
  const auto start = static_cast<int32_t>(input.Within(0, INT32_MAX));
  const std::vector<int32_t> indices = TakeIndices(input);
  const Encoded encoded = Encode(indices, start);
  const bool ascends = Ascends(indices, start, int64_t{INT32_MAX} + 1);
  HVDS_EXPECT(encoded.status == (ascends ? kHvdsOk : kHvdsBadIndex));
  if (!ascends || (!indices.empty() && indices.back() == INT32_MAX)) return;
  ExpectReadsAs(encoded.code, indices, start, INT32_MAX);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  if (input.Byte() % 2 == 0) {
    DecodeAnything(input);
  } else {
    EncodeAnything(input);
  }
  return 0;
}
