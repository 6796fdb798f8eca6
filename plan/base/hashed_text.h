// FNV-1a over texts that stand behind many others, such as the lines of one case file after another.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "plan/base/hash.h"

namespace shardlab {

/// A text and its `hash_text` behind any other text, which costs one product once the text has been hashed behind a few.
///
/// FNV-1a mixes a byte b into a hash h as (h ^ b) p, and h ^ b is h plus a number that follows from b and the low byte of h. The low byte of
/// the product follows from the low byte of h ^ b. Behind n bytes the hash is therefore h p^n plus an offset that follows from the text and
/// the low byte of h: there are 256 offsets, and each is remembered when it was needed.
class HashedText {
 public:
  explicit HashedText(std::string text) : text_(std::move(text)) {
    for (size_t i = 0; i < text_.size(); ++i) power_ *= kHashPrime;
  }

  const std::string& text() const { return text_; }

  /// `hash_text(text(), seed)`.
  uint64_t behind(uint64_t seed) {
    if (!offsets_) {  // a text that is met once needs no table of 2 KiB
      if (!std::exchange(met_, true)) return hash_text(text_, seed);
      offsets_ = std::make_unique<Offsets>();
    }
    const auto low = static_cast<size_t>(seed & 0xff);
    uint64_t& offset = offsets_->of[low];
    if (!offsets_->known[low]) offset = hash_text(text_, seed) - seed * power_, offsets_->known.set(low);
    return seed * power_ + offset;
  }

 private:
  struct Offsets {
    std::array<uint64_t, 256> of;  ///< by the low byte of the hash before the text
    std::bitset<256> known;
  };
  std::string text_;
  uint64_t power_ = 1;  ///< of the prime, by the size of the text
  bool met_ = false;
  std::unique_ptr<Offsets> offsets_;
};

}  // namespace shardlab
