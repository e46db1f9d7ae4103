// QSGD: any codes and scales are read as their definition says; what was rounded is near what it
// was, and what is not finite stays so.
#include <cmath>
#include <limits>

#include "fuzz.h"

using namespace hvds::fuzz;

namespace {

struct Form {
  int32_t bits;
  int64_t bucket_numel;

  int32_t Levels() const { return (1 << (bits - 1)) - 1; }
  size_t CodeBytes(size_t n) const { return (n * static_cast<size_t>(bits) + 7) / 8; }
  size_t Buckets(size_t n) const {
    return (n + static_cast<size_t>(bucket_numel) - 1) / static_cast<size_t>(bucket_numel);
  }
};

std::vector<float> Dequantize(const std::vector<uint8_t>& codes, const std::vector<float>& scales,
                              size_t n, const Form& form, int32_t threads) {
  std::vector<float> x(n);
  HVDS_EXPECT(hvds_qsgd_dequantize(codes.data(), scales.data(), Size(n), form.bits,
                                   form.bucket_numel, threads, x.data()) == kHvdsOk);
  return x;
}

void DequantizeAnything(Input& input, size_t n, const Form& form, int32_t threads) {
  std::vector<float> scales(form.Buckets(n));
  for (float& scale : scales) scale = input.Take<float>();
  std::vector<uint8_t> codes(form.CodeBytes(n));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(input.Byte());
  const std::vector<float> x = Dequantize(codes, scales, n, form, threads);
  const auto bits = static_cast<size_t>(form.bits);
  for (size_t i = 0; i < n; ++i) {
    const int32_t code = codes[i * bits / 8] >> (i * bits % 8) & ((1 << form.bits) - 1);
    const float step =
        scales[i / static_cast<size_t>(form.bucket_numel)] / static_cast<float>(form.Levels());
    HVDS_EXPECT(Same(x[i], static_cast<float>(code - form.Levels()) * step));
  }
}

void QuantizeAnything(Input& input, size_t n, const Form& form, int32_t threads) {
  const auto seed = input.Take<uint64_t>();
  std::vector<float> x = Values(input.Take<uint32_t>(), n);
  for (size_t i = 0; i < n && input.left() > 0; ++i) x[i] = input.Take<float>();
  std::vector<float> scales(form.Buckets(n));
  std::vector<uint8_t> codes(form.CodeBytes(n));
  HVDS_EXPECT(hvds_qsgd_quantize(x.data(), Size(n), form.bits, form.bucket_numel, seed, threads,
                                 codes.data(), scales.data()) == kHvdsOk);
  const std::vector<float> read = Dequantize(codes, scales, n, form, threads);
  const auto bucket_numel = static_cast<size_t>(form.bucket_numel);
  for (size_t first = 0; first < n; first += bucket_numel) {
    const size_t end = std::min(n, first + bucket_numel);
    float largest = 0.0f;
    bool finite = true;
    for (size_t i = first; i < end; ++i) {
      finite = finite && std::isfinite(x[i]);
      largest = std::max(largest, std::fabs(x[i]));
    }
    const double step = static_cast<double>(largest) / form.Levels();
    for (size_t i = first; i < end; ++i) {
      HVDS_EXPECT(std::isfinite(read[i]) == finite);
      if (!finite) continue;
      const double error = std::fabs(static_cast<double>(read[i]) - static_cast<double>(x[i]));
      HVDS_EXPECT(error <= step * 1.0001 + 1e-36);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  TakeIsa(input);
  const bool quantizes = input.Byte() % 2 == 1;
  const int32_t threads = TakeThreads(input);
  const Form form{2 << input.Byte() % 3, 512 << input.Byte() % 2};
  // Now and then enough for several threads.
  const size_t n = input.Byte() == 255 ? (1 << 17) + 7 : input.Take<uint16_t>() % 3000;
  if (quantizes) {
    QuantizeAnything(input, n, form, threads);
  } else {
    DequantizeAnything(input, n, form, threads);
  }
  return 0;
}
