#include "kernels/cuda/attention_graph.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "plan/base/check.h"

namespace shardlab::gpu::cudnn {
namespace {

using Extents = std::array<int64_t, 4>;

DataType data_type(DType t) { return t == DType::bf16 ? DataType::kBF16 : DataType::kF16; }

Extents packed(const Extents& e) { return {e[1] * e[2] * e[3], e[2] * e[3], e[3], 1}; }
Extents transposed(const Extents& e) { return {e[0], e[1], e[3], e[2]}; }

/// Heads of qkv and of o: strides by batch, head, token and element.
struct Layout {
  Extents query, shared, out;  ///< shared: of keys and values, one a group
  explicit Layout(const AttentionShape& s) {
    const int64_t d = s.head_dim, queries = s.heads / s.kv_heads, group = (queries + 2) * d;
    const bool by_group = s.kv_heads != 1 && queries != 1;  // a call's batch is the groups of a sequence
    const int64_t head = queries == 1 ? group : d, row = s.qkv_width(), out_row = s.out_width();
    query = {by_group ? group : s.tokens * row, head, row, 1};
    shared = {query[0], group, row, 1};
    out = {by_group ? queries * d : s.tokens * out_row, d, out_row, 1};
  }
};

class Builder {
 public:
  Builder(const AttentionShape& s, DType type) : calls_(calls_of(s)), layout_(s), type_(data_type(type)) {}

  int given(std::string name, Place place, const Extents& extents, const Extents& strides) {
    return add({std::move(name), place, type_, extents, strides, 0});
  }
  /// fp32 in memory, row by row.
  int plain(std::string name, Place place, const Extents& extents) {
    return add({std::move(name), place, DataType::kF32, extents, packed(extents), 0});
  }
  int scalar(std::string name, float value) {
    return add({std::move(name), Place::kScalar, DataType::kF32, {1, 1, 1, 1}, {1, 1, 1, 1}, value});
  }
  int inner(std::string name, const Extents& extents, DataType type = DataType::kF32) {
    return add({std::move(name), Place::kVirtual, type, extents, packed(extents), 0});
  }
  int inner(std::string name, const Extents& extents, const Extents& strides, DataType type) {
    return add({std::move(name), Place::kVirtual, type, extents, strides, 0});
  }

  int product(int a, int b, int c) { return op({.kind = GraphOp::Kind::kProduct, .inputs = {a, b, -1}, .output = c}); }
  int pointwise(Pointwise mode, std::array<int, 3> inputs, int y, DataType precision = DataType::kF32, int axis = -1) {
    return op(
        {.kind = GraphOp::Kind::kPointwise, .mode = mode, .axis = axis, .precision = precision, .inputs = inputs, .output = y});
  }
  int reduce(Reduce how, int x, int y) {
    return op({.kind = GraphOp::Kind::kReduction, .reduce = how, .inputs = {x, -1, -1}, .output = y});
  }
  int reshape(int x, int y) { return op({.kind = GraphOp::Kind::kReshape, .inputs = {x, -1, -1}, .output = y}); }

  /// Scores of keys after the query become minus infinity (its number in cuDNN before 9.10: the lowest).
  int masked(int scores, int64_t version) {
    const Extents e = this->scores();
    const float infinity = std::numeric_limits<float>::infinity();
    const int row = pointwise(Pointwise::kIndex, {scores, -1, -1}, inner("row", e, DataType::kI32), DataType::kF32, 2);
    const int column = pointwise(Pointwise::kIndex, {scores, -1, -1}, inner("column", e, DataType::kI32), DataType::kF32, 3);
    const int seen = pointwise(Pointwise::kGreaterOrEqual, {row, column, -1}, inner("seen", e, DataType::kBool), DataType::kBool);
    const int never = scalar("never", version < 91000 ? std::numeric_limits<float>::lowest() : -infinity);
    return pointwise(Pointwise::kSelect, {scores, never, seen}, inner("masked", e));
  }

  Extents queries() const { return {calls_.batch, calls_.heads, calls_.tokens, calls_.head_dim}; }
  Extents keys() const { return {calls_.batch, calls_.kv_heads, calls_.tokens, calls_.head_dim}; }
  Extents scores() const { return {calls_.batch, calls_.heads, calls_.tokens, calls_.tokens}; }
  Extents rows() const { return {calls_.batch, calls_.heads, calls_.tokens, 1}; }
  const Layout& layout() const { return layout_; }
  DataType type() const { return type_; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(calls_.head_dim)); }
  Graph take() { return std::move(graph_); }

 private:
  int add(GraphTensor t) {
    graph_.tensors.push_back(std::move(t));
    return static_cast<int>(graph_.tensors.size()) - 1;
  }
  int op(const GraphOp& o) {
    graph_.ops.push_back(o);
    return o.output;
  }

