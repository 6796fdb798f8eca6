// Optimizer moments in 8 bits: the numbers that codes stand for, and the blocks that share a scale.
//
// A moment is code * scale, the scale being the largest size in the element's block. Codes are those of dynamic quantisation: seven
// decades below 1, each with twice as many codes as the decade below it, so that sizes from 1 down to 3e-7 of the largest are told apart.
// Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", sections 2.1 and 2.2 and appendix F.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace shardlab {

/// Consecutive elements that share a scale; the paper's number. The last block of a buffer may have fewer.
inline constexpr int64_t kMomentBlock = 2048;
constexpr int64_t moment_blocks(int64_t elements) { return (elements + kMomentBlock - 1) / kMomentBlock; }

using MomentCodes = std::array<float, 256>;

/// The numbers of codes 0 to 255, ascending. Decade i, 10^(i-7) to 10^(i-6), is cut into 2^i equal parts (2^(i+1) without a sign), and a
/// code is the middle of a part, rounded to fp32. 0 and 1 have a code each, -1 has none.
constexpr MomentCodes moment_codes(bool has_sign) {
  constexpr std::array<double, 7> kTops{1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
  MomentCodes codes{};
  const size_t zero = has_sign ? 127 : 0;
  size_t above = zero;
  for (size_t decade = 0; decade < kTops.size(); ++decade) {
    const size_t parts = size_t{1} << (has_sign ? decade : decade + 1);
    for (size_t part = 0; part < parts; ++part) {
      const double middle = 0.1 + 0.9 * ((static_cast<double>(part) + 0.5) / static_cast<double>(parts));
      codes[++above] = static_cast<float>(kTops[decade] * middle);
      if (has_sign) codes[2 * zero - above] = -codes[above];
    }
  }
  codes[255] = 1;
  return codes;
}

/// Halfway between code k and code k + 1, in fp32: numbers up to it, itself included, go to code k.
constexpr float moment_threshold(const MomentCodes& codes, size_t k) { return 0.5f * (codes[k] + codes[k + 1]); }

}  // namespace shardlab
