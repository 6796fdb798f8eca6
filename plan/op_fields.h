// The attributes of every op, listed once: the printer and the parser both walk this list, so neither can forget one.
//
// `archive` has flag(name, bool&), number(name, value&, default), choice(name, enum&, names, default), text(name, string&)
// and comm(name, CommId&). The phase is part of the op's name ("linear.F") and so is a collective's kind.
#pragma once

#include <array>
#include <string_view>

#include "plan/op.h"

namespace shardlab {

inline constexpr std::array<std::string_view, 5> kCrossEntropyParts{"fused", "loss-only", "max", "sum", "grad"};
inline constexpr std::array<std::string_view, 3> kSumsOver{"all", "tokens", "sequences"};
inline constexpr std::array<std::string_view, 5> kKernelRules{"elementwise", "linear", "contract", "opaque", "trusted"};
inline constexpr std::array<std::string_view, 3> kTokenOrders{"contiguous", "zigzag", "striped"};
inline constexpr std::array<std::string_view, 2> kReduceOps{"sum", "max"};
inline constexpr std::array<std::string_view, 5> kAlgorithms{"ring", "halving-doubling", "direct", "tree", "hierarchical"};

template <class A>
void op_fields(A& a, LoadBatch& w) {
  a.flag("targets", w.targets);
  a.flag("packed", w.packed);
  a.flag("positions", w.positions);
}
template <class A>
void op_fields(A& a, Embed& w) {
  a.flag("accumulate", w.accumulate);
}
template <class A>
void op_fields(A& a, Positions& w) {
  a.flag("packed", w.packed);
  a.flag("accumulate", w.accumulate);
}
template <class A>
void op_fields(A& a, Norm& w) {
  a.flag("rms", w.rms);
  a.number("epsilon", w.epsilon, Norm{}.epsilon);
  a.flag("residual", w.residual);
  a.flag("accumulate", w.accumulate);
  a.choice("over", w.over, kSumsOver, SumOver::kAll);
}
template <class A>
void op_fields(A& a, Linear& w) {
  a.flag("bias", w.bias);
  a.flag("accumulate", w.accumulate);
  a.number("chunks", w.chunks, 1);
  a.number("strips", w.strips, 1);
  a.number("turn", w.turn, 0);
  a.flag("carry", w.carry);
}
template <class A>
void op_fields(A& a, Strips& w) {
  a.number("step", w.step, 1);
  a.flag("sum", w.sum);
}
template <class A>
void op_fields(A& a, Rope& w) {
  a.number("heads", w.heads, 0);
  a.number("kv_heads", w.kv_heads, 0);
  a.number("head_dim", w.head_dim, 0);
  a.number("theta", w.theta, Rope{}.theta);
  a.flag("packed", w.packed);
}
template <class A>
void op_fields(A& a, HeadNorm& w) {
  a.number("heads", w.heads, 0);
  a.number("kv_heads", w.kv_heads, 0);
  a.number("head_dim", w.head_dim, 0);
  a.number("epsilon", w.epsilon, HeadNorm{}.epsilon);
  a.flag("accumulate", w.accumulate);
  a.choice("over", w.over, kSumsOver, SumOver::kAll);
}
template <class A>
void op_fields(A& a, LatentHeads& w) {
  a.number("heads", w.heads, 0);
  a.number("nope", w.nope, 0);
  a.number("rope", w.rope, 0);
  a.number("v_dim", w.v_dim, 0);
  a.number("theta", w.theta, LatentHeads{}.theta);
  a.flag("packed", w.packed);
}
template <class A>
void op_fields(A& a, Attention& w) {
  a.number("heads", w.heads, 0);
  a.number("kv_heads", w.kv_heads, 0);
  a.number("head_dim", w.head_dim, 0);
  a.flag("packed", w.packed);
  a.number("document", w.document, int64_t{0});
  a.number("v_dim", w.v_dim, 0);
  a.number("window", w.window, int64_t{0});
}
template <class A>
void op_fields(A& a, SplitHeads& w) {
  a.number("heads", w.heads, 0);
  a.number("kv_heads", w.kv_heads, 0);
  a.number("head_dim", w.head_dim, 0);
  a.number("v_dim", w.v_dim, 0);
}
template <class A>
void op_fields(A& a, AttentionBlock& w) {
  a.number("heads", w.heads, 0);
  a.number("kv_heads", w.kv_heads, 0);
  a.number("head_dim", w.head_dim, 0);
  a.number("turn", w.turn, 0);
  a.flag("carry", w.carry);
  a.flag("carry_kv", w.carry_kv);
  a.flag("partial", w.partial);
  a.flag("packed", w.packed);
  a.number("document", w.document, int64_t{0});
  a.number("v_dim", w.v_dim, 0);
  a.number("window", w.window, int64_t{0});
}
template <class A>
void op_fields(A& a, AttentionMerge& w) {
  a.number("heads", w.heads, 0);
  a.number("kv_heads", w.kv_heads, 0);
  a.number("head_dim", w.head_dim, 0);
  a.number("step", w.step, 0);
  a.flag("keys", w.keys);
  a.number("v_dim", w.v_dim, 0);
}
template <class A>
void op_fields(A& a, Activation& w) {
  a.flag("swiglu", w.swiglu);
  a.flag("counted", w.counted);
  a.number("rows", w.rows, int64_t{0});
}
template <class A>
void op_fields(A& a, Residual& w) {
  a.flag("bias", w.bias);
  a.flag("accumulate", w.accumulate);
  a.choice("over", w.over, kSumsOver, SumOver::kAll);
}
template <class A>
void op_fields(A& a, Dropout& w) {
  a.number("p", w.p, 0.0f);
  a.number("site", w.site, 0);
}
template <class A>
void op_fields(A& a, CrossEntropy& w) {
  a.choice("part", w.part, kCrossEntropyParts, CrossEntropy::Part::kFused);
  a.number("tokens", w.tokens, int64_t{1});
  a.number("chunks", w.chunks, 1);
  a.number("words", w.words, int64_t{0});
}
template <class A>
void op_fields(A&, Add&) {}
template <class A>
void op_fields(A& a, Fill& w) {
  a.number("value", w.value, 0.0f);
}
template <class A>
void op_fields(A& a, SumScalars& w) {
  a.number("factor", w.factor, Rational{});
}
template <class A>
void op_fields(A&, SquaredNorm&) {}
template <class A>
void op_fields(A& a, Sgd& w) {
  a.number("weight_decay", w.weight_decay, 0.0f);
}
template <class A>
void op_fields(A& a, AdamW& w) {
  a.number("beta1", w.beta1, AdamW{}.beta1);
  a.number("beta2", w.beta2, AdamW{}.beta2);
  a.number("epsilon", w.epsilon, AdamW{}.epsilon);
  a.number("weight_decay", w.weight_decay, 0.0f);
}
template <class A>
void op_fields(A& a, Lion& w) {
  a.number("beta1", w.beta1, Lion{}.beta1);
  a.number("beta2", w.beta2, Lion{}.beta2);
  a.number("weight_decay", w.weight_decay, 0.0f);
}
template <class A>
void op_fields(A& a, AdamW8bit& w) {
  a.number("beta1", w.beta1, AdamW8bit{}.beta1);
  a.number("beta2", w.beta2, AdamW8bit{}.beta2);
  a.number("epsilon", w.epsilon, AdamW8bit{}.epsilon);
  a.number("weight_decay", w.weight_decay, 0.0f);
}
template <class A>
void op_fields(A& a, Copy& w) {
  a.flag("restores", w.restores);
}
template <class A>
void op_fields(A& a, Kernel& w) {
  a.text("name", w.name);
  a.choice("rule", w.rule, kKernelRules, Kernel::Rule::kElementwise);
  a.number("flops", w.flops, int64_t{0});
  a.flag("counted", w.counted);
  a.number("rows", w.rows, int64_t{0});
}
template <class A>
void op_fields(A& a, Collective& w) {
  a.comm("comm", w.comm);
  a.choice("reduce", w.reduce, kReduceOps, ReduceOp::kSum);
  a.choice("algorithm", w.algorithm, kAlgorithms, Algorithm::kRing);
  a.number("root", w.root, 0);
  a.number("per_node", w.per_node, 1);
  a.number("room", w.room, int64_t{0});
  a.number("across", w.across, int64_t{0});
}
template <class A>
void op_fields(A& a, Send& w) {
  a.comm("comm", w.comm);
  a.number("hop", w.hop, Send{}.hop);
  a.flag("cyclic", w.cyclic);
}
template <class A>
void op_fields(A& a, Recv& w) {
  a.comm("comm", w.comm);
  a.number("hop", w.hop, Recv{}.hop);
  a.flag("cyclic", w.cyclic);
}

template <class A>
void op_fields(A& a, Regroup& w) {
  a.flag("join", w.join);
  a.number("parts", w.parts, 1);
  a.number("copies", w.copies, 1);
  a.number("kv_heads", w.kv_heads, 0);
  a.number("head_dim", w.head_dim, 0);
}

template <class A>
void op_fields(A& a, Route& w) {
  a.flag("sigmoid", w.sigmoid);
  a.flag("normalise", w.normalise);
  a.number("factor", w.factor, 1.0f);
  a.number("balance", w.balance, 0.0f);
  a.number("z_loss", w.z_loss, 0.0f);
  a.number("groups", w.groups, 1);
  a.number("groups_chosen", w.groups_chosen, 1);
  a.number("tokens", w.tokens, int64_t{1});
  a.number("sequence", w.sequence, int64_t{0});
  a.flag("biased", w.biased);
  a.number("capacity", w.capacity, int64_t{0});
}
template <class A>
void op_fields(A& a, ChooseExperts& w) {
  a.flag("sigmoid", w.sigmoid);
  a.number("groups", w.groups, 1);
  a.number("groups_chosen", w.groups_chosen, 1);
  a.flag("biased", w.biased);
}
template <class A>
void op_fields(A& a, ExpertLoad& w) {
  a.flag("accumulate", w.accumulate);
}
template <class A>
void op_fields(A&, Gate&) {}
template <class A>
void op_fields(A& a, Dispatch& w) {
  a.number("experts", w.experts, 1);
  a.number("capacity", w.capacity, int64_t{0});
}
template <class A>
void op_fields(A& a, GroupedLinear& w) {
  a.number("sources", w.sources, 1);
  a.number("rows", w.rows, int64_t{0});
  a.flag("accumulate", w.accumulate);
}
template <class A>
void op_fields(A& a, Combine& w) {
  a.number("experts", w.experts, 1);
  a.number("capacity", w.capacity, int64_t{0});
}

/// The phase of an op that has one, to be read or set.
template <class W>
constexpr bool has_phase = requires(W& w) {
  w.phase;
};

}  // namespace shardlab
