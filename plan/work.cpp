// Flops are those of the formulas in docs/canonical-order.md: each addition, multiplication, division, comparison, root or
// elementary function counts 1. Memory is every operand once, but tables of which only some rows are read count those.

#include "plan/work.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "plan/base/documents.h"
#include "plan/base/tree.h"
#include "plan/named_kernels.h"
#include "plan/optimizers.h"
#include "plan/precision.h"
#include "plan/rope_table.h"
#include "plan/row_levels.h"

namespace shardlab {
namespace {

/// Types of an op's operands, by position.
class Operands {
 public:
  Operands(const Segment& segment, const Op& op) : segment_(segment), op_(op) {}

  const Type& read(size_t i) const { return type_of(op_.reads, i, "read"); }
  size_t reads() const { return op_.reads.size(); }
  size_t writes() const { return op_.writes.size(); }
  const Type& write(size_t i) const { return type_of(op_.writes, i, "write"); }
  int64_t memory() const {
    int64_t bytes = 0;
    for (const SlotId s : op_.reads) bytes += segment_.slots[s.index()].type.bytes();
    for (const SlotId s : op_.writes) bytes += segment_.slots[s.index()].type.bytes();
    return bytes;
  }
  const Segment& segment() const { return segment_; }
  const Op& op() const { return op_; }
  int64_t read_elements() const {
    int64_t n = 0;
    for (const SlotId s : op_.reads) n += segment_.slots[s.index()].type.shape.elements();
    return n;
  }

