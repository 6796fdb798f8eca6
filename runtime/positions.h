// Where a rank's tokens stand in the text, by the plan's order of tokens, and in their documents.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "plan/base/check.h"
#include "plan/interfaces.h"
#include "runtime/backend.h"

namespace shardlab::runtime {

/// The positions of the tokens along dim 1 of what the rank holds.
inline std::vector<int64_t> positions_of(const BoundOp& op, const Type& type) {
  const int64_t begin = logical_origin(type, op.mesh(), op.at)[1], total = logical_shape(type, op.mesh())[1];
  std::vector<int64_t> positions(static_cast<size_t>(type.shape[1]));
  for (size_t t = 0; t < positions.size(); ++t)
    positions[t] = op.plan->token_order.position(begin + static_cast<int64_t>(t), total);
  return positions;
}

/// The places in documents of the tokens that a rank holds of packed sequences: `first` is the place of its first token of the first
/// sequence, and token t of sequence b is `stride` b + t further on. Null where the op goes by no documents.
struct DocumentPositions {
  const int32_t* first = nullptr;
  int64_t stride = 0;
};

/// Those of the tokens along dim 1 of `rows`, an operand of the op.
inline DocumentPositions document_positions(const BoundOp& op, const Type& rows) {
  const auto at = positions_read(op.op());
  if (!at) return {};
  const Tensor& positions = op.reads[*at];
  return {positions.as<const int32_t>() + logical_origin(rows, op.mesh(), op.at)[1], positions.shape()[1]};
}

/// What Positions adds to packed documents, or their gradient: x of `width` columns by a table of `rows` positions.
struct PackedPositions {
  DocumentPositions documents;
  int64_t width = 0, rows = 0;
};
inline PackedPositions packed_positions(const BoundOp& op, const Positions& w) {
  const Type& x = *op.reads[0].type;
  return {document_positions(op, x), x.shape.last(), (w.phase == Phase::kF ? op.reads[1] : op.writes[0]).shape()[0]};
}

/// Runs of a rank's tokens that stand one behind the other in a document. body(first token, n, position of the first). A bug where a
/// table of `rows` positions has no row for a token.
template <class Body>
void for_document_runs(const DocumentPositions& documents, int64_t sequences, int64_t tokens, int64_t rows, const Body& body) {
  for (int64_t b = 0; b < sequences; ++b)
    for (int64_t t = 0; t < tokens;) {
      const int32_t* at = documents.first + b * documents.stride + t;
      int64_t n = 1;
      while (t + n < tokens && at[n] == at[0] + n) ++n;
      SHARDLAB_CHECK(at[0] >= 0 && at[0] + n <= rows, "positions {} to {} of a table of {}", at[0], at[0] + n - 1, rows);
      body(b * tokens + t, n, int64_t{at[0]});
      t += n;
    }
}

/// The positions of a rank's tokens, without gaps between sequences.
inline void copy_positions(const DocumentPositions& documents, int64_t sequences, int64_t tokens, int32_t* to) {
  for (int64_t b = 0; b < sequences; ++b) std::copy_n(documents.first + b * documents.stride, tokens, to + b * tokens);
}

/// What a LoadBatch writes on its rank: tokens, targets or positions in documents, sequence by sequence in the plan's order of tokens.
class BatchRows {
 public:
  BatchRows(const BoundOp& op, const LoadBatch& w)
      : source_(op.source),
        load_(w),
        sequences_(op.writes[0].shape()[0]),
        first_(op.first_sequence(*op.writes[0].type)),
        per_step_(op.sequences_per_step(*op.writes[0].type)),
        places_(positions_of(op, *op.writes[0].type)),
        length_(logical_shape(*op.writes[0].type, op.mesh())[1]),
        read_(std::make_shared<std::vector<int32_t>>(static_cast<size_t>(w.packed ? 3 * length_ : length_ + 1))) {
    SHARDLAB_CHECK(source_ != nullptr, "`{}` reads a batch and the session has no data", describe(*op.plan, *op.instruction));
  }

  void read(int64_t step, int32_t* to) const {
    const std::span<int32_t> read(*read_);
    const auto n = static_cast<size_t>(length_);
    // A target stands behind its token in the text, wherever that lies; a packed source gives it beside its token.
    const size_t offset = load_.packed ? (load_.positions ? 2 * n : load_.targets ? n : 0) : load_.targets ? 1 : 0;
    for (int64_t i = 0; i < sequences_; ++i) {
      const int64_t number = step * per_step_ + first_ + i;
      if (load_.packed)
        source_->packed(number, {read.subspan(0, n), read.subspan(n, n), read.subspan(2 * n, n)});
      else
        source_->sequence(number, read);
      for (const int64_t place : places_) *to++ = read[offset + static_cast<size_t>(place)];
    }
  }

 private:
  const BatchSource* source_;
  LoadBatch load_;
  int64_t sequences_, first_, per_step_;
  std::vector<int64_t> places_;
  int64_t length_;
  std::shared_ptr<std::vector<int32_t>> read_;
};

}  // namespace shardlab::runtime
