// The library's C interface, loaded with ctypes.
//
// Every function returns a Status and throws nothing. The caller has checked types and lengths;
// indices are checked here, as far as memory safety needs it. Pointers may be null where their
// length is zero. `threads` is the largest number of threads that a call may use, its own included.
// Calls may come from several threads at once. No call keeps a pointer after it returns.
#pragma once

#include <cstdint>

#define HVDS_API extern "C" __attribute__((visibility("default")))

enum HvdsStatus : int32_t {
  kHvdsOk = 0,
  kHvdsOutOfMemory = 1,
  kHvdsBadIndex = 2,     // an index outside [0, n), or out of order
  kHvdsBadArgument = 3,  // a length or a code that no caller of ours gives
};

// Rises with every change of a signature below.
HVDS_API int32_t hvds_abi_version();

// 0 portable, 1 AVX2, 2 AVX-512: what is live, and a switch for tests. Setting what the processor
// lacks is kHvdsBadArgument.
HVDS_API int32_t hvds_isa();
HVDS_API int32_t hvds_set_isa(int32_t isa);

// `segments`: `segment_count` triples (address, numel, dtype code) whose numels add up to n.
// Dtype codes: 0 float32, 1 float16, 2 bfloat16. The selection stays with the calling thread until
// its next call; hvds_take copies it out.
HVDS_API int32_t hvds_accumulate_select(float* residual, int64_t n, const int64_t* segments,
                                        int64_t segment_count, uint32_t key, int32_t threads,
                                        int64_t* nnz);
HVDS_API int32_t hvds_take(int32_t* indices, float* values, int64_t nnz, int32_t threads);

// `indices` and `values` have room for min(k, n). `pivot_key` 0: no guess.
HVDS_API int32_t hvds_accumulate_topk(float* residual, int64_t n, const int64_t* segments,
                                      int64_t segment_count, int64_t k, uint32_t pivot_key,
                                      int32_t threads, int32_t* indices, float* values,
                                      int64_t* nnz, float* threshold);

// 1 <= k <= n.
HVDS_API int32_t hvds_kth_magnitude(const float* x, int64_t n, int64_t k, int32_t threads,
                                    float* magnitude);

// `streams`: `stream_count` triples (indices' address, values' address, nnz). The output has room
// for the sum of the nnz.
HVDS_API int32_t hvds_merge_sum(const int64_t* streams, int64_t stream_count, int64_t numel,
                                int32_t threads, int32_t* indices, float* values, int64_t* nnz);

// The output has room for `nnz_in`.
HVDS_API int32_t hvds_difference(const int32_t* indices, const float* values, int64_t nnz_in,
                                 const int32_t* other, int64_t other_count, int32_t* out_indices,
                                 float* out_values, int64_t* nnz);
HVDS_API int32_t hvds_threshold_stream(const int32_t* indices, const float* values, int64_t nnz_in,
                                       uint32_t key, int32_t* out_indices, float* out_values,
                                       int64_t* nnz);

HVDS_API int32_t hvds_scatter_add(float* x, int64_t n, const int32_t* indices, const float* values,
                                  int64_t nnz, int32_t threads);
HVDS_API int32_t hvds_decode(void* out, int32_t dtype, int64_t n, const int32_t* indices,
                             const float* values, int64_t nnz, int32_t threads);
