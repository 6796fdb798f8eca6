#include "interop/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "plan/base/json_depth.h"
#include "plan/base/limits.h"
#include "plan/base/utf8.h"

namespace shardlab::interop {

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

constexpr int64_t kHeaderBytes = 100'000'000;  ///< as the reference has it

struct TypeName {
  WeightType type;
  std::string_view name;
  int64_t width;
};
constexpr std::array kTypes{TypeName{WeightType::kF32, "F32", 4}, TypeName{WeightType::kBf16, "BF16", 2},
                            TypeName{WeightType::kF16, "F16", 2}};

Error damaged(const std::string& name, std::string why) {
  return {ExitCode::kUsage,
          fmt::format("{}: {}", name, std::move(why)),
          "name a whole .safetensors file; fetch it again if it was cut short",
          {}};
}

/// A whole number that is not negative.
std::optional<int64_t> count_in(const nlohmann::json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned()) {
    const auto n = value.get<uint64_t>();
    return n <= INT64_MAX ? std::optional(static_cast<int64_t>(n)) : std::nullopt;
  }
  const auto n = value.get<int64_t>();
  return n >= 0 ? std::optional(n) : std::nullopt;
}

/// What one entry says, whatever its type: extents, and its part of the file.
std::optional<StoredTensor> read_entry(const nlohmann::json& entry, int64_t data_bytes) {
  if (!entry.is_object() || !entry.contains("shape") || !entry.contains("data_offsets")) return std::nullopt;
  const auto &shape = entry["shape"], &offsets = entry["data_offsets"];
  if (!shape.is_array() || shape.size() > 8 || !offsets.is_array() || offsets.size() != 2) return std::nullopt;
  StoredTensor tensor;
  for (const auto& extent : shape) {
    const auto n = count_in(extent);
    if (!n) return std::nullopt;
    tensor.shape.push_back(*n);
  }
  const auto begin = count_in(offsets[0]), end = count_in(offsets[1]);
  if (!begin || !end || *begin > *end || *end > data_bytes) return std::nullopt;
  tensor.begin = *begin;
  tensor.end = *end;
  return tensor;
}

float widen_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) return std::copysign(static_cast<float>(fraction) * 0x1.0p-24f, std::bit_cast<float>(sign));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

uint16_t narrow_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 64u);  // stays a NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Rounded to nearest even; beyond the range an infinity.
uint16_t narrow_f16(float value) {
  const uint16_t sign = static_cast<uint16_t>((std::bit_cast<uint32_t>(value) >> 16) & 0x8000u);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00u);
  const float size = std::abs(value);
  if (size == 0) return sign;
  if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
  int exponent = 0;
  std::frexp(size, &exponent);
  // In units of the last place: 2^-24 below the least normal number, 2^(exponent - 11) above. rint rounds to even.
  const int unit = std::max(exponent - 11, -24);
  const auto units = static_cast<uint32_t>(std::rint(std::ldexp(size, -unit)));
  if (unit == -24 && units < 1024) return static_cast<uint16_t>(sign | units);
  // units is in [1024, 2048]; 2048 carries into the exponent by itself.
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(unit + 24 + 1) << 10) + (units - 1024)));
}

}  // namespace

std::string_view name_of(WeightType type) { return kTypes[static_cast<size_t>(type)].name; }
int64_t width_of(WeightType type) { return kTypes[static_cast<size_t>(type)].width; }

Result<int64_t> safetensors_header_bytes(std::string_view first_eight, int64_t file_bytes, const std::string& name) {
  if (first_eight.size() < 8) return damaged(name, "it ends within the length of its header");
  uint64_t length = 0;
  std::memcpy(&length, first_eight.data(), 8);
  if (length > static_cast<uint64_t>(kHeaderBytes))
    return damaged(name, fmt::format("its header would have {} bytes; {} is the most", length, kHeaderBytes));
  if (static_cast<int64_t>(length) > file_bytes - 8) return damaged(name, "it ends within its header");
  return static_cast<int64_t>(length) + 8;
}

