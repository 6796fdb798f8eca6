// Element types. fp32 is executed today; the others are planned, costed and checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace shardlab {

enum class DType : uint8_t { f32, f64, bf16, f16, f8e4m3, f8e5m2, f4e2m1, i64, i32, i16, i8, u8 };

/// Bits of one element. Block-scaled types keep their scales in a buffer of their own.
constexpr int bits_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64: return 64;
    case DType::f32:
    case DType::i32: return 32;
    case DType::bf16:
    case DType::f16:
    case DType::i16: return 16;
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::i8:
    case DType::u8: return 8;
    case DType::f4e2m1: return 4;
  }
  return 0;
}

constexpr int64_t bytes_of(DType t, int64_t elements) { return (elements * bits_of(t) + 7) / 8; }

constexpr std::string_view name_of(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::f64: return "f64";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::f8e4m3: return "f8e4m3";
    case DType::f8e5m2: return "f8e5m2";
    case DType::f4e2m1: return "f4e2m1";
    case DType::i64: return "i64";
    case DType::i32: return "i32";
    case DType::i16: return "i16";
    case DType::i8: return "i8";
    case DType::u8: return "u8";
  }
  return "?";
}

constexpr std::optional<DType> dtype_named(std::string_view name) {
  for (int i = 0; i <= static_cast<int>(DType::u8); ++i)
    if (name_of(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  return std::nullopt;
}

}  // namespace shardlab