 private:
  const Type& type_of(const std::vector<SlotId>& slots, size_t i, std::string_view what) const {
    SHARDLAB_CHECK(i < slots.size() && slots[i] && slots[i].index() < segment_.slots.size(), "{} `{}` of `{}` lacks {} {}",
                   kind_of(op_.work), op_.label, segment_.name, what, i);
    return segment_.slots[slots[i].index()].type;
  }
  const Segment& segment_;
  const Op& op_;
};

int64_t elements(const Type& t) { return t.shape.elements(); }

std::vector<int64_t> extents_of(const Linear& linear, const Operands& o) {
  if (linear.phase == Phase::kW) {  // x[tokens, in], dy[tokens, out] -> dw[out, in]
    const int64_t in = o.read(0).shape.last(), out = o.read(1).shape.last();
    return {out, in, elements(o.read(0)) / in};
  }
  const Shape& w = o.read(1).shape;  // [out, in]
  int64_t tokens = rows_of(o.read(0));
  if (linear.strips > 1) tokens = std::min(tokens, rows_of(o.write(0)));  // of the strip
  return linear.phase == Phase::kI ? std::vector<int64_t>{tokens, w[1], w[0]} : std::vector<int64_t>{tokens, w[0], w[1]};
}

// --- flops ---------------------------------------------------------------------------------------------------------------

int64_t flops_of(const LoadBatch&, const Operands&) { return 0; }
int64_t flops_of(const Embed& w, const Operands& o) { return w.phase == Phase::kW ? elements(o.read(1)) : 0; }
int64_t flops_of(const Positions& w, const Operands& o) {
  return w.phase == Phase::kW ? elements(o.read(0)) : elements(o.write(0));
}

/// Per element. F: mean 1, variance 3, then subtract, scale, gamma, beta; rms: square sum 2, scale, gamma.
/// I: dy gamma 1, xhat 2 (rms 1), mean of g 1 (rms 0), of g xhat 2, combination 4 (rms 3), residual 1. W: xhat, times dy,
/// sum, dbeta's sum.
int64_t flops_of(const Norm& w, const Operands& o) {
  const int64_t n = elements(o.read(0));
  if (w.phase == Phase::kF) return n * (w.rms ? 4 : 8);
  if (w.phase == Phase::kI) return n * ((w.rms ? 7 : 10) + (w.residual ? 1 : 0));
  if (w.over == SumOver::kSequences) return n * (w.rms ? 1 : 2);
  return n * (w.rms ? 3 : 5);
}

int64_t flops_of(const Linear& w, const Operands& o) {
  const std::vector<int64_t> e = extents_of(w, o);
  const int64_t bias = !w.bias ? 0 : w.phase == Phase::kW ? elements(o.read(1)) : w.phase == Phase::kF ? e[0] * e[1] : 0;
  return 2 * e[0] * e[1] * e[2] + bias;
}

/// Of summands all but one are added.
int64_t flops_of(const Strips& w, const Operands& o) {
  return w.sum ? elements(o.write(0)) * (static_cast<int64_t>(o.reads()) - 1) : 0;
}

/// Each pair of a query or key: 4 products, 2 sums.
int64_t flops_of(const Rope& w, const Operands& o) {
  const int64_t rows = w.heads + 2 * w.kv_heads;
  return rows == 0 ? 0 : elements(o.read(0)) / rows * (w.heads + w.kv_heads) * 3;
}

/// Each pair of a query, and of the shared part of the key: 4 products, 2 sums. I: of every key, and a sum an element over the heads.
int64_t flops_of(const LatentHeads& w, const Operands& o) {
  const Type& qkv = w.phase == Phase::kI ? o.read(0) : o.write(0);
  const int64_t tokens = qkv.shape[0] * qkv.shape[1], heads = w.heads;
  if (w.phase == Phase::kF) return tokens * w.rope * 3 * (heads + 1);
  return tokens * w.rope * (3 * 2 * heads + heads - 1);
}

/// Per element of q and k, as of an RMSNorm.
int64_t flops_of(const HeadNorm& w, const Operands& o) {
  if (w.over == SumOver::kSequences) return elements(o.read(0)) + elements(o.read(1));
  const int64_t rows = w.heads + 2 * w.kv_heads, n = rows == 0 ? 0 : elements(o.read(0)) / rows * (w.heads + w.kv_heads);
  return n * (w.phase == Phase::kF ? 4 : w.phase == Phase::kI ? 7 : 3);
}

/// Pairs of a query and a key that it sees, in a sequence: those of one document, or what is expected of packed ones. Within a window
/// they are a band of the causal triangle, and the order of the tokens moves none.
int64_t pairs_of_sequence(const Attention& w, int64_t tokens) {
  if (w.document > 0) return std::llround(expected_pairs({}, tokens, w.document, 0, tokens, 0, tokens, w.window));
  return seen_pairs({}, tokens, 0, tokens, 0, tokens, w.window);
}

/// Per query head and causal (query, key) pair. F: products of d and of v_dim multiply-adds, scale, maximum, subtract, exp, sum.
/// I: five products (scores again, dq, dk of d; dp, dv of v_dim), scale, subtract, exp, subtract, product, scale.
template <class W>
int64_t flops_of_pair(const W& w) {
  const int64_t d = w.head_dim, v = value_dim_of(w);
  return w.phase == Phase::kF ? 2 * (d + v) + 5 : 6 * d + 4 * v + 6;
}

/// Of all pairs; of phase I 2 for do . o per output beside.
int64_t flops_of(const Attention& w, const Operands& o) {
  const Type& qkv = w.phase == Phase::kI ? o.read(3) : o.read(0);
  const int64_t sequences = qkv.shape[0], tokens = qkv.shape[1];
  const int64_t pairs = sequences * w.heads * pairs_of_sequence(w, tokens);
  return pairs * flops_of_pair(w) + (w.phase == Phase::kF ? 0 : 2 * elements(o.read(0)));
}

int64_t flops_of(const SplitHeads&, const Operands&) { return 0; }
/// Without the pairs, which depend on the rank: see `work_of`. F: a division a result, and with `carry` two products and a sum more.
int64_t flops_of(const AttentionBlock& w, const Operands& o) {
  if (w.phase == Phase::kF) return elements(o.write(0)) * (w.partial ? 0 : w.carry ? 4 : 1);
  return 2 * elements(o.read(0)) + (w.carry ? elements(o.write(0)) : 0) + (w.carry_kv ? elements(o.write(1)) : 0);
}
/// F: each part but the first two products and a sum, and a division a result. I: a sum each, over parts and over a group's heads.
int64_t flops_of(const AttentionMerge& w, const Operands& o) {
  const auto parts = static_cast<int64_t>(o.reads()) / (w.phase == Phase::kF ? 2 : 1);
  if (w.phase == Phase::kF) return elements(o.write(0)) * (3 * (parts - 1) + 1);
  return elements(o.read(0)) * parts - elements(o.write(0));
}

/// gelu: u^3 2, inner 3, tanh 1, outer 3; its derivative adds 11. swiglu per output: negate, exp, add, divide,
/// times; derivative 12.
int64_t flops_of(const Activation& w, const Operands& o) {
  const Type& a = w.phase == Phase::kF ? o.write(0) : o.read(0);
  const int64_t n = w.counted ? w.rows * a.shape.last() : elements(a);
  if (w.phase == Phase::kF) return n * (w.swiglu ? 5 : 9);
  return n * (w.swiglu ? 12 : 20);
}

/// Per logit: maximum, subtract, exp, sum, product; a comparison for each expert of the token. Going back: the scores again, a product
/// and a sum, a subtraction and a product; of the log-sum-exp a product and a sum more.
int64_t flops_of(const Route& w, const Operands& o) {
  if (w.reads_chosen()) return elements(o.read(0)) * 5;
  if (w.phase == Phase::kF) return elements(o.read(0)) * 5 + elements(o.read(0)) * o.write(0).shape.last();
  return elements(o.read(1)) * (9 + (w.balance != 0 ? 1 : 0) + (w.z_loss != 0 ? 2 : 0));
}
int64_t flops_of(const ChooseExperts&, const Operands& o) { return elements(o.read(0)) * (5 + o.write(0).shape.last()); }
/// A sum for each expert that a token goes to.
int64_t flops_of(const ExpertLoad&, const Operands& o) { return elements(o.read(0)); }
/// Of a token's rows all but one are added.
int64_t flops_of(const Dispatch& w, const Operands& o) {
  return w.phase == Phase::kF ? 0 : elements(o.write(0)) * (o.read(1).shape.last() - 1);
}
/// Of the rows that are expected.
int64_t flops_of(const GroupedLinear& w, const Operands& o) {
  const Type& weight = w.phase == Phase::kW ? o.write(0) : o.read(1);
  return 2 * w.rows * weight.shape[1] * weight.shape[2];
}
/// F: a product and a sum an element, less the first sum. I: a product for drows; a product and a sum for dweights.
int64_t flops_of(const Combine& w, const Operands& o) {
  if (w.phase == Phase::kF) return elements(o.write(0)) * (2 * o.read(1).shape.last() - 1);
  return elements(o.read(0)) * 3 * o.read(2).shape.last();
}

/// F: a product. I: two products and a sum. Of a token's gate: negate, exp, add, divide; going back three more.
int64_t flops_of(const Gate& w, const Operands& o) {
  if (w.phase == Phase::kF) return elements(o.read(0)) + 4 * elements(o.read(1));
  return 3 * elements(o.read(0)) + 7 * elements(o.read(2));
}

int64_t flops_of(const Residual& w, const Operands& o) { return elements(o.read(0)) * (w.phase == Phase::kF && w.bias ? 2 : 1); }
int64_t flops_of(const Dropout&, const Operands& o) { return elements(o.read(0)); }

/// Per logit. Maximum 1; sum: subtract, exp, add; gradient: subtract, exp, two products.
int64_t flops_of(const CrossEntropy& w, const Operands& o) {
  static constexpr std::array<int64_t, 5> kPerLogit{8, 4, 1, 3, 4};  // fused, loss only, max, sum, grad
  return elements(o.read(0)) * kPerLogit[static_cast<size_t>(w.part)];
}

int64_t flops_of(const Add&, const Operands& o) { return elements(o.read(0)); }
int64_t flops_of(const Fill&, const Operands&) { return 0; }
int64_t flops_of(const SumScalars&, const Operands& o) { return o.read_elements(); }
int64_t flops_of(const SquaredNorm&, const Operands& o) { return 2 * o.read_elements(); }
int64_t update_flops(const OptimizerRow& row, float weight_decay, const Operands& o) {
  return elements(o.read(0)) * (row.flops + (weight_decay != 0 ? row.decay_flops : 0));
}
int64_t flops_of(const Sgd& w, const Operands& o) { return update_flops(row_of(Optimizer::kSgd), w.weight_decay, o); }
int64_t flops_of(const AdamW& w, const Operands& o) { return update_flops(row_of(Optimizer::kAdamW), w.weight_decay, o); }
int64_t flops_of(const Lion& w, const Operands& o) { return update_flops(row_of(Optimizer::kLion), w.weight_decay, o); }
int64_t flops_of(const AdamW8bit& w, const Operands& o) { return update_flops(row_of(Optimizer::kAdamW8bit), w.weight_decay, o); }
int64_t flops_of(const Copy&, const Operands&) { return 0; }
int64_t flops_of(const Kernel& w, const Operands& o) { return static_cast<int64_t>(kernel_flops(o.segment(), o.op(), w)); }
int64_t flops_of(const Collective&, const Operands&) { return 0; }
int64_t flops_of(const Send&, const Operands&) { return 0; }
int64_t flops_of(const Recv&, const Operands&) { return 0; }
/// Of rows that are put together of copies: the sum of each key and value over them.
int64_t flops_of(const Regroup& w, const Operands& o) {
  if (!w.join || w.copies == 1) return 0;
  const Shape& x = o.write(0).shape;
  return x[0] * x[1] * w.kv_heads * 2 * w.head_dim * (w.copies - 1);
}

// --- memory and payload ------------------------------------------------------------------------------------------------------

/// Bytes of the rows that are expected where `t` holds rows of experts.
int64_t expected_bytes(const Type& t, int64_t rows) { return bytes_of(t.dtype, rows * t.shape.last()); }

int64_t memory_of(const Work& work, const Operands& o) {
  if (moves_packed_rows(o.op())) return 2 * std::min(o.read(0).bytes(), o.write(0).bytes()) + o.read(1).bytes() + o.read(2).bytes();
  if (const auto* w = std::get_if<GroupedLinear>(&work)) {
    const bool weight = w->phase == Phase::kW;
    const auto factors = [&](size_t first) {
      return expected_bytes(o.read(first), w->rows) +
             (weight ? expected_bytes(o.read(first + 1), w->rows) : o.read(first + 1).bytes());
    };
    return factors(0) + (has_scales(o.read(0).dtype) ? factors(3) : 0) + o.read(2).bytes() +
           (weight ? o.write(0).bytes() : expected_bytes(o.write(0), w->rows));
  }
  if (const auto* w = std::get_if<Activation>(&work); w != nullptr && w->counted)
    return expected_bytes(o.read(0), w->rows) + (w->phase == Phase::kI ? expected_bytes(o.read(1), w->rows) : 0) +
           expected_bytes(o.write(0), w->rows);
  if (const auto* w = std::get_if<Linear>(&work); w != nullptr && w->strips > 1) {
    // Rows of the strip: the others of the operands that have them are not touched.
    const std::vector<int64_t> e = extents_of(*w, o);
    const Type &x = o.read(0), &y = o.write(0);
    return bytes_of(x.dtype, e[0] * x.shape.last()) + o.read(1).bytes() + (w->bias ? o.read(2).bytes() : 0) +
           bytes_of(y.dtype, e[0] * y.shape.last());
  }
  if (const auto* kernel = std::get_if<Kernel>(&work); kernel != nullptr && meaning_of(*kernel) == KernelMeaning::kFit)
    return o.read(1).bytes() + o.write(0).bytes() + o.read(2).bytes() + o.write(1).bytes();  // the rows give their number
  if (const auto* kernel = std::get_if<Kernel>(&work); kernel != nullptr && kernel->counted)
    return expected_bytes(o.read(0), kernel->rows) + expected_bytes(o.write(0), kernel->rows) +
           expected_bytes(o.write(1), kernel->rows) + o.read(1).bytes();
  const Embed* embed = std::get_if<Embed>(&work);
  if (!embed || embed->phase != Phase::kF) return o.memory();
  return o.read(0).bytes() + 2 * o.write(0).bytes();  // a row of the table for each row written
}

int64_t payload_of(const Work& work, const Operands& o) {
  if (moves_packed_rows(o.op())) return std::min(o.read(0).bytes(), o.write(0).bytes());
  if (const auto* c = std::get_if<Collective>(&work))
    return c->kind == CollectiveKind::kAllGather ? o.write(0).bytes() : o.read(0).bytes();
  if (std::holds_alternative<Send>(work)) return o.read(0).bytes();
  if (std::holds_alternative<Recv>(work)) return o.write(0).bytes();
  return 0;
}

// --- scratch -----------------------------------------------------------------------------------------------------------------

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
int64_t floats(int64_t n) { return aligned(4 * n); }

int64_t product_scratch(int64_t k, bool canonical) {
  if (!canonical) return 0;
  const int64_t columns = std::clamp<int64_t>((int64_t{1} << 18) / std::max<int64_t>(k, 1) / 64 * 64, 64, 512);
  return floats(8 * k) + floats(columns * k);
}

int64_t scratch_of(const Linear& w, const Operands& o, bool canonical) { return product_scratch(extents_of(w, o)[2], canonical); }

/// Of `s` keys. In canonical mode dk and dv are held at each level of a tree over 16 leaves and the heads of a group.
template <class W>
int64_t attention_scratch(const W& w, int64_t s, bool canonical) {
  const int64_t d = w.head_dim, v = value_dim_of(w), row = padded(s);
  if (w.phase == Phase::kF) return floats(d * row) + floats(s * padded(v)) + floats(4 * row);
  int64_t entries = canonical ? 6 : 1;
  for (int n = w.heads / w.kv_heads - 1; canonical && n > 0; n /= 2) ++entries;
  return floats(d * row) + floats(v * row) + floats(s * padded(d)) + 2 * floats(4 * row) + floats(4 * padded(d)) +
         floats(4 * padded(v)) + floats(entries * s * padded(d)) + floats(entries * s * padded(v));
}

int64_t scratch_of(const Attention& w, const Operands& o, bool canonical) {
  return attention_scratch(w, (w.phase == Phase::kI ? o.read(3) : o.read(0)).shape[1], canonical);
}
int64_t scratch_of(const AttentionBlock& w, const Operands& o, bool canonical) {
  return attention_scratch(w, (w.phase == Phase::kI ? o.read(4) : o.read(1)).shape[1], canonical);
}

/// W of packed documents: the rows of tokens in the table, and the scratch of a sum over the rows of an embedding.
int64_t scratch_of(const Positions& w, const Operands& o, bool) {
  if (w.phase == Phase::kF || !w.packed) return 0;
  const int64_t tokens = o.read(0).shape[0] * o.read(0).shape[1];
  return floats(tokens) + 2 * aligned(8 * tokens);
}

int64_t scratch_of(const Embed& w, const Operands& o, bool) {
  return w.phase == Phase::kW ? 2 * aligned(8 * elements(o.read(0))) : 0;
}

/// W: sums by head, by leaf and by sequence, one over all, and where they lie.
int64_t scratch_of(const HeadNorm& w, const Operands& o, bool) {
  if (w.phase != Phase::kW || w.over == SumOver::kSequences) return 0;
  const int64_t sequences = o.read(0).shape[0];
  return floats((w.heads + kContractionLeaves + sequences + 1) * w.head_dim) +
         aligned(8 * std::max<int64_t>({int64_t{w.heads}, int64_t{kContractionLeaves}, sequences}));
}

/// Most of a product whose contraction is of `k` elements or fewer.
int64_t product_scratch_up_to(int64_t k) {
  return floats(8 * k) + floats(std::min<int64_t>(512 * k, std::max<int64_t>(int64_t{1} << 18, 64 * k)));
}

/// Four rows of numbers by expert; with a capacity forward counts the rows that each expert has of a sequence.
int64_t scratch_of(const Route& w, const Operands& o, bool) {
  const bool forward = w.phase == Phase::kF;
  return (forward && w.capacity > 0 ? 5 : 4) * floats(o.read(forward ? 0 : 1).shape.last());
}
int64_t scratch_of(const ChooseExperts&, const Operands& o, bool) { return 4 * floats(o.read(0).shape.last()); }
/// The places of a token's rows, and how many rows each expert has so far.
int64_t scratch_of(const Dispatch& w, const Operands& o, bool) { return floats(elements(o.read(1))) + floats(w.experts); }
int64_t scratch_of(const Combine& w, const Operands& o, bool) {
  return floats(elements(o.read(w.phase == Phase::kF ? 2 : 3))) + floats(w.experts);
}
/// W: where each expert's rows begin, by source; canonical: runs of rows and ends of leaves too, and a product over all rows.
int64_t scratch_of(const GroupedLinear& w, const Operands& o, bool canonical) {
  if (w.phase != Phase::kW) return product_scratch(o.read(1).shape[w.phase == Phase::kF ? 2 : 1], canonical);
  const Shape& counts = o.read(2).shape;
  const int64_t begins = aligned(8 * w.sources * (counts[2] + 1));
  if (!canonical) return begins;
  return begins + aligned(16 * w.sources) + aligned(8 * (counts[1] + 1)) + product_scratch_up_to(o.read(0).shape[1]);
}

int64_t scratch_of(const Collective&, const Operands& o, bool) { return row_stage_bytes(o.segment(), o.op()); }

template <class Other>
int64_t scratch_of(const Other&, const Operands&, bool) {
  return 0;
}

// On narrow storage: blocks of operands in fp32, as kernels/mixed.h cuts them. A window is there for narrow operands only,
// a panel always.

constexpr int64_t kBlock = 4096, kColumns = 64;

bool is_narrow(const Type& t) {
  return t.dtype == DType::bf16 || t.dtype == DType::f16 || t.dtype == DType::f8e4m3 || t.dtype == DType::f8e5m2;
}
int64_t window(const Type& t, int64_t n) { return is_narrow(t) ? floats(n) : 0; }
/// Whole rows of so many elements as fill a block.
int64_t block_of_rows(int64_t width) { return std::max<int64_t>(1, kBlock / std::max<int64_t>(1, width)) * width; }

/// Windows of `n` elements for every narrow operand.
int64_t windows(const Operands& o, int64_t n) {
  int64_t bytes = 0;
  for (size_t i = 0; i < o.reads(); ++i) bytes += window(o.read(i), n);
  for (size_t i = 0; i < o.writes(); ++i) bytes += window(o.write(i), n);
  return bytes;
}

/// Rows that a sum over tokens takes in one launch: sequences that are summed apart are taken one after another.
int64_t rows_at_once(SumOver over, const Type& gradient) {
  return over == SumOver::kTokens ? rows_of(gradient) / gradient.shape[0] : rows_of(gradient);
}

int64_t narrow_scratch(const Norm& w, const Operands& o, bool) {
  const size_t beta = 2;
  const int64_t width = o.read(0).shape.last(), block = block_of_rows(width);
  if (w.phase == Phase::kF)
    return window(o.read(0), block) + window(o.write(0), block) + window(o.read(1), width) +
           (w.rms ? 0 : window(o.read(beta), width));
  if (w.phase == Phase::kI)
    return window(o.read(0), block) + window(o.read(1), block) + window(o.write(0), block) + window(o.read(2), width) +
           (w.residual ? window(o.read(4), block) : 0);
  if (w.over == SumOver::kSequences) {  // one sum after another
    int64_t widest = 0;
    for (size_t i = 0; i < o.writes(); ++i) widest = std::max(widest, window(o.write(i), kColumns));
    return floats(rows_of(o.read(0)) * kColumns) + widest;
  }
  return 2 * floats(rows_at_once(w.over, o.read(0)) * kColumns) + window(o.write(0), kColumns) +
         (w.rms ? 0 : window(o.write(1), kColumns));
}

int64_t narrow_scratch(const HeadNorm& w, const Operands& o, bool canonical) {
  if (w.phase != Phase::kW) {
    const int64_t block = block_of_rows(o.write(0).shape.last());
    const bool forward = w.phase == Phase::kF;
    return window(o.read(0), block) + window(o.write(0), block) + (forward ? 0 : window(o.read(1), block)) +
           window(o.read(forward ? 1 : 2), w.head_dim) + window(o.read(forward ? 2 : 3), w.head_dim);
  }
  if (w.over == SumOver::kSequences) {  // one sum after another
    const int64_t widest = std::max(window(o.write(0), kColumns), window(o.write(1), kColumns));
    return floats(rows_of(o.read(0)) * kColumns) + widest;
  }
  return window(o.read(0), w.head_dim) + window(o.read(1), w.head_dim) + window(o.write(0), elements(o.write(0))) +
         window(o.write(1), elements(o.write(1))) + scratch_of(w, o, canonical);
}

int64_t narrow_scratch(const Linear& w, const Operands& o, bool canonical) {
  const auto e = extents_of(w, o);  // F [tokens, out, in], I [tokens, in, out], W [out, in, tokens]
  const int64_t product = product_scratch(e[2], canonical);
  if (w.phase == Phase::kW) {
    const int64_t outs = std::min<int64_t>(e[0], 64), ins = std::min<int64_t>(e[1], 128);
    const int64_t factors = floats(e[2] * outs) + floats(e[2] * ins) + floats(outs * ins);
    if (has_scales(o.read(0).dtype))  // the bias is a sum of its own
      return factors + product + (w.bias ? floats(e[2] * kColumns) + window(o.write(1), kColumns) : 0);
    const int64_t blocks = factors + (w.bias ? window(o.write(1), outs) : 0);
    // The library's product of two bf16 factors leaves the bias to a sum over tokens.
    return std::max(blocks + product, w.bias ? floats(e[2] * kColumns) + window(o.write(1), kColumns) : 0);
  }
  const int64_t rows = std::min<int64_t>(e[0], 128), columns = std::min<int64_t>(e[1], 64);
  const int64_t result = floats(rows * columns), left = window(o.read(0), rows * e[2]);
  if (w.phase == Phase::kI) return left + floats(e[2] * columns) + result + product;
  const size_t bias = has_scales(o.read(0).dtype) ? 4 : 2;
  return left + window(o.read(1), columns * e[2]) + (w.bias ? window(o.read(bias), columns) : 0) + result + product;
}

int64_t narrow_scratch(const SplitHeads&, const Operands& o, bool) {
  bool through = false;
  for (const Type* whole : {&o.read(0), &o.write(0)})
    for (size_t i = 0; i < std::max(o.reads(), o.writes()); ++i) {
      const Type& part = whole == &o.read(0) ? o.write(std::min(i, o.writes() - 1)) : o.read(std::min(i, o.reads() - 1));
      through = through || (is_narrow(*whole) && is_narrow(part));
    }
  return through ? floats(kBlock) : 0;
}

int64_t narrow_scratch(const LatentHeads& w, const Operands& o, bool) {
  const bool back = w.phase == Phase::kI;
  const Type& qkv = back ? o.read(0) : o.write(0);
  const int64_t rows = std::max<int64_t>(1, kBlock / qkv.shape.last());
  int64_t bytes = window(qkv, rows * qkv.shape.last());
  for (size_t i = 0; i < 3; ++i) {
    const Type& part = back ? o.write(i) : o.read(i);
    bytes += window(part, rows * part.shape.last());
  }
  return bytes;
}

int64_t narrow_scratch(const AttentionBlock& w, const Operands& o, bool canonical) {
  const bool back = w.phase == Phase::kI;
  const int64_t sq = o.read(back ? 3 : 0).shape[1], sk = o.read(back ? 4 : 1).shape[1], heads = w.heads / w.kv_heads,
                d = w.head_dim, v = value_dim_of(w);
  const int64_t rows = floats(sq * heads * d), out = floats(sq * heads * v),
                keys = floats(sk * (d + v));  // of one group of query heads
  const int64_t gradient = w.partial ? floats(sk * heads * (d + v)) : keys;
  return (back ? 2 * rows + 2 * out + keys + gradient : rows + out + keys) + attention_scratch(w, sk, canonical);
}

int64_t narrow_scratch(const AttentionMerge& w, const Operands& o, bool) {
  const Type& y = o.write(0);
  if (w.phase == Phase::kF) return window(y, y.shape[1] * y.shape[2]);
  return window(y, block_of_rows(y.shape.last()));
}

int64_t narrow_scratch(const Attention& w, const Operands& o, bool canonical) {
  const Type& qkv = w.phase == Phase::kI ? o.read(3) : o.read(0);
  const int64_t s = qkv.shape[1], heads = w.heads / w.kv_heads, d = w.head_dim, v = value_dim_of(w);
  const int64_t one = floats(s * (heads * d + d + v)) + floats(s * heads * v);  // of one group of query heads
  return (w.phase == Phase::kI ? 2 : 1) * one + attention_scratch(w, s, canonical);
}

int64_t narrow_scratch(const Embed& w, const Operands& o, bool) {
  const int64_t width = w.phase == Phase::kF ? o.write(0).shape.last() : o.read(1).shape.last();
  if (w.phase == Phase::kF) return window(o.read(1), width) + window(o.write(0), width);
  const int64_t tokens = elements(o.read(0)), columns = std::min(width, kColumns);
  return 2 * floats(tokens) + 2 * floats(tokens * columns) + 2 * aligned(8 * tokens);
}

int64_t narrow_scratch(const Positions& w, const Operands& o, bool) {
  if (w.phase == Phase::kF) return windows(o, kBlock);
  if (w.packed) {
    const int64_t tokens = o.read(0).shape[0] * o.read(0).shape[1], columns = std::min(o.read(0).shape[2], kColumns);
    return 3 * floats(tokens) + 2 * floats(tokens * columns) + 2 * aligned(8 * tokens);
  }
  const int64_t sequences = o.read(0).shape[0], block = std::max<int64_t>(1, kBlock / sequences);
  return floats(sequences * block) + window(o.write(0), block);
}

int64_t narrow_scratch(const Activation& w, const Operands& o, bool) {
  const int64_t inputs = w.swiglu ? 2 : 1;
  if (w.phase == Phase::kF) return window(o.read(0), inputs * kBlock) + window(o.write(0), kBlock);
  return window(o.read(0), kBlock) + window(o.read(1), inputs * kBlock) + window(o.write(0), inputs * kBlock);
}

/// Rows of one token, dense and one at a time; and their places, which an fp32 kernel counts again.
int64_t token_rows(const Type& rows, int64_t top_k) { return window(rows, rows.shape.last()) + floats(top_k * rows.shape.last()); }
int64_t one_token(int64_t top_k, int64_t experts) { return floats(top_k) + floats(experts); }

int64_t narrow_scratch(const Dispatch& w, const Operands& o, bool) {
  const bool back = w.phase == Phase::kI;
  const Type &rows = back ? o.read(0) : o.write(0), &token = back ? o.write(0) : o.read(0);
  const int64_t top_k = o.read(1).shape.last();
  return scratch_of(w, o, false) + one_token(top_k, w.experts) + token_rows(rows, top_k) + window(token, token.shape.last());
}

int64_t narrow_scratch(const Combine& w, const Operands& o, bool) {
  const bool forward = w.phase == Phase::kF;
  const int64_t top_k = o.read(forward ? 2 : 3).shape.last();
  const int64_t places = scratch_of(w, o, false) + one_token(top_k, w.experts);
  if (forward) return places + token_rows(o.read(0), top_k) + window(o.write(0), o.write(0).shape.last());
  return places + token_rows(o.read(1), top_k) + token_rows(o.write(0), top_k) + window(o.read(0), o.read(0).shape.last());
}

int64_t narrow_scratch(const Gate& w, const Operands& o, bool) {
  const int64_t width = o.read(0).shape.last(), rows = block_of_rows(width) / width;
  const bool forward = w.phase == Phase::kF;
  int64_t bytes = window(o.read(0), rows * width) + window(o.write(0), rows * width) + window(o.read(forward ? 1 : 2), rows);
  return forward ? bytes : bytes + window(o.read(1), rows * width) + window(o.write(1), rows);
}

/// W: an expert's rows are put together, so that there is one run of them.
int64_t narrow_scratch(const GroupedLinear& w, const Operands& o, bool canonical) {
  const int64_t rows = o.read(0).shape[1];
  if (w.phase == Phase::kW) {
    const Shape &dw = o.write(0).shape, &counts = o.read(2).shape;
    const int64_t outs = std::min<int64_t>(dw[1], 64), ins = std::min<int64_t>(dw[2], 128);
    const int64_t held = canonical ? rows : std::min<int64_t>(rows, 1024);
    const int64_t found = aligned(8 * w.sources * (counts[2] + 1)) + (canonical ? aligned(8 * (counts[1] + 1)) : 0);
    return found + floats(held * outs) + floats(held * ins) + floats(outs * ins) + (canonical ? product_scratch_up_to(rows) : 0);
  }
  const Shape& weight = o.read(1).shape;
  const bool back = w.phase == Phase::kI;
  const int64_t from = weight[back ? 1 : 2], to = weight[back ? 2 : 1];
  const int64_t block = std::min<int64_t>(rows, 128), columns = std::min<int64_t>(to, 64);
  const int64_t left = window(o.read(0), block * from), result = floats(block * columns);
  return left + (back ? floats(from * columns) : window(o.read(1), columns * from)) + result + product_scratch(from, canonical);
}

int64_t narrow_scratch(const Residual& w, const Operands& o, bool) {
  const int64_t width = o.read(0).shape.last(), block = block_of_rows(width);
  if (w.phase == Phase::kW) return floats(rows_at_once(w.over, o.read(0)) * kColumns) + window(o.write(0), kColumns);
  return window(o.read(0), block) + window(o.read(1), block) + window(o.write(0), block) + (w.bias ? window(o.read(2), width) : 0);
}

int64_t narrow_scratch(const Rope&, const Operands& o, bool) { return window(o.write(0), block_of_rows(o.write(0).shape.last())); }
int64_t narrow_scratch(const Dropout&, const Operands& o, bool) {
  return window(o.write(0), block_of_rows(o.write(0).shape.last()));
}

int64_t narrow_scratch(const CrossEntropy& w, const Operands& o, bool) {
  using Part = CrossEntropy::Part;
  const Type& logits = o.read(0);
  return window(logits, block_of_rows(logits.shape.last())) +
         (w.part == Part::kMax || w.part == Part::kSum ? 0 : floats(rows_of(logits)));
}

int64_t narrow_scratch(const Copy&, const Operands& o, bool) {
  return is_narrow(o.read(0)) && is_narrow(o.write(0)) && o.read(0).dtype != o.write(0).dtype ? floats(kBlock) : 0;
}
int64_t narrow_scratch(const Add&, const Operands& o, bool) { return windows(o, kBlock); }
int64_t narrow_scratch(const Fill&, const Operands& o, bool) { return windows(o, kBlock); }
int64_t narrow_scratch(const SquaredNorm&, const Operands&, bool) { return floats(kBlock); }
/// Whether an op is an update with a factor, by which it multiplies the gradient in blocks.
bool scales_gradient(const Operands& o) {
  const OptimizerRow* row = update_of(o.op().work);
  return row != nullptr && o.reads() > update_operands(*row);
}
/// Blocks of the gradient, as it is and multiplied, of the parameter and of its state.
int64_t update_scratch(const Operands& o) {
  int64_t bytes = window(o.read(0), kBlock) + (scales_gradient(o) ? floats(kBlock) : 0);
  for (size_t i = 0; i < o.writes(); ++i) bytes += window(o.write(i), kBlock);
  return bytes;
}
int64_t narrow_scratch(const Sgd&, const Operands& o, bool) { return update_scratch(o); }
int64_t narrow_scratch(const AdamW&, const Operands& o, bool) { return update_scratch(o); }
int64_t narrow_scratch(const Lion&, const Operands& o, bool) { return update_scratch(o); }
/// And a block of both moments.
int64_t narrow_scratch(const AdamW8bit&, const Operands& o, bool) { return update_scratch(o) + floats(2 * kMomentBlock); }
/// A canonical tree over `rows` parts, a block of each at a time: the parts, and where they lie.
int64_t tree_scratch(int64_t rows, int64_t block) { return floats(rows * block) + aligned(8 * rows); }

/// Scratch bytes of a kernel by name, in the form that its row gives. A kernel that asks for more at run time gets a block of its
/// own from the back end.
int64_t kernel_scratch(const Kernel& w, const Operands& o) {
  const NamedKernel* row = find_kernel(w.name);
  switch (row == nullptr ? KernelScratch::kBlocks : row->scratch) {
    case KernelScratch::kBlocks: break;
    case KernelScratch::kNarrowCopy: return is_narrow(o.read(0)) && is_narrow(o.write(0)) ? floats(kBlock) : 0;
    case KernelScratch::kTree: {
      const int64_t rows = o.read(0).shape[0], block = std::max<int64_t>(2, kBlock / std::max<int64_t>(1, rows) / 2 * 2);
      return tree_scratch(rows, block) + window(o.write(0), block);
    }
    case KernelScratch::kBasis: return aligned(8 * elements(o.read(0)));
    case KernelScratch::kProjection:
      if (is_narrow(o.read(0)) || is_narrow(o.read(1)) || is_narrow(o.write(0))) break;
      return floats(std::min<int64_t>(rows_of(o.read(0)), 128) * std::min<int64_t>(rows_of(o.read(1)), 64)) +
             product_scratch(o.read(0).shape.last(), true);
    case KernelScratch::kDraws: return windows(o, kBlock) + floats(kBlock);
    case KernelScratch::kScattered: {
      const int64_t parts = rows_of(o.read(0)), block = std::max<int64_t>(1, kBlock / std::max<int64_t>(1, parts));
      return tree_scratch(parts, block) + aligned(8 * parts) + window(o.write(0), block);
    }
    case KernelScratch::kTwoPasses: return 2 * window(o.read(0), kBlock) + window(o.write(0), kBlock);
    case KernelScratch::kOneBlock: return std::min(floats(kBlock), windows(o, kBlock));
  }
  return windows(o, kBlock);
}
int64_t narrow_scratch(const Kernel& w, const Operands& o, bool) { return kernel_scratch(w, o); }
int64_t narrow_scratch(const Collective& w, const Operands& o, bool canonical) { return scratch_of(w, o, canonical); }
template <class Other>
int64_t narrow_scratch(const Other&, const Operands&, bool) {
  return 0;
}

bool any_narrow(const Operands& o) {
  for (size_t i = 0; i < o.reads(); ++i)
    if (is_narrow(o.read(i))) return true;
  for (size_t i = 0; i < o.writes(); ++i)
    if (is_narrow(o.write(i))) return true;
  return false;
}

}  // namespace

BlockParts block_parts(const Segment& segment, const Op& op, const Mesh& mesh, const Coordinates& at) {
  const AttentionBlock& w = std::get<AttentionBlock>(op.work);
  const bool forward = w.phase == Phase::kF;
  const Type &q = segment.slots[op.reads[forward ? 0 : 3].index()].type,
             &kv = segment.slots[op.reads[forward ? 1 : 4].index()].type;
  const int64_t total = logical_shape(q, mesh)[1];
  BlockParts parts{{logical_origin(q, mesh, at)[1], q.shape[1], total}, {0, kv.shape[1], total}};
  if (kv.shape[1] == total) return parts;
  for (size_t a = 0; a < mesh.axes.size(); ++a) {
    const int size = mesh.axes[a].size;
    if (size > 1 && q.place[a] == Placement::shard(1)) parts.keys.begin = ((at[a] + w.turn) % size + size) % size * kv.shape[1];
  }
  return parts;
}

int strip_axis(const Segment& segment, const Op& op, const Mesh& mesh) {
  const auto place = [&](SlotId slot, size_t axis) { return segment.slots[slot.index()].type.place[axis]; };
  const auto* linear = std::get_if<Linear>(&op.work);
  if (op.reads.size() < 2 || op.writes.empty()) return -1;
  for (size_t a = 0; a < mesh.axes.size(); ++a) {
    const Placement other = place(op.reads[1], a);  // the weight of a product; a strip of another rank, which no result is
    const bool of_product = linear != nullptr && mesh.axes[a].size == linear->strips && other.is_shard();
    const bool of_strips = linear == nullptr && static_cast<size_t>(mesh.axes[a].size) == op.reads.size() &&
                           other.kind == Place::kLocal && place(op.writes[0], a).kind != Place::kLocal;
    if (mesh.axes[a].size > 1 && (of_product || of_strips)) return static_cast<int>(a);
  }
  return -1;
}

int64_t pairs_of_block(const Segment& segment, const Op& op, const Mesh& mesh, const TokenOrder& order, const Coordinates* at) {
  const int64_t document = std::get<AttentionBlock>(op.work).document, window = std::get<AttentionBlock>(op.work).window;
  const auto pairs = [&](const Coordinates& c) {
    const BlockParts p = block_parts(segment, op, mesh, c);
    if (document > 0)
      return static_cast<int64_t>(std::llround(expected_pairs(order, p.queries.total, document, p.queries.begin, p.queries.tokens,
                                                              p.keys.begin, p.keys.tokens, window)));
    return seen_pairs(order, p.queries.total, p.queries.begin, p.queries.tokens, p.keys.begin, p.keys.tokens, window);
  };
  if (at != nullptr) return pairs(*at);
  // Ranks differ along the axes that cut the sequence of the queries.
  const Type& q = segment.slots[op.reads[std::get<AttentionBlock>(op.work).phase == Phase::kF ? 0 : 3].index()].type;
  int64_t most = 0;
  const auto visit = [&](const auto& self, size_t axis, Coordinates& c) -> void {
    if (axis == mesh.axes.size()) {
      most = std::max(most, pairs(c));
      return;
    }
    const int size = q.place[axis] == Placement::shard(1) ? mesh.axes[axis].size : 1;
    for (int i = 0; i < size; ++i) {
      c[axis] = i;
      self(self, axis + 1, c);
    }
  };
  Coordinates c{};
  visit(visit, 0, c);
  return most;
}

WorkAmount work_of(const Segment& segment, const Op& op, const Mesh& mesh, const TokenOrder& order, const Coordinates* at) {
  const Operands operands(segment, op);
  int64_t flops = std::visit([&](const auto& w) { return flops_of(w, operands); }, op.work);
  if (const auto* w = std::get_if<AttentionBlock>(&op.work)) {
    const int64_t sequences = operands.read(0).shape[0];
    flops += sequences * w->heads * pairs_of_block(segment, op, mesh, order, at) * flops_of_pair(*w);
  }
  return {Flops(flops), Bytes(memory_of(op.work, operands)), Bytes(payload_of(op.work, operands))};
}

int64_t scratch_bytes(const Segment& segment, const Op& op, bool canonical) {
  const Operands operands(segment, op);
  if (scales_gradient(operands) || any_narrow(operands) || std::holds_alternative<AdamW8bit>(op.work))
    return std::visit([&](const auto& w) { return narrow_scratch(w, operands, canonical); }, op.work);
  if (const Kernel* kernel = std::get_if<Kernel>(&op.work)) return kernel_scratch(*kernel, operands);
  return std::visit([&](const auto& w) { return scratch_of(w, operands, canonical); }, op.work);
}

int64_t rope_table_elements(const Segment& segment, const Op& op) {
  const Operands operands(segment, op);
  const auto rows = [&](bool packed) {  // packed: a row for each position of a sequence
    return operands.read(packed ? operands.reads() - 1 : 0).shape[1];
  };
  if (const Rope* rope = std::get_if<Rope>(&op.work)) return rows(rope->packed) * rope->head_dim;
  if (const LatentHeads* latent = std::get_if<LatentHeads>(&op.work)) return rows(latent->packed) * latent->rope;
  return 0;
}

std::vector<int64_t> matmul_extents(const Segment& segment, const Op& op) {
  const Linear* linear = std::get_if<Linear>(&op.work);
  SHARDLAB_CHECK(linear != nullptr, "matmul extents of a {}", kind_of(op.work));
  return extents_of(*linear, Operands(segment, op));
}

bool works_on_host(const Segment& segment, const Op& op) {
  for (const auto* operands : {&op.reads, &op.writes})
    for (const SlotId slot : *operands)
      if (segment.slots[slot.index()].space == Space::kDevice) return false;
  return true;
}

void add_workspaces(Plan& plan, bool canonical) {
  add_workspaces(plan, [&](const Segment& segment, const Op& op) { return scratch_bytes(segment, op, canonical); });
}

void add_workspace(const Plan& plan, Role& role, std::string name, DType dtype, int64_t elements, Space space) {
  if (elements == 0) return;
  if (const auto known = std::ranges::find(role.buffers, name, &Buffer::name); known != role.buffers.end()) {
    known->type.shape = {elements};
    return;
  }
  Buffer b;
  b.name = std::move(name);
  b.type.dtype = dtype;
  b.type.shape = {elements};
  // Nothing is said of its values, on any rank.
  for (size_t a = 0; a < plan.mesh.axes.size(); ++a)
    if (plan.mesh.axes[a].size > 1) b.type.place[a] = Placement::local();
  b.kind = BufferClass::kWorkspace;
  b.space = space;
  b.persistent = true;
  role.buffers.push_back(std::move(b));
}

void add_workspaces(Plan& plan, const std::function<int64_t(const Segment&, const Op&)>& scratch) {
  struct Needs {
    std::vector<int64_t> scratch;     ///< by stream
    std::map<float, int64_t> tables;  ///< elements, by base
  };
  std::vector<Needs> by_segment(plan.segments.size(), {std::vector<int64_t>(plan.streams.size()), {}});
  std::vector<Space> space(plan.streams.size(), Space::kHost);  // of a stream's workspace: one that only hosts' ops need is theirs
  for (size_t s = 0; s < plan.segments.size(); ++s)
    for (const Step& step : plan.segments[s].steps)
      if (const Op* op = std::get_if<Op>(&step)) {
        int64_t& most = by_segment[s].scratch[op->stream.index()];
        const int64_t bytes = scratch(plan.segments[s], *op);
        if (bytes > 0 && !works_on_host(plan.segments[s], *op)) space[op->stream.index()] = Space::kDevice;
        most = std::max(most, bytes);
        if (const auto base = rope_base(*op)) {
          int64_t& table = by_segment[s].tables[*base];
          table = std::max(table, rope_table_elements(plan.segments[s], *op));
        }
      }
  for (Role& role : plan.roles) {
    Needs needs{std::vector<int64_t>(plan.streams.size()), {}};
    for (const Item& item : role.program)
      if (const Call* call = std::get_if<Call>(&item)) {
        const Needs& n = by_segment[call->segment.index()];
        for (size_t i = 0; i < needs.scratch.size(); ++i) needs.scratch[i] = std::max(needs.scratch[i], n.scratch[i]);
        for (const auto& [base, elements] : n.tables) needs.tables[base] = std::max(needs.tables[base], elements);
      }
    for (size_t i = 0; i < needs.scratch.size(); ++i)
      add_workspace(plan, role, "workspace." + plan.streams[i], DType::f32, needs.scratch[i] / 4, space[i]);
    for (const auto& [base, elements] : needs.tables)
      add_workspace(plan, role, needs.tables.size() == 1 ? kRopeTable : rope_table_of(base), DType::f32, elements, Space::kDevice);
  }
}

}  // namespace shardlab