  const AttentionCalls calls_;
  const Layout layout_;
  const DataType type_;
  Graph graph_;
};

}  // namespace

AttentionCalls calls_of(const AttentionShape& s) { return {s.sequences, s.tokens, s.heads, s.kv_heads, s.head_dim}; }

Graph forward_graph(const AttentionShape& s, DType type, int64_t version) {
  Builder b(s, type);
  const Extents scores = b.scores(), rows = b.rows();
  const int q = b.given("q", Place::kQuery, b.queries(), b.layout().query);
  const int k = b.given("k^T", Place::kKey, transposed(b.keys()), transposed(b.layout().shared));
  const int v = b.given("v", Place::kValue, b.keys(), b.layout().shared), scale = b.scalar("scale", b.scale());

  const int dots = b.product(q, k, b.inner("dots", scores));
  const int scaled = b.pointwise(Pointwise::kMul, {dots, scale, -1}, b.inner("scaled", scores));
  const int masked = b.masked(scaled, version);

  const int most = b.reduce(Reduce::kMax, masked, b.inner("most", rows));
  const int less = b.pointwise(Pointwise::kSub, {masked, most, -1}, b.inner("less", scores));
  const int power = b.pointwise(Pointwise::kExp, {less, -1, -1}, b.inner("power", scores));
  const int sum = b.reduce(Reduce::kAdd, power, b.inner("sum", rows));
  const int log = b.pointwise(Pointwise::kLog, {sum, -1, -1}, b.inner("log", rows));
  b.pointwise(Pointwise::kAdd, {most, log, -1}, b.plain("lse", Place::kLse, rows));
  const int p = b.pointwise(Pointwise::kDiv, {power, sum, -1}, b.inner("p", scores, b.type()));

  b.product(p, v, b.given("o", Place::kOut, b.queries(), b.layout().out));
  return b.take();
}

Graph backward_graph(const AttentionShape& s, DType type, int64_t version) {
  Builder b(s, type);
  const Extents scores = b.scores(), rows = b.rows(), queries = b.queries(), keys = b.keys();
  const Layout& at = b.layout();
  const bool shared = queries[1] != keys[1];
  const int q = b.given("q", Place::kQuery, queries, at.query);
  const int k = b.given("k^T", Place::kKey, transposed(keys), transposed(at.shared));
  const int v = b.given("v^T", Place::kValue, transposed(keys), transposed(at.shared));
  const int o = b.given("o", Place::kOut, queries, at.out), dout = b.given("dout", Place::kOutGradient, queries, at.out);
  const int lse = b.plain("lse", Place::kLse, rows), scale = b.scalar("scale", b.scale()), one = b.scalar("one", 1.0f);
  /// x[.., rows, columns] -> y[.., columns, rows] in the factors' type.
  const auto turned = [&](int x, const char* name) {
    return b.reshape(x, b.inner(name, transposed(scores), transposed(packed(scores)), b.type()));
  };
  /// y = x^T z for each query head; a key's gradient is the sum over those that share it.
  const auto key_gradient = [&](int turned_x, int z, const char* name, Place place) {
    const int y = b.given(name, place, keys, at.shared);
    if (!shared) return b.product(turned_x, z, y);
    return b.reduce(Reduce::kAdd, b.product(turned_x, z, b.inner(std::string(name) + " by head", queries, b.type())), y);
  };

  const int both = b.pointwise(Pointwise::kMul, {dout, o, -1}, b.inner("dout*o", queries));
  const int row = b.reduce(Reduce::kAdd, both, b.inner("row sum", rows));
  // Times one: where dropout's inverse scale stands in the graph that engines look for.
  const int row_sum = b.pointwise(Pointwise::kMul, {row, one, -1}, b.plain("d", Place::kRowSum, rows));

  const int dots = b.product(q, k, b.inner("dots", scores));
  const int scaled = b.pointwise(Pointwise::kMul, {dots, scale, -1}, b.inner("scaled", scores));
  const int less = b.pointwise(Pointwise::kSub, {scaled, lse, -1}, b.inner("less", scores));
  const int masked = b.masked(less, version);
  const int p = b.pointwise(Pointwise::kExp, {masked, -1, -1}, b.inner("p", scores));
  key_gradient(turned(p, "p^T"), dout, "dv", Place::kValueGradient);

  const int dp = b.product(dout, v, b.inner("dp", scores));
  const int centred = b.pointwise(Pointwise::kSub, {dp, row_sum, -1}, b.inner("dp-d", scores));
  const int slope = b.pointwise(Pointwise::kMul, {centred, p, -1}, b.inner("p*(dp-d)", scores));
  const int ds = b.pointwise(Pointwise::kMul, {slope, scale, -1}, b.inner("ds", scores));
  key_gradient(turned(ds, "ds^T"), q, "dk", Place::kKeyGradient);

  const int straight = b.reshape(k, b.inner("k", keys, at.shared, DataType::kF32));
  const int dq = b.product(ds, straight, b.plain("dq in fp32", Place::kQuerySum, queries));
  b.pointwise(Pointwise::kIdentity, {dq, -1, -1}, b.given("dq", Place::kQueryGradient, queries, at.query));
  return b.take();
}

