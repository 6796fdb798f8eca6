// Names of the items that take a device's memory beside buffers. Predictions and measurements share these words.
#pragma once

#include <string_view>

namespace shardlab::device_words {

inline constexpr std::string_view kContext = "context";
inline constexpr std::string_view kKernels = "loaded kernels";
/// The two, where they cannot be told apart.
inline constexpr std::string_view kContextAndKernels = "context and loaded kernels";
inline constexpr std::string_view kNccl = "NCCL buffers";
inline constexpr std::string_view kMatmul = "cuBLASLt handles";
inline constexpr std::string_view kCudnn = "cuDNN handles and plans";
inline constexpr std::string_view kStreams = "streams and events";
inline constexpr std::string_view kRecorder = "recorder's buffers";
inline constexpr std::string_view kRounding = "rounding of allocations";
inline constexpr std::string_view kRest = "other";

}  // namespace shardlab::device_words
