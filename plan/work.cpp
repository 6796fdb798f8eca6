// Flops are those of the formulas in docs/canonical-order.md: each addition, multiplication, division, comparison, root or
// elementary function counts 1. Memory is every operand once, but tables of which only some rows are read count those.

#include "plan/work.h"

namespace shardlab {
namespace {

/// Types of an op's operands, by position.
class Operands {
 public:
  Operands(const Segment& segment, const Op& op) : segment_(segment), op_(op) {}

  const Type& read(size_t i) const { return type_of(op_.reads, i, "read"); }
  const Type& write(size_t i) const { return type_of(op_.writes, i, "write"); }
  int64_t memory() const {
    int64_t bytes = 0;
    for (const SlotId s : op_.reads) bytes += segment_.slots[s.index()].type.bytes();
    for (const SlotId s : op_.writes) bytes += segment_.slots[s.index()].type.bytes();
    return bytes;
  }
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
  const int64_t tokens = elements(o.read(0)) / o.read(0).shape.last();
  return linear.phase == Phase::kI ? std::vector<int64_t>{tokens, w[1], w[0]} : std::vector<int64_t>{tokens, w[0], w[1]};
}

// --- flops ---------------------------------------------------------------------------------------------------------------

int64_t flops_of(const LoadBatch&, const Operands&) { return 0; }
int64_t flops_of(const Embed& w, const Operands& o) { return w.phase == Phase::kW ? elements(o.read(1)) : 0; }
int64_t flops_of(const Positions& w, const Operands& o) {
  return w.phase == Phase::kW ? elements(o.read(0)) : elements(o.write(0));
}

/// Per element. F: mean 1, variance 3, then subtract, scale, gamma, beta; rms: square sum 2, scale, gamma.
/// I: dy gamma 1, xhat 2 (rms 1), mean of g 1 (rms 0), of g xhat 2, combination 4 (rms 3), residual 1. W: xhat, times dy, sum,
/// dbeta's sum.
int64_t flops_of(const Norm& w, const Operands& o) {
  const int64_t n = elements(o.read(0));
  if (w.phase == Phase::kF) return n * (w.rms ? 4 : 8);
  if (w.phase == Phase::kI) return n * ((w.rms ? 7 : 10) + (w.residual ? 1 : 0));
  return n * (w.rms ? 3 : 5);
}

int64_t flops_of(const Linear& w, const Operands& o) {
  const std::vector<int64_t> e = extents_of(w, o);
  const int64_t bias = !w.bias ? 0 : w.phase == Phase::kW ? elements(o.read(1)) : w.phase == Phase::kF ? elements(o.write(0)) : 0;
  return 2 * e[0] * e[1] * e[2] + bias;
}

/// Each pair of a query or key: 4 products, 2 sums.
int64_t flops_of(const Rope& w, const Operands& o) {
  const int64_t rows = w.heads + 2 * w.kv_heads;
  return rows == 0 ? 0 : elements(o.read(0)) / rows * (w.heads + w.kv_heads) * 3;
}

/// Per query head and causal (query, key) pair. F: two products of d multiply-adds, scale, maximum, subtract, exp, sum.
/// I: five products (scores again, dp, dq, dk, dv), scale, subtract, exp, subtract, product, scale; and 2 for do . o per output.
int64_t flops_of(const Attention& w, const Operands& o) {
  const Type& qkv = w.phase == Phase::kI ? o.read(3) : o.read(0);
  const int64_t sequences = qkv.shape[0], tokens = qkv.shape[1];
  const int64_t pairs = sequences * w.heads * (tokens * (tokens + 1) / 2);
  if (w.phase == Phase::kF) return pairs * (4 * w.head_dim + 5);
  return pairs * (10 * w.head_dim + 6) + 2 * elements(o.read(0));
}

/// gelu: u^3 2, inner 3, tanh 1, outer 3; its derivative adds 11. swiglu per output: negate, exp, add, divide, times;
/// derivative 12.
int64_t flops_of(const Activation& w, const Operands& o) {
  if (w.phase == Phase::kF) return elements(o.write(0)) * (w.swiglu ? 5 : 9);
  return elements(o.read(0)) * (w.swiglu ? 12 : 20);
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
int64_t flops_of(const Sgd& w, const Operands& o) { return elements(o.read(0)) * (w.weight_decay != 0 ? 4 : 2); }
/// m 3, v 4, corrections 2, root, epsilon, quotient, times lr, subtract; decay 2.
int64_t flops_of(const AdamW& w, const Operands& o) { return elements(o.read(0)) * (w.weight_decay != 0 ? 16 : 14); }
int64_t flops_of(const Copy&, const Operands&) { return 0; }
int64_t flops_of(const Kernel& w, const Operands&) { return w.flops; }
int64_t flops_of(const Collective&, const Operands&) { return 0; }
int64_t flops_of(const Send&, const Operands&) { return 0; }
int64_t flops_of(const Recv&, const Operands&) { return 0; }

// --- memory and payload ------------------------------------------------------------------------------------------------------

int64_t memory_of(const Work& work, const Operands& o) {
  const Embed* embed = std::get_if<Embed>(&work);
  if (!embed || embed->phase != Phase::kF) return o.memory();
  return o.read(0).bytes() + 2 * o.write(0).bytes();  // a row of the table for each row written
}

int64_t payload_of(const Work& work, const Operands& o) {
  if (const auto* c = std::get_if<Collective>(&work))
    return c->kind == CollectiveKind::kAllGather ? o.write(0).bytes() : o.read(0).bytes();
  if (std::holds_alternative<Send>(work)) return o.read(0).bytes();
  if (std::holds_alternative<Recv>(work)) return o.write(0).bytes();
  return 0;
}

}  // namespace

WorkAmount work_of(const Segment& segment, const Op& op, const Mesh&) {
  const Operands operands(segment, op);
  return {Flops(std::visit([&](const auto& w) { return flops_of(w, operands); }, op.work)), Bytes(memory_of(op.work, operands)),
          Bytes(payload_of(op.work, operands))};
}

std::vector<int64_t> matmul_extents(const Segment& segment, const Op& op) {
  const Linear* linear = std::get_if<Linear>(&op.work);
  SHARDLAB_CHECK(linear != nullptr, "matmul extents of a {}", kind_of(op.work));
  return extents_of(*linear, Operands(segment, op));
}

}  // namespace shardlab
