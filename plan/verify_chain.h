// The chain rule as a ledger: which forward op made each value, and who read it. The gradient of a value is the sum of one
// term per reader.
// Internal to plan/verify_backward.cpp and plan/verify_chain.cpp.
//
// A VALUE is a logical tensor of one micro-batch: copies, collectives and messages carry it about and leave it the value it is,
// however its shards lie. A NODE is one run of a forward op. The backward op of a node, which reads the gradient of the node's
// result, gives one TERM: the node's part of the gradient of what it read. So the gradient of a value is the sum of the terms
// of all nodes that read it; where a node is linear with factor one (a residual's operands, an addition, positions) its term is the
// gradient of its own result. A sum of terms is held as a sum of hashes: the order in which contributions are joined does not
// matter, and one that is missing or there twice shows.
#pragma once

#include <set>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "plan/verify_internal.h"

namespace shardlab::verifying {

/// The content of a window, as far as the chain rule needs it.
struct Held {
  enum class Kind : uint8_t {
    kUnknown,    ///< not followed: a sum over micro-batches, or made of such
    kZero,       ///< filled with zeroes
    kValue,      ///< value number `what`, from its element `shift` on
    kGradient,   ///< the sum of terms `what`
    kParameter,  ///< parameter number `what`, from its element `shift` on
    kSeveral,    ///< unlike parts: `what` tells them apart
    kMessage,    ///< what message number `what` brings
    kTokenSums,  ///< sums over the tokens of each sequence, number `what`: a part of a parameter's gradient
  } kind = Kind::kUnknown;
  uint64_t what = 0;
  int64_t shift = 0;
  uint64_t scales = 0;  ///< for values rounded to 8 bits: the scales by which they were divided
  int32_t turn = 0;     ///< around a ring: rank i holds the block of rank i + turn along `axis`
  int8_t axis = -1;     ///< of the mesh, where `turn` is not 0
  int64_t fitted = 0;   ///< counts of rows, cut off where so many rows end; 0: as the router has counted
  friend bool operator==(const Held&, const Held&) = default;
};

/// The place of an op, for messages.
struct Site {
  int role = -1;
  const Segment* segment = nullptr;
  const Op* op = nullptr;
  const Call* call = nullptr;
};

/// One run of a forward op.
struct Node {
  int role = -1;
  const Segment* segment = nullptr;
  const Op* op = nullptr;
  const Call* call = nullptr;
  int32_t settings = -1;  ///< number of its attributes' text
  size_t first_held = 0;  ///< of its reads and then its writes, in ChainRule::held
  uint32_t reads = 0;
  uint32_t writes = 0;
  int32_t depth = 0;  ///< layers that its results have been through; -1 where a kernel by name made them of nothing
};

/// Blocks of keys that an attention over parts of a sequence has met so far.
struct Blocks {
  std::set<int32_t> turns;  ///< ranks that the blocks met are of, counted from the own one on
  int32_t size = 1;         ///< blocks that there are
  int32_t next = -1;        ///< the node that went on with the result
  bool partial = false;     ///< the result is to be merged with others
};

class ChainRule {
 public:
  explicit ChainRule(Report& report) : report_(report) {}

  /// The last node of this key (role, label, layer and micro-batch, as one number), or -1.
  int32_t find(uint64_t key) const;
  /// A new node of the key, with what it read; `made` values follow. It replaces an earlier one: a later step of the period.
  int32_t add(uint64_t key, const Site& site, int32_t settings, const std::vector<Held>& reads, size_t made, int32_t depth);

  const Node& node(int32_t n) const { return nodes_[static_cast<size_t>(n)]; }
  const Held& read(int32_t n, size_t i) const { return held_[node(n).first_held + i]; }
  const Held& made(int32_t n, size_t i) const { return held_[node(n).first_held + node(n).reads + i]; }
  /// "what layers.3 m2 attn.core made".
  std::string name_of(const Held& value) const;
  /// The node that made a value.
  int32_t maker(const Held& value) const { return values_[value.what].maker; }
  /// Layers that a value has been through.
  int32_t depth(const Held& value) const { return node(maker(value)).depth; }

  /// The gradient of read `input` that the backward op of node `n` makes. Two are made by a block of
  /// attention, of queries and of keys, and by the sum over a token's experts, of their rows and of their weights.
  static uint64_t term_of(int32_t n, size_t input = 0) { return mix_term(n, input); }

