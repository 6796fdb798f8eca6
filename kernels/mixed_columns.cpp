// Mixed storage: the sums over tokens, whose columns are independent of one another, and the loss.
#include <algorithm>
#include <vector>

#include "kernels/window.h"

namespace shardlab::kernels {

namespace {

/// Columns of a sum over tokens that are widened together: four of the widest vectors.
constexpr int64_t kColumns = 64;

}  // namespace

void MixedKernels::norm_weight(const MixedNormWeight& a, Scratch& scratch) const {
  const int64_t rows = a.tokens.rows(), width = a.width;
  Panel dy(s_, a.dy, width, {rows, kColumns}, scratch), x(s_, a.x, width, {rows, kColumns}, scratch);
  Window dgamma(s_, a.dgamma, kColumns, scratch), dbeta(s_, a.rms ? Stored{} : a.dbeta, kColumns, scratch);
  if (scratch.counting()) return;
  for_blocks(width, kColumns, [&](int64_t first, int64_t n) {
    k_.norm_weight({.dy = dy.read(first, {rows, n}),
                    .x = x.read(first, {rows, n}),
                    .stats = a.stats,
                    .dgamma = dgamma.read(first, n),
                    .dbeta = dbeta.read(first, n),
                    .tokens = a.tokens,
                    .width = n,
                    .rms = a.rms,
                    .accumulate = a.accumulate});
    dgamma.write();
    dbeta.write();
  });
}

void MixedKernels::bias_weight(const MixedBiasWeight& a, Scratch& scratch) const {
  const int64_t rows = a.tokens.rows();
  Panel dy(s_, a.dy, a.width, {rows, kColumns}, scratch);
  Window dbias(s_, a.dbias, kColumns, scratch);
  if (scratch.counting()) return;
  for_blocks(a.width, kColumns, [&](int64_t first, int64_t n) {
    k_.bias_weight({dy.read(first, {rows, n}), dbias.read(first, n), a.tokens, n, a.accumulate});
    dbias.write();
  });
}

void MixedKernels::positions_weight(const MixedPositionsWeight& a, Scratch& scratch) const {
  const int64_t width = a.tokens * a.width, block = rows_per_block(a.sequences);
  Panel dx(s_, a.dx, a.stride != 0 ? a.stride : width, {a.sequences, block}, scratch);
  Window dtable(s_, a.dtable, block, scratch);
  if (scratch.counting()) return;
  for_blocks(width, block, [&](int64_t first, int64_t n) {
    k_.positions_weight({dx.read(first, {a.sequences, n}), dtable.read(first, n), a.sequences, 1, n, a.accumulate});
    dtable.write();
  });
}

namespace {

/// Rows of the table that a micro-batch has tokens of, ascending, and for each token which of them, or -1 for a row not held.
int64_t compact_rows(const MixedEmbedWeight& a, int32_t* rows, int32_t* compact) {
  const int64_t tokens = a.sequences * a.tokens;
  int64_t count = 0;
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t held = a.ids[i] - a.row_begin;
    if (held >= 0 && held < a.table_rows) rows[count++] = static_cast<int32_t>(held);
  }
  std::sort(rows, rows + count);
  count = std::unique(rows, rows + count) - rows;
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t held = a.ids[i] - a.row_begin;
    const bool here = held >= 0 && held < a.table_rows;
    compact[i] = here ? static_cast<int32_t>(std::lower_bound(rows, rows + count, static_cast<int32_t>(held)) - rows) : -1;
  }
  return count;
}

/// Rows without a token get +0, which is all-zero bits in every format.
void clear_table(const MixedEmbedWeight& a) {
  std::fill_n(static_cast<char*>(a.dtable.data), a.table_rows * a.width * bytes_per_element(a.dtable.dtype), char{0});
}

}  // namespace

