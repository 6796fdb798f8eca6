// Compressed gradients on their way: the kernels around each message, by the formulas of closed_form_compression.cpp, which names
// the papers. Kernels read and write each operand once; a number is 4 bytes, codes have b bits an element and a scale for each
// block.
#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>

#include "simulator/step_stage.h"

namespace shardlab::simulator::forms {
namespace {

constexpr double kNumber = 4;

double of(int64_t v) { return static_cast<double>(v); }

/// A bucket in codes: `bits` each, and how many scales go with each rank's slice.
struct Coded {
  int64_t bits, scales_of_slice;
  bool scaled() const { return bits < 16; }
  int64_t element() const { return bits == 16 ? 2 : 1; }
  int64_t elements(int64_t n) const { return bits < 8 ? n * bits / 8 : n; }
  double bytes(int64_t n, int64_t slices) const {
    return of(elements(n) * element()) + (scaled() ? kNumber * of(slices * scales_of_slice) : 0);
  }
};

}  // namespace

/// Kernels and messages in turn, on the stream that reduces.
class StageWriter::Reducing {
 public:
  Reducing(StageWriter& stage, Events& to) : stage_(stage), to_(to) {}
  void kernel(double flops, double bytes, bool product = false) {
    last = stage_.start(to_, stage_.kernels_.kernel({flops, bytes, product}, Spent::kData), kReducing);
  }
  void exchange(CollectiveKind kind, int64_t elements, int64_t element) {
    const Exchange e{kind, stage_.c_.layout.shard_ranks(), elements, element};
    last = stage_.start(to_, stage_.kernels_.exchange(e, stage_.kernels_.ways().data, Spent::kData), kReducing);
  }
  int32_t last = -1;

