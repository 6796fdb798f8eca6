// How large a plan may be; `limits::kPlanBytes` bounds its text (plan/base/limits.h). The parser refuses a text beyond these
// limits, and rule 1 of `verify` a plan, before anything is multiplied, allocated or expanded. The limits lie far above what
// anybody trains, and so low that the products which the program takes of them fit in 64 bits.
#pragma once

#include <cstdint>

#include "plan/type.h"

namespace shardlab {

/// Names, numbers and marks of a text. A token takes about 60 bytes while the text is read.
inline constexpr int64_t kMaxPlanTokens = int64_t{16} << 20;
/// Ops, allocations and frees of all roles of a text, with every call expanded.
inline constexpr int64_t kMaxInstructions = int64_t{4} << 20;
inline constexpr int64_t kMaxRanks = int64_t{1} << 20;
inline constexpr int64_t kMaxMicroBatches = int64_t{1} << 20;
inline constexpr int64_t kMaxPeriod = int64_t{1} << 16;
inline constexpr int64_t kMaxLayers = int64_t{1} << 20;
/// Heads, and the extent of one.
inline constexpr int64_t kMaxHeads = int64_t{1} << 20;
/// Reads of one op, and writes.
inline constexpr int64_t kMaxOperands = 65535;
/// Ranks whose strips are put together.
inline constexpr int kMaxStrips = 64;
/// Elements of one buffer on one rank.
inline constexpr int64_t kMaxElements = int64_t{1} << 42;
/// Bytes of all buffers of a role, and of all locals of a segment; the sum of both fits in 63 bits.
inline constexpr int64_t kMaxRoleBytes = 4'500'000'000'000'000'000;
/// Floating-point operations of one op on one rank.
inline constexpr int64_t kMaxFlops = 9'000'000'000'000'000'000;
/// Numerator and denominator of a scale.
inline constexpr int64_t kMaxScale = (int64_t{1} << 31) - 1;
/// Target tokens of a step, and the numbers by which losses are multiplied and divided.
inline constexpr int64_t kMaxTokens = int64_t{1} << 52;

/// Whether no extent is negative and the elements are at most `kMaxElements`.
constexpr bool fits_limits(const Shape& shape) {
  int64_t n = 1;
  for (int d = 0; d < shape.rank; ++d) {
    if (shape[d] < 0 || shape[d] > kMaxElements) return false;
    if (shape[d] != 0 && n > kMaxElements / shape[d]) return false;
    n *= shape[d];
  }
  return true;
}

/// Whether the ranks of a mesh are at least one and at most `kMaxRanks`.
inline bool fits_limits(const Mesh& mesh) {
  int64_t n = 1;
  for (const MeshAxis& a : mesh.axes) {
    if (a.size < 1 || a.size > kMaxRanks || n > kMaxRanks / a.size) return false;
    n *= a.size;
  }
  return true;
}

}  // namespace shardlab
