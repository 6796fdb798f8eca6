// Token embedding and learned positions.
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {

void embed_forward(const EmbedForward& a) {
  const size_t bytes = sizeof(float) * static_cast<size_t>(a.width);
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t held = a.ids[row] - a.row_begin;
    if (held >= 0 && held < a.table_rows)
      std::memcpy(a.x + row * a.width, a.table + held * a.width, bytes);
    else
      std::memset(a.x + row * a.width, 0, bytes);
  }
}

namespace {

/// A token of the micro-batch: its id and its place in [sequences, tokens].
struct Token {
  int32_t id;
  int32_t place;
};
inline constexpr int kRadixBits = 8;
inline constexpr int kRadix = 1 << kRadixBits;

/// One stable pass of a radix sort by eight bits of the id.
void radix_pass(const Token* from, Token* to, int64_t n, int shift) {
  int64_t begin[kRadix + 1] = {};
  for (int64_t i = 0; i < n; ++i) ++begin[((from[i].id >> shift) & (kRadix - 1)) + 1];
  for (int d = 0; d < kRadix; ++d) begin[d + 1] += begin[d];
  for (int64_t i = 0; i < n; ++i) to[begin[(from[i].id >> shift) & (kRadix - 1)]++] = from[i];
}

/// The tokens whose row is held, by row and then by place, in `first`; returns their number.
int64_t sort_tokens(const EmbedWeight& a, Token* first, Token* second) {
  int64_t n = 0;
  for (int64_t i = 0; i < a.sequences * a.tokens; ++i) {
    const int64_t held = a.ids[i] - a.row_begin;
    if (held >= 0 && held < a.table_rows) first[n++] = {static_cast<int32_t>(held), static_cast<int32_t>(i)};
  }
  // An even number of passes: the result ends in `first`.
  for (int shift = 0; shift < 32 && (a.table_rows >> shift) != 0; shift += 2 * kRadixBits) {
    radix_pass(first, second, n, shift);
    radix_pass(second, first, n, shift + kRadixBits);
  }
  return n;
}

/// Leaves of one sequence in the numbering of leaves: a power of two, so that a sequence is a subtree.
inline constexpr int64_t kLeafStride = 32;

/// One vector of columns of one row: the sum over its tokens [list, end), leaf by leaf. No partial sum is -0, so that leaves without
/// a token, which would add +0, are left out.
SHARDLAB_INLINE Floats row_sum(const EmbedWeight& a, const PartLeaves& leaves, const Token* list, const Token* end, int64_t column,
                               int n) {
  Floats stack[kSequenceLevels + 8];
  TreeStack tree;
  const auto join = [&](int i) { stack[i] = stack[i] + stack[i + 1]; };
  while (list != end) {
    const int64_t b = list->place / a.tokens, t = list->place % a.tokens;
    int leaf = 0;
    while (leaves.begin(leaf + 1) <= t) ++leaf;
    const int64_t past = b * a.tokens + leaves.begin(leaf + 1);
    Floats sum = zeros();
    for (; list != end && list->place < past; ++list) sum = sum + load_some(a.dx + list->place * a.width + column, n);
    stack[tree.push(static_cast<uint32_t>(b * kLeafStride + leaf), join)] = sum;
  }
  tree.finish(join);
  return stack[0];
}

}  // namespace

void embed_weight(const EmbedWeight& a) {
  expect(a.sequences >= 1 && a.sequences < (1 << (kSequenceLevels - 1)), "embed: 1 <= sequences < 32768", a.sequences);
  expect(a.sequences * a.tokens < (int64_t{1} << 31), "embed: fewer than 2^31 tokens", a.sequences * a.tokens);
  void* scratch = a.scratch;
  Token* tokens = take<Token>(scratch, a.sequences * a.tokens);
  Token* spare = take<Token>(scratch, a.sequences * a.tokens);
  const int64_t count = sort_tokens(a, tokens, spare);
  const PartLeaves leaves(a.part, a.tokens);
  if (!a.accumulate) std::memset(a.dtable, 0, sizeof(float) * static_cast<size_t>(a.table_rows * a.width));
  for (int64_t i = 0; i < count;) {
    int64_t end = i;
    while (end < count && tokens[end].id == tokens[i].id) ++end;
    float* row = a.dtable + tokens[i].id * a.width;
    for_vectors(a.width, [&](int64_t column, int n) {
      const Floats sum = row_sum(a, leaves, tokens + i, tokens + end, column, n);
      store_some(row + column, a.accumulate ? load_some(row + column, n) + sum : sum, n);
    });
    i = end;
  }
}

void positions_forward(const PositionsForward& a) {
  const int64_t n = a.tokens * a.width;
  for (int64_t b = 0; b < a.sequences; ++b)
    for_vectors(
        n, [&](int64_t i, int m) { store_some(a.y + b * n + i, load_some(a.x + b * n + i, m) + load_some(a.table + i, m), m); });
}

void positions_weight(const PositionsWeight& a) {
  expect(a.sequences >= 1 && a.sequences < (1 << (kSequenceLevels - 1)), "positions: 1 <= sequences < 32768", a.sequences);
  const int64_t n = a.tokens * a.width, stride = a.stride != 0 ? a.stride : n;
  for_vectors(n, [&](int64_t i, int m) {
    TreeCounter<Floats, kSequenceLevels> sum;
    for (int64_t b = 0; b < a.sequences; ++b) sum.push(load_some(a.dx + b * stride + i, m));
    const Floats total = sum.total() + zeros();
    store_some(a.dtable + i, a.accumulate ? load_some(a.dtable + i, m) + total : total, m);
  });
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