Result<SafetensorsHeader> parse_safetensors(std::string_view head, int64_t file_bytes, const std::string& name) {
  const auto header_bytes = safetensors_header_bytes(head, file_bytes, name);
  if (!header_bytes.ok()) return header_bytes.error();
  if (static_cast<int64_t>(head.size()) < *header_bytes) return damaged(name, "it ends within its header");
  const std::string_view text = head.substr(8, static_cast<size_t>(*header_bytes) - 8);
  if (json_depth(text) > limits::kJsonDepth) return damaged(name, "its header is nested too deep");
  const auto root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return damaged(name, "its header is not a JSON object");
  SafetensorsHeader header;
  header.data_begin = *header_bytes;
  const int64_t data_bytes = file_bytes - *header_bytes;
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (const auto& [key, entry] : root.items()) {
    if (key == "__metadata__") continue;
    const auto tensor = read_entry(entry, data_bytes);
    if (!tensor || !entry.contains("dtype") || !entry["dtype"].is_string())
      return damaged(name, fmt::format("`{}` says no tensor of this file", shown_name(key)));
    parts.emplace_back(tensor->begin, tensor->end);
    const auto type = std::ranges::find(kTypes, entry["dtype"].get_ref<const std::string&>(), &TypeName::name);
    if (type == kTypes.end()) {
      header.others.push_back(key);
      continue;
    }
    int64_t bytes = type->width;
    for (const int64_t extent : tensor->shape)
      if (__builtin_mul_overflow(bytes, extent, &bytes))
        return damaged(name, fmt::format("the extents of `{}` overflow", shown_name(key)));
    if (bytes != tensor->end - tensor->begin)
      return damaged(
          name, fmt::format("`{}` has {} bytes where its extents ask for {}", shown_name(key), tensor->end - tensor->begin, bytes));
    header.tensors[key] = *tensor;
    header.tensors[key].type = type->type;
  }
  std::ranges::sort(parts);
  int64_t at = 0;
  for (const auto& [begin, end] : parts) {
    if (begin != at) return damaged(name, begin < at ? "tensors overlap" : "there is a hole between tensors");
    at = end;
  }
  if (at != data_bytes) return damaged(name, fmt::format("{} bytes belong to no tensor", data_bytes - at));
  return header;
}

std::string safetensors_header(const std::vector<std::pair<std::string, StoredTensor>>& tensors) {
  nlohmann::ordered_json root{{"__metadata__", {{"format", "pt"}}}};
  for (const auto& [name, tensor] : tensors) {
    root[name] = {{"dtype", name_of(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text = root.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // tensors begin at a multiple of eight
  const auto length = static_cast<uint64_t>(text.size());
  std::string head(8, '\0');
  std::memcpy(head.data(), &length, 8);
  return head + text;
}

std::vector<float> widened(std::string_view bytes, WeightType type) {
  std::vector<float> values(bytes.size() / static_cast<size_t>(width_of(type)));
  if (type == WeightType::kF32) {
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + 2 * i, 2);
    values[i] = type == WeightType::kBf16 ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16) : widen_f16(bits);
  }
  return values;
}

std::string narrowed(const std::vector<float>& values, WeightType type) {
  std::string bytes(values.size() * static_cast<size_t>(width_of(type)), '\0');
  if (type == WeightType::kF32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = type == WeightType::kBf16 ? narrow_bf16(values[i]) : narrow_f16(values[i]);
    std::memcpy(bytes.data() + 2 * i, &bits, 2);
  }
  return bytes;
}

std::string shown_name(std::string_view name) {
  std::string out;
  for (const char c : visible(name.substr(0, limits::kShownBytes)))
    out += c == '\n' || c == '\t' ? fmt::format("\\u{:04x}", static_cast<unsigned>(c)) : std::string(1, c);
  return name.size() > limits::kShownBytes ? out + "..." : out;
}

}  // namespace shardlab::interop
