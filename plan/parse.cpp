// The parser of plan text: one member function for each kind of line. What was expected is said where it was expected, so
// that every message names line, column, the expected and the found.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "plan/base/limits.h"
#include "plan/base/nearest.h"
#include "plan/lexer.h"
#include "plan/limits.h"
#include "plan/op_fields.h"
#include "plan/text.h"
#include "plan/text_names.h"
#include "plan/text_places.h"

namespace shardlab {
namespace {

/// Names of one table (slots of a segment, buffers of a role, ...), each once.
using Names = std::unordered_map<std::string, int32_t>;

/// A name that may stand before its definition: the entry's reference is set once the table is complete.
struct Pending {
  enum class Use : uint8_t { kView, kCount, kPacked };
  Token name;
  size_t entry;
  Use use;  ///< which of the entry's references it is
};

/// "name", "name=value" behind an op's operands.
struct Attribute {
  Token name;
  Token value;
  bool has_value = false;
  bool used = false;
};

/// Number in the text of a token, nothing when it is none or does not fit.
template <class T>
std::optional<T> number_in(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

template <>
std::optional<float> number_in<float>(std::string_view text) {
  if (text.starts_with("0x")) {
    uint32_t bits = 0;
    const auto [end, error] = std::from_chars(text.data() + 2, text.data() + text.size(), bits, 16);
    if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    return std::bit_cast<float>(bits);
  }
  float value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

template <>
std::optional<Rational> number_in<Rational>(std::string_view text) {
  const size_t slash = text.find('/');
  const auto num = number_in<int64_t>(text.substr(0, slash));
  const auto den = slash == std::string_view::npos ? std::optional<int64_t>(1) : number_in<int64_t>(text.substr(slash + 1));
  constexpr int64_t kNoNegation = std::numeric_limits<int64_t>::min();  // the one number whose negative does not fit
  if (!num || !den || *den == 0 || *num == kNoNegation || *den == kNoNegation) return std::nullopt;
  return Rational(*num, *den);
}

/// One op of every kind, from which a parsed op starts.
std::vector<Work> prototypes() {
  std::vector<Work> all{LoadBatch{},   Embed{},          Positions{},      Norm{},        Linear{},   Rope{},       Attention{},
                        SplitHeads{},  AttentionBlock{}, AttentionMerge{}, Activation{},  Residual{}, Dropout{},    CrossEntropy{},
                        Add{},         Fill{},           SumScalars{},     SquaredNorm{}, Sgd{},      AdamW{},      Lion{},
                        AdamW8bit{},   Copy{},           Kernel{},         Send{},        Recv{},     Regroup{},    Route{},
                        Dispatch{},    GroupedLinear{},  Combine{},        HeadNorm{},    Strips{},   ExpertLoad{}, Gate{},
                        LatentHeads{}, ChooseExperts{}};
  for (const CollectiveKind kind : {CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllGather,
                                    CollectiveKind::kBroadcast, CollectiveKind::kAllToAll})
    all.push_back(Collective{.kind = kind});
  return all;
}

class Parser {
 public:
  Parser(std::string_view text, std::string_view file, PlanPlaces* places)
      : file_(file), tokens_(lex(text)), prototypes_(prototypes()), places_(places) {}

  Result<Plan> run() {
    if (static_cast<int64_t>(tokens_.size()) > kMaxPlanTokens)
      return Error{ExitCode::kUsage, fmt::format("the text has more than {} names, numbers and marks", kMaxPlanTokens),
                   "print a plan of fewer micro-batches or stages", file_};
    if (magic())
      while (!failed() && peek().kind != Token::Kind::kFileEnd) {
        if (peek().kind == Token::Kind::kLineEnd)
          ++at_;
        else
          statement();
      }
    if (!failed()) close_segment() && close_role() && whole();
    if (failed()) return *error_;
    return std::move(plan_);
  }

 private:
  // --- tokens ------------------------------------------------------------------------------------------------------

  static TextPlace place_of(const Token& token) { return {token.line, token.column}; }
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  bool failed() const { return error_.has_value(); }

  static constexpr const char* kSyntax = "plan/README.md explains the syntax of plans";

  bool fail(const Token& token, std::string message,
            std::string hint = fmt::format("correct the text at this place; {}", kSyntax)) {
    if (!error_)
      error_ =
          Error{ExitCode::kUsage, std::move(message), std::move(hint), fmt::format("{}:{}:{}", file_, token.line, token.column)};
    return false;
  }
  bool expected(std::string_view what) { return fail(peek(), fmt::format("expected {}, found {}", what, describe(peek()))); }

  bool is_mark(std::string_view mark, size_t ahead = 0) const {
    return peek(ahead).kind == Token::Kind::kMark && peek(ahead).text == mark;
  }
  bool is_word(std::string_view word) const { return peek().kind == Token::Kind::kWord && !peek().quoted && peek().text == word; }
  bool take_mark(std::string_view mark) { return is_mark(mark) && ++at_; }
  bool take_word(std::string_view word) { return is_word(word) && ++at_; }
  bool mark(std::string_view m) { return take_mark(m) || expected(fmt::format("`{}`", m)); }
  bool line_end() {
    if (peek().kind == Token::Kind::kFileEnd) return true;
    return (peek().kind == Token::Kind::kLineEnd && ++at_) || expected("the end of the line");
  }
  bool more() const { return peek().kind != Token::Kind::kLineEnd && peek().kind != Token::Kind::kFileEnd; }

  bool name(std::string& out, std::string_view what) {
    if (peek().kind != Token::Kind::kWord) return expected(what);
    out = tokens_[at_++].text;
    return true;
  }
  template <class T>
  bool number(T& out, std::string_view what) {
    const auto value = peek().kind == Token::Kind::kWord ? number_in<T>(peek().text) : std::nullopt;
    if (!value) return expected(what);
    out = *value;
    ++at_;
    return true;
  }
  template <class E, size_t N>
  bool one_of(E& out, const std::array<std::string_view, N>& names, std::string_view what) {
    for (size_t i = 0; i < N; ++i)
      if (take_word(names[i])) return out = static_cast<E>(i), true;
    return expected(fmt::format("{} ({})", what, fmt::join(names, ", ")));
  }
  /// The entry that `token` names in `names`.
  bool find(const Names& names, const Token& token, int32_t& out, std::string_view what) {
    const auto found = names.find(token.text);
    if (found == names.end()) return unknown(names, token, what);
    out = found->second;
    return true;
  }
  bool unknown(const Names& names, const Token& token, std::string_view what) {
    using Kind = Token::Kind;
    if (token.kind != Kind::kWord && token.kind != Kind::kOperand && token.kind != Kind::kStream)
      return fail(token, fmt::format("expected the name of {}, found {}", what, describe(token)));
    std::vector<std::string> known;
    for (const auto& [name, index] : names) known.push_back(name);
    std::ranges::sort(known);  // of two that are as near, always the same
    constexpr size_t kListed = 12;
    const std::string close = nearest(token.text, known);
    std::string hint = known.empty() ? "none is defined" : fmt::format("{} are defined", known.size());
    if (!known.empty() && known.size() <= kListed) {
      hint = "defined:";
      Token each = token;
      for (std::string& name : known) each.text = std::move(name), hint += " " + describe(each);
    }
    return fail(token, fmt::format("{} is not the name of {}{}", describe(token), what, meant(token, close)),
                fmt::format("{}; {}", hint, kSyntax));
  }
  /// ", did you mean `%x`?", or nothing: of one letter, and of two, anything could be meant.
  static std::string meant(Token token, const std::string& close) {
    if (close.empty() || token.text.size() < 3) return {};
    token.text = close;
    return fmt::format(", did you mean {}?", describe(token));
  }
  bool define(Names& names, const Token& token, size_t index, std::string_view what) {
    if (names.emplace(token.text, static_cast<int32_t>(index)).second) return true;
    return fail(token, fmt::format("expected a new name for {}, found {} a second time", what, describe(token)));
  }

  // --- lines ---------------------------------------------------------------------------------------------------------

  bool magic() {
    while (peek().kind == Token::Kind::kLineEnd) ++at_;
    if (!is_word("shardlab") || peek(1).text != "plan") return expected(fmt::format("`{} {}`", kPlanMagic, kPlanVersion));
    at_ += 2;
    int version = 0;
    const Token at = peek();
    if (!number(version, "the version of the plan text")) return false;
    if (version != kPlanVersion)
      return fail(at, fmt::format("the plan has version {}, and this program reads version {}", version, kPlanVersion),
                  "print the plan again with this program: `shardlab plan CASE.yaml`");
    return line_end();
  }

  bool statement() {
    static constexpr std::string_view kLines =
        "`name`, `mesh`, `micro_batches`, `sequences_per_micro_batch`, `period`, `streams`, `together`, `token_order`, "
        "`expert_placement`, `strategies`, `comm`, "
        "`parameter`, "
        "`segment` or `role`";
    if (take_word("segment")) return close_segment() && close_role() && segment_head();
    if (take_word("role")) return close_segment() && close_role() && role_head();
    if (in_segment_) return segment_line();
    if (in_role_) return role_line();
    if (take_word("name")) return name(plan_.name, "the plan's name") && line_end();
    if (take_word("mesh")) return mesh_line();
    if (take_word("micro_batches")) return number(plan_.micro_batches, "a number of micro-batches") && line_end();
    if (take_word("sequences_per_micro_batch"))
      return number(plan_.sequences_per_micro_batch, "a number of sequences") && line_end();
    if (take_word("period")) return number(plan_.period, "a number of steps") && line_end();
    if (take_word("streams")) return streams_line();
    if (take_word("together")) return axis_set(plan_.together) && line_end();
    if (take_word("token_order")) return token_order_line();
    if (take_word("expert_placement")) return expert_placement_line();
    if (take_word("strategies")) return strategies_line();
    if (take_word("comm")) return comm_line();
    if (take_word("parameter")) return parameter_line();
    return expected(kLines);
  }

  bool whole() {
    if (plan_.streams.empty()) return fail(peek(), "expected a line `streams compute ...`, found none");
    return true;
  }

  bool mesh_line() {
    while (more()) {
      const Token at = peek();
      MeshAxis axis;
      if (!name(axis.name, "the name of an axis") || !mark("=") || !number(axis.size, "the size of the axis")) return false;
      if (axis.name == "micro") return fail(at, "expected another name for an axis: `micro` is the micro-batch part of a type");
      if (axis.size < 1)
        return fail(at, fmt::format("expected a size of at least 1 for axis `{}`, found {}", axis.name, axis.size));
      if (axis.size > kMaxRanks)
        return fail(at, fmt::format("expected at most {} ranks, found {} along axis `{}`", kMaxRanks, axis.size, axis.name));
      if (plan_.mesh.axes.size() == kMaxAxes) return fail(at, fmt::format("expected at most {} axes, found one more", kMaxAxes));
      if (!define(axes_, at, plan_.mesh.axes.size(), "an axis")) return false;
      plan_.mesh.axes.push_back(axis);
      if (!fits_limits(plan_.mesh))
        return fail(at, fmt::format("expected at most {} ranks in all, found more with `{}={}`", kMaxRanks, axis.name, axis.size));
    }
    return line_end();
  }

  bool streams_line() {
    while (more()) {
      const Token at = peek();
      std::string stream;
      if (!name(stream, "the name of a stream") || !define(streams_, at, plan_.streams.size(), "a stream")) return false;
      if (plan_.streams.size() == kMaxStreams)
        return fail(at, fmt::format("expected at most {} streams, found one more", kMaxStreams));
      plan_.streams.push_back(stream);
    }
    return line_end();
  }

  bool token_order_line() {
    TokenOrder& order = plan_.token_order;
    const auto known = std::ranges::find(kTokenOrders, peek().text);
    if (known == kTokenOrders.end()) return expected("`contiguous`, `zigzag` or `striped`");
    order.kind = static_cast<TokenOrder::Kind>(known - kTokenOrders.begin());
    ++at_;
    if (order.kind == TokenOrder::Kind::kContiguous) return line_end();
    const Token at = peek();
    if (!number(order.parts, "a number of parts")) return false;
    if (order.parts < 1 || order.parts > kMaxRanks)
      return fail(at, fmt::format("expected 1 to {} parts, found {}", kMaxRanks, order.parts));
    return line_end();
  }

  bool expert_placement_line() {
    int layer = 0;
    if (!number(layer, "the number of a layer")) return false;
    std::vector<int32_t> experts;
    while (more())
      if (!number(experts.emplace_back(), "the number of an expert")) return false;
    plan_.expert_placement.push_back(place_experts(layer, std::move(experts)));
    return line_end();
  }

  bool strategies_line() {
    while (more())
      if (!name(plan_.strategies.emplace_back(), "the name of a strategy")) return false;
    return line_end();
  }

  bool axis_set(AxisSet& out) {
    if (take_word("none")) return true;
    do {
      int32_t axis = 0;
      if (!find(axes_, peek(), axis, "an axis of the mesh")) return false;
      ++at_;
      out = out | AxisSet::of(axis);
    } while (take_mark(","));
    return true;
  }

  bool comm_line() {
    Comm comm;
    const Token at = peek();
    if (!name(comm.name, "the name of a communicator") || !define(comms_, at, plan_.comms.size(), "a communicator")) return false;
    if (!take_word("axes")) return expected("`axes`");
    if (!axis_set(comm.axes)) return false;
    grouped_ += is_word("ends") ? plan_.mesh.size(comm.axes) : 0;
    if (grouped_ > kMaxInstructions)
      return fail(peek(), fmt::format("expected at most {} coordinates in groups of communicators, found more", kMaxInstructions));
    if (take_word("ends"))
      comm.groups = mirror_pairs(plan_.mesh.size(comm.axes));
    else if (take_word("groups") && !groups(comm.groups))
      return false;
    plan_.comms.push_back(comm);
    return line_end();
  }

  /// "0,3 1,2": coordinates along the communicator's axis.
  bool groups(Groups& out) {
    do {
      std::vector<int>& group = out.emplace_back();
      do {
        if (!number(group.emplace_back(), "a coordinate along the axis")) return false;
      } while (take_mark(","));
    } while (more());
    return true;
  }

  bool parameter_line() {
    Parameter p;
    const Token at = peek();
    p.decay = false;
    if (!name(p.name, "the name of a parameter") || !define(parameters_, at, plan_.parameters.size(), "a parameter")) return false;
    if (places_ != nullptr) places_->entries.try_emplace("%" + p.name, place_of(at));
    if (!type(p.type)) return false;
    const bool several = take_word("stages");
    if (!several && !take_word("stage")) return expected("`stage` or `stages`");
    p.stages.clear();
    do {
      if (!number(p.stages.emplace_back(), "a stage")) return false;
    } while (several && peek().kind == Token::Kind::kWord && number_in<int>(peek().text));
    if (!one_of(p.initial, kInitialNames, "how the parameter starts")) return false;
    if (take_word("deviation") && !number(p.deviation, "a deviation")) return false;
    if (take_word("decay")) p.decay = true;
    if (!take_word("tensor")) return expected("`tensor`");
    if (!number(p.tensor, "the tensor's number in random keys")) return false;
    plan_.parameters.push_back(p);
    return line_end();
  }

  // --- types -----------------------------------------------------------------------------------------------------

  bool type(Type& out) {
    const Token first = peek();
    const auto dtype = peek().kind == Token::Kind::kWord ? dtype_named(peek().text) : std::nullopt;
    if (!dtype) return expected("an element type (f32, f64, bf16, f16, i64, i32, ...)");
    out.dtype = *dtype;
    ++at_;
    if (!mark("[")) return false;
    while (!take_mark("]")) {
      if (out.shape.rank > 0 && !take_mark(",")) return expected("`,` or `]`");
      if (out.shape.rank == 4) return fail(peek(), "expected at most 4 dims, found one more");
      int64_t extent = 0;
      const Token at = peek();
      if (!number(extent, "an extent")) return false;
      if (extent < 0) return fail(at, fmt::format("expected an extent of at least 0, found {}", extent));
      out.shape[out.shape.rank++] = extent;
    }
    if (!fits_limits(out.shape))
      return fail(first, fmt::format("expected at most {} elements in a buffer, found {}", kMaxElements,
                                     fmt::join(out.shape.extent.begin(), out.shape.extent.begin() + out.shape.rank, " x ")));
    while (is_mark(":", 1))
      if (!placement(out)) return false;
    if (take_word("scale") && !scale(out.scale.factor)) return false;
    if (take_word("per") && !name(out.scale.denominator, "the name of a denominator")) return false;
    return is_mark(":", 1) ? placement(out) : true;
  }

  bool scale(Rational& out) {
    const Token at = peek();
    if (!number(out, "a scale such as 1/4")) return false;
    if (out.num >= -kMaxScale && out.num <= kMaxScale && out.den <= kMaxScale) return true;
    return fail(at, fmt::format("expected a scale of numbers up to {}, found {}", kMaxScale, describe(at)));
  }

  /// "dp:S0", "tp:P", "pp:L", "micro:slice".
  bool placement(Type& out) {
    if (take_word("micro")) {
      ++at_;
      if (take_word("slice")) return out.micro = Micro::kSlice, true;
      if (take_word("sum")) return out.micro = Micro::kSum, true;
      return expected("`slice` or `sum`");
    }
    int32_t axis = 0;
    if (!find(axes_, peek(), axis, "an axis of the mesh, or `micro`")) return false;
    at_ += 2;
    Placement& place = out.place[static_cast<size_t>(axis)];
    if (take_word("R")) return place = Placement::replicate(), true;
    if (take_word("P")) return place = Placement::partial(), true;
    if (take_word("L")) return place = Placement::local(), true;
    const std::string& text = peek().text;
    const auto dim = !text.empty() && text[0] == 'S' ? number_in<int>(std::string_view(text).substr(1)) : std::nullopt;
    if (!dim || *dim < 0 || *dim >= std::max(out.shape.rank, 1))
      return expected(fmt::format("a placement (R, P, L, or S0 to S{})", std::max(out.shape.rank, 1) - 1));
    ++at_;
    place = Placement::shard(*dim);
    return true;
  }

  bool view(View& out, size_t entry) {
    if (peek().kind != Token::Kind::kOperand) return expected("the name of the view's base");
    pending_.push_back({tokens_[at_++], entry, Pending::Use::kView});
    if (take_word("offset") && !number(out.offset, "an offset in elements")) return false;
    return !take_word("shard") || axis_set(out.shard_axes);
  }

  bool reference(size_t entry, Pending::Use use, std::string_view what) {
    if (peek().kind != Token::Kind::kOperand) return expected(what);
    pending_.push_back({tokens_[at_++], entry, use});
    return true;
  }
  bool count(size_t entry) { return reference(entry, Pending::Use::kCount, "the name of the scalar that counts rows"); }
  bool packed(size_t entry) { return reference(entry, Pending::Use::kPacked, "the name of the flat buffer that it is packed as"); }

  template <class Names, class Class>
  bool class_and_type(Names& names, const Token& at, size_t index, std::string_view what, Class& cls, Type& t) {
    if (at.kind != Token::Kind::kOperand) return expected(fmt::format("the name of {} such as %x", what));
    ++at_;
    return define(names, at, index, what) && one_of(cls, kClasses, "a class") && type(t);
  }

  // --- segments ----------------------------------------------------------------------------------------------------

  bool segment_head() {
    const Token at = peek();
    Segment segment;
    if (!name(segment.name, "the name of a segment") || !define(segments_, at, plan_.segments.size(), "a segment")) return false;
    if (places_ != nullptr) places_->segments.try_emplace(segment.name, place_of(at));
    plan_.segments.push_back(segment);
    slot_names_.emplace_back();
    in_segment_ = true;
    return line_end();
  }

  bool segment_line() {
    Segment& segment = plan_.segments.back();
    if (is_word("bound") || is_word("local")) return slot_line(segment);
    if (take_word("alloc")) return slot_step<AllocSlot>(segment);
    if (take_word("free")) return slot_step<FreeSlot>(segment);
    return op_line(segment);
  }

  bool slot_line(Segment& segment) {
    Slot slot;
    slot.kind = is_word("bound") ? SlotKind::kBound : SlotKind::kLocal;
    ++at_;
    const size_t index = segment.slots.size();
    slot.name = peek().text;
    if (places_ != nullptr) places_->entries.try_emplace(segment.name + " %" + slot.name, place_of(peek()));
    if (!class_and_type(slot_names_.back(), peek(), index, "a slot", slot.cls, slot.type)) return false;
    if (!space(slot.space)) return false;
    if (take_word("view") && !view(slot.view.emplace(), index)) return false;
    if (take_word("count") && !count(index)) return false;
    segment.slots.push_back(std::move(slot));
    return line_end();
  }

  bool space(Space& out) {
    for (int s = 0; s < kSpaces; ++s)
      if (take_word(name_of(static_cast<Space>(s)))) out = static_cast<Space>(s);
    return true;
  }

  bool slot(SlotId& out) {
    if (peek().kind != Token::Kind::kOperand) return expected("the name of a slot such as %x");
    return find(slot_names_.back(), peek(), out.value, "a slot of the segment") && ++at_;
  }

  template <class StepKind>
  bool slot_step(Segment& segment) {
    StepKind step;
    if (!slot(step.slot)) return false;
    segment.steps.emplace_back(step);
    return line_end();
  }

  bool operands(std::vector<SlotId>& out) {
    if (!mark("(")) return false;
    while (!take_mark(")")) {
      if (!out.empty() && !mark(",")) return false;
      if (!slot(out.emplace_back())) return false;
    }
    return true;
  }

  bool op_line(Segment& segment) {
    const Token at = peek();
    Op op;
    if (!op_name(op.work) || !name(op.label, "the op's label")) return false;
    if (!operands(op.reads) || !mark("->") || !operands(op.writes) || !op_tail(op) || !apply_attributes(op.work)) return false;
    if (places_ != nullptr) places_->ops.try_emplace(shardlab::op_name(segment, op), place_of(at));
    segment.steps.emplace_back(std::move(op));
    return line_end();
  }

  /// "linear.F", "all_reduce".
  bool op_name(Work& out) {
    const Token& token = peek();
    if (token.kind != Token::Kind::kWord) return expected("an op, `bound`, `local`, `alloc` or `free`");
    const size_t dot = token.text.rfind('.');
    const std::string_view kind = std::string_view(token.text).substr(0, dot);
    const std::string_view phase = dot == std::string::npos ? "" : std::string_view(token.text).substr(dot + 1);
    const size_t phase_index = std::string_view("FIW").find(phase);
    if (phase.size() > 1 || phase_index == std::string_view::npos || (dot != std::string::npos && phase.empty()))
      return expected("an op with phase F, I or W");
    for (const Work& w : prototypes_) {
      if (kind_of(w) != kind) continue;
      out = w;
      const bool has = std::visit([]<class W>(W&) { return has_phase<W>; }, out);
      if (!has && !phase.empty()) return expected(fmt::format("`{}`, which has no phase", kind));
      const Phase value = phase.empty() ? Phase::kNone : static_cast<Phase>(phase_index + 1);
      std::visit(
          [&]<class W>(W& w) {
            if constexpr (has_phase<W>) w.phase = value;
          },
          out);
      ++at_;
      return true;
    }
    std::vector<std::string> kinds;
    for (const Work& w : prototypes_) kinds.emplace_back(kind_of(w));
    std::string close = nearest(kind, kinds);
    if (!close.empty() && !phase.empty()) close += fmt::format(".{}", phase);
    return fail(token, fmt::format("{} is not an op{}", describe(token), meant(token, close)),
                fmt::format("expected an op, `bound`, `local`, `alloc` or `free`; {}", kSyntax));
  }

  bool op_tail(Op& op) {
    attributes_.clear();
    while (more()) {
      if (peek().kind == Token::Kind::kStream) {
        if (!find(streams_, peek(), op.stream.value, "a stream")) return false;
        ++at_;
      } else if (peek().kind == Token::Kind::kStrategy) {
        op.strategy = tokens_[at_++].text;
      } else if (take_word("when")) {
        if (!slot(op.when)) return false;
      } else if (peek().kind == Token::Kind::kWord) {
        Attribute attribute{.name = tokens_[at_++]};
        if (take_mark("=")) {
          if (peek().kind != Token::Kind::kWord) return expected(fmt::format("a value of `{}`", attribute.name.text));
          attribute.has_value = true;
          attribute.value = tokens_[at_++];
        }
        attributes_.push_back(std::move(attribute));
      } else {
        return expected("an attribute, @stream, #strategy or the end of the line");
      }
    }
    return true;
  }

  // --- attributes: the archive that plan/op_fields.h walks -------------------------------------------------------------

  struct FieldReader {
    Parser& parser;
    std::string known;  ///< names asked for so far

    Attribute* find(std::string_view name, bool value) {
      known += (known.empty() ? "" : ", ") + std::string(name);
      for (Attribute& a : parser.attributes_) {
        if (a.name.text != name || a.used) continue;
        a.used = true;
        if (a.has_value == value) return &a;
        parser.fail(a.name, fmt::format("expected `{}` {} a value", name, value ? "with" : "without"));
      }
      return nullptr;
    }
    void flag(std::string_view name, bool& value) {
      if (find(name, false)) value = true;
    }
    template <class T>
    void number(std::string_view name, T& value, T) {
      const Attribute* a = find(name, true);
      if (!a) return;
      const auto v = number_in<T>(a->value.text);
      if (v)
        value = *v;
      else
        parser.fail(a->value, fmt::format("expected a number for `{}`, found {}", name, describe(a->value)));
    }
    template <class E, size_t N>
    void choice(std::string_view name, E& value, const std::array<std::string_view, N>& names, E) {
      const Attribute* a = find(name, true);
      if (!a) return;
      for (size_t i = 0; i < N; ++i)
        if (a->value.text == names[i]) return void(value = static_cast<E>(i));
      parser.fail(a->value, fmt::format("expected one of {} for `{}`, found {}", fmt::join(names, ", "), name, describe(a->value)));
    }
    void text(std::string_view name, std::string& value) {
      if (const Attribute* a = find(name, true)) value = a->value.text;
    }
    void comm(std::string_view name, CommId& value) {
      if (const Attribute* a = find(name, true))
        parser.find(parser.comms_, a->value, value.value, "a communicator");
      else if (!parser.failed())
        parser.expected(fmt::format("`{}=` and the name of a communicator", name));
    }
  };

  bool apply_attributes(Work& work) {
    FieldReader reader{*this, {}};
    std::visit([&](auto& w) { op_fields(reader, w); }, work);
    if (failed()) return false;
    for (const Attribute& a : attributes_)
      if (!a.used)
        return fail(a.name, fmt::format("expected an attribute of {} ({}), found {}", kind_of(work),
                                        reader.known.empty() ? "it has none" : reader.known, describe(a.name)));
    return true;
  }

  // --- roles -----------------------------------------------------------------------------------------------------------

  bool role_head() {
    Role role;
    const Token at = peek();
    if (!number(role.stage, "the role's stage")) return false;
    if (role.stage < 0 || role.stage >= kMaxRanks)
      return fail(at, fmt::format("expected a stage from 0 to {}, found {}", kMaxRanks - 1, role.stage));
    if (places_ != nullptr) places_->roles.try_emplace(role.stage, place_of(at));
    plan_.roles.push_back(std::move(role));
    buffer_names_.clear();
    in_role_ = true;
    return line_end();
  }

  bool role_line() {
    Role& role = plan_.roles.back();
    if (peek().kind == Token::Kind::kOperand) return buffer_line(role);
    if (take_word("call")) return call_line(role);
    if (take_word("alloc")) return buffer_item<Alloc>(role);
    if (take_word("free")) return buffer_item<Free>(role);
    return expected("a buffer such as %x, `call`, `alloc`, `free`, `segment` or `role`");
  }

  bool buffer_line(Role& role) {
    Buffer buffer;
    const size_t index = role.buffers.size();
    buffer.name = peek().text;
    if (places_ != nullptr) places_->entries.try_emplace(fmt::format("{} %{}", role.stage, buffer.name), place_of(peek()));
    if (!class_and_type(buffer_names_, peek(), index, "a buffer", buffer.kind, buffer.type) || !space(buffer.space)) return false;
    if (take_word("persistent")) buffer.persistent = true;
    if (take_word("view") && !view(buffer.view.emplace(), index)) return false;
    if (take_word("of")) {
      if (!find(parameters_, peek(), buffer.parameter, "a parameter")) return false;
      ++at_;
    }
    if (take_word("count") && !count(index)) return false;
    if (take_word("packed") && !packed(index)) return false;
    role.buffers.push_back(std::move(buffer));
    return line_end();
  }

  bool buffer(BufferId& out) {
    if (peek().kind != Token::Kind::kOperand) return expected("the name of a buffer such as %x");
    return find(buffer_names_, peek(), out.value, "a buffer of the role") && ++at_;
  }

  template <class ItemKind>
  bool buffer_item(Role& role) {
    ItemKind item;
    if (!buffer(item.buffer)) return false;
    role.program.emplace_back(item);
    return counted(1) && line_end();
  }

  bool call_line(Role& role) {
    Call call;
    if (!find(segments_, peek(), call.segment.value, "a segment")) return false;
    ++at_;
    while (is_mark("=", 1)) {
      int* const target = is_word("l") ? &call.layer : is_word("m") ? &call.micro_batch : nullptr;
      if (!target) return expected("`l=` (layer), `m=` (micro-batch) or `(`");
      at_ += 2;
      if (!number(*target, "an index")) return false;
    }
    const Names& slots = slot_names_[call.segment.index()];
    call.binding.resize(plan_.segments[call.segment.index()].slots.size());
    if (!mark("(")) return false;
    for (bool first = true; !take_mark(")"); first = false) {
      int32_t slot = 0;
      if ((!first && !mark(",")) || !find(slots, peek(), slot, "a slot of the segment")) return false;
      BufferId& bound = call.binding[static_cast<size_t>(slot)];
      if (bound) return fail(peek(), fmt::format("expected each slot once, found {} a second time", describe(peek())));
      ++at_;
      if (!mark("=") || !buffer(bound)) return false;
    }
    const size_t steps = plan_.segments[call.segment.index()].steps.size();
    role.program.emplace_back(std::move(call));
    return counted(static_cast<int64_t>(steps)) && line_end();
  }

  /// So many more instructions than the lines before it make.
  bool counted(int64_t instructions) {
    instructions_ += instructions;
    if (instructions_ <= kMaxInstructions) return true;
    return fail(peek(), fmt::format("expected at most {} ops, allocations and frees with every call expanded, found more",
                                    kMaxInstructions));
  }

  // --- names used before their definition --------------------------------------------------------------------------------

  bool close_segment() {
    if (!in_segment_) return true;
    in_segment_ = false;
    for (const Pending& p : pending_) {
      int32_t index = 0;
      if (!find(slot_names_.back(), p.name, index, "a slot of the segment")) return false;
      Slot& slot = plan_.segments.back().slots[p.entry];
      (p.use == Pending::Use::kCount ? slot.count.value : slot.view->base) = index;
    }
    pending_.clear();
    return true;
  }

  bool close_role() {
    if (!in_role_) return true;
    in_role_ = false;
    for (const Pending& p : pending_) {
      int32_t index = 0;
      if (!find(buffer_names_, p.name, index, "a buffer of the role")) return false;
      Buffer& buffer = plan_.roles.back().buffers[p.entry];
      (p.use == Pending::Use::kCount    ? buffer.count
       : p.use == Pending::Use::kPacked ? buffer.packed_as
                                        : buffer.view->base) = index;
    }
    pending_.clear();
    return true;
  }

  static constexpr std::array<std::string_view, kBufferClasses> kClasses{
      "parameter", "gradient", "master", "moment", "activation", "temporary", "buffer", "input", "metric", "workspace", "other"};

  std::string file_;
  std::vector<Token> tokens_;
  std::vector<Work> prototypes_;
  size_t at_ = 0;
  int64_t instructions_ = 0;  ///< of all roles so far, calls expanded
  int64_t grouped_ = 0;       ///< coordinates in groups of communicators that the text does not list
  std::optional<Error> error_;
  Plan plan_;
  bool in_segment_ = false, in_role_ = false;
  Names axes_, streams_, comms_, parameters_, segments_, buffer_names_;
  std::vector<Names> slot_names_;  ///< by segment
  std::vector<Pending> pending_;
  std::vector<Attribute> attributes_;
  PlanPlaces* places_;  ///< what the caller wants filled, or nullptr
};

}  // namespace

bool is_plan_text(std::string_view text) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    while (!line.empty() && (line.front() == ' ' || line.front() == '\t' || line.front() == '\r')) line.remove_prefix(1);
    if (line.starts_with("//") || line.empty()) continue;
    return line.starts_with(kPlanMagic) && line.substr(kPlanMagic.size()).starts_with(' ');
  }
  return false;
}

namespace {

Result<Plan> parse_text(std::string_view text, std::string_view file, PlanPlaces* places) {
  if (static_cast<int64_t>(text.size()) > limits::kPlanBytes)
    return Error{ExitCode::kUsage, fmt::format("the text has more than {} bytes", limits::kPlanBytes),
                 "print a plan of fewer micro-batches or stages", std::string(file)};
  return Parser(text, file, places).run();
}

}  // namespace

Result<Plan> parse_plan(std::string_view text, std::string_view file) { return parse_text(text, file, nullptr); }
Result<Plan> parse_plan(std::string_view text, std::string_view file, PlanPlaces& places) {
  return parse_text(text, file, &places);
}

}  // namespace shardlab
