// Rules 3 and 4, backward from forward: an op of phase I or W reads what the forward op of its label, layer and micro-batch read
// and made, the same parameters, and as the gradient of that op's result exactly what the chain rule gives.
//
// The programs of all roles are replayed together, a message passing what it carries on to its receiver, with nothing known of a
// window but what it holds (`Held`). Forward ops enter a ledger (`ChainRule`); backward ops are held to it by the table in
// `sources_of`, which says for each operand what it must be. A forward op that runs again must read what it read the first time,
// and makes the same values. What kernels make that the core does not know by name is identified but not derived; sums over
// micro-batches are followed by rule 4 (plan/verify_gradients.cpp) and not here.
//
// Model order, across stages too: an op of layer l reads what layer l - 1 made, or its own layer, and parameters called after
// layer l. What belongs to no layer stands before the first layer (an embedding) or after the last (a head, a loss).
//
// Around a ring a block of each rank goes from rank to rank: what it is then is told by its TURN, the hops that it has come. Blocks
// of one turn meet in an op, one that is read as the rank's own shard has come home, and of a value all of whose blocks are wanted
// each is read equally often.
//
// An attention over parts of a sequence meets each block of keys once before anything else reads its result. Its backward ops read
// the output and log-sum-exp of all blocks together, and give each a summand of dq and its own dk and dv.
//
// A product in strips multiplies each rank's tokens once, and its result is read by nothing else before. A summand of another rank's strip
// goes home, where one of each rank is added up.
//
// A value that products read in parts has a gradient in parts: each where the part is, and together the whole. Read in parts by other
// ops its gradient is not derived.
#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "plan/base/hash.h"
#include "plan/named_kernels.h"
#include "plan/op_fields.h"
#include "plan/verify_chain.h"
#include "plan/work.h"

namespace shardlab::verifying {
namespace backward {
namespace {

constexpr std::string_view kAgain = ".again";
/// Ends the label of a sum over tokens that is not yet one over sequences.
constexpr std::string_view kTokens = ".tokens";

/// The rule for an operand of a backward op.
struct Source {
  enum class Kind : uint8_t {
    kGradient,  ///< the gradient of the forward op's result `index`
    kRead,      ///< the forward op's read `index`
    kLastRead,  ///< the forward op's last read
    kMade,      ///< the forward op's write `index`
    kLast,      ///< write `index` of the last op that carried on the forward op's result
    kTerm,      ///< another gradient, added to result `index`
    kLoad,      ///< the load of the experts that result `index` names
    kSums,      ///< what the op over tokens made, its result `index`, summed over the ranks that have tokens
    kFree,      ///< an old value of a sum over micro-batches
  } kind = Kind::kFree;
  size_t index = 0;
};

/// The operands of an op of phase I or W in order, as plan/op.h states them. Those beyond the list are free.
/// `scaled`: a matrix product's factors are followed by their scales.
std::vector<Source> sources_of(const Work& work, bool scaled) {
  using Kind = Source::Kind;
  constexpr Source kGradient{Kind::kGradient, 0}, kX{Kind::kRead, 0}, kParameter{Kind::kRead, 1}, kY{Kind::kMade, 0},
      kSaved{Kind::kMade, 1}, kTerm{Kind::kTerm, 0};
  const bool input = phase_of(work) == Phase::kI;
  // Positions in documents are the last operand of a packed op going forward.
  const auto with_positions = [](bool packed, std::vector<Source> sources) {
    if (packed) sources.push_back({Kind::kLastRead, 0});
    return sources;
  };
  return std::visit(
      Overload{
          [&](const Embed&) {
            return std::vector{kX, kGradient};
          },
          [&](const Positions& w) { return with_positions(w.packed, {kGradient}); },
          [&](const Rope& w) { return with_positions(w.packed, {kGradient}); },
          [&](const LatentHeads& w) { return with_positions(w.packed, {kGradient}); },
          [&](const Norm& w) {
            constexpr Source kOfGamma{Kind::kSums, 0}, kOfBeta{Kind::kSums, 1};
            if (w.over == SumOver::kSequences) return w.rms ? std::vector{kOfGamma} : std::vector{kOfGamma, kOfBeta};
            return input ? std::vector{kGradient, kX, kParameter, kSaved, kTerm} : std::vector{kGradient, kX, kSaved};
          },
          [&](const Linear& w) {
            constexpr Source kScales{Kind::kFree, 0}, kXScales{Kind::kRead, 2}, kWScales{Kind::kRead, 3};
            if (input && w.carry) return std::vector{kGradient, kParameter, kTerm};
            if (!scaled) return input ? std::vector{kGradient, kParameter} : std::vector{kX, kGradient};
            if (input) return std::vector{kGradient, kParameter, kScales, kWScales};
            std::vector sources{kX, kGradient, kXScales, kScales};
            if (w.bias) sources.push_back(kGradient);
            return sources;
          },
          [&](const HeadNorm& w) {
            if (w.over == SumOver::kSequences) return std::vector{Source{Kind::kSums, 0}, Source{Kind::kSums, 1}};
            if (!input) return std::vector{kGradient, kX, kSaved};
            return std::vector{kGradient, kX, kParameter, Source{Kind::kRead, 2}, kSaved};
          },
          [&](const Attention& w) {
            return with_positions(w.packed, {kGradient, kY, kSaved, kX});
          },
          [&](const SplitHeads&) {
            return std::vector{kGradient, Source{Kind::kGradient, 1}};
          },
          [&](const AttentionBlock& w) {
            std::vector sources{kGradient, Source{Kind::kLast, 0}, Source{Kind::kLast, 1}, kX, Source{Kind::kRead, 1}};
            if (w.carry) sources.push_back(kTerm);
            if (w.carry_kv) sources.push_back({Kind::kTerm, 1});
            return with_positions(w.packed, std::move(sources));
          },
          [&](const Activation& w) {
            return w.counted ? std::vector{kGradient, kX, kParameter} : std::vector{kGradient, kX};
          },
          [&](const Route& w) {
            std::vector sources{kGradient, kX, kSaved};
            if (w.reads_load()) sources.push_back({Kind::kLoad, 1});
            return sources;
          },
          [&](const Dispatch&) {
            return std::vector{kGradient, kParameter};
          },
          [&](const GroupedLinear&) {
            constexpr Source kCounts{Kind::kRead, 2}, kScales{Kind::kFree, 0}, kXScales{Kind::kRead, 3}, kWScales{Kind::kRead, 4};
            std::vector sources = input ? std::vector{kGradient, kParameter, kCounts} : std::vector{kX, kGradient, kCounts};
            if (scaled) sources.insert(sources.end(), {input ? kScales : kXScales, input ? kWScales : kScales});
            return sources;
          },
          [&](const Combine&) {
            return std::vector{kGradient, kX, kParameter, Source{Kind::kRead, 2}};
          },
          [&](const Gate&) {
            return std::vector{kGradient, kX, kParameter};
          },
          [&](const Residual& w) {
            return std::vector{w.over == SumOver::kSequences ? Source{Kind::kSums, 0} : kGradient};
          },
          [&](const auto&) { return std::vector{kGradient}; },  // dropout
      },
      work);
}

/// How a forward op depends on a read, for its gradient.
enum class Way : uint8_t { kNone, kTerm, kPass };

Way way_of(const Work& work, size_t read) {
  return std::visit(Overload{
                        [&](const Embed&) { return Way::kNone; },
                        [&](const Residual&) { return read < 2 ? Way::kPass : Way::kNone; },
                        [&](const Add&) { return Way::kPass; },
                        [&](const AttentionBlock& w) {
                          return read < 2 ? Way::kTerm : read == 2 && w.carry ? Way::kPass : Way::kNone;
                        },
                        [&](const AttentionMerge&) { return read % 2 == 0 ? Way::kPass : Way::kNone; },
                        [&](const Linear& w) {
                          const size_t before = w.bias ? 3 : 2;  // strips
                          return read == 0 ? Way::kTerm : w.carry && read == before ? Way::kPass : Way::kNone;
                        },
                        [&](const Strips&) { return Way::kPass; },
                        [&](const LatentHeads&) { return read < 3 ? Way::kTerm : Way::kNone; },
                        [&](const Combine&) { return read < 2 ? Way::kTerm : Way::kNone; },
                        [&](const Gate&) { return Way::kTerm; },
                        [&](const ExpertLoad&) { return Way::kNone; },
                        [&](const ChooseExperts&) { return Way::kNone; },
                        [&](const Positions&) { return read == 0 ? Way::kPass : Way::kNone; },
                        [&](const CrossEntropy& w) {
                          const bool back = w.part == CrossEntropy::Part::kFused || w.part == CrossEntropy::Part::kGrad;
                          return read == 0 && back ? Way::kTerm : Way::kNone;
                        },
                        [&](const auto&) { return read == 0 ? Way::kTerm : Way::kNone; },
                    },
                    work);
}

/// What a load brings.
std::string_view content_of(const LoadBatch& load) { return load.positions ? "positions" : load.targets ? "targets" : "tokens"; }

/// All that the ops of one label must agree on, as text. Apart are what accumulates or adds a residual, a bias, which a gradient of
/// the input has no use for, the part of a loss, and strips, of which a gradient of weights knows nothing (`check_strip`).
class Settings {
 public:
  static std::string of(Work work) {
    Settings s;
    s.text_ = kind_of(work);
    if (auto* product = std::get_if<Linear>(&work)) product->strips = 1, product->turn = 0;
    std::visit([&](auto& w) { op_fields(s, w); }, work);
    return s.text_;
  }
  void flag(std::string_view name, bool on) {
    constexpr std::array<std::string_view, 6> kOwn{"accumulate", "residual", "bias", "carry", "carry_kv", "partial"};
    if (on && std::ranges::find(kOwn, name) == kOwn.end()) text_ += fmt::format(" {}", name);
  }
  template <class T>
  void number(std::string_view name, const T& value, const T&) {
    if constexpr (std::is_arithmetic_v<T>) text_ += fmt::format(" {}={}", name, value);
  }
  template <class T, class Names>
  void choice(std::string_view, T, const Names&, T) {}
  void text(std::string_view, const std::string&) {}
  void comm(std::string_view, CommId) {}

