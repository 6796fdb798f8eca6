// The quantised reduce-scatter of gradients: qgZ of ZeRO++, and what compression makes of the reduce-scatter of ZeRO-1 and ZeRO-2.
//
// A reduce-scatter adds on its way, which integers would overflow and 16-bit floats would round at every hop. So each rank
// quantises its gradient, sends every other rank its slice of it, and adds up in fp32 what it receives. In one hop that is one
// all-to-all over all ranks. Where ranks have nodes (`zero_plus_plus.secondary`), two: within the node, which leaves each rank the
// node's sum of the slices of all ranks that have its place in their nodes, 1/G of the bucket; that is quantised again, and goes
// between nodes: a G-th of what one hop would send there. Slices lie in the order of ranks, [D, G] for D nodes of G, and the first
// hop cuts by place in the node: so codes, not gradients, are put in the order [G, D] before it.
//
// qgZ keeps no error: what is lost is lost, as in the paper, and it takes 4 bits in both hops. Compression keeps it: m = gradient +
// error is quantised, and what was not sent of m is the next error, as in quantised_gradients.cpp; the sum stays in fp32, where
// the optimizer reads it, so there is no second leg.
//
// Shapes   bucket[n], codes [n], scales [N blocks]; slices [n/N]; between the hops a sum [n/G]
// Adds     per scatter an all-to-all of codes and scales: Psi (N-1)/N (b/8 + 4/256) bytes; in two hops Psi (G-1)/G within the node
//          and Psi/G (D-1)/D between; b = 16: no scales
// Memory   two buffers of the largest bucket's codes; twice 4 bytes a block of scales; compression: errors 4 bytes an element
// Refuses  gradients narrower than fp32; qgZ: zero other than 3; compression: see quantised_gradients.cpp
// Paper    Wang et al., "ZeRO++" (2023), section 3.3; Seide et al., "1-Bit Stochastic Gradient Descent" (2014): error feedback
#include <algorithm>
#include <memory>

#include "strategies/zero_plus_plus.h"

