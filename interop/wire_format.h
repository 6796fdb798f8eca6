// Protocol buffers as bytes: a field is a tag (number and wire type) and a value. Source: protobuf.dev/programming-guides/encoding.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace shardlab::interop {

/// A message that is built field by field, in the order in which a reader is to see them.
class WireMessage {
 public:
  /// uint64, uint32, bool and enums.
  WireMessage& number(int field, uint64_t value) {
    tag(field, 0);
    varint(value);
    return *this;
  }
  /// int64 and int32: two's complement of 64 bits, so a negative number has ten bytes.
  WireMessage& whole(int field, int64_t value) { return number(field, static_cast<uint64_t>(value)); }
  WireMessage& real(int field, double value) {
    tag(field, 1);
    for (uint64_t bits = std::bit_cast<uint64_t>(value), i = 0; i < 8; ++i, bits >>= 8) bytes_ += static_cast<char>(bits & 0xff);
    return *this;
  }
  /// string and bytes.
  WireMessage& text(int field, std::string_view value) {
    tag(field, 2);
    varint(value.size());
    bytes_ += value;
    return *this;
  }
  WireMessage& message(int field, const WireMessage& value) { return text(field, value.bytes_); }

  /// The fields of another message behind those of this one.
  WireMessage& fields(const WireMessage& more) {
    bytes_ += more.bytes_;
    return *this;
  }

  const std::string& bytes() const { return bytes_; }
  bool empty() const { return bytes_.empty(); }

  /// The message with its length before it, as streams of messages have it.
  std::string delimited() const {
    WireMessage length;
    length.varint(bytes_.size());
    return length.bytes_ + bytes_;
  }

 private:
  void tag(int field, int type) { varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(type)); }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

}  // namespace shardlab::interop