 private:
  StageWriter& stage_;
  Events& to_;
};

int32_t StageWriter::reduce(const BucketForm& b, Events& to) {
  const int zero = c_.layout.zero;
  Reducing ops(*this, to);
  switch (c_.layout.compression.kind) {
    case CompressionKind::kNone:
      return start(to, exchanged(zero == 0 ? CollectiveKind::kAllReduce : CollectiveKind::kReduceScatter, b, Widths(c_).gradient),
                   kReducing);
    case CompressionKind::kBf16:
    case CompressionKind::kInt8:
    case CompressionKind::kOneBitAdam: reduce_in_codes(b, ops); break;
    case CompressionKind::kTopK:
    case CompressionKind::kRandomK: reduce_some(b, ops); break;
    case CompressionKind::kPowerSgd: reduce_in_low_rank(b, ops); break;
  }
  return ops.last;
}

/// What was lost is added, codes travel, and what they lose is kept; of whole gradients so on both legs, of slices on the first.
/// 1-bit Adam makes of the gradient the momentum before, and of its sum the direction after.
void StageWriter::reduce_in_codes(const BucketForm& b, Reducing& ops) const {
  const Compression& k = c_.layout.compression;
  const int64_t n = b.elements, ranks = c_.layout.shard_ranks(), slice = n / ranks;
  const bool signs = sends_signs(c_);
  const int64_t bits = k.kind == CompressionKind::kBf16 ? 16 : signs ? 1 : k.bits;
  const Coded code{bits, bits == 1 ? 1 : (slice + kScaleBlock - 1) / kScaleBlock};
  const auto quantise = [&](int64_t m, int64_t slices) {
    ops.kernel(code.scaled() ? of(3 * m) : 0, kNumber * of(m) + code.bytes(m, slices));
  };
  const auto dequantise = [&](int64_t m, int64_t slices) {
    ops.kernel(code.scaled() ? of(m) : 0, kNumber * of(m) + code.bytes(m, slices));
  };
  const auto exchange = [&](CollectiveKind kind) {
    ops.exchange(kind, code.elements(n), code.element());
    if (code.scaled()) ops.exchange(kind, ranks * code.scales_of_slice, 4);
  };
  const auto lose = [&](int64_t m, int64_t slices) {  // m = gradient + error; codes; what they say; the next error
    ops.kernel(of(m), 3 * kNumber * of(m));
    quantise(m, slices);
    dequantise(m, slices);
    ops.kernel(of(m), 3 * kNumber * of(m));
  };
  if (signs) ops.kernel(of(4 * n), kNumber * of(3 * n + 1));
  lose(n, ranks);
  exchange(CollectiveKind::kAllToAll);
  ops.kernel(of(code.scaled() ? 2 * n : n), code.bytes(n, ranks) + kNumber * of(slice));
  if (c_.layout.zero > 0) return;
  lose(slice, 1);
  exchange(CollectiveKind::kAllGather);
  dequantise(n, ranks);
  if (signs) ops.kernel(of(5 * n), kNumber * of(4 * n + 3));
}

/// The largest elements and where they are, or some by chance, which every rank knows.
void StageWriter::reduce_some(const BucketForm& b, Reducing& ops) const {
  const bool top = c_.layout.compression.kind == CompressionKind::kTopK;
  const auto share = static_cast<int64_t>(std::ceil(c_.layout.compression.k * of(b.elements)));
  const int64_t n = b.elements, k = std::clamp<int64_t>(share, 1, n), rows = top ? c_.layout.dp : 1;
  ops.kernel(of(n), 3 * kNumber * of(n));
  ops.kernel(of(4 * n), kNumber * of(n + 2 * k));
  ops.kernel(0, kNumber * of(2 * n + k));
  if (top) {
    ops.exchange(CollectiveKind::kAllGather, rows * k, 4);
    ops.exchange(CollectiveKind::kAllGather, rows * k, 4);
  } else {
    ops.exchange(CollectiveKind::kAllReduce, k, 4);
  }
  ops.kernel(of(rows * n), kNumber * of(2 * rows * k + n));
}

namespace {

struct Matrix {
  int64_t rows, columns;
};

/// The matrix that a bucket is, by the gradient that completes it; none where it holds vectors.
std::optional<Matrix> matrix_of(const Case& c, const BucketForm& b, bool embedding, bool head) {
  const Model& m = c.model;
  const auto is = [&](int64_t rows, int64_t columns) -> std::optional<Matrix> {
    return b.highest == b.lowest && b.elements == rows * columns ? std::optional(Matrix{rows, columns}) : std::nullopt;
  };
  if (embedding) return b.tied || is(m.vocab, m.hidden) ? Matrix{m.vocab, m.hidden} : Matrix{m.max_positions, m.hidden};
  if (head) return is(m.vocab, m.hidden);
  switch (b.last) {
    case kDown: return is(m.hidden, m.ffn);
    case kUp: return is(m.up_rows(), m.hidden);
    case kOut: return is(m.hidden, m.heads * m.head_dim);
    case kQkv: return is(m.qkv_rows(), m.hidden);
    default: return std::nullopt;
  }
}

}  // namespace

/// P = M Q, summed and made orthonormal; Q = M^T P, summed; what P Q says of M, and the rest.
void StageWriter::reduce_in_low_rank(const BucketForm& b, Reducing& ops) const {
  const auto matrix = matrix_of(c_, b, part_.first && b.lowest == 0, part_.last && b.highest == units_ - 1);
  if (!matrix) return ops.exchange(CollectiveKind::kAllReduce, b.elements, Widths(c_).gradient);
  const int64_t r = std::min({int64_t{c_.layout.compression.rank}, matrix->rows, matrix->columns});
  const double n = of(b.elements), left = of(matrix->rows * r), right = of(matrix->columns * r);
  ops.kernel(n, 3 * kNumber * n);
  ops.kernel(0, 2 * kNumber * right);
  ops.kernel(2 * n * of(r), kNumber * (n + left + right));
  ops.exchange(CollectiveKind::kAllReduce, matrix->rows * r, 4);
  ops.kernel(4 * left * of(r), 2 * kNumber * left);
  ops.kernel(2 * n * of(r), kNumber * (n + left + right), true);
  ops.exchange(CollectiveKind::kAllReduce, matrix->columns * r, 4);
  ops.kernel(2 * n * of(r), kNumber * (n + left + right), true);
  ops.kernel(2 * n, 3 * kNumber * n);
  ops.kernel(0, 2 * kNumber * right);
}

}  // namespace shardlab::simulator::forms
