// The safetensors format: eight bytes of length, a header in JSON, then the tensors' bytes, little-endian, one after another.
// Source: huggingface/safetensors, safetensors/src/tensor.rs (the same limits: a header of 100 MB, no holes, no overlaps).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"

namespace shardlab::interop {

/// The element types that weights are stored in here.
enum class WeightType : uint8_t { kF32, kBf16, kF16 };
std::string_view name_of(WeightType type);  ///< "F32", "BF16", "F16", as the format writes them
int64_t width_of(WeightType type);          ///< bytes of an element

struct StoredTensor {
  WeightType type = WeightType::kF32;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  ///< bytes, from the end of the header
};

/// The header of a file of `file_bytes`, whose first bytes are `head` (all of the header, or as much as the caller read: the error says
/// how much is wanted then). Refuses a header that is no JSON or too long, extents that do not multiply to the bytes, bytes outside the
/// file, holes and overlaps. Tensors of other types are left out, and named in `others`.
struct SafetensorsHeader {
  int64_t data_begin = 0;  ///< bytes before the tensors
  std::map<std::string, StoredTensor> tensors;
  std::vector<std::string> others;
};
Result<SafetensorsHeader> parse_safetensors(std::string_view head, int64_t file_bytes, const std::string& name);

/// Bytes of the header with its length, as its first eight bytes say. Refuses what no header has.
Result<int64_t> safetensors_header_bytes(std::string_view first_eight, int64_t file_bytes, const std::string& name);

/// A header for tensors that follow one another in this order.
std::string safetensors_header(const std::vector<std::pair<std::string, StoredTensor>>& tensors);

/// Elements widened to fp32, exactly; `bytes` has a whole number of them.
std::vector<float> widened(std::string_view bytes, WeightType type);

/// fp32 as stored bytes: exact for kF32, rounded to nearest even for kBf16 and kF16.
std::string narrowed(const std::vector<float>& values, WeightType type);

/// A name of a foreign file as messages show it: its first bytes, with line ends, control characters and marks of direction in JSON's
/// notation ("\u000a"), so that a name cannot write lines of its own.
std::string shown_name(std::string_view name);

}  // namespace shardlab::interop