// The table of fp32 sums that the fp32 kernel wants would be as large as the vocabulary: the rows that have tokens are numbered
// anew, and only they are summed, a panel of columns at a time.
void MixedKernels::embed_weight(const MixedEmbedWeight& a, Scratch& scratch) const {
  const int64_t tokens = a.sequences * a.tokens, width = a.width, columns = std::min(width, kColumns);
  auto* rows = scratch.take<int32_t>(tokens);
  auto* compact = scratch.take<int32_t>(tokens);
  Panel dx(s_, a.dx, width, {tokens, columns}, scratch);
  auto* sums = scratch.take<float>(tokens * columns);
  EmbedWeight args{.ids = compact, .sequences = a.sequences, .tokens = a.tokens, .accumulate = a.accumulate, .part = a.part};
  args.scratch = scratch.take_bytes(embed_scratch_bytes(args));
  if (scratch.counting()) return;
  args.table_rows = compact_rows(a, rows, compact);
  if (!a.accumulate) clear_table(a);
  const int64_t size = bytes_per_element(a.dtable.dtype);
  const auto at = [&](int64_t i, int64_t first) { return static_cast<char*>(a.dtable.data) + (rows[i] * width + first) * size; };
  for_blocks(width, kColumns, [&](int64_t first, int64_t n) {
    args.dx = dx.read(first, {tokens, n});
    args.dtable = sums;
    args.width = n;
    for (int64_t i = 0; i < args.table_rows && a.accumulate; ++i) s_.widen({at(i, first), a.dtable.dtype, n, sums + i * n});
    k_.embed_weight(args);
    for (int64_t i = 0; i < args.table_rows; ++i) s_.narrow({sums + i * n, n, a.dtable.dtype, at(i, first)});
  });
}

namespace {

/// nll[b] = token_tree over the losses of its tokens.
void sum_losses(const Tokens& tokens, const float* losses, float* nll) {
  const PartLeaves leaves(tokens.part, tokens.tokens);
  for (int64_t b = 0; b < tokens.sequences; ++b)
    nll[b] = tree_sum(
        0, leaves.count(),
        [&](int64_t leaf) {
          float sum = 0;
          for (int64_t t = leaves.begin(static_cast<int>(leaf)); t < leaves.begin(static_cast<int>(leaf) + 1); ++t)
            sum += losses[b * tokens.tokens + t];
          return sum;
        },
        [](float x, float y) { return x + y; });
}

}  // namespace

// A block of rows is given to the fp32 kernel as so many sequences of one token, so that it returns each token's loss; the sum over
// a sequence's tokens is then formed here. The loss of one token is its own token_tree.
void MixedKernels::cross_entropy(const MixedCrossEntropy& a, Scratch& scratch) const {
  using Form = MixedCrossEntropy::Form;
  const CrossEntropy& whole = a.loss;
  const int64_t rows = whole.tokens.rows(), vocab = whole.vocab, block = rows_per_block(vocab);
  const bool losses_wanted = a.form == Form::kFused || a.form == Form::kLossOnly || a.form == Form::kGrad;
  Window logits(s_, a.logits, block * vocab, scratch);
  auto* losses = scratch.take<float>(losses_wanted ? rows : 0);
  if (scratch.counting()) return;
  for_blocks(rows, block, [&](int64_t first, int64_t n) {
    CrossEntropy part = whole;
    part.logits = logits.read(first * vocab, n * vocab);
    part.tokens = {n, 1, {}};
    part.nll = losses + first;
    part.targets = whole.targets == nullptr ? nullptr : whole.targets + first;
    part.max = whole.max == nullptr ? nullptr : whole.max + first;
    part.sums = whole.sums == nullptr ? nullptr : whole.sums + 2 * first;
    switch (a.form) {
      case Form::kFused: k_.cross_entropy_fused(part); break;
      case Form::kLossOnly: return k_.cross_entropy_loss_only(part);
      case Form::kMax: return k_.cross_entropy_max(part);
      case Form::kSum: return k_.cross_entropy_sum(part);
      case Form::kGrad: k_.cross_entropy_grad(part); break;
    }
    logits.write();
  });
  if (losses_wanted) sum_losses(whole.tokens, losses, whole.nll);
}

}  // namespace shardlab::kernels