 private:
  std::string text_;
};

/// A slot, followed to what owns its storage.
struct Place {
  Window window;
  bool bound = false;  ///< its root is
  bool slice = false;  ///< belongs to one micro-batch
  bool flat = false;   ///< neither: a parameter, perhaps
};

struct Act {
  enum class Kind : uint8_t {
    kAlloc,
    kFree,
    kLoad,
    kForward,
    kBackward,
    kKernel,
    kAdd,
    kMerge,
    kStrips,
    kFill,
    kTransfer,
    kSend,
    kReceive,
    kOther
  };
  Kind kind = Kind::kOther;
  const Op* op = nullptr;
  uint64_t label = 0;
  bool again = false;
  int32_t settings = -1;
  std::vector<int32_t> reads, writes;  ///< slots
  std::vector<Source> sources;         ///< of kBackward
};

struct Script {
  std::vector<Place> slots;
  std::vector<Act> acts;
};

SumOver over_of(const Work& work) {
  return std::visit(
      []<class W>(const W& w) {
        if constexpr (requires { w.over; })
          return w.over;
        else
          return SumOver::kAll;
      },
      work);
}

/// A product of one rank's strip of tokens.
bool multiplies_strip(const Work& work) {
  const auto* product = std::get_if<Linear>(&work);
  return product != nullptr && product->strips > 1;
}

/// The identity of the sums over tokens that go to the n-th parameter of a node.
uint64_t sums_of(int32_t node, size_t n) { return static_cast<uint64_t>(node) * 2 + n; }

Act::Kind kind_of_act(const Op& op) {
  using Kind = Act::Kind;
  const Phase phase = phase_of(op.work);
  if (std::holds_alternative<Kernel>(op.work)) return Kind::kKernel;
  if (std::holds_alternative<AttentionMerge>(op.work) && phase == Phase::kI) return Kind::kMerge;
  if (std::holds_alternative<Strips>(op.work)) return Kind::kStrips;
  if (phase == Phase::kF || std::holds_alternative<CrossEntropy>(op.work) || std::holds_alternative<ExpertLoad>(op.work))
    return Kind::kForward;
  if (phase != Phase::kNone) return Kind::kBackward;
  if (std::holds_alternative<LoadBatch>(op.work)) return Kind::kLoad;
  if (std::holds_alternative<Add>(op.work)) return Kind::kAdd;
  if (std::holds_alternative<Fill>(op.work)) return Kind::kFill;
  if (std::holds_alternative<Copy>(op.work) || std::holds_alternative<Regroup>(op.work) ||
      std::holds_alternative<Collective>(op.work))
    return Kind::kTransfer;
  if (std::holds_alternative<Send>(op.work)) return Kind::kSend;
  if (std::holds_alternative<Recv>(op.work)) return Kind::kReceive;
  return Kind::kOther;
}

class Compiler {
 public:
  Script compile(const Segment& segment) {
    Script script;
    for (size_t s = 0; s < segment.slots.size(); ++s) {
      const Slot& slot = segment.slots[s];
      const Window w = window_of(segment, SlotId(static_cast<int32_t>(s)));
      script.slots.push_back({w, segment.slots[static_cast<size_t>(w.root)].kind == SlotKind::kBound,
                              slot.type.micro == Micro::kSlice, slot.type.micro == Micro::kNone});
    }
    for (const Step& step : segment.steps) script.acts.push_back(act_of(segment, step));
    return script;
  }

  const std::string& settings(int32_t number) const { return texts_[static_cast<size_t>(number)]; }

 private:
  Act act_of(const Segment& segment, const Step& step) {
    Act act;
    if (const auto* alloc = std::get_if<AllocSlot>(&step)) {
      act.kind = Act::Kind::kAlloc;
      act.writes = {alloc->slot.value};
      return act;
    }
    if (const auto* free = std::get_if<FreeSlot>(&step)) {
      act.kind = Act::Kind::kFree;
      act.writes = {free->slot.value};
      return act;
    }
    const Op& op = std::get<Op>(step);
    act.op = &op;
    act.kind = kind_of_act(op);
    std::string_view label = op.label;
    act.again = label.ends_with(kAgain);
    if (act.again) label.remove_suffix(kAgain.size());
    if (over_of(op.work) == SumOver::kTokens && label.ends_with(kTokens)) label.remove_suffix(kTokens.size());
    act.label = hash_text(label);
    const std::string text = Settings::of(op.work);
    const auto [at, fresh] = numbers_.try_emplace(text, static_cast<int32_t>(texts_.size()));
    if (fresh) texts_.push_back(text);
    act.settings = at->second;
    if (act.kind == Act::Kind::kBackward)
      act.sources = sources_of(op.work, has_scales(segment.slots[op.reads[0].index()].type.dtype));
    for (const SlotId s : op.reads) act.reads.push_back(s.value);
    for (const SlotId s : op.writes) act.writes.push_back(s.value);
    return act;
  }

  std::map<std::string, int32_t> numbers_;
  std::vector<std::string> texts_;
};

/// Elements [begin, end) of a storage hold one thing.
struct Extent {
  int64_t begin = 0, end = 0;
  Held held;
};
using Storage = std::vector<Extent>;

struct Region {
  Storage* storage = nullptr;
  int64_t begin = 0, end = 0;
  int32_t root = -1;  ///< role buffer, or -1 for a local
};

/// Messages between roles: the n-th send of a communicator along one line from one role to another belongs to the
/// n-th receive there.
class Mail {
 public:
  using Line = std::array<int, 4>;  ///< communicator, roles from and to, and `line_of` the hop
  void send(const Line& line, const Held& held) { brought_[next(line, 0)] = held; }
  /// The number of a message, which may not have been sent yet.
  size_t receive(const Line& line) { return next(line, 1); }
  const std::optional<Held>& brought(uint64_t message) const { return brought_[message]; }
  /// It is not known what the message brings.
  void give_up(uint64_t message) { brought_[message] = Held{}; }

 private:
  struct Queue {
    std::vector<size_t> messages;
    std::array<size_t, 2> used{};  ///< sends and receives so far
  };
  size_t next(const Line& line, size_t side) {
    Queue& queue = queues_[line];
    const size_t n = queue.used[side]++;
    if (n == queue.messages.size()) {
      queue.messages.push_back(brought_.size());
      brought_.emplace_back();
    }
    return queue.messages[n];
  }

  std::map<Line, Queue> queues_;
  std::vector<std::optional<Held>> brought_;
};

/// Whether blocks go round some axis, which layers the model has, and which layer a parameter's name says it belongs to
/// ("layers.3.attn.wqkv"), or -1.
struct ModelOrder {
  explicit ModelOrder(const Plan& plan) {
    for (const Role& role : plan.roles)
      for (const Item& item : role.program)
        if (const Call* call = std::get_if<Call>(&item)) layers = std::max(layers, call->layer + 1);
    for (const Segment& segment : plan.segments)
      for (const Step& step : segment.steps)
        if (const Op* op = std::get_if<Op>(&step))
          if (const auto* r = std::get_if<Recv>(&op->work); r != nullptr && !joins_roles(plan, plan.comms[r->comm.index()]))
            rings = true;
    for (const Parameter& p : plan.parameters) {
      constexpr std::string_view kLayers = "layers.";
      int32_t layer = -1;
      if (p.name.starts_with(kLayers)) std::from_chars(p.name.data() + kLayers.size(), p.name.data() + p.name.size(), layer);
      of_parameter.push_back(layer);
    }
  }

  int32_t layers = 0;
  std::vector<int32_t> of_parameter;
  bool rings = false;  ///< blocks go round within a role
};

/// The program of one role, which stops where it reads what no message has brought yet.
class Replay {
 public:
  Replay(const Plan& plan, int role, const Compiler& compiler, const std::vector<Script>& scripts, const ModelOrder& order,
         ChainRule& rule, Mail& mail, Report& report);

  /// Plays on to the end, or to an op whose message is not there yet; with `give_up` past that op. True if it came any further.
  bool advance(bool give_up);
  bool is_done() const { return item_ >= role_.program.size(); }

 private:
  bool play_call(bool give_up);
  void play(const Act& act);
  bool has_mail(const Act& act, bool give_up);
  int32_t check_order(const Act& act);
  void check_turns(const Act& act);
  void check_counts(const Act& act);
  void check_packed(const Act& act);
  void check_copies(const Act& act, int32_t route);
  void check_sources(const Act& act, int32_t node);
  Held turned(const Act& act, int32_t slot, Held held);
  int axis_of_parts(int32_t slot) const;
  void check_complete(const Act& act);
  int64_t attention_window(int32_t node) const;
  void check_window(const Act& act, int32_t before);
  void meet_block(const Act& act, int32_t node);
  void meet_all(const Act& act, int32_t node);
  int32_t last_of(int32_t node) const;
  void play_merge(const Act& act);
  int strip_axis_of(const Act& act) const { return strip_axis(*segment_, *act.op, plan_.mesh); }
  int32_t turn_of_strip(const Act& act) const;
  bool is_summand(const Act& act) const;
  void check_strip(const Act& act, int32_t node);
  void meet_strip(const Act& act, int32_t node);
  void play_strips(const Act& act);
  void check_join(const Act& act, int32_t n);
  void check_summands(const Act& act, int32_t n);
  Held away(const Act& act, Held held) const;
  void play_load(const Act& act);
  void play_forward(const Act& act);
  void play_again(const Act& act, int32_t node);
  void play_backward(const Act& act);
  void play_kernel(const Act& act);
  void play_rounding(const Act& act);
  uint64_t scales_of(int32_t slot, const Held& held);
  void check_scales(const Act& act);
  void check_scales_of_rows(const Act& act, size_t i, const Held& scales);
  void check_rounded_rows(const Act& act);
  void play_add(const Act& act);
  void play_transfer(const Act& act);
  void send(const Act& act, const Send& send);
  void receive(const Act& act, const Recv& receive);
  void check_batch(const Act& act);
  void check_part(const Act& act);
  void check_loss_parts(const Act& act, int32_t node);
  void check_room(const Act& act, int32_t route);
  void check_bounded(const Act& act, int32_t route);
  void check_fitted(const Act& act);
  void play_fit(const Act& act);
  int64_t most_that_come(int32_t route, const Type& counts) const;
  void check_chosen(const Act& act);
  void check_route(const Act& act);
  int32_t route_of_rows(const Held& rows) const;
  int32_t route_of(const Held& held, size_t result) const;
  /// Compares a backward operand with its rule. `sum` grows by the gradient that the operand adds to the result, if it adds one.
  void check_operand(const Act& act, size_t i, int32_t node, std::optional<uint64_t>& sum);
  void check_gradient(const Act& act, size_t i, int32_t node, size_t result);
  void check_parameters(const Act& act, int32_t node);
  void check_same(const Act& act, size_t i, const Held& noted, std::string_view which);
  void check_load(const Act& act, size_t i, const Held& choice);
  void check_settings(const Act& act, int32_t node);

  Region region(int32_t slot);
  Held parameter_at(const Region& at) const;
  Held read(int32_t slot);
  void read_all(const Act& act);
  void write(int32_t slot, const Held& held);
  template <class F>
  void for_values(int32_t slot, F f);
  void consume(const Act& act, int32_t node);
  uint64_t key(const Act& act) const {
    const uint64_t at = static_cast<uint64_t>(call_->layer + 1) << 32 | static_cast<uint64_t>(call_->micro_batch + 1);
    return mix(mix(act.label + static_cast<uint64_t>(role_index_)) + at);
  }
  Site site(const Act& act) const { return {role_index_, segment_, act.op, call_}; }
  const std::string& name(int32_t slot) const { return segment_->slots[static_cast<size_t>(slot)].name; }
  template <class... T>
  void fault(Rule rule, const Act& act, fmt::format_string<T...> format, T&&... values) {
    report_.add(rule, role_index_, op_name(*segment_, *act.op, *call_), fmt::format(format, std::forward<T>(values)...));
  }