  /// Node `n` read the value as a whole, and its backward op gives a term.
  void consume(const Held& value, int32_t n, size_t input) { values_[value.what].terms += term_of(n, input); }
  /// Node `n` read the value as a whole and passes the gradient of its result on as it is.
  void pass(const Held& value, int32_t n);
  /// Node `n` read `length` elements of the value, from its element `shift` on, and its backward op gives the term of these.
  void consume_part(const Held& value, int64_t length, int32_t n, size_t input) {
    parts_[value.what].push_back({value.shift, length, term_of(n, input)});
  }
  /// The content of a window whose parts are unlike, as far as it is known: `part` follows, `begin` elements in.
  static uint64_t mix_part(uint64_t several, const Held& part, int64_t begin);

  /// A loss is told to whoever asks for the step's.
  void report(const Held& loss) { ++values_[loss.what].reports; }

  /// The value was read in parts that are not followed, or by a kernel whose backward the core does not know: its gradient is not derived.
  void hide(const Held& value) { values_[value.what].hidden = true; }
  /// The results of a kernel may be a gradient because the kernel declares so.
  void trust(const Held& value) { values_[value.what].trusted = true; }
  bool is_trusted(const Held& value) const { return values_[value.what].trusted; }

  /// `by` replaces a value in its place; a kernel made it from that value (a running result).
  void replace(const Held& value, const Held& by) { values_[by.what].before = static_cast<int64_t>(value.what); }
  /// Whether a value is `made` or stands in its place since.
  bool stands_for(const Held& value, const Held& made) const;
  /// The op at `site` read the value's block that is `value.turn` ranks around a ring. `settle` asks for each block as often.
  void read_block(const Held& value, const Mesh& mesh, const Site& site);

  /// The op at `site` reads a sum of terms as the gradient of the result of node `n`; judged by `settle`, when all
  /// readers are known.
  void expect(int32_t n, size_t result, const Held& gradient, std::string_view slot, const Site& site) {
    const bool in_parts = gradient.kind == Held::Kind::kSeveral;
    checks_.push_back({made(n, result).what, gradient.kind == Held::Kind::kZero ? 0 : gradient.what, in_parts, slot, site});
  }
  /// Notes the blocks that node `n` and those before it have met; or null for a node that is no attention over parts.
  Blocks& blocks(int32_t n) { return blocks_[n]; }
  const Blocks* known_blocks(int32_t n) const {
    const auto at = blocks_.find(n);
    return at == blocks_.end() ? nullptr : &at->second;
  }
  /// The turn of the block whose backward op made this term alone; nothing for any other gradient.
  void note_block_term(int32_t n, int32_t turn) { block_terms_[term_of(n, 0)] = block_terms_[term_of(n, 1)] = turn; }
  std::optional<int32_t> turn_of_term(uint64_t term) const {
    const auto at = block_terms_.find(term);
    return at == block_terms_.end() ? std::nullopt : std::optional(at->second);
  }
  void settle();

 private:
  struct Value {
    int32_t maker = -1;
    int32_t first_pass = -1;  ///< into passes_
    uint64_t terms = 0;
    int64_t before = -1;  ///< the value in whose place this one is
    int32_t reports = 0;  ///< of a loss: how often it is in the step's
    bool hidden = false;
    bool trusted = false;
  };
  /// Reads of a value that goes round a ring, by turn.
  struct Ring {
    std::vector<int32_t> reads;
    std::string_view axis;
    Site site;  ///< of the last read
  };
  struct PassOn {
    uint64_t result;
    int32_t next;
  };
  struct Check {
    uint64_t value;
    uint64_t terms;
    bool in_parts;  ///< `terms` are those of several parts of the gradient
    std::string_view slot;
    Site site;
  };
  /// A part of a value that some node read, and the term of its gradient.
  struct Part {
    int64_t begin = 0, length = 0;
    uint64_t term = 0;
    friend auto operator<=>(const Part&, const Part&) = default;
  };
  static uint64_t mix_term(int32_t n, size_t input);
  void settle_rings();
  void settle_losses();
  bool is_gradient(const Check& check) const;

  Report& report_;
  std::vector<Node> nodes_;
  std::vector<Held> held_;
  std::vector<Value> values_;
  std::vector<PassOn> passes_;
  std::vector<Check> checks_;
  std::map<uint64_t, Ring> rings_;               ///< by value
  std::map<uint64_t, std::vector<Part>> parts_;  ///< by value, in the order in which they were read
  std::unordered_map<uint64_t, int32_t> by_key_;
  std::unordered_map<int32_t, Blocks> blocks_;
  std::unordered_map<uint64_t, int32_t> block_terms_;
};

}  // namespace shardlab::verifying