int64_t offset_of(Place place, const AttentionShape& s, int64_t call) {
  const int64_t d = s.head_dim, queries = s.heads / s.kv_heads;
  const int64_t qkv = call * s.tokens * s.qkv_width(), o = call * s.tokens * s.out_width();
  switch (place) {
    case Place::kQuery:
    case Place::kQueryGradient: return qkv;
    case Place::kKey:
    case Place::kKeyGradient: return qkv + queries * d;
    case Place::kValue:
    case Place::kValueGradient: return qkv + (queries + 1) * d;
    case Place::kOut:
    case Place::kOutGradient: return o;
    case Place::kLse: return call * s.heads * s.tokens;
    default: return 0;
  }
}

std::string refusal(const AttentionShape& s, DType type, bool backward, int64_t version) {
  if (type != DType::bf16 && type != DType::f16) return fmt::format("{} is not multiplied on its tensor cores", name_of(type));
  if (s.head_dim % 8 != 0) return fmt::format("head_dim {} is no multiple of 8", s.head_dim);
  // Before 9.6 somebody must clear what blocks add dq to; 9.10.0 and 9.10.1 are known to err (cudnn-frontend refuses them too).
  if (version < 90600) return fmt::format("cuDNN {}.{} is older than 9.6", version / 10000, version / 100 % 100);
  if (version == 91000 || version == 91001) return "cuDNN 9.10.0 and 9.10.1 give wrong results for some shapes";
  if (backward && s.tokens < 2) return "a single token has no backward there";
  return {};
}

namespace {

std::string_view text_of(DataType t) {
  switch (t) {
    case DataType::kF32: return "f32";
    case DataType::kF16: return "f16";
    case DataType::kI32: return "i32";
    case DataType::kBF16: return "bf16";
    case DataType::kBool: return "bool";
  }
  return "?";
}

std::string_view text_of(Pointwise m) {
  switch (m) {
    case Pointwise::kAdd: return "add";
    case Pointwise::kMul: return "mul";
    case Pointwise::kDiv: return "div";
    case Pointwise::kSub: return "sub";
    case Pointwise::kExp: return "exp";
    case Pointwise::kLog: return "log";
    case Pointwise::kIdentity: return "identity";
    case Pointwise::kGreaterOrEqual: return "greater-or-equal";
    case Pointwise::kIndex: return "index";
    case Pointwise::kSelect: return "select";
  }
  return "?";
}

std::string_view text_of(Place p) {
  constexpr std::string_view kNames[] = {"virtual", "scalar", "qkv",  "qkv",  "qkv",       "o",        "lse",
                                         "dout",    "dqkv",   "dqkv", "dqkv", "workspace", "workspace"};
  return kNames[static_cast<size_t>(p)];
}

std::string text_of(const GraphOp& op) {
  switch (op.kind) {
    case GraphOp::Kind::kProduct: return "product";
    case GraphOp::Kind::kReshape: return "reshape";
    case GraphOp::Kind::kReduction: return op.reduce == Reduce::kMax ? "maximum over" : "sum over";
    case GraphOp::Kind::kPointwise: break;
  }
  return op.axis < 0 ? std::string(text_of(op.mode)) : fmt::format("{} of dim {}", text_of(op.mode), op.axis);
}

}  // namespace

std::string to_text(const Graph& graph) {
  std::string text;
  for (const GraphTensor& t : graph.tensors) {
    const auto& e = t.extents;
    const auto& s = t.strides;
    text += fmt::format("{} {}[{},{},{},{}]", t.name, text_of(t.type), e[0], e[1], e[2], e[3]);
    if (t.place == Place::kScalar)
      text += fmt::format(" = {}\n", t.scalar);
    else
      text += fmt::format(" strides {},{},{},{} {}\n", s[0], s[1], s[2], s[3], text_of(t.place));
  }
  for (const GraphOp& op : graph.ops) {
    std::string inputs;
    for (const int i : op.inputs)
      if (i >= 0) inputs += (inputs.empty() ? "" : ", ") + graph.tensors[static_cast<size_t>(i)].name;
    text += fmt::format("{} ({}) -> {}{}\n", text_of(op), inputs, graph.tensors[static_cast<size_t>(op.output)].name,
                        op.precision == DataType::kF32 ? "" : fmt::format(" in {}", text_of(op.precision)));
  }
  return text;
}

}  // namespace shardlab::gpu::cudnn