  const Plan& plan_;
  const Role& role_;
  const int role_index_;
  const Compiler& compiler_;
  const std::vector<Script>& scripts_;
  const ModelOrder& order_;
  ChainRule& rule_;
  Mail& mail_;
  Report& report_;
  struct Link {
    int64_t begin, end;
    int32_t parameter;
  };
  std::vector<Window> buffers_;
  std::vector<std::vector<Link>> links_;  ///< by root: where parameters lie in it
  std::vector<Storage> storages_, locals_;
  std::vector<Held> held_;    ///< what the op in play reads
  std::set<int32_t> judged_;  ///< routers of whose rows a kernel has said whether all that come have room
  size_t item_ = 0, act_ = 0;
  const Call* call_ = nullptr;
  const Segment* segment_ = nullptr;
  const Script* script_ = nullptr;
};

Replay::Replay(const Plan& plan, int role, const Compiler& compiler, const std::vector<Script>& scripts, const ModelOrder& order,
               ChainRule& rule, Mail& mail, Report& report)
    : plan_(plan),
      role_(plan.roles[static_cast<size_t>(role)]),
      role_index_(role),
      compiler_(compiler),
      scripts_(scripts),
      order_(order),
      rule_(rule),
      mail_(mail),
      report_(report),
      links_(role_.buffers.size()),
      storages_(role_.buffers.size()) {
  for (size_t b = 0; b < role_.buffers.size(); ++b) {
    buffers_.push_back(window_of(role_, BufferId(static_cast<int32_t>(b))));
    const Window& w = buffers_.back();
    if (role_.buffers[b].parameter >= 0 && w.shard.empty())
      links_[static_cast<size_t>(w.root)].push_back({w.begin, w.begin + w.length, role_.buffers[b].parameter});
  }
  for (auto& links : links_) std::ranges::stable_sort(links, {}, &Link::begin);
}

bool Replay::advance(bool give_up) {
  const size_t item = item_, act = act_;
  for (; item_ < role_.program.size() && !report_.full(); ++item_) {
    const Item& at = role_.program[item_];
    if (const auto* alloc = std::get_if<Alloc>(&at)) {
      storages_[alloc->buffer.index()].clear();
    } else if (const auto* call = std::get_if<Call>(&at)) {
      call_ = call;
      segment_ = &plan_.segments[call->segment.index()];
      script_ = &scripts_[call->segment.index()];
      if (!play_call(give_up)) break;
      give_up = false;
    }
  }
  return item_ != item || act_ != act;
}

bool Replay::play_call(bool give_up) {
  if (locals_.size() < script_->slots.size()) locals_.resize(script_->slots.size());
  for (; act_ < script_->acts.size(); ++act_) {
    if (!has_mail(script_->acts[act_], give_up)) return false;
    play(script_->acts[act_]);
  }
  act_ = 0;
  return true;
}

/// Puts what messages brought where the op reads it. A receive may be issued long before what it waits for can be sent, so that
/// only a read waits.
bool Replay::has_mail(const Act& act, bool give_up) {
  for (const int32_t slot : act.reads) {
    const Region at = region(slot);
    for (Extent& e : *at.storage) {
      if (e.held.kind != Held::Kind::kMessage || e.end <= at.begin || at.end <= e.begin) continue;
      if (!mail_.brought(e.held.what) && give_up) mail_.give_up(e.held.what);
      const auto& brought = mail_.brought(e.held.what);
      if (!brought) return false;
      const Held message = e.held;
      e.held = *brought;
      if (message.turn == 0) continue;
      const int32_t size = plan_.mesh.axes[static_cast<size_t>(message.axis)].size;
      e.held.turn = ((e.held.turn + message.turn) % size + size) % size;
      e.held.axis = e.held.turn == 0 ? int8_t{-1} : message.axis;
    }
  }
  return true;
}

Region Replay::region(int32_t slot) {
  const Place& place = script_->slots[static_cast<size_t>(slot)];
  Region at;
  AxisSet shard = place.window.shard;
  at.begin = place.window.begin;
  if (place.bound) {
    const Window& w = buffers_[call_->binding[static_cast<size_t>(place.window.root)].index()];
    at.storage = &storages_[static_cast<size_t>(w.root)];
    at.root = w.root;
    at.begin += w.begin;
    shard = shard | w.shard;
  } else {
    at.storage = &locals_[static_cast<size_t>(place.window.root)];
  }
  at.end = at.begin + place.window.length * plan_.mesh.size(shard);
  return at;
}

/// The parameter that the buffer itself names. Rule 3 proves that the gathered or copied contents are this parameter.
Held Replay::parameter_at(const Region& at) const {
  if (at.root < 0) return {};
  const auto& links = links_[static_cast<size_t>(at.root)];
  const auto after = std::upper_bound(links.begin(), links.end(), at.begin, [](int64_t v, const Link& l) { return v < l.begin; });
  if (after == links.begin()) return {};
  const Link& link = *(after - 1);
  if (at.end > link.end) return {};
  return {Held::Kind::kParameter, static_cast<uint64_t>(link.parameter), at.begin - link.begin};
}

Held Replay::read(int32_t slot) {
  const Place& place = script_->slots[static_cast<size_t>(slot)];
  const Region at = region(slot);
  if (place.flat && at.root >= 0) return parameter_at(at);
  if (!place.slice && !place.flat) return {};  // a local that is flat is a parameter rounded, or unknown
  Held held;
  uint64_t several = 0;
  for (const Extent& e : *at.storage) {
    if (e.end <= at.begin || at.end <= e.begin) continue;
    if (e.held.kind == Held::Kind::kUnknown) {
      if (held.kind == Held::Kind::kUnknown) held = e.held;  // its turn is known
      continue;
    }
    Held here = e.held;
    const int64_t begin = std::max(at.begin, e.begin);
    here.shift += begin - e.begin;
    several = ChainRule::mix_part(several, here, here.kind == Held::Kind::kGradient ? begin - at.begin : here.shift);
    if (held.kind == Held::Kind::kUnknown || held.kind == Held::Kind::kZero)
      held = here;
    else if (here.kind != Held::Kind::kZero)
      held = {Held::Kind::kSeveral, several, 0};
  }
  return held;
}

void Replay::read_all(const Act& act) {
  held_.clear();
  for (const int32_t slot : act.reads) held_.push_back(read(slot));
  check_complete(act);
}

void Replay::write(int32_t slot, const Held& held) {
  const Region at = region(slot);
  Storage& storage = *at.storage;
  if (storage.empty() || (storage.size() == 1 && at.begin <= storage[0].begin && storage[0].end <= at.end)) {
    storage.assign(1, {at.begin, at.end, held});
    return;
  }
  Storage kept;
  for (const Extent& e : storage) {
    if (e.begin < at.begin) kept.push_back({e.begin, std::min(e.end, at.begin), e.held});
    if (e.end <= at.end) continue;
    Extent right = e;
    right.begin = std::max(e.begin, at.end);
    right.held.shift += right.begin - e.begin;
    kept.push_back(right);
  }
  kept.push_back({at.begin, at.end, held});
  storage = std::move(kept);
}

/// Calls f(value, whole) for every value that lies in the slot.
template <class F>
void Replay::for_values(int32_t slot, F f) {
  if (!script_->slots[static_cast<size_t>(slot)].slice) return;
  const Region at = region(slot);
  for (const Extent& e : *at.storage)
    if (e.begin < at.end && at.begin < e.end && e.held.kind == Held::Kind::kValue)
      f(e.held, e.held.shift == 0 && at.begin <= e.begin && e.end <= at.end);
}

/// Enters the op's readings of values into the ledger.
void Replay::consume(const Act& act, int32_t node) {
  for (size_t i = 0; i < act.reads.size(); ++i) {
    const Way way = way_of(act.op->work, i);
    if (way == Way::kNone) continue;
    const bool alone = held_[i].kind == Held::Kind::kValue;
    for_values(act.reads[i], [&](const Held& value, bool whole) {
      if (alone && !whole && std::holds_alternative<Linear>(act.op->work) && way == Way::kTerm)
        rule_.consume_part(held_[i], script_->slots[static_cast<size_t>(act.reads[i])].window.length, node, i);
      else if (!whole || !alone)
        rule_.hide(value);
      else if (way == Way::kTerm)
        rule_.consume(value, node, i);
      else
        rule_.pass(value, node);
    });
  }
}

void Replay::play(const Act& act) {
  using Kind = Act::Kind;
  switch (act.kind) {
    case Kind::kAlloc:
    case Kind::kFree: return region(act.writes[0]).storage->clear();
    case Kind::kLoad: return play_load(act);
    case Kind::kForward: return play_forward(act);
    case Kind::kBackward: return play_backward(act);
    case Kind::kKernel: return play_kernel(act);
    case Kind::kAdd: return play_add(act);
    case Kind::kMerge: return play_merge(act);
    case Kind::kStrips: return play_strips(act);
    case Kind::kTransfer: return play_transfer(act);
    case Kind::kSend: return send(act, std::get<Send>(act.op->work));
    case Kind::kReceive: return receive(act, std::get<Recv>(act.op->work));
    case Kind::kFill: {
      const bool zero = std::get<Fill>(act.op->work).value == 0;
      return write(act.writes[0], zero ? Held{Held::Kind::kZero, 0, 0} : Held{});
    }
    case Kind::kOther: break;
  }
  if (std::holds_alternative<SumScalars>(act.op->work))
    for (const int32_t slot : act.reads) for_values(slot, [&](const Held& loss, bool) { rule_.report(loss); });
  for (const int32_t slot : act.writes)
    if (script_->slots[static_cast<size_t>(slot)].slice) write(slot, {});
}

/// Holds what a forward op reads to the order of the model's layers. How many of them its results have been through. A kernel by
/// name that belongs to no layer may stand anywhere.
int32_t Replay::check_order(const Act& act) {
  const int32_t layer = call_->layer;
  const bool anywhere = layer < 0 && act.kind == Act::Kind::kKernel;
  int32_t depth = anywhere ? -1 : layer + 1;
  for (const int32_t slot : act.reads)
    for_values(slot, [&](const Held& value, bool) {
      const Node& from = rule_.node(rule_.maker(value));
      if (std::holds_alternative<LoadBatch>(from.op->work)) return;  // every layer may read the batch
      const bool in_order = anywhere || from.depth < 0 ||
                            (layer < 0 ? from.depth == 0 || from.depth == order_.layers
                                       : from.depth == layer || (from.depth == layer + 1 && from.call->layer == layer));
      depth = std::max(depth, from.depth);
      if (in_order) return;
      const std::string where = from.role == role_index_ ? "" : fmt::format(" on stage {} along {}", from.role, kPipelineAxis);
      if (layer < 0)
        fault(Rule::kValues, act, "reads %{}, and {}{} is there: it has been through {} of the model's {} layers", name(slot),
              rule_.name_of(value), where, from.depth, order_.layers);
      else
        fault(Rule::kValues, act, "reads %{}, and {}{} is there: layer {} reads what {} made", name(slot), rule_.name_of(value),
              where, layer, layer == 0 ? "the embedding" : fmt::format("layer {}", layer - 1));
    });
  for (size_t i = 0; i < held_.size(); ++i)
    if (held_[i].kind == Held::Kind::kParameter)
      if (const int32_t of = order_.of_parameter[held_[i].what]; of >= 0 && of != layer)
        fault(Rule::kValues, act, "reads %{} in {}, and {} is there", name(act.reads[i]),
              layer < 0 ? "no layer" : fmt::format("layer {}", layer), plan_.parameters[held_[i].what].name);
  return depth;
}

/// Blocks that have come round a ring.
void Replay::check_turns(const Act& act) {
  int32_t turn = 0;
  for (size_t i = 0; i < act.reads.size(); ++i) {
    const Held& held = held_[i];
    if (held.turn == 0) continue;
    const auto axis = static_cast<size_t>(held.axis);
    const MeshAxis& ring = plan_.mesh.axes[axis];
    if (segment_->slots[static_cast<size_t>(act.reads[i])].type.place[axis].kind != shardlab::Place::kLocal)
      fault(Rule::kValues, act, "along {}: reads %{} as the rank's own, and it is {} of {} hops away from home", ring.name,
            name(act.reads[i]), held.turn, ring.size);
    if (turn != 0 && held.turn != turn)
      fault(Rule::kValues, act, "along {}: reads %{}, which has come {} hops, with what has come {}", ring.name, name(act.reads[i]),
            held.turn, turn);
    turn = held.turn;
  }
  if (phase_of(act.op->work) == Phase::kI || phase_of(act.op->work) == Phase::kW || !order_.rings) return;
  for (const Held& held : held_)
    if (held.kind == Held::Kind::kValue) rule_.read_block(held, plan_.mesh, site(act));
}

/// A value written in place of a block that has come round a ring belongs to that block.
Held Replay::turned(const Act& act, int32_t slot, Held held) {
  const Region out = region(slot);
  for (size_t i = 0; i < act.reads.size(); ++i) {
    const Region in = region(act.reads[i]);
    if (held_[i].turn == 0 || in.storage != out.storage || in.begin != out.begin || in.end != out.end) continue;
    held.turn = held_[i].turn;
    held.axis = held_[i].axis;
  }
  return held;
}

/// The axis along which the ranks hold parts of a sequence, or -1.
int Replay::axis_of_parts(int32_t slot) const {
  const Type& type = segment_->slots[static_cast<size_t>(slot)].type;
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
    if (plan_.mesh.axes[a].size > 1 && type.place[a] == Placement::shard(1)) return static_cast<int>(a);
  return -1;
}

/// What an attention has made of some of its blocks is read by its next step alone.
void Replay::check_complete(const Act& act) {
  if (std::holds_alternative<AttentionBlock>(act.op->work) || std::holds_alternative<AttentionMerge>(act.op->work) ||
      std::holds_alternative<Strips>(act.op->work))
    return;
  const auto* strip = std::get_if<Linear>(&act.op->work);
  for (size_t i = 0; i < held_.size(); ++i) {
    if (held_[i].kind != Held::Kind::kValue || (strip != nullptr && strip->carry && i + 1 == held_.size())) continue;
    const int32_t maker = rule_.maker(held_[i]);
    const Blocks* blocks = rule_.known_blocks(maker);
    if (blocks == nullptr || (!blocks->partial && static_cast<int32_t>(blocks->turns.size()) == blocks->size)) continue;
    const bool product = std::holds_alternative<Linear>(rule_.node(maker).op->work);
    fault(Rule::kValues, act, "reads %{}, and {} is there: {} {} of {} {}{}", name(act.reads[i]), rule_.name_of(held_[i]),
          product ? "a product of" : "an attention to", blocks->turns.size(), blocks->size, product ? "strips" : "blocks of keys",
          !blocks->partial ? ""
          : product        ? ", not added up"
                           : ", not merged");
  }
}

/// Whether two blocks are of one value, wherever each has come from.
bool same_blocks(const Held& a, const Held& b) { return a.kind == b.kind && a.what == b.what && a.shift == b.shift; }

/// The window of an op of attention to a block of keys; 0: none.
int64_t Replay::attention_window(int32_t node) const {
  const auto* block = std::get_if<AttentionBlock>(&rule_.node(node).op->work);
  return block == nullptr ? 0 : block->window;
}

/// Blocks of one attention have one window.
void Replay::check_window(const Act& act, int32_t before) {
  const int64_t window = std::get<AttentionBlock>(act.op->work).window;
  if (window != attention_window(before))
    fault(Rule::kValues, act, "window={}, and %{} is of keys within a window of {}", window, name(act.reads[2]),
          attention_window(before));
}

/// An attention meets the next block of keys: the one that the op says, and each once.
void Replay::meet_block(const Act& act, int32_t node) {
  const AttentionBlock& w = std::get<AttentionBlock>(act.op->work);
  const int axis = axis_of_parts(act.reads[0]);
  const auto place = [&](int32_t slot) {
    return segment_->slots[static_cast<size_t>(slot)].type.place[static_cast<size_t>(axis)].kind;
  };
  const bool in_blocks = axis >= 0 && place(act.reads[1]) != shardlab::Place::kReplicate;
  Blocks blocks;
  blocks.size = in_blocks ? plan_.mesh.axes[static_cast<size_t>(axis)].size : 1;
  blocks.partial = w.partial;
  if (w.carry) {
    const int32_t before = held_[2].kind == Held::Kind::kValue ? rule_.maker(held_[2]) : -1;
    const Blocks* met = before < 0 ? nullptr : rule_.known_blocks(before);
    if (met == nullptr || met->partial || held_[2] != rule_.made(before, 0) || held_[3] != rule_.made(before, 1))
      fault(Rule::kValues, act, "goes on with %{} and %{}, which are not the running result of one attention", name(act.reads[2]),
            name(act.reads[3]));
    else
      check_same(act, 0, rule_.read(before, 0), "the queries of the blocks before");
    if (met != nullptr && !same_blocks(held_[1], rule_.read(before, 1)))
      fault(Rule::kValues, act, "reads %{}, which is no block of the keys of the blocks before", name(act.reads[1]));
    if (met != nullptr) check_window(act, before);
    if (met != nullptr) blocks.turns = met->turns;
    if (met != nullptr) rule_.blocks(before).next = node;
  }
  const int32_t turn = ((w.turn % blocks.size) + blocks.size) % blocks.size;
  if (held_[1].turn != turn)
    fault(Rule::kValues, act, "turn={}, and %{} has come {} hops", w.turn, name(act.reads[1]), held_[1].turn);
  if (!blocks.turns.insert(turn).second) fault(Rule::kValues, act, "meets the block {} ranks away a second time", w.turn);
  rule_.blocks(node) = std::move(blocks);
}

/// Parts of one attention, each of the rank that its place says.
void Replay::meet_all(const Act& act, int32_t node) {
  const AttentionMerge& w = std::get<AttentionMerge>(act.op->work);
  const auto n = static_cast<int32_t>(act.reads.size() / 2);
  Blocks all;
  all.size = n;
  for (int32_t i = 0; i < n; ++i) {
    const auto at = static_cast<size_t>(2 * i);
    const int32_t maker = held_[at].kind == Held::Kind::kValue ? rule_.maker(held_[at]) : -1;
    const Blocks* part = maker < 0 ? nullptr : rule_.known_blocks(maker);
    if (part == nullptr || !part->partial || held_[at] != rule_.made(maker, 0) || held_[at + 1] != rule_.made(maker, 1)) {
      fault(Rule::kValues, act, "merges %{} and %{}, which are not the results of one partial block", name(act.reads[at]),
            name(act.reads[at + 1]));
      continue;
    }
    const int32_t turn = *part->turns.begin(), wanted = ((w.step * i) % n + n) % n;
    if (turn != wanted || part->size != n)
      fault(Rule::kValues, act, "takes %{} for that of the block {} ranks away, and it is of {} of {}", name(act.reads[at]), wanted,
            turn, part->size);
    all.turns.insert(turn);
    rule_.blocks(maker).next = node;
    const int32_t first = held_[0].kind == Held::Kind::kValue ? rule_.maker(held_[0]) : -1;
    if (i > 0 && first >= 0 && rule_.known_blocks(first) != nullptr && attention_window(maker) != attention_window(first))
      fault(Rule::kValues, act, "merges %{} of a window of {} tokens with %{} of {}", name(act.reads[at]), attention_window(maker),
            name(act.reads[0]), attention_window(first));
    if (i > 0 && first >= 0 && rule_.known_blocks(first) != nullptr &&
        (rule_.read(maker, 0) != rule_.read(first, 0) || !same_blocks(rule_.read(maker, 1), rule_.read(first, 1))))
      fault(Rule::kValues, act, "merges %{}, which is of other queries or keys than %{}", name(act.reads[at]), name(act.reads[0]));
  }
  rule_.blocks(node) = std::move(all);
}

/// The op that made the result of all blocks.
int32_t Replay::last_of(int32_t node) const {
  for (const Blocks* blocks = rule_.known_blocks(node); blocks != nullptr && blocks->next >= 0; blocks = rule_.known_blocks(node))
    node = blocks->next;
  return node;
}

/// Gradients of parts of one attention, added up: each is what the op of one block made, of the rank that its place says.
void Replay::play_merge(const Act& act) {
  read_all(act);
  check_turns(act);
  const AttentionMerge& w = std::get<AttentionMerge>(act.op->work);
  const auto n = static_cast<int32_t>(act.reads.size());
  std::optional<uint64_t> sum = 0;
  for (int32_t i = 0; i < n; ++i) {
    const Held& held = held_[static_cast<size_t>(i)];
    const std::string& slot = name(act.reads[static_cast<size_t>(i)]);
    if (held.kind == Held::Kind::kValue || held.kind == Held::Kind::kParameter)
      fault(Rule::kGradients, act, "adds up %{}, and it is a forward value", slot);
    if (held.kind != Held::Kind::kGradient) {
      sum.reset();
      continue;
    }
    if (sum) *sum += held.what;
    if (n == 1) continue;
    // The gradient of a rank's keys by the queries of rank j is of the block that was -j ranks away there.
    const int32_t wanted = (((w.keys ? -w.step : w.step) * i) % n + n) % n;
    const auto turn = rule_.turn_of_term(held.what);
    if (!turn || *turn != wanted)
      fault(Rule::kGradients, act, "takes %{} for that of the block {} ranks away, and it is of {}", slot, wanted,
            turn ? fmt::format("the one {} away", *turn) : "no block alone");
  }
  write(act.writes[0], sum ? Held{Held::Kind::kGradient, *sum, 0} : Held{});
}

/// How far along the rank is whose strip a product takes.
int32_t Replay::turn_of_strip(const Act& act) const {
  const Linear& w = std::get<Linear>(act.op->work);
  return ((w.turn % w.strips) + w.strips) % w.strips;
}

/// Whether a product in strips makes a summand of another rank's strip, and no strip of a whole.
bool Replay::is_summand(const Act& act) const {
  const auto tokens = [&](int32_t slot) { return segment_->slots[static_cast<size_t>(slot)].type.shape[1]; };
  return tokens(act.reads[0]) > tokens(act.writes[0]);
}

/// A summand of the strip of a rank some way along belongs there.
Held Replay::away(const Act& act, Held held) const {
  held.turn = turn_of_strip(act);
  held.axis = held.turn == 0 ? int8_t{-1} : static_cast<int8_t>(strip_axis_of(act));
  return held;
}

/// A product takes the strip that it says, and goes back as it went forward.
void Replay::check_strip(const Act& act, int32_t node) {
  const Linear& w = std::get<Linear>(act.op->work);
  const Linear* forward = std::get_if<Linear>(&rule_.node(node).op->work);
  if (forward != nullptr && (forward->strips != w.strips || forward->turn != w.turn))
    fault(Rule::kGradients, act, "strips={} turn={} where the forward op has strips={} turn={}", w.strips, w.turn, forward->strips,
          forward->turn);
  if (!is_summand(act) && held_[0].kind != Held::Kind::kUnknown && held_[0].turn != turn_of_strip(act))
    fault(Rule::kValues, act, "turn={}, and %{} has come {} hops", w.turn, name(act.reads[0]), held_[0].turn);
}

/// A product meets the next strip: of the same tokens and weight as those before, and each once.
void Replay::meet_strip(const Act& act, int32_t node) {
  const Linear& w = std::get<Linear>(act.op->work);
  check_strip(act, node);
  Blocks blocks;
  blocks.size = w.strips;
  blocks.partial = is_summand(act);
  if (w.carry) {
    const Held& old = held_.back();
    const int32_t before = old.kind == Held::Kind::kValue ? rule_.maker(old) : -1;
    const Blocks* met = before < 0 ? nullptr : rule_.known_blocks(before);
    if (met == nullptr || met->partial || old != rule_.made(before, 0))
      fault(Rule::kValues, act, "goes on with %{}, which is not the running result of one product", name(act.reads.back()));
    else if (!same_blocks(held_[0], rule_.read(before, 0)))
      fault(Rule::kValues, act, "reads %{}, which is no strip of the tokens of the strips before", name(act.reads[0]));
    else
      for (size_t i = 1; i + 1 < held_.size(); ++i) check_same(act, i, rule_.read(before, i), "the weight of the strips before");
    if (met != nullptr) {
      blocks.turns = met->turns;
      rule_.blocks(before).next = node;
    }
  }
  if (!blocks.turns.insert(turn_of_strip(act)).second)
    fault(Rule::kValues, act, "multiplies the strip of the rank {} further along a second time", w.turn);
  rule_.blocks(node) = std::move(blocks);
}

/// Strips of one value, each of the rank that its place says.
void Replay::check_join(const Act& act, int32_t n) {
  const int32_t step = std::get<Strips>(act.op->work).step;
  for (int32_t i = 0; i < n; ++i) {
    const Held& held = held_[static_cast<size_t>(i)];
    const int32_t wanted = ((step * i) % n + n) % n;
    if (held.kind != Held::Kind::kUnknown && held.turn != wanted)
      fault(Rule::kValues, act, "takes %{} for the strip of the rank {} further along, and it has come {} hops",
            name(act.reads[static_cast<size_t>(i)]), wanted, held.turn);
    if (!same_blocks(held, held_[0]))
      fault(Rule::kValues, act, "puts %{} beside %{}, and they are of other tensors", name(act.reads[static_cast<size_t>(i)]),
            name(act.reads[0]));
  }
}

/// Summands of the rank's own strip, one of each rank, in the order of the ranks: each has come home.
void Replay::check_summands(const Act& act, int32_t n) {
  const int32_t step = std::get<Strips>(act.op->work).step;
  const int32_t first = held_[0].kind == Held::Kind::kValue ? rule_.maker(held_[0]) : -1;
  for (int32_t i = 0; i < n; ++i) {
    const Held& held = held_[static_cast<size_t>(i)];
    const std::string& slot = name(act.reads[static_cast<size_t>(i)]);
    if (held.kind == Held::Kind::kUnknown) continue;
    if (held.turn != 0) fault(Rule::kValues, act, "adds %{}, which is {} hops away from home", slot, held.turn);
    std::optional<int32_t> turn;
    if (held.kind == Held::Kind::kGradient) turn = rule_.turn_of_term(held.what);
    if (held.kind == Held::Kind::kValue) {
      const int32_t maker = rule_.maker(held);
      const Blocks* part = rule_.known_blocks(maker);
      if (part != nullptr && part->partial && part->size == n && held == rule_.made(maker, 0)) turn = *part->turns.begin();
      if (turn && first >= 0 && rule_.node(maker).reads == rule_.node(first).reads &&
          (rule_.read(maker, 0) != rule_.read(first, 0) || rule_.read(maker, 1) != rule_.read(first, 1)))
        fault(Rule::kValues, act, "adds %{}, which is of another product than %{}", slot, name(act.reads[0]));
    }
    const int32_t wanted = ((-step * i) % n + n) % n;  // the rank that made it took the strip of the rank so far along
    if (!turn || *turn != wanted)
      fault(Rule::kValues, act, "takes %{} for the summand that the rank {} further along made, and it is {}", slot,
            ((step * i) % n + n) % n,
            turn ? fmt::format("one for a rank {} further along", *turn) : "no summand of a product in strips");
  }
}

/// What is put together is the value, or the gradient, that its strips are of. Summands make a value of their own, or the sum of terms.
void Replay::play_strips(const Act& act) {
  read_all(act);
  const auto n = static_cast<int32_t>(act.reads.size());
  const bool sum = std::get<Strips>(act.op->work).sum;
  if (sum) check_summands(act, n);
  const auto is = [&](Held::Kind kind) { return std::ranges::all_of(held_, [&](const Held& h) { return h.kind == kind; }); };
  if (sum && is(Held::Kind::kValue)) return play_forward(act);
  if (!sum) {
    check_join(act, n);
    return write(act.writes[0], held_[0]);
  }
  uint64_t terms = 0;
  for (const Held& held : held_) terms += held.what;
  write(act.writes[0], is(Held::Kind::kGradient) ? Held{Held::Kind::kGradient, terms, 0} : Held{});
}

/// As many rows as the op has room for go from one rank to another at most: as many as the router's capacity lets go.
void Replay::check_room(const Act& act, int32_t route) {
  const int64_t room = std::get<Collective>(act.op->work).room;
  if (room == 0) return;
  const auto none = [&] {
    return fault(Rule::kValues, act, "has room for {} rows of each rank, and no router with a capacity chose the rows", room);
  };
  if (route < 0) return none();
  const Node& node = rule_.node(route);
  const int64_t capacity = std::get<Route>(node.op->work).capacity;
  if (capacity == 0) return none();
  const auto shape = [&](size_t result) { return node.segment->slots[node.op->writes[result].index()].type.shape; };
  const Shape choice = shape(1), counts = shape(2);
  const int64_t most = most_rows(choice, counts[2], capacity);
  if (room < most)
    fault(Rule::kValues, act, "has room for {} rows of each rank, and {} sequences fill {} with capacity={}", room, choice[0], most,
          capacity);
  // Ranks that have parts of the same sequences send no more than the sequences have room for.
  const auto type = [&](int32_t slot) -> const Type& { return segment_->slots[static_cast<size_t>(slot)].type; };
  const bool returns = type(act.reads[0]).shape[0] < type(act.writes[0]).shape[0];
  const Shape& away = type(returns ? act.reads[0] : act.writes[0]).shape;
  if (const int64_t come = most_that_come(route, type(act.reads[returns ? 1 : 2])); away[0] * away[1] < come)
    fault(Rule::kValues, act, "has room for {} rows of all ranks, and up to {} come with capacity={}", away[0] * away[1], come,
          capacity);
}

/// Rows that come back from less room than all may take have been judged there: some kernel has said whether they had room.
void Replay::check_bounded(const Act& act, int32_t route) {
  const auto shape = [&](int32_t slot) { return segment_->slots[static_cast<size_t>(slot)].type.shape; };
  const Shape from = shape(act.reads[0]), to = shape(act.writes[0]);
  const int64_t groups = std::max(from[0], to[0]);
  if (groups == 1 || std::get<Collective>(act.op->work).room > 0) return;
  const bool returns = from[0] != groups;
  const Shape &home = returns ? to : from, &away = returns ? from : to;
  if (away[1] >= groups * home[0] * home[1]) return;
  const bool drops = route >= 0 && std::get<Route>(rule_.node(route).op->work).capacity > 0;
  const bool goes = !returns && !drops && held_[0].kind == Held::Kind::kValue;  // the judgement follows
  if (route < 0 || (!goes && !judged_.contains(route)))
    fault(Rule::kValues, act,
          "has room for {} of {} rows, and no fit_rows of this layer and micro-batch says whether more have come", away[1],
          groups * home[0] * home[1]);
}

/// Rows of one rank, of which all that send it some make at most so many. `counts`: the type of the counts of those that come.
int64_t Replay::most_that_come(int32_t route, const Type& counts) const {
  const Node& node = rule_.node(route);
  const auto made = [&](size_t result) -> const Type& { return node.segment->slots[node.op->writes[result].index()].type; };
  Shape choice = made(1).shape;
  const Shape& counted = made(2).shape;
  const int64_t capacity = std::get<Route>(node.op->work).capacity;
  int64_t senders = counts.shape[1] / counted[1];
  if (capacity == 0) return senders * choice.elements();
  // Of the ranks that have parts of a sequence, and share its room, all are senders or none.
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
    if (const int64_t parts = plan_.mesh.axes[a].size;
        made(1).place[a] == Placement::shard(1) && counts.place[a] == Placement::shard(0) && senders % parts == 0)
      senders /= parts, choice[1] *= parts;
  return senders * most_rows(choice, counted[2], capacity);
}

/// Experts go through rows that may be more than there is room for by counts that end where the room does.
void Replay::check_fitted(const Act& act) {
  const auto counts_at = counts_read(*act.op);
  if (!counts_at) return;
  const size_t at = *counts_at;
  const Held& counts = held_[at];
  if (counts.kind == Held::Kind::kUnknown)
    return fault(Rule::kValues, act, "goes through %{} by %{}, and no router is known to have counted that", name(act.reads[0]),
                 name(act.reads[at]));
  Held all = counts;
  all.fitted = 0;
  const int32_t route = route_of(all, 2);
  if (route < 0) return;
  const auto shape = [&](int32_t slot) { return segment_->slots[static_cast<size_t>(slot)].type.shape; };
  const Shape rows = shape(act.reads[0]);
  const int64_t room = rows[0] * rows[1], most = most_that_come(route, segment_->slots[static_cast<size_t>(act.reads[at])].type);
  if (counts.fitted != 0 && counts.fitted != room)
    fault(Rule::kValues, act, "reads %{}, which ends where {} rows do, and %{} has {}", name(act.reads[at]), counts.fitted,
          name(act.reads[0]), room);
  if (counts.fitted == 0 && room < most)
    fault(Rule::kValues, act,
          "goes through %{} by %{}: up to {} rows come, and there is room for {}. Counts that fit_rows makes end there",
          name(act.reads[0]), name(act.reads[at]), most, room);
}

/// Counts cut off where rows end are those counts still: what belongs to them does. Whether some are cut off is said of the rows that came.
void Replay::play_fit(const Act& act) {
  read_all(act);
  const int32_t rows = route_of_rows(held_[0]), counted = route_of(held_[1], 2);
  const auto known = [&](size_t i) { return held_[i].kind != Held::Kind::kUnknown; };
  if (counted < 0 && known(1)) fault(Rule::kValues, act, "cuts off %{}, and no router counted that", name(act.reads[1]));
  if (rows < 0 && known(0))
    fault(Rule::kValues, act, "reads %{} as rows of experts, and no dispatch of a router's choice made them", name(act.reads[0]));
  if (rows >= 0 && counted >= 0 && rows != counted)
    fault(Rule::kValues, act, "cuts off %{}, and {} is there: the rows of %{} go by {}", name(act.reads[1]),
          rule_.name_of(held_[1]), name(act.reads[0]), rule_.name_of(rule_.made(rows, 1)));
  if (counted >= 0) {
    const Call& of = *rule_.node(counted).call;
    if (of.layer != call_->layer || of.micro_batch != call_->micro_batch)
      fault(Rule::kValues, act, "judges {} in another layer or micro-batch", rule_.name_of(held_[1]));
    if (rows == counted) judged_.insert(counted);
  }
  Held fitted = counted >= 0 ? held_[1] : Held{};
  if (counted >= 0) fitted.fitted = segment_->slots[static_cast<size_t>(act.reads[0])].type.shape[1];
  write(act.writes[0], fitted);
}

/// A token crosses in the place of all its rows where they are copies of it, laid out by the choice that the exchange reads.
void Replay::check_copies(const Act& act, int32_t route) {
  const Held& choice = held_[3];
  if (choice.kind != Held::Kind::kUnknown && (route < 0 || route_of(choice, 1) != route))
    fault(Rule::kValues, act, "reads %{} as the choice that laid out %{}, and {} is there", name(act.reads[3]), name(act.reads[0]),
          choice.kind == Held::Kind::kValue ? rule_.name_of(choice) : "something else");
  if (crosses_weighed(*act.op)) {
    if (held_[4].kind != Held::Kind::kUnknown && (route < 0 || route_of(held_[4], 0) != route))
      fault(Rule::kValues, act, "reads %{} as the weights of the rows of %{}, and {} is there", name(act.reads[4]),
            name(act.reads[0]), held_[4].kind == Held::Kind::kValue ? rule_.name_of(held_[4]) : "something else");
    return;  // the types have shown which op made the rows
  }
  const Held* rows = &held_[0];
  while (rows->kind == Held::Kind::kValue && rounds(rule_.node(rule_.maker(*rows)).op->work))
    rows = &rule_.read(rule_.maker(*rows), 0);
  if (rows->kind == Held::Kind::kUnknown) return;
  const auto* dispatch =
      rows->kind == Held::Kind::kValue ? std::get_if<Dispatch>(&rule_.node(rule_.maker(*rows)).op->work) : nullptr;
  if (dispatch == nullptr || dispatch->phase != Phase::kF)
    fault(Rule::kValues, act, "sends a token once in the place of its rows in %{}, which are no copies of tokens",
          name(act.reads[0]));
}

/// Packed rows go by the counts of the router that chose where they go, exchanged.
void Replay::check_packed(const Act& act) {
  for (const int32_t slot : act.reads) held_.push_back(read(slot));
  int32_t route = route_of_rows(held_[0]);
  for (const size_t i : {size_t{1}, size_t{2}}) {
    if (held_[i].fitted != 0)
      fault(Rule::kValues, act, "moves rows by %{}, which is cut off where {} rows end: the other side counts all",
            name(act.reads[i]), held_[i].fitted);
    held_[i].fitted = 0;
    const int32_t counted = route_of(held_[i], 2);
    if (counted < 0) fault(Rule::kValues, act, "moves rows by %{}, and no router counted that", name(act.reads[i]));
    if (route >= 0 && counted >= 0 && counted != route)
      fault(Rule::kValues, act, "moves %{} by %{}, and {} is there: the rows go by {}", name(act.reads[0]), name(act.reads[i]),
            rule_.name_of(held_[i]), rule_.name_of(rule_.made(route, 1)));
    if (route < 0) route = counted;
  }
  if (crosses_once(*act.op)) check_copies(act, route);
  check_room(act, route);
  check_bounded(act, route);
  if (route < 0) return;
  const Call& of = *rule_.node(route).call;
  if (of.layer != call_->layer || of.micro_batch != call_->micro_batch)
    fault(Rule::kValues, act, "moves %{} by {}", name(act.reads[0]), rule_.name_of(rule_.made(route, 2)));
}

/// Rows that arrive are counted by the counts of the rows that were sent, exchanged.
void Replay::check_counts(const Act& act) {
  held_.clear();
  if (moves_packed_rows(*act.op)) return check_packed(act);
  const auto count = [&](int32_t slot) { return segment_->slots[static_cast<size_t>(slot)].count; };
  const SlotId sent = count(act.reads[0]), came = count(act.writes[0]);
  if (!sent || !came) return;
  const Held of_sent = read(sent.value), of_came = read(came.value);
  if (of_sent.kind != Held::Kind::kValue || of_came.kind != Held::Kind::kValue || of_sent == of_came) return;
  fault(Rule::kValues, act, "the rows of %{} are counted by %{}, which {}, and those of %{} by %{}, which {}", name(act.reads[0]),
        name(sent.value), rule_.name_of(of_sent), name(act.writes[0]), name(came.value), rule_.name_of(of_came));
}

/// A kernel that goes back reads values that its forward op read or made, or what stands in their place since.
void Replay::check_sources(const Act& act, int32_t node) {
  for (size_t i = 0; i < held_.size(); ++i) {
    if (held_[i].kind != Held::Kind::kValue || rule_.is_trusted(held_[i])) continue;
    const Node& forward = rule_.node(node);
    bool known = false;
    for (size_t r = 0; r < forward.reads && !known; ++r) known = rule_.stands_for(held_[i], rule_.read(node, r));
    for (size_t w = 0; w < forward.writes && !known; ++w) known = rule_.stands_for(held_[i], rule_.made(node, w));
    if (!known)
      fault(Rule::kValues, act, "reads %{}, and {} is there: the forward op of this label neither read nor made it",
            name(act.reads[i]), rule_.name_of(held_[i]));
  }
}

/// The batch of a micro-batch is one, however often it is read.
void Replay::play_load(const Act& act) {
  Act by_content = act;
  by_content.label = hash_text(content_of(std::get<LoadBatch>(act.op->work)));
  const uint64_t k = key(by_content);
  int32_t node = rule_.find(k);
  if (node < 0) node = rule_.add(k, site(act), act.settings, {}, 1, 0);
  write(act.writes[0], rule_.made(node, 0));
}

void Replay::play_forward(const Act& act) {
  read_all(act);
  check_scales(act);
  check_turns(act);
  const uint64_t k = key(act);
  const int32_t first = act.again ? rule_.find(k) : -1;
  if (first >= 0) return play_again(act, first);
  const int32_t node = rule_.add(k, site(act), act.settings, held_, act.writes.size(), check_order(act));
  consume(act, node);
  check_batch(act);
  if (std::holds_alternative<AttentionBlock>(act.op->work)) meet_block(act, node);
  if (std::holds_alternative<AttentionMerge>(act.op->work)) meet_all(act, node);
  const bool strip = multiplies_strip(act.op->work), summand = strip && is_summand(act);
  if (strip) meet_strip(act, node);
  const bool loss = std::holds_alternative<CrossEntropy>(act.op->work);
  if (loss) check_part(act);
  if (loss) check_loss_parts(act, node);
  check_chosen(act);
  check_route(act);
  check_fitted(act);
  for (size_t i = 0; i < act.writes.size(); ++i) {
    const Held made = summand ? away(act, rule_.made(node, i)) : rule_.made(node, i);
    write(act.writes[i], loss && i == 1 ? Held{Held::Kind::kGradient, ChainRule::term_of(node), 0} : made);
  }
}

/// An op that runs again reads what it read, and makes the same values.
void Replay::play_again(const Act& act, int32_t node) {
  check_settings(act, node);
  if (rule_.node(node).reads != act.reads.size() || rule_.node(node).writes != act.writes.size())
    return fault(Rule::kValues, act, "runs again with other operands than the first time");
  for (size_t i = 0; i < act.reads.size(); ++i) check_same(act, i, rule_.read(node, i), "what the op read when it first ran");
  check_fitted(act);  // its rows may have less room than the first time
  const bool strip = multiplies_strip(act.op->work), summand = strip && is_summand(act);
  if (strip) check_strip(act, node);
  const bool loss = std::holds_alternative<CrossEntropy>(act.op->work);
  for (size_t i = 0; i < act.writes.size(); ++i) {
    const Held made = summand ? away(act, rule_.made(node, i)) : rule_.made(node, i);
    write(act.writes[i], loss && i == 1 ? Held{Held::Kind::kGradient, ChainRule::term_of(node), 0} : made);
  }
}

/// Embeddings read tokens; losses read targets, which are the tokens shifted by one; ops of packed documents read positions.
void Replay::check_batch(const Act& act) {
  const bool loss = std::holds_alternative<CrossEntropy>(act.op->work);
  const auto positions = positions_read(*act.op);
  if (!loss && !positions && !std::holds_alternative<Embed>(act.op->work)) return;
  const size_t at = loss ? 1 : positions.value_or(0);
  const std::string_view wanted = loss ? "targets" : positions ? "positions" : "tokens";
  if (held_.size() <= at || held_[at].kind != Held::Kind::kValue) return;
  const auto* load = std::get_if<LoadBatch>(&rule_.node(rule_.maker(held_[at])).op->work);
  if (load == nullptr && positions)
    fault(Rule::kValues, act, "reads %{} as positions in documents, and {} is there", name(act.reads[at]),
          rule_.name_of(held_[at]));
  if (load != nullptr && content_of(*load) != wanted)
    fault(Rule::kValues, act, "reads %{}, which are {} and no {}", name(act.reads[at]), content_of(*load), wanted);
}

/// Where tokens go through head and loss in parts, logits and targets are of the same part.
void Replay::check_part(const Act& act) {
  if (held_[0].kind != Held::Kind::kValue || held_.size() < 2 || held_[1].kind != Held::Kind::kValue) return;
  const Node& head = rule_.node(rule_.maker(held_[0]));
  const int chunks = chunks_of(act.op->work);
  if (chunks_of(head.op->work) != chunks)
    fault(Rule::kValues, act, "chunks={}, and {} is there: chunks={}", chunks, rule_.name_of(held_[0]), chunks_of(head.op->work));
  if (!std::holds_alternative<Linear>(head.op->work)) return;
  const Held& of = rule_.read(rule_.maker(held_[0]), 0);
  const int64_t width = head.segment->slots[head.op->reads[0].index()].type.shape.last();
  if (of.kind == Held::Kind::kValue && of.shift != held_[1].shift * width)
    fault(Rule::kValues, act, "judges %{} by %{}: the logits are of the tokens from {} on, the targets from {} on",
          name(act.reads[0]), name(act.reads[1]), of.shift / width, held_[1].shift);
}

/// The parts of a loss over a vocabulary in slices are of one loss: the same logits and targets, and what the part before made.
void Replay::check_loss_parts(const Act& act, int32_t node) {
  for (size_t i = 2; i < act.reads.size(); ++i) {
    if (held_[i].kind != Held::Kind::kValue || rule_.is_trusted(held_[i])) continue;
    const int32_t part = rule_.maker(held_[i]);
    const Node& before = rule_.node(part);
    if (!std::holds_alternative<CrossEntropy>(before.op->work)) {
      fault(Rule::kValues, act, "reads %{}, which {} made and no part of a loss", name(act.reads[i]), before.op->label);
      continue;
    }
    check_settings(act, part);
    for (size_t j = 0; j < std::min<size_t>(before.reads, i); ++j)
      if (rule_.read(part, j) != rule_.read(node, j) && rule_.read(part, j).kind != Held::Kind::kUnknown &&
          rule_.read(node, j).kind != Held::Kind::kUnknown)
        fault(Rule::kValues, act, "reads %{} with other operands than {}, which made %{}", name(act.reads[j]), before.op->label,
              name(act.reads[i]));
  }
}

/// The node of the router whose result `result` (0 weights, 1 choice, 2 counts) is there, or -1.
int32_t Replay::route_of(const Held& held, size_t result) const {
  if (held.kind != Held::Kind::kValue) return -1;
  const int32_t maker = rule_.maker(held);
  return std::holds_alternative<Route>(rule_.node(maker).op->work) && held == rule_.made(maker, result) ? maker : -1;
}

/// The node of the router that chose where rows go, or -1 where they are no rows of a dispatch.
int32_t Replay::route_of_rows(const Held& rows) const {
  if (rows.kind != Held::Kind::kValue) return -1;
  const int32_t maker = rule_.maker(rows);
  const Work& work = rule_.node(maker).op->work;
  if (std::holds_alternative<Dispatch>(work)) return route_of(rule_.read(maker, 1), 1);
  if (std::holds_alternative<GroupedLinear>(work) || std::holds_alternative<Activation>(work))
    return route_of_rows(rule_.read(maker, 0));
  if (rounds(work)) return route_of_rows(rule_.read(maker, 0));  // rows in 8 bits, or their scales
  return -1;
}

/// Where ranks have parts of a sequence, the room of its experts is dealt by what all parts chose, by the same logits in the same way.
void Replay::check_chosen(const Act& act) {
  const auto* route = std::get_if<Route>(&act.op->work);
  if (route == nullptr || !route->reads_chosen() || held_.back().kind == Held::Kind::kUnknown) return;
  const Held& all = held_.back();
  if (all.kind == Held::Kind::kValue)
    if (const int32_t by = rule_.maker(all); const auto* choose = std::get_if<ChooseExperts>(&rule_.node(by).op->work)) {
      if (rule_.read(by, 0) == held_[0] && choose->sigmoid == route->sigmoid && choose->groups == route->groups &&
          choose->groups_chosen == route->groups_chosen)
        return;
    }
  fault(Rule::kValues, act, "reads %{} as what all parts of a sequence chose by %{}, and {} is there", name(act.reads.back()),
        name(act.reads[0]), all.kind == Held::Kind::kValue ? rule_.name_of(all) : "something else");
}

/// Rows, their counts, and the weights by which they are added up are of one router's choice.
void Replay::check_route(const Act& act) {
  const auto known = [&](size_t i) { return held_[i].kind != Held::Kind::kUnknown; };
  const auto must_be = [&](size_t i, int32_t route, size_t result, std::string_view what) {
    Held all = held_[i];
    all.fitted = 0;  // `check_fitted` says where counts are cut off
    if (known(i) && route_of(all, result) < 0)
      return fault(Rule::kValues, act, "reads %{} as {}, and no router made that", name(act.reads[i]), what);
    if (known(i) && route >= 0 && route_of(all, result) != route)
      fault(Rule::kValues, act, "reads %{}, and {} is there: the rows of %{} go by {}", name(act.reads[i]), rule_.name_of(held_[i]),
            name(act.reads[0]), rule_.name_of(rule_.made(route, 1)));
  };
  const Work& work = act.op->work;
  // Rows are dropped where the router says so, and nowhere else: how many there may be follows from both numbers.
  const auto agrees = [&](size_t i, int experts, int64_t capacity) {
    const int32_t by = route_of(held_[i], 1);
    if (by < 0) return;
    const Node& router = rule_.node(by);
    const Shape& counts = router.segment->slots[router.op->writes[2].index()].type.shape;
    if (const int64_t chosen = std::get<Route>(router.op->work).capacity; chosen != capacity)
      fault(Rule::kValues, act, "has capacity={}, and the router of %{} has capacity={}: both drop the same rows", capacity,
            name(act.reads[i]), chosen);
    if (counts[0] * counts[2] != experts)
      fault(Rule::kValues, act, "has experts={}, and the router of %{} chooses among {}", experts, name(act.reads[i]),
            counts[0] * counts[2]);
  };
  if (const auto* dispatch = std::get_if<Dispatch>(&work)) {
    agrees(1, dispatch->experts, dispatch->capacity);
    return must_be(1, -1, 1, "the experts of tokens");
  }
  const auto counts = counts_read(*act.op);
  if (!counts && !std::holds_alternative<Combine>(work)) return;
  const int32_t route = route_of_rows(held_[0]);
  const bool gradient = rounds(work) && held_[0].kind != Held::Kind::kValue;  // whose rows are those that went forward
  if (route < 0 && known(0) && !gradient)
    fault(Rule::kValues, act, "reads %{} as rows of experts, and no dispatch of a router's choice made them", name(act.reads[0]));
  if (counts) return must_be(*counts, route, 2, "counts of rows");
  if (known(0) && held_[0].kind == Held::Kind::kValue &&
      !std::holds_alternative<GroupedLinear>(rule_.node(rule_.maker(held_[0])).op->work))
    fault(Rule::kValues, act, "adds up %{}, which no expert made: {} is there", name(act.reads[0]), rule_.name_of(held_[0]));
  agrees(2, std::get<Combine>(work).experts, std::get<Combine>(work).capacity);
  must_be(1, route, 0, "the weights of a token's experts");
  must_be(2, route, 1, "the experts of tokens");
}

void Replay::play_backward(const Act& act) {
  read_all(act);
  check_scales(act);
  check_turns(act);
  const int32_t node = rule_.find(key(act));
  const bool of_slice = std::ranges::any_of(act.reads, [&](int32_t s) { return script_->slots[static_cast<size_t>(s)].slice; });
  if (node < 0) {
    if (of_slice) fault(Rule::kGradients, act, "goes back through what no forward op of this label, layer and micro-batch did");
    return;
  }
  check_settings(act, node);
  check_fitted(act);
  if (phase_of(act.op->work) == Phase::kW) check_parameters(act, node);
  const bool block = std::holds_alternative<AttentionBlock>(act.op->work);
  const bool strip =
      multiplies_strip(act.op->work) || (std::holds_alternative<Linear>(rule_.node(node).op->work) &&
                                         multiplies_strip(rule_.node(node).op->work) && phase_of(act.op->work) == Phase::kI);
  if (strip) check_strip(act, node);
  std::vector<std::optional<uint64_t>> sums;  // by result
  for (size_t w = 0; w < act.writes.size(); ++w)
    sums.emplace_back(ChainRule::term_of(node, way_of(act.op->work, w) == Way::kTerm ? w : 0));
  for (size_t i = 0; i < std::min(act.reads.size(), act.sources.size()); ++i)
    check_operand(act, i, node,
                  sums[std::min(act.sources[i].kind == Source::Kind::kTerm ? act.sources[i].index : 0, sums.size() - 1)]);
  const bool over_tokens = over_of(act.op->work) == SumOver::kTokens;
  if (block) rule_.note_block_term(node, held_[4].turn);
  const bool summand = multiplies_strip(act.op->work) && is_summand(act);
  if (summand) rule_.note_block_term(node, turn_of_strip(act));
  for (size_t w = 0; w < act.writes.size(); ++w) {
    if (!script_->slots[static_cast<size_t>(act.writes[w])].slice) continue;
    if (over_tokens) {
      write(act.writes[w], {Held::Kind::kTokenSums, sums_of(node, w), 0});
      continue;
    }
    Held held = sums[w] ? Held{Held::Kind::kGradient, *sums[w], 0} : Held{};
    if (summand && sums[w]) held = away(act, held);
    if (block && w == 1) {  // the gradient of keys that have come round a ring goes on from where they are
      held.turn = held_[4].turn;
      held.axis = held_[4].axis;
    }
    write(act.writes[w], held);
  }
}

/// The n-th result of an op of phase W is kept where the gradient of the n-th parameter of the forward op is.
void Replay::check_parameters(const Act& act, int32_t node) {
  size_t w = 0;
  for (size_t i = 0; i < rule_.node(node).reads && w < act.writes.size(); ++i) {
    const Held& noted = rule_.read(node, i);
    if (noted.kind != Held::Kind::kParameter) continue;
    const Held kept = parameter_at(region(act.writes[w]));
    if (kept.kind == Held::Kind::kParameter && kept.what != noted.what)
      fault(Rule::kGradients, act, "writes %{}, which belongs to {}, and the forward op of this label read {}", name(act.writes[w]),
            plan_.parameters[kept.what].name, plan_.parameters[noted.what].name);
    ++w;
  }
}

void Replay::check_operand(const Act& act, size_t i, int32_t node, std::optional<uint64_t>& sum) {
  const Source source = act.sources[i];
  switch (source.kind) {
    case Source::Kind::kGradient: return check_gradient(act, i, node, source.index);
    case Source::Kind::kLast:
      return check_same(act, i, rule_.made(last_of(node), source.index), "what the attention of this label made of all blocks");
    case Source::Kind::kRead: return check_same(act, i, rule_.read(node, source.index), "what the forward op of this label read");
    case Source::Kind::kLastRead:
      return check_same(act, i, rule_.read(node, rule_.node(node).reads - 1), "what the forward op of this label read last");
    case Source::Kind::kMade: return check_same(act, i, rule_.made(node, source.index), "what the forward op of this label made");
    case Source::Kind::kTerm:
      if (held_[i].kind == Held::Kind::kGradient && sum) *sum += held_[i].what;
      if (held_[i].kind == Held::Kind::kValue && !rule_.is_trusted(held_[i]))
        fault(Rule::kGradients, act, "adds %{} to a gradient, and it is a forward value", name(act.reads[i]));
      if (held_[i].kind != Held::Kind::kGradient && held_[i].kind != Held::Kind::kZero) sum.reset();
      return;
    case Source::Kind::kLoad: return check_load(act, i, rule_.made(node, source.index));
    case Source::Kind::kSums:
      if (held_[i] == Held{Held::Kind::kTokenSums, sums_of(node, source.index), 0}) return;
      return fault(Rule::kGradients, act,
                   "adds up %{} over sequences, and no sum over the tokens of this label and micro-batch is there",
                   name(act.reads[i]));
    case Source::Kind::kFree: return;
  }
}

void Replay::check_gradient(const Act& act, size_t i, int32_t node, size_t result) {
  const Held& held = held_[i];
  if (held.kind == Held::Kind::kGradient || held.kind == Held::Kind::kZero || held.kind == Held::Kind::kSeveral)
    return rule_.expect(node, result, held, name(act.reads[i]), site(act));
  if (held.kind == Held::Kind::kParameter || (held.kind == Held::Kind::kValue && !rule_.is_trusted(held)))
    fault(Rule::kGradients, act, "reads %{} as a gradient, and it is a forward value", name(act.reads[i]));
}

/// The load of experts counts the choice of the router that it goes back through.
void Replay::check_load(const Act& act, size_t i, const Held& choice) {
  const Held& held = held_[i];
  if (held.kind == Held::Kind::kUnknown) return;
  if (held.kind == Held::Kind::kValue)
    if (const int32_t by = rule_.maker(held);
        std::holds_alternative<ExpertLoad>(rule_.node(by).op->work) && rule_.read(by, 0) == choice)
      return;
  fault(Rule::kValues, act, "reads %{} as the load of {}, and {} is there", name(act.reads[i]), rule_.name_of(choice),
        held.kind == Held::Kind::kValue ? rule_.name_of(held) : "something else");
}

void Replay::check_same(const Act& act, size_t i, const Held& noted, std::string_view which) {
  const Held& held = held_[i];
  if (held == noted || held.kind == Held::Kind::kUnknown || noted.kind == Held::Kind::kUnknown) return;
  const auto called = [&](const Held& h) -> std::string {
    if (h.kind == Held::Kind::kParameter) return plan_.parameters[h.what].name;
    if (h.kind == Held::Kind::kGradient) return "a gradient";
    return h.kind == Held::Kind::kValue ? rule_.name_of(h) : "something else";
  };
  fault(Rule::kValues, act, "reads %{}, which is not {}: {} is there, {} was expected", name(act.reads[i]), which, called(held),
        called(noted));
}

void Replay::check_settings(const Act& act, int32_t node) {
  const int32_t first = rule_.node(node).settings;
  if (first != act.settings)
    fault(Rule::kGradients, act, "{} where the forward op has {}", compiler_.settings(act.settings), compiler_.settings(first));
}

/// A kernel's results are known by its label; what it reads has a gradient that only the kernel's own backward knows. One of phase
/// none that reads values may make a gradient of them (a loss).
void Replay::play_kernel(const Act& act) {
  if (rounds(act.op->work)) return play_rounding(act);
  if (meaning_of(std::get<Kernel>(act.op->work)) == KernelMeaning::kFit) return play_fit(act);
  read_all(act);
  check_turns(act);
  const Phase phase = phase_of(act.op->work);
  const bool goes_back = phase == Phase::kI || phase == Phase::kW;
  const bool is_constant =
      meaning_of(std::get<Kernel>(act.op->work)) == KernelMeaning::kLargest;  // no gradient goes back through a scale
  if (const int32_t forward = goes_back ? rule_.find(key(act)) : -1; forward >= 0) check_sources(act, forward);
  if (!goes_back && !is_constant)
    for (const int32_t slot : act.reads) for_values(slot, [&](const Held& value, bool) { rule_.hide(value); });
  const auto is_slice = [&](int32_t s) { return script_->slots[static_cast<size_t>(s)].slice; };
  if (std::ranges::none_of(act.writes, is_slice)) return;
  const bool reads_slices = std::ranges::any_of(act.reads, is_slice);
  int32_t node = -1;
  if (!goes_back) {
    const uint64_t k = key(act);
    node = act.again ? rule_.find(k) : -1;
    if (node < 0 || rule_.node(node).writes != act.writes.size())
      node = rule_.add(k, site(act), act.settings, held_, act.writes.size(), check_order(act));
  }
  for (size_t i = 0; i < act.writes.size(); ++i) {
    if (!is_slice(act.writes[i])) continue;
    const Held result = node < 0 ? Held{} : rule_.made(node, i);
    for (size_t r = 0; r < act.reads.size() && node >= 0; ++r) {
      const Region in = region(act.reads[r]), out = region(act.writes[i]);
      if (held_[r].kind == Held::Kind::kValue && in.storage == out.storage && in.begin == out.begin && in.end == out.end)
        rule_.replace(held_[r], result);
    }
    write(act.writes[i], turned(act, act.writes[i], result));
    if (reads_slices && node >= 0 && phase == Phase::kNone) rule_.trust(rule_.made(node, i));
  }
}

/// Rows are rounded by the counts of the router that chose where they go. Gradients of rows do not say whose: the layer and the micro-batch do.
void Replay::check_rounded_rows(const Act& act) {
  check_route(act);
  check_fitted(act);
  Held counts = held_[1];
  counts.fitted = 0;
  const int32_t route = route_of(counts, 2);
  if (route < 0) return;
  const Call& of = *rule_.node(route).call;
  if (of.layer != call_->layer || of.micro_batch != call_->micro_batch)
    fault(Rule::kValues, act, "rounds %{} by {}", name(act.reads[0]), rule_.name_of(counts));
}

/// A parameter and a gradient stay what they are; a value is another, whose gradient passes to it.
void Replay::play_rounding(const Act& act) {
  read_all(act);
  if (std::get<Kernel>(act.op->work).counted) check_rounded_rows(act);
  const Held& from = held_[0];
  const uint64_t k = key(act);
  int32_t node = act.again ? rule_.find(k) : -1;
  if (node >= 0 && rule_.node(node).reads == act.reads.size())
    for (size_t i = 0; i < act.reads.size(); ++i) check_same(act, i, rule_.read(node, i), "what the op read when it first ran");
  if (node < 0) {
    node = rule_.add(k, site(act), act.settings, held_, act.writes.size(), check_order(act));
    for_values(act.reads[0], [&](const Held& value, bool whole) {
      if (whole && from.kind == Held::Kind::kValue)
        rule_.pass(value, node);
      else
        rule_.hide(value);
    });
  }
  const bool stays = from.kind == Held::Kind::kGradient || from.kind == Held::Kind::kZero || from.kind == Held::Kind::kParameter;
  Held rounded = stays ? from : rule_.made(node, 0);
  for (size_t i = 1; i < act.writes.size(); ++i) write(act.writes[i], rule_.made(node, i));
  const bool finds = act.writes.size() > 1;  // its scales
  rounded.scales = finds ? scales_of(act.writes[1], rule_.made(node, 1)) : scales_of(act.reads[1], held_[1]);
  write(act.writes[0], rounded);
}

/// The identity of scales: their value, or the place where they lie for the step.
uint64_t Replay::scales_of(int32_t slot, const Held& held) {
  if (held.kind == Held::Kind::kValue) return mix(held.what + 1);
  const Region at = region(slot);
  return at.root < 0 ? 0 : mix(mix(static_cast<uint64_t>(at.root) + 1) + static_cast<uint64_t>(at.begin));
}

/// Each factor of 8 bits goes with the scales that it was divided by.
void Replay::check_scales(const Act& act) {
  const size_t first = first_scales(act.op->work);
  if (first == 0 || !has_scales(segment_->slots[act.op->reads[0].index()].type.dtype)) return;
  for (const size_t i : {size_t{0}, size_t{1}}) {
    const Held& scales = held_[i + first];
    const uint64_t there = scales_of(act.reads[i + first], scales);
    if (held_[i].scales != 0 && there != 0 && held_[i].scales != there)
      fault(Rule::kValues, act, "multiplies %{} by %{}, and it was divided by other scales", name(act.reads[i]),
            name(act.reads[i + first]));
    const bool rows = first == 3 && (i == 0 || phase_of(act.op->work) == Phase::kW);
    if (rows && scales.kind == Held::Kind::kValue) check_scales_of_rows(act, i, scales);
  }
}

/// An expert goes through the rows that were rounded, and no others: both by the counts of one router.
void Replay::check_scales_of_rows(const Act& act, size_t i, const Held& scales) {
  const int32_t maker = rule_.maker(scales);
  const Node& node = rule_.node(maker);
  if (!rounds(node.op->work) || !std::get<Kernel>(node.op->work).counted)
    return fault(Rule::kValues, act, "reads %{} as rows of experts in 8 bits, and {} goes by no counts of rows", name(act.reads[i]),
                 node.op->label);
  Held rounded = rule_.read(maker, 1), gone = held_[2];
  rounded.fitted = gone.fitted = 0;
  if (rounded.kind != Held::Kind::kValue || gone.kind != Held::Kind::kValue || rounded == gone) return;
  fault(Rule::kValues, act, "goes through %{} by %{}, and {} is there: the rows were rounded by {}", name(act.reads[i]),
        name(act.reads[2]), rule_.name_of(gone), rule_.name_of(rounded));
}

/// An Add of values makes a value, through which the gradient passes to both. An Add of gradients makes the sum of their terms.
void Replay::play_add(const Act& act) {
  if (!script_->slots[static_cast<size_t>(act.writes[0])].slice) return;
  read_all(act);
  check_turns(act);
  const auto is = [&](Held::Kind kind) { return held_[0].kind == kind && held_[1].kind == kind; };
  const auto zero = [&](size_t i) { return held_[i].kind == Held::Kind::kZero; };
  const bool trusted =
      std::ranges::any_of(held_, [&](const Held& h) { return h.kind == Held::Kind::kValue && rule_.is_trusted(h); });
  if (zero(0) || zero(1)) return write(act.writes[0], zero(0) ? held_[1] : held_[0]);
  for (const size_t i : {size_t{0}, size_t{1}})
    if (!trusted && held_[i].kind == Held::Kind::kValue && held_[1 - i].kind == Held::Kind::kGradient)
      fault(Rule::kGradients, act, "adds %{} to a gradient, and it is a forward value", name(act.reads[i]));
  if (is(Held::Kind::kGradient)) return write(act.writes[0], {Held::Kind::kGradient, held_[0].what + held_[1].what, 0});
  if (is(Held::Kind::kValue) && !trusted) return play_forward(act);
  for (const int32_t slot : act.reads) for_values(slot, [&](const Held& value, bool) { rule_.hide(value); });
  write(act.writes[0], turned(act, act.writes[0], {}));
}

/// Copies and collectives leave a value what it is. What other roles bring is not known here.
void Replay::play_transfer(const Act& act) {
  if (!script_->slots[static_cast<size_t>(act.writes[0])].slice) return;
  const auto* collective = std::get_if<Collective>(&act.op->work);
  const bool joins = collective != nullptr && joins_roles(plan_, plan_.comms[collective->comm.index()]);
  if (collective != nullptr && collective->kind == CollectiveKind::kAllToAll) check_counts(act);
  write(act.writes[0], joins ? Held{} : read(act.reads[0]));
}

void Replay::send(const Act& act, const Send& send) {
  const Comm& comm = plan_.comms[send.comm.index()];
  const int to = peer_of(plan_, role_index_, comm, send.hop, send.cyclic);
  if (to >= 0) mail_.send({send.comm.value, role_index_, to, line_of(plan_, comm, send.hop)}, read(act.reads[0]));
}

void Replay::receive(const Act& act, const Recv& receive) {
  const Comm& comm = plan_.comms[receive.comm.index()];
  const int from = peer_of(plan_, role_index_, comm, receive.hop, receive.cyclic);
  if (from < 0) return write(act.writes[0], {});
  const size_t brought = mail_.receive({receive.comm.value, from, role_index_, line_of(plan_, comm, -receive.hop)});
  Held message{Held::Kind::kMessage, brought, 0};
  if (!joins_roles(plan_, comm)) {
    message.turn = receive.hop;
    message.axis = static_cast<int8_t>(std::countr_zero(comm.axes.mask));
  }
  write(act.writes[0], script_->slots[static_cast<size_t>(act.writes[0])].slice ? message : Held{});
}

}  // namespace
}  // namespace backward

void check_backward(const Plan& plan, Report& report) {
  backward::Compiler compiler;
  const backward::ModelOrder order(plan);
  std::vector<backward::Script> scripts;
  for (const Segment& s : plan.segments) scripts.push_back(compiler.compile(s));
  ChainRule rule(report);
  backward::Mail mail;
  std::deque<backward::Replay> roles;
  for (size_t r = 0; r < plan.roles.size(); ++r)
    roles.emplace_back(plan, static_cast<int>(r), compiler, scripts, order, rule, mail, report);
  const size_t before = report.count();
  const auto done = [](const backward::Replay& r) { return r.is_done(); };
  while (!report.full() && !std::ranges::all_of(roles, done)) {
    bool any = false;
    for (backward::Replay& r : roles) any |= r.advance(false);
    if (any) continue;
    // Rule 6 has proved that no plan gets here; what the message brings is not known then.
    const auto waiting = std::ranges::find_if(roles, [&](const backward::Replay& r) { return !done(r); });
    waiting->advance(true);
  }
  if (report.count() == before) rule.settle();
}

}  // namespace shardlab::verifying