namespace shardlab::strategies {

QuantisedScatter::QuantisedScatter(Draft& draft, StageDraft& stage, const Shards& shards, Options options)
    : draft_(draft), stage_(stage), ranks_(shards.ranks()), options_(options) {
  int64_t codes = 0;
  for (const Bucket& bucket : stage.buckets) codes = std::max(codes, options_.code.of(bucket.elements));
  if (codes == 0) return;
  const Type gradient = stage.role.buffers[stage.buckets.front().gradient.index()].type;
  const Type any = message_type(draft_, gradient, options_.code.dtype, {codes}, Placement::local(), Micro::kNone);
  a_ = add_message(stage_, "scatter.codes.a", any);
  b_ = add_message(stage_, "scatter.codes.b", any);
}

int64_t QuantisedScatter::scales_of(const Bucket& bucket) const { return ranks_ * blocks_of(bucket.elements / ranks_); }

QuantisedScatter::Messages& QuantisedScatter::messages_of(const Bucket& bucket) {
  const auto [found, is_new] = messages_.try_emplace(bucket.name);
  Messages& m = found->second;
  if (!is_new) return m;
  const Type gradient = stage_.role.buffers[bucket.gradient.index()].type;
  const auto type = [&](DType dtype, int64_t n, Micro micro) {
    return message_type(draft_, gradient, dtype, {n}, Placement::local(), micro);
  };
  const Type codes = type(options_.code.dtype, options_.code.of(bucket.elements), Micro::kSum);
  m.a.push_back(add_message_view(stage_, bucket.name + ".codes.a", codes, a_));
  m.b.push_back(add_message_view(stage_, bucket.name + ".codes.b", codes, b_));
  if (options_.code.scaled()) {
    const Type scales = type(DType::f32, scales_of(bucket), Micro::kNone);
    m.a.push_back(add_message(stage_, bucket.name + ".scales.a", scales));
    m.b.push_back(add_message(stage_, bucket.name + ".scales.b", scales));
  }
  if (options_.feedback) m.error = add_error(stage_, bucket.name + ".error", gradient);
  return m;
}

Event QuantisedScatter::scatter(const Bucket& bucket, BufferId slice, int micro_batch) {
  const Messages& messages = messages_of(bucket);
  Compressing ops(draft_, stage_, "scatter.quantised." + signature(draft_, stage_, bucket), options_.strategy);
  Sum sum;
  sum.elements = bucket.elements;
  sum.gradient = sum.m = ops.bound("gradient", bucket.gradient);
  sum.slice = ops.bound("slice", slice);
  for (size_t i = 0; i < messages.a.size(); ++i) {
    const bool codes = i == 0;
    const std::string name = codes ? "codes" : "scales";
    const int64_t n = codes ? options_.code.of(bucket.elements) : scales_of(bucket);
    sum.wires.push_back({name, codes ? options_.code.dtype : DType::f32, n / ranks_, codes ? Micro::kSum : Micro::kNone,
                         ops.bound(name + ".a", messages.a[i]), ops.bound(name + ".b", messages.b[i])});
  }
  if (options_.feedback) {
    sum.error = ops.bound("error", messages.error);
    sum.m = ops.view("m", sum.error, ops.type(sum.gradient));
    ops.kernel("add", {sum.gradient, sum.error}, {sum.m}, "feedback");
  }
  if (draft_.plan.mesh.find("node"))
    two_hops(ops, sum);
  else
    one_hop(ops, sum);
  return ops.event(bucket.last_unit, micro_batch);
}

void QuantisedScatter::one_hop(Compressing& ops, const Sum& sum) const {
  const WireCode& code = options_.code;
  const Type like = ops.type(sum.m);
  std::vector<SlotId> mine, parts;
  for (const Wire& w : sum.wires) {
    mine.push_back(ops.view(w.name + ".mine", w.a,
                            message_type(draft_, like, w.dtype, {1, ranks_ * w.of_slice}, Placement::shard(0), w.micro)));
    parts.push_back(
        ops.view(w.name + ".parts", w.b, message_type(draft_, like, w.dtype, {ranks_, w.of_slice}, Placement::shard(1), w.micro)));
  }
  ops.kernel(code.kernel("quantise"), {sum.m}, mine, "quantise");
  if (options_.feedback) {
    const SlotId sent = ops.view("sent", sum.gradient, ops.type(sum.error));  // the gradient has gone into m
    ops.kernel(code.kernel("dequantise"), mine, {sent}, "sent");
    ops.kernel("subtract", {sum.m, sent}, {sum.error}, "error");
  }
  const CommId comm = draft_.comm("dp.grads", data_axes(draft_.plan.mesh));
  for (size_t i = 0; i < mine.size(); ++i)
    ops.collective(CollectiveKind::kAllToAll, comm, mine[i], parts[i], i == 0 ? "exchange" : "exchange.scales");
  ops.kernel(code.sum_kernel(), parts, {sum.slice}, "sum");
}

void QuantisedScatter::two_hops(Compressing& ops, const Sum& sum) const {
  const Mesh& mesh = draft_.plan.mesh;
  const int dp = mesh.axis("dp"), node = mesh.axis("node");
  const int64_t nodes = mesh.size("dp"), members = mesh.size("node"), n = sum.elements;
  const Type like = ops.type(sum.m);
  const Placement rows = Placement::shard(0), columns = Placement::shard(1), local = Placement::local();
  const auto type = [&](const Wire& w, Shape shape, Placement along_dp, Placement along_node) {
    return placed(message_type(draft_, like, w.dtype, shape, along_dp, w.micro), node, along_node);
  };
  std::vector<SlotId> mine, regrouped, sent, parts, sums, parts_of_sums;
  for (const Wire& w : sum.wires) {
    const int64_t s = w.of_slice;
    mine.push_back(ops.view(w.name + ".mine", w.a, type(w, {1, nodes * members * s}, local, local)));
    regrouped.push_back(ops.view(w.name + ".regrouped", w.b, type(w, {members, nodes, s}, rows, rows)));
    sent.push_back(ops.view(w.name + ".sent", w.b, type(w, {1, members * nodes * s}, rows, rows)));
    parts.push_back(ops.view(w.name + ".parts", w.a, type(w, {members, nodes * s}, rows, columns)));
    sums.push_back(ops.view(w.name + ".sums", w.b, type(w, {1, nodes * s}, rows, local)));
    parts_of_sums.push_back(ops.view(w.name + ".parts_of_sums", w.a, type(w, {nodes, s}, columns, local)));
  }
  // The node's sum takes the place of the gradient, of which nothing is needed any more.
  Type node_sum = placed(like, node, local);
  node_sum.shape = {n / members};
  const SlotId of_node = ops.view("node.sum", sum.gradient, node_sum);
  const auto exchange = [&](std::string_view name, int axis, const std::vector<SlotId>& from, const std::vector<SlotId>& to) {
    const CommId comm = draft_.comm(name, AxisSet::of(axis));
    for (size_t i = 0; i < from.size(); ++i)
      ops.collective(CollectiveKind::kAllToAll, comm, from[i], to[i],
                     (axis == node ? "exchange.node" : "exchange.cross") + std::string(i == 0 ? "" : ".scales"));
  };
  const std::string quantise = options_.code.kernel("quantise"), add_up = options_.code.sum_kernel();
  ops.kernel(quantise, {sum.m}, mine, "quantise");
  for (size_t i = 0; i < mine.size(); ++i) ops.kernel("swap_leading", {mine[i]}, {regrouped[i]}, "regroup." + sum.wires[i].name);
  exchange("dp.grads.node", node, sent, parts);
  ops.kernel(add_up, parts, {of_node}, "sum.node");
  ops.kernel(quantise, {of_node}, sums, "quantise.node");
  exchange("dp.grads.cross", dp, sums, parts_of_sums);
  ops.kernel(add_up, parts_of_sums, {sum.slice}, "sum");
}

ScatterEvent compressed_scatter(Draft& draft, StageDraft& stage, const Shards& shards) {
  const Compression& compression = draft.config.layout.compression;
  if (compression.kind == CompressionKind::kNone || !draft.training) return {};
  const auto quantised = std::make_shared<QuantisedScatter>(
      draft, stage, shards,
      QuantisedScatter::Options{.code = code_of(compression), .feedback = true, .strategy = "compressed-scatter"});
  return
      [quantised](const Bucket& bucket, BufferId slice, int micro_batch) { return quantised->scatter(bucket, slice, micro_batch); };
}

int64_t code_block(const Case& c) { return c.layout.compression.kind == CompressionKind::kInt8 ? kScaleBlock : 0; }

}  // namespace shardlab::strategies
