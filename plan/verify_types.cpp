// Rule 2, types: the type of every write follows from the op's reads.
//
// Each op is an EQUATION over letters, one per dim, as in einsum: Linear's forward is `bsi, oi -> bso`. A letter that reads
// share and the write lacks is contracted. From that alone follows, axis by axis, how the write is placed:
//
//   all reads replicated                     -> replicated
//   letter c sharded wherever it occurs      -> sharded on c, or, when c is contracted, partial
//   one factor partial, the others replicated -> partial (the op is linear in a factor)
//   every term partial                       -> partial (a sum of terms; a whole term would be added once per rank)
//   some reads local, none sharded or partial -> local; a contraction may declare its result partial instead: each coordinate
//                                               then gives its own summand (both ends of a pipeline to a tied weight's gradient,
//                                               each stage to a norm), and rule 4 proves that the summands make one whole
//
// Anything else is refused. Scales multiply over factors and must agree between terms; nonlinear operands have scale 1.
// Source: the placement rules of DTensor and of spmd_types (PyTorch), derived here from the equations instead of listed.
#include <algorithm>
#include <bit>
#include <string_view>

#include "plan/base/tree.h"
#include "plan/collective_steps.h"
#include "plan/limits.h"
#include "plan/named_kernels.h"
#include "plan/optimizers.h"
#include "plan/row_levels.h"
#include "plan/verify_internal.h"
#include "plan/work.h"

namespace shardlab::verifying {

int64_t most_rows(const Shape& choice, int64_t some, int64_t capacity) {
  const int64_t all = choice[1] * std::min(choice[2], some);
  return choice[0] * (some > all / std::max<int64_t>(1, capacity) ? all : some * capacity);
}

namespace {

/// How an op depends on one operand.
enum class Pass : uint8_t {
  kNonlinear,  ///< must be whole and unscaled
  kFactor,     ///< the op is linear in it
  kTerm,       ///< is added to the result
};

struct Operand {
  SlotId slot;
  std::string dims;  ///< one letter a dim
  Pass pass = Pass::kNonlinear;
};

struct Written {
  SlotId slot;
  std::string dims;
  uint32_t uses = 0;     ///< the reads it depends on, as a bit mask
  SlotId replaces;       ///< the read that it must be in place of, or none
  bool trusted = false;  ///< the declared type is the type
};

struct Equation {
  std::vector<Operand> reads;
  std::vector<Written> writes;
  std::string frozen;           ///< letters that must not be sharded: the op needs all of them
  std::string loose;            ///< letters whose extents may differ between operands
  bool sums_micro = false;      ///< a sum over tokens: micro-batch slices in, a sum over micro-batches out
  bool may_alias = false;       ///< writes may lie exactly over reads
  uint32_t may_replace = 0;     ///< reads that writes may lie exactly over, where not all may
  bool tokens_in_rows = false;  ///< the letter r counts rows of tokens: it is cut along what the tokens are cut along, b or s
  char queries = 0;             ///< letter of a part of a sequence whose tokens attend to the tokens of `keys`
  char keys = 0;                ///< letter of the same or another part of that sequence, or of the whole
  int strip_axis = -1;          ///< along which ranks have strips of tokens ...
  int strips = 1;               ///< ... of which a product takes that of the rank `turn` further along
  int turn = 0;
};

/// Builds the equation of one op and says what is wrong with its operands.
class Builder {
 public:
  Builder(const Segment& segment, const Op& op) : segment_(segment), op_(op) {}

  std::string build();
  Equation equation;

 private:
  const Type* type_of_read(size_t i) const { return i < op_.reads.size() ? &segment_.slots[op_.reads[i].index()].type : nullptr; }
  /// Leading dims of read `i`: all but the last.
  std::string lead(size_t i) const {
    const Type* t = type_of_read(i);
    return std::string("bst").substr(0, static_cast<size_t>(t == nullptr ? 0 : std::max(0, t->shape.rank - 1)));
  }
  /// One letter a dim, for operands that are taken element by element.
  static std::string by_position(const Type& t) { return std::string("abcd").substr(0, static_cast<size_t>(t.shape.rank)); }

  void read(std::string_view name, std::string dims, Pass pass) {
    names_ += fmt::format("{}%{}", names_.empty() ? "" : ", ", name);
    const size_t i = equation.reads.size();
    equation.reads.push_back({i < op_.reads.size() ? op_.reads[i] : SlotId(), std::move(dims), pass});
  }
  void write(std::string_view name, std::string dims, uint32_t uses = ~0u, SlotId replaces = SlotId(), bool trusted = false) {
    outs_ += fmt::format("{}%{}", outs_.empty() ? "" : ", ", name);
    const size_t i = equation.writes.size();
    equation.writes.push_back({i < op_.writes.size() ? op_.writes[i] : SlotId(), std::move(dims), uses, replaces, trusted});
  }
  SlotId slot_of_read(size_t i) const { return i < op_.reads.size() ? op_.reads[i] : SlotId(); }
  /// The positions of packed documents: of whole sequences, along whichever axes the tokens are cut. `check_packed_positions` says more.
  void read_positions(bool packed) {
    if (packed) read("positions", "bS", Pass::kNonlinear);
  }
  /// Old values that an accumulating op reads, one for each of its results, in place.
  void accumulate(bool on) {
    equation.sums_micro = true;
    if (!on) return;
    const size_t n = equation.reads.size();
    for (size_t w = 0; w < equation.writes.size(); ++w) {
      Written& written = equation.writes[w];
      written.uses &= (1u << n) - 1;
      written.uses |= 1u << (n + w);
      read("old", written.dims, Pass::kTerm);
      written.replaces = slot_of_read(n + w);
    }
  }

  void describe(const LoadBatch& w) { write(w.positions ? "positions" : "tokens", "bs", ~0u, SlotId(), true); }
  void describe(const Embed& w);
  void describe(const Positions& w);
  void describe(const Norm& w);
  void describe_sequences(int sums, bool accumulates);
  void read_scales(const char* left, const char* right, size_t first);
  void describe(const Linear& w);
  void describe(const Rope& w);
  void describe(const LatentHeads& w);
  void describe(const HeadNorm& w);
  void describe(const Attention& w);
  void describe(const SplitHeads& w);
  void describe(const AttentionBlock& w);
  void describe(const AttentionMerge& w);
  void describe(const Activation& w);
  void describe(const Residual& w);
  void describe(const Dropout&);
  void describe(const CrossEntropy& w);
  void describe(const Add&);
  void describe(const Fill&);
  void describe(const SumScalars&);
  void describe(const SquaredNorm&);
  void describe(const Sgd&);
  void describe(const AdamW&);
  void describe(const Lion&);
  void describe(const AdamW8bit&);
  void describe_update(const OptimizerRow& row);
  void describe(const Copy&);
  void describe(const Kernel& w);
  void describe(const Collective&);
  void describe(const Send&) { read("x", first_dims(), Pass::kTerm); }
  void describe(const Recv&);
  void describe(const Regroup& w);
  void describe(const Strips& w);
  void describe(const Route& w);
  void describe(const ChooseExperts& w);
  void describe(const ExpertLoad& w);
  void describe(const Dispatch& w);
  void describe(const GroupedLinear& w);
  void describe(const Combine& w);
  void describe(const Gate& w);

  std::string first_dims() const { return type_of_read(0) == nullptr ? "" : by_position(*type_of_read(0)); }
  std::string operands_fault() const;
  std::string extents_fault() const;
  /// What an op's settings say of extents that no letter can: heads of rows, gates of pairs, numbers of statistics.
  std::string settings_fault() const;
  std::string fit_fault() const;
  std::string counted_fault(const Kernel& w) const;
  std::string state_fault(const OptimizerRow& row) const;
  std::string aliases_fault() const;
  const Slot& slot(SlotId id) const { return segment_.slots[id.index()]; }
  /// Two bound slots may be bound to one storage: only a call can tell.
  bool bound_apart(const Window& a, const Window& b) const {
    const auto bound = [&](const Window& w) { return segment_.slots[static_cast<size_t>(w.root)].kind == SlotKind::kBound; };
    return a.root != b.root && bound(a) && bound(b);
  }

  const Segment& segment_;
  const Op& op_;
  std::string names_, outs_;
};

void Builder::describe(const Embed& w) {
  read("tokens", "bs", Pass::kNonlinear);
  if (w.phase == Phase::kF) {
    read("table", "Vh", Pass::kFactor);
    write("x", "bsh");
  } else {
    read("dx", "bsh", Pass::kFactor);
    write("dtable", "Vh");
    accumulate(w.accumulate);
  }
}

void Builder::describe(const Positions& w) {
  // Each token takes the row of its position. A rank adds those rows, and sums over its tokens: the table is whole and may have
  // more rows than the sequence has tokens, its gradient is a summand.
  if (w.phase == Phase::kF) {
    read("x", "bsh", Pass::kTerm);
    read("table", "ph", Pass::kTerm);
    read_positions(w.packed);
    write("y", "bsh", 0b11u, slot_of_read(0));
  } else {
    read("dx", "bsh", Pass::kFactor);
    read_positions(w.packed);
    write("dtable", "ph", 0b1u);
    accumulate(w.accumulate);
  }
}

void Builder::describe(const Norm& w) {
  if (w.over == SumOver::kSequences) return describe_sequences(w.rms ? 1 : 2, w.accumulate);
  const std::string b = lead(w.phase == Phase::kF ? 0 : 1);
  equation.frozen = "h";
  if (w.phase == Phase::kF) {
    read("x", b + "h", Pass::kNonlinear);
    read("gamma", "h", Pass::kNonlinear);
    if (!w.rms) read("beta", "h", Pass::kNonlinear);
    write("y", b + "h");
    write("stats", b + "k", 1u);
    return;
  }
  read("dy", b + "h", Pass::kFactor);
  read("x", b + "h", Pass::kNonlinear);
  if (w.phase == Phase::kI) read("gamma", "h", Pass::kNonlinear);
  read("stats", b + "k", Pass::kNonlinear);
  if (w.phase == Phase::kI) {
    if (w.residual) read("residual", b + "h", Pass::kTerm);
    if (w.residual) equation.may_replace = 1u << 4;
    write("dx", b + "h");
    return;
  }
  const bool apart = w.over == SumOver::kTokens;
  write("dgamma", apart ? "bnh" : "h", 0b111u);
  if (!w.rms) write("dbeta", apart ? "bnh" : "h", 0b001u);
  if (!apart) accumulate(w.accumulate);
}

/// Sums of the tokens of each sequence are added up over sequences.
void Builder::describe_sequences(int sums, bool accumulates) {
  for (int i = 0; i < sums; ++i) read("sums", "bnh", Pass::kFactor);
  for (int i = 0; i < sums; ++i) write("dparameter", "h", 1u << i);
  accumulate(accumulates);
}

/// The scales of both factors, from read `first` on. They say nothing of how the result is placed: each rank multiplies what it holds by
/// what it was divided by.
void Builder::read_scales(const char* left, const char* right, size_t first) {
  for (const auto& [name, letters, i] : {std::tuple{left, "jklm", first}, {right, "pquv", first + 1}}) {
    const Type* t = type_of_read(i);
    read(name, std::string(letters).substr(0, static_cast<size_t>(t == nullptr ? 0 : t->shape.rank)), Pass::kNonlinear);
  }
}

void Builder::describe(const Linear& w) {
  const std::string b = lead(0);
  const bool scaled = type_of_read(0) != nullptr && has_scales(type_of_read(0)->dtype);
  const auto scales = [&](const char* left, const char* right) {
    if (scaled) read_scales(left, right, 2);
  };
  const uint32_t bias = w.bias ? 1u << (scaled ? 4 : 2) : 0u;
  if (w.strips > 1) {
    equation.loose = "s";  // a strip, and all tokens
    equation.strips = w.strips;
    equation.turn = w.turn;
  }
  const auto result = [&](const char* name, const std::string& dims, uint32_t uses) {
    const size_t n = equation.reads.size();
    if (w.carry) read("old", dims, Pass::kTerm);
    write(name, dims, uses | (w.carry ? 1u << n : 0u), w.carry ? slot_of_read(n) : SlotId());
  };
  if (w.phase == Phase::kF) {
    read("x", b + "i", Pass::kFactor);
    read("w", "oi", Pass::kFactor);
    scales("x_scales", "w_scales");
    if (w.bias) read("bias", "o", Pass::kTerm);
    result("y", b + "o", 0b11u | bias);
  } else if (w.phase == Phase::kI) {
    read("dy", b + "o", Pass::kFactor);
    read("w", "oi", Pass::kFactor);
    scales("dy_scales", "w_scales");
    result("dx", b + "i", 0b11u);
  } else {
    read("x", b + "i", Pass::kFactor);
    read("dy", b + "o", Pass::kFactor);
    scales("x_scales", "dy_scales");
    if (scaled && w.bias) read("dy_for_bias", b + "o", Pass::kFactor);
    write("dw", "oi", 0b11u);
    if (w.bias) write("dbias", "o", scaled ? 1u << 4 : 0b10u);
    accumulate(w.accumulate);
  }
}

void Builder::describe(const Rope& w) {
  read("qkv", "bsg", Pass::kFactor);
  read_positions(w.packed);
  write("qkv", "bsg", 0b1u, slot_of_read(0));
}

/// Along g ranks may have other heads, which share the rotated part of the key: its gradients are then summands.
void Builder::describe(const LatentHeads& w) {
  equation.loose = "g";  // rows of q, of keys and values, and of all three
  if (w.phase == Phase::kF) {
    read("q", "bsg", Pass::kNonlinear);
    read("kv", "bsg", Pass::kNonlinear);
    read("k_rope", "bsr", Pass::kNonlinear);
    read_positions(w.packed);
    write("qkv", "bsg", 0b111u);
    return;
  }
  read("dqkv", "bsg", Pass::kFactor);
  read_positions(w.packed);
  write("dq", "bsg", 0b1u);
  write("dkv", "bsg", 0b1u);
  write("dk_rope", "bsr", 0b1u);
}

/// Each head of a token by itself: along g ranks may have other heads, whose sums over tokens are then summands.
void Builder::describe(const HeadNorm& w) {
  if (w.over == SumOver::kSequences) return describe_sequences(2, w.accumulate);
  equation.loose = "g";  // rows of qkv, and a number a head
  if (w.phase == Phase::kF) {
    read("qkv", "bsg", Pass::kNonlinear);
    read("gamma_q", "d", Pass::kNonlinear);
    read("gamma_k", "d", Pass::kNonlinear);
    write("y", "bsg");
    write("stats", "bsg", 1u);
    return;
  }
  read("dy", "bsg", Pass::kFactor);
  read("qkv", "bsg", Pass::kNonlinear);
  if (w.phase == Phase::kI) {
    read("gamma_q", "d", Pass::kNonlinear);
    read("gamma_k", "d", Pass::kNonlinear);
  }
  read("stats", "bsg", Pass::kNonlinear);
  if (w.phase == Phase::kI) return write("dqkv", "bsg");
  const bool apart = w.over == SumOver::kTokens;
  write("dgamma_q", apart ? "bnd" : "d", 0b111u);
  write("dgamma_k", apart ? "bnd" : "d", 0b111u);
  if (!apart) accumulate(w.accumulate);
}

void Builder::describe(const Attention& w) {
  equation.frozen = "s";  // a token attends to all before it
  equation.loose = "g";   // rows of qkv, rows of o, and heads are all counted along it
  if (w.phase == Phase::kF) {
    read("qkv", "bsg", Pass::kNonlinear);
    read_positions(w.packed);
    write("o", "bsg", 0b1u);
    write("lse", "bgs", 0b1u);
  } else {
    read("do", "bsg", Pass::kFactor);
    read("o", "bsg", Pass::kNonlinear);
    read("lse", "bgs", Pass::kNonlinear);
    read("qkv", "bsg", Pass::kNonlinear);
    read_positions(w.packed);
    write("dqkv", "bsg", 0b1111u);
  }
}

void Builder::describe(const SplitHeads& w) {
  equation.loose = "g";
  if (w.phase == Phase::kF) {
    read("qkv", "bsg", Pass::kTerm);
    write("q", "bsg");
    write("kv", "bsg");
  } else {
    read("dq", "bsg", Pass::kTerm);
    read("dkv", "bsg", Pass::kTerm);
    write("dqkv", "bsg");
  }
}

void Builder::describe(const AttentionBlock& w) {
  equation.queries = 'q';
  equation.keys = 'k';
  equation.loose = "g";
  if (w.phase == Phase::kF) {
    read("q", "bqg", Pass::kNonlinear);
    read("kv", "bkg", Pass::kNonlinear);
    if (w.carry) {
      read("o", "bqg", Pass::kNonlinear);
      read("lse", "bgq", Pass::kNonlinear);
    }
    const uint32_t uses = w.carry ? 0b1111u : 0b11u;
    write("o", "bqg", uses, w.carry ? slot_of_read(2) : SlotId());
    if (w.partial)
      write("sums", "bgqc", uses);
    else
      write("lse", "bgq", uses, w.carry ? slot_of_read(3) : SlotId());
    return read_positions(w.packed);
  }
  read("do", "bqg", Pass::kFactor);
  read("o", "bqg", Pass::kNonlinear);
  read("lse", "bgq", Pass::kNonlinear);
  read("q", "bqg", Pass::kNonlinear);
  read("kv", "bkg", Pass::kNonlinear);
  uint32_t old = 5;
  const uint32_t dq_old = w.carry ? 1u << old++ : 0u, dkv_old = w.carry_kv ? 1u << old : 0u;
  write("dq", "bqg", 0b11111u | dq_old, w.carry ? slot_of_read(5) : SlotId());
  write("dkv", "bkg", 0b11111u | dkv_old, w.carry_kv ? slot_of_read(w.carry ? 6 : 5) : SlotId());
  if (w.carry) read("dq", "bqg", Pass::kTerm);
  if (w.carry_kv) read("dkv", "bkg", Pass::kTerm);
  read_positions(w.packed);
}

void Builder::describe(const AttentionMerge& w) {
  equation.loose = w.keys || w.phase == Phase::kF ? "g" : "";  // rows of o and heads are counted along it
  if (w.phase == Phase::kF) {
    for (size_t i = 0; i < std::max<size_t>(1, op_.reads.size() / 2); ++i) {
      read("o", "bqg", Pass::kNonlinear);
      read("sums", "bgqc", Pass::kNonlinear);
    }
    write("o", "bqg");
    write("lse", "bgq");
    return;
  }
  for (size_t i = 0; i < std::max<size_t>(1, op_.reads.size()); ++i) read(w.keys ? "dkv" : "dq", "bqg", Pass::kTerm);
  write(w.keys ? "dkv" : "dq", "bqg");
}

void Builder::describe(const Activation& w) {
  const std::string b = lead(0);
  equation.loose = w.swiglu ? "f" : "";  // u holds gate and up
  equation.may_alias = !w.swiglu;
  if (w.counted) equation.loose += "s";  // rows, and parts of tokens by which they are counted
  if (w.phase == Phase::kF) {
    read("u", b + "f", Pass::kNonlinear);
    if (w.counted) read("counts", "bse", Pass::kNonlinear);
    write("a", b + "f");
  } else {
    read("da", b + "f", Pass::kFactor);
    read("u", b + "f", Pass::kNonlinear);
    if (w.counted) read("counts", "bse", Pass::kNonlinear);
    write("du", b + "f");
  }
}

// Rows of experts are [x,r,width]: x counts groups of experts, of which each rank has one, r the rows that tokens make. A rank's
// own tokens make rows for every group; moved by an all_to_all, all ranks' rows for its group. So where x is cut an expert's weight
// is the rank's own, and where r is cut a sum over rows is a summand.

void Builder::describe(const Route& w) {
  // A mean over the tokens of a sequence, and rows that an expert takes of it, are of all its tokens.
  equation.frozen = w.is_of_part() || (w.balance == 0 && w.capacity == 0) ? "E" : "sE";
  equation.loose = "r";
  equation.tokens_in_rows = true;
  if (w.phase == Phase::kF) {
    read("logits", "bsE", Pass::kNonlinear);
    if (w.biased) read("bias", "E", Pass::kNonlinear);
    if (w.reads_chosen()) read("chosen", "bSk", Pass::kNonlinear);
    write("weights", "bsk");
    write("choice", "bsk");
    write("counts", "xre");
    return;
  }
  // The router's own losses are in no gradient that comes from behind it.
  read("dweights", "bsk", w.balance == 0 && w.z_loss == 0 ? Pass::kFactor : Pass::kNonlinear);
  read("logits", "bsE", Pass::kNonlinear);
  read("choice", "bsk", Pass::kNonlinear);
  if (w.reads_load()) read("load", "bE", Pass::kNonlinear);
  write("dlogits", "bsE");
}

void Builder::describe(const ChooseExperts& w) {
  equation.frozen = "E";
  read("logits", "bsE", Pass::kNonlinear);
  if (w.biased) read("bias", "E", Pass::kNonlinear);
  write("chosen", "bsk");
}

void Builder::describe(const ExpertLoad& w) {
  read("choice", "bsk", Pass::kNonlinear);
  if (!w.accumulate) return write("load", "bE");
  write("load", "E");
  accumulate(true);
}

void Builder::describe(const Dispatch& w) {
  equation.loose = "r";
  equation.tokens_in_rows = true;
  read(w.phase == Phase::kF ? "x" : "drows", w.phase == Phase::kF ? "bsh" : "xrh", Pass::kFactor);
  read("choice", "bsk", Pass::kNonlinear);
  write(w.phase == Phase::kF ? "rows" : "dx", w.phase == Phase::kF ? "xrh" : "bsh");
}

void Builder::describe(const GroupedLinear& w) {
  equation.loose = "xr";  // a group and its experts; rows, and parts of tokens by which they are counted
  const auto counts_and_scales = [&](const char* left, const char* right) {
    read("counts", "xre", Pass::kNonlinear);
    if (type_of_read(0) != nullptr && has_scales(type_of_read(0)->dtype)) read_scales(left, right, 3);
  };
  if (w.phase == Phase::kW) {
    read("rows", "xri", Pass::kFactor);
    read("dy", "xro", Pass::kFactor);
    counts_and_scales("row_scales", "dy_scales");
    write("dw", "xoi", 0b111u);
    return accumulate(w.accumulate);
  }
  const bool forward = w.phase == Phase::kF;
  read(forward ? "rows" : "dy", forward ? "xri" : "xro", Pass::kFactor);
  read("w", "xoi", Pass::kFactor);
  counts_and_scales(forward ? "row_scales" : "dy_scales", "w_scales");
  write(forward ? "y" : "drows", forward ? "xro" : "xri", 0b111u);
}

void Builder::describe(const Combine& w) {
  equation.loose = "r";
  equation.tokens_in_rows = true;
  if (w.phase == Phase::kF) {
    read("rows", "xrh", Pass::kFactor);
    read("weights", "bsk", Pass::kFactor);
    read("choice", "bsk", Pass::kNonlinear);
    write("y", "bsh");
    return;
  }
  read("dy", "bsh", Pass::kFactor);
  read("rows", "xrh", Pass::kFactor);
  read("weights", "bsk", Pass::kFactor);
  read("choice", "bsk", Pass::kNonlinear);
  write("drows", "xrh", 0b1101u);
  write("dweights", "bsk", 0b1011u);
}

void Builder::describe(const Gate& w) {
  if (w.phase == Phase::kF) {
    read("x", "bsh", Pass::kFactor);
    read("gate", "bsj", Pass::kNonlinear);
    write("y", "bsh");
    return;
  }
  read("dy", "bsh", Pass::kFactor);
  read("x", "bsh", Pass::kFactor);
  read("gate", "bsj", Pass::kNonlinear);
  write("dx", "bsh", 0b101u);
  write("dgate", "bsj");
}

void Builder::describe(const Residual& w) {
  if (w.over == SumOver::kSequences) return describe_sequences(1, w.accumulate);
  const std::string b = lead(0);
  equation.may_alias = true;
  if (w.phase == Phase::kF) {
    read("x", b + "h", Pass::kTerm);
    read("z", b + "h", Pass::kTerm);
    if (w.bias) read("bias", "h", Pass::kTerm);
    write("y", b + "h");
  } else {
    read("dy", b + "h", Pass::kFactor);
    write("dbias", w.over == SumOver::kTokens ? "bnh" : "h");
    if (w.over == SumOver::kAll) accumulate(w.accumulate);
  }
}

void Builder::describe(const Dropout&) {
  read("z", first_dims(), Pass::kFactor);
  write("z", first_dims(), ~0u, slot_of_read(0));
}

void Builder::describe(const CrossEntropy& w) {
  using Part = CrossEntropy::Part;
  read("logits", "bsV", Pass::kNonlinear);
  if (w.part == Part::kMax) return write("max", "bs");
  read("targets", "bs", Pass::kNonlinear);
  if (w.part == Part::kFused || w.part == Part::kLossOnly) {
    equation.frozen = "V";
    if (w.part == Part::kFused && op_.reads.size() == 3) read("scale", "k", Pass::kNonlinear);
    write("nll", "b", 0b11u);
    if (w.part == Part::kFused) write("dlogits", "bsV", ~0u, slot_of_read(0));
    return;
  }
  read("max", "bs", Pass::kNonlinear);
  if (w.part == Part::kSum) return write("sums", "bsk");
  read("sums", "bsj", Pass::kNonlinear);
  if (op_.reads.size() == 5) read("scale", "k", Pass::kNonlinear);
  write("nll", "b", 0b1110u);  // the target's logit comes with the sums
  if (op_.writes.size() != 1) write("dlogits", "bsV", ~0u, slot_of_read(0));
}

void Builder::describe(const Add&) {
  equation.may_alias = true;
  read("a", first_dims(), Pass::kTerm);
  read("b", first_dims(), Pass::kTerm);
  write("c", first_dims());
}

void Builder::describe(const Fill&) {
  write("x", op_.writes.empty() ? "" : by_position(slot(op_.writes[0]).type), ~0u, SlotId(), true);
}

void Builder::describe(const SumScalars&) {
  for (size_t i = 0; i < std::max<size_t>(1, op_.reads.size()); ++i)
    read("loss", type_of_read(i) == nullptr ? "" : by_position(*type_of_read(i)), Pass::kTerm);
  equation.loose = "abcd";
  equation.sums_micro = true;
  write("total", "k");
}

void Builder::describe(const SquaredNorm&) {
  for (size_t i = 0; i < std::max<size_t>(1, op_.reads.size()); ++i)
    read("gradient", type_of_read(i) == nullptr ? "" : by_position(*type_of_read(i)), Pass::kNonlinear);
  equation.loose = "abcd";
  write("norm", "k");
}

void Builder::describe(const Sgd&) { describe_update(row_of(Optimizer::kSgd)); }

void Builder::describe(const AdamW&) { describe_update(row_of(Optimizer::kAdamW)); }

void Builder::describe(const Lion&) { describe_update(row_of(Optimizer::kLion)); }

void Builder::describe(const AdamW8bit&) { describe_update(row_of(Optimizer::kAdamW8bit)); }

void Builder::describe_update(const OptimizerRow& row) {
  read("grad", first_dims(), Pass::kNonlinear);
  read("param", first_dims(), Pass::kNonlinear);
  const auto dims = [&](const OptimizerState& state) { return state.by_block ? "n" : first_dims(); };
  for (const OptimizerState& state : row.state) read(state.name, dims(state), Pass::kNonlinear);
  if (op_.reads.size() > update_operands(row)) read("factor", "k", Pass::kNonlinear);
  write("param", first_dims(), ~0u, slot_of_read(1));
  for (size_t i = 0; i < row.state.size(); ++i) write(row.state[i].name, dims(row.state[i]), ~0u, slot_of_read(2 + i));
}

void Builder::describe(const Copy&) {
  const Type* from = type_of_read(0);
  const bool own_part =
      from != nullptr && !op_.writes.empty() && from->micro == Micro::kSlice && from->place != slot(op_.writes[0]).type.place;
  equation.loose = own_part ? "abcd" : "";  // `check_own_part` says more
  read("a", first_dims(), Pass::kTerm);
  write("b", first_dims());
}

void Builder::describe(const Kernel& w) {
  using Rule = Kernel::Rule;
  equation.may_alias = true;
  equation.loose = "abcdbstoik";
  equation.sums_micro = w.phase == Phase::kW;
  const Rule rule = rule_of(w);
  const bool trusted = is_believed(w);
  const uint32_t summands = rule == Rule::kLinear ? ~0u : summands_of(w);
  for (size_t i = 0; i < op_.reads.size(); ++i) {
    const bool contracted = rule == Rule::kContract && i < 2;
    const Pass pass = (summands >> std::min<size_t>(i, 31)) & 1 ? Pass::kTerm : Pass::kNonlinear;
    const std::string dims = contracted ? lead(i) + (i == 0 ? "i" : "o") : by_position(*type_of_read(i));
    read("x", dims, contracted ? Pass::kFactor : pass);
  }
  for (const SlotId out : op_.writes) {
    const bool matrix = rule == Rule::kContract && slot(out).type.shape.rank == 2;
    write("y", matrix ? "oi" : by_position(slot(out).type), rule == Rule::kContract ? 0b11u : ~0u, SlotId(), trusted);
  }
}

void Builder::describe(const Collective& w) {
  read("src", first_dims(), Pass::kTerm);
  if (w.kind == CollectiveKind::kAllToAll && op_.reads.size() >= 2) read("sent", by_position(*type_of_read(1)), Pass::kNonlinear);
  if (w.kind == CollectiveKind::kAllToAll && op_.reads.size() >= 3)
    read("received", by_position(*type_of_read(2)), Pass::kNonlinear);
  if (w.kind == CollectiveKind::kAllToAll && op_.reads.size() >= 4) read("choice", by_position(*type_of_read(3)), Pass::kNonlinear);
  if (w.kind == CollectiveKind::kAllToAll && op_.reads.size() >= 6) {
    read("weights", by_position(*type_of_read(4)), Pass::kFactor);
    read("tokens", by_position(*type_of_read(5)), Pass::kFactor);
  }
  equation.loose = "abcdxyzw";
  equation.may_alias = true;
  const bool in_place = w.kind == CollectiveKind::kAllReduce || w.kind == CollectiveKind::kBroadcast;
  write("dst", op_.writes.empty() ? "" : by_position(slot(op_.writes[0]).type), ~0u, in_place ? slot_of_read(0) : SlotId(), true);
}

/// Placements are judged by `check_regroup`: along one axis the parts of a row are cut apart, along another each part.
void Builder::describe(const Regroup& w) {
  equation.loose = "wv";
  read("x", w.join ? "nsbv" : "bsw", Pass::kTerm);
  write("y", w.join ? "bsw" : "nsbv");
}

void Builder::describe(const Strips&) {
  equation.loose = "s";
  for (size_t i = 0; i < std::max<size_t>(1, op_.reads.size()); ++i) read("strip", "bsh", Pass::kTerm);
  write("y", "bsh");
}

void Builder::describe(const Recv&) {
  write("x", op_.writes.empty() ? "" : by_position(slot(op_.writes[0]).type), ~0u, SlotId(), true);
}

std::string Builder::build() {
  std::visit([&](const auto& w) { describe(w); }, op_.work);
  if (std::string fault = operands_fault(); !fault.empty()) return fault;
  if (std::string fault = extents_fault(); !fault.empty()) return fault;
  if (std::string fault = settings_fault(); !fault.empty()) return fault;
  return aliases_fault();
}

std::string Builder::operands_fault() const {
  if (op_.reads.size() != equation.reads.size() || op_.writes.size() != equation.writes.size())
    return fmt::format("takes ({}) -> ({}), found {} reads and {} writes", names_, outs_, op_.reads.size(), op_.writes.size());
  if (op_.reads.size() > 32 && !std::holds_alternative<AttentionMerge>(op_.work) && !std::holds_alternative<SumScalars>(op_.work) &&
      !std::holds_alternative<SquaredNorm>(op_.work) && !std::holds_alternative<Kernel>(op_.work) &&
      !std::holds_alternative<Strips>(op_.work))
    return fmt::format("{} reads are too many", op_.reads.size());
  const auto dims_fault = [&](SlotId id, const std::string& dims) -> std::string {
    const int rank = slot(id).type.shape.rank;
    if (rank == static_cast<int>(dims.size())) return "";
    return fmt::format("%{} has {} dims, {} expected", slot(id).name, rank, dims.size());
  };
  const bool scalar_out = std::holds_alternative<SumScalars>(op_.work) || std::holds_alternative<SquaredNorm>(op_.work);
  for (const Operand& r : equation.reads)
    if (auto fault = dims_fault(r.slot, r.dims); !fault.empty()) return fault;
  for (const Written& w : equation.writes) {
    if (auto fault = dims_fault(w.slot, w.dims); !fault.empty()) return fault;
    if (scalar_out && slot(w.slot).type.shape.elements() != 1) return fmt::format("%{} must have one element", slot(w.slot).name);
  }
  return "";
}

/// Equal letters mean equal extents. A letter lives on one rank: sharding is judged by `derive`.
std::string Builder::extents_fault() const {
  struct Seen {
    int64_t extent = 0;  ///< 0: the letter has not been seen
    SlotId slot;
    size_t dim = 0;
  };
  std::array<Seen, 128> letters{};
  const auto check = [&](SlotId id, const std::string& dims) -> std::string {
    for (size_t d = 0; d < dims.size(); ++d) {
      if (equation.loose.find(dims[d]) != std::string::npos) continue;
      Seen& seen = letters[static_cast<size_t>(dims[d])];
      const int64_t here = slot(id).type.shape[static_cast<int>(d)];
      if (seen.extent == 0) seen = {here, id, d};
      if (seen.extent != here)
        return fmt::format("dim {} of %{} has extent {}, but dim {} of %{}, which it must equal, has {}", d, slot(id).name, here,
                           seen.dim, slot(seen.slot).name, seen.extent);
    }
    return "";
  };
  for (const Operand& r : equation.reads)
    if (auto fault = check(r.slot, r.dims); !fault.empty()) return fault;
  for (const Written& w : equation.writes)
    if (auto fault = check(w.slot, w.dims); !fault.empty()) return fault;
  return "";
}

namespace {

std::string values_fault(int v_dim) {
  if (v_dim >= 0 && v_dim <= kMaxHeads) return "";
  return fmt::format("v_dim={}: elements of a head of v, 0 for as many as of q, at most {}", v_dim, kMaxHeads);
}

/// Heads, and the rows of qkv that they make: kv_heads groups of heads / kv_heads queries, one key and one value.
/// `v_dim`: elements of a value, where these are not head_dim; else 0.
std::string heads_fault(int heads, int kv_heads, int head_dim, const Slot& qkv, int v_dim = 0) {
  if (std::string fault = values_fault(v_dim); !fault.empty()) return fault;
  if (heads < 1 || kv_heads < 1 || head_dim < 1 || heads % kv_heads != 0)
    return fmt::format("heads={} kv_heads={} head_dim={}: positive numbers, and every kv head serves as many heads", heads,
                       kv_heads, head_dim);
  if (std::max({heads, kv_heads, head_dim}) > kMaxHeads)
    return fmt::format("heads={} kv_heads={} head_dim={}: each is at most {}", heads, kv_heads, head_dim, kMaxHeads);
  const int64_t values = v_dim == 0 ? head_dim : v_dim;
  const int64_t rows = (static_cast<int64_t>(heads) + kv_heads) * head_dim + kv_heads * values;
  if (qkv.type.shape.last() != rows)
    return fmt::format("heads={} kv_heads={} head_dim={} make {} rows of q, k and v, but %{} has {}", heads, kv_heads, head_dim,
                       rows, qkv.name, qkv.type.shape.last());
  return "";
}

/// A factor of 8 bits and its scales: one, one each 128 of a row, or one each 128 x 128.
std::string scales_fault(const Slot& factor, const Slot& scales) {
  constexpr int64_t kBlock = 128;
  const auto blocks = [](int64_t n) { return (n + kBlock - 1) / kBlock; };
  const Shape &x = factor.type.shape, &s = scales.type.shape;
  if (!has_scales(factor.type.dtype))
    return fmt::format("%{} is {}, and what has scales is f8e4m3 or f8e5m2", factor.name, name_of(factor.type.dtype));
  if (scales.type.dtype != DType::f32)
    return fmt::format("the scales %{} are {}, not f32", scales.name, name_of(scales.type.dtype));
  if (s.elements() == 1) return "";
  const bool alike = s.rank == x.rank && s.last() == blocks(x.last());
  const bool rows = alike && s.elements() / s.last() == x.elements() / x.last();
  if (rows || (alike && x.rank == 2 && s[0] == blocks(x[0]))) return "";
  return fmt::format("the scales %{} are neither one for %{}, nor one each 128 of its rows, nor one each 128 x 128", scales.name,
                     factor.name);
}

/// Scales of a factor of a grouped product: one each 128 of a row, or of `squares` one each 128 x 128 of each expert's weight.
std::string grouped_scales_fault(const Slot& factor, const Slot& scales, bool squares) {
  constexpr int64_t kBlock = 128;
  const auto blocks = [](int64_t n) { return (n + kBlock - 1) / kBlock; };
  if (!has_scales(factor.type.dtype))
    return fmt::format("%{} is {}, and what has scales is f8e4m3 or f8e5m2", factor.name, name_of(factor.type.dtype));
  if (scales.type.dtype != DType::f32)
    return fmt::format("the scales %{} are {}, not f32", scales.name, name_of(scales.type.dtype));
  const Shape &x = factor.type.shape, &s = scales.type.shape;
  if (s.rank == 3 && s[0] == x[0] && s[1] == (squares ? blocks(x[1]) : x[1]) && s[2] == blocks(x[2])) return "";
  return squares ? fmt::format("the scales %{} are not one each 128 x 128 of each expert's matrix of %{}", scales.name, factor.name)
                 : fmt::format("the scales %{} are not one each 128 of a row of %{}", scales.name, factor.name);
}

std::string extent_fault(const Slot& slot, int dim, int64_t expected, std::string_view why) {
  if (slot.type.shape[dim] == expected) return "";
  return fmt::format("%{} has extent {} along dim {}, and {} expects {}", slot.name, slot.type.shape[dim], dim, why, expected);
}

}  // namespace

/// Rows of experts, their counts, and one flag; what is made of the counts has their type, and the flag stays where it is.
std::string Builder::fit_fault() const {
  if (op_.reads.size() != 3 || op_.writes.size() != 2)
    return fmt::format("takes (%rows, %counts, %overflow) -> (%fitted, %overflow), found {} reads and {} writes", op_.reads.size(),
                       op_.writes.size());
  const Slot &rows = slot(op_.reads[0]), &counts = slot(op_.reads[1]), &flag = slot(op_.reads[2]), &fitted = slot(op_.writes[0]);
  if (rows.type.shape.rank != 3 || counts.type.shape.rank != 3)
    return fmt::format("%{} has {} dims and %{} has {}: rows and counts of experts have 3", rows.name, rows.type.shape.rank,
                       counts.name, counts.type.shape.rank);
  if (rows.type.shape[0] != 1 || counts.type.shape[0] != 1)
    return fmt::format("%{} has {} groups of rows and %{} counts {}: those that have come are one", rows.name, rows.type.shape[0],
                       counts.name, counts.type.shape[0]);
  if (counts.type.dtype != DType::i32)
    return fmt::format("%{} is {}, and counts of rows are i32", counts.name, name_of(counts.type.dtype));
  if (!(fitted.type == counts.type))
    return fmt::format("%{} must have the type of %{}, whose rows it counts", fitted.name, counts.name);
  for (const SlotId s : {op_.reads[2], op_.writes[1]})
    if (slot(s).type.dtype != DType::i32 || slot(s).type.shape.elements() != 1)
      return fmt::format("%{} must be a flag, i32[1]", slot(s).name);
  if (op_.writes[1] != op_.reads[2])
    return fmt::format("%{} is a maximum over the step, and goes on from %{}", slot(op_.writes[1]).name, flag.name);
  if (flag.type.micro != Micro::kNone) return fmt::format("%{} is of the step, and not of one micro-batch", flag.name);
  for (size_t axis = 0; axis < kMaxAxes; ++axis) {
    if (counts.type.place[axis] != (rows.type.place[axis].is_partial() ? Placement::replicate() : rows.type.place[axis]))
      return fmt::format("%{} and %{} are placed otherwise: rows are counted where they are", rows.name, counts.name);
    if (counts.type.place[axis].kind != Place::kReplicate && !flag.type.place[axis].is_partial())
      return fmt::format("%{} must be partial wherever ranks count other rows: each speaks for its own", flag.name);
  }
  return "";
}

/// Rows of experts and counts of them, group by group, and as many rows expected as the buffer may hold.
std::string Builder::counted_fault(const Kernel& w) const {
  const Slot &rows = slot(op_.reads.front()), &counts = slot(op_.reads.back());
  const Shape &r = rows.type.shape, &c = counts.type.shape;
  if (r.rank != 3 || c.rank != 3)
    return fmt::format("%{} has {} dims and %{} has {}: rows and counts of experts have 3", rows.name, r.rank, counts.name, c.rank);
  if (counts.type.dtype != DType::i32)
    return fmt::format("%{} is {}, and counts of rows are i32", counts.name, name_of(counts.type.dtype));
  if (r[0] != c[0]) return fmt::format("%{} counts {} groups of rows, and %{} has {}", counts.name, c[0], rows.name, r[0]);
  if (w.rows < 1 || w.rows > r[0] * r[1]) return fmt::format("rows={} of %{}, which has {}", w.rows, rows.name, r[0] * r[1]);
  return "";
}

std::string Builder::settings_fault() const {
  const auto read_slot = [&](size_t i) -> const Slot& { return slot(op_.reads[i]); };
  const auto write_slot = [&](size_t i) -> const Slot& { return slot(op_.writes[i]); };
  const auto document_fault = [](bool packed, int64_t document) -> std::string {
    if (document == 0 || (packed && document > 0 && document <= kMaxTokens)) return "";
    return fmt::format("document={}: tokens expected of a packed document, up to {}", document, kMaxTokens);
  };
  const auto window_fault = [](int64_t window) -> std::string {
    if (window >= 0 && window <= kMaxTokens) return "";
    return fmt::format("window={}: keys that a query sees, 0 for all before it, at most {}", window, kMaxTokens);
  };
  const auto of_attention = [&](const Attention& w) -> std::string {
    if (std::string fault = document_fault(w.packed, w.document); !fault.empty()) return fault;
    if (std::string fault = window_fault(w.window); !fault.empty()) return fault;
    const bool forward = w.phase == Phase::kF;
    const Slot &qkv = forward ? read_slot(0) : read_slot(3), &o = forward ? write_slot(0) : read_slot(1),
               &lse = forward ? write_slot(1) : read_slot(2);
    if (std::string fault = heads_fault(w.heads, w.kv_heads, w.head_dim, qkv, w.v_dim); !fault.empty()) return fault;
    if (std::string fault = extent_fault(o, 2, static_cast<int64_t>(w.heads) * value_dim_of(w), "a row of every head");
        !fault.empty())
      return fault;
    if (std::string fault = extent_fault(lse, 1, w.heads, "one a head"); !fault.empty() || forward) return fault;
    if (std::string fault = extent_fault(read_slot(0), 2, o.type.shape[2], "the gradient of the rows"); !fault.empty())
      return fault;
    return extent_fault(write_slot(0), 2, qkv.type.shape[2], "the gradient of q, k and v");
  };
  const auto leaves_fault = [&](const Slot& sums) -> std::string {
    if (sums.type.dtype != DType::f32)
      return fmt::format("%{} is {}, and sums that are to be added up are f32", sums.name, name_of(sums.type.dtype));
    if (sums.type.shape[1] <= kContractionLeaves) return "";
    return fmt::format("%{} has sums of {} leaves of a sequence: one, or up to {}", sums.name, sums.type.shape[1],
                       kContractionLeaves);
  };
  const auto of_head_norm = [&](const HeadNorm& w) -> std::string {
    if (w.over != SumOver::kAll) {
      if (w.phase != Phase::kW) return "only a sum over tokens, of phase W, is over tokens or sequences alone";
      if (w.over == SumOver::kTokens && w.accumulate)
        return "sums of one micro-batch are not added to others: that is for over=sequences";
      for (const size_t i : {size_t{0}, size_t{1}})
        if (std::string fault = leaves_fault(w.over == SumOver::kTokens ? write_slot(i) : read_slot(i)); !fault.empty())
          return fault;
      if (w.over == SumOver::kSequences) return "";
    }
    const bool forward = w.phase == Phase::kF, weight = w.phase == Phase::kW;
    const Slot &qkv = read_slot(forward ? 0 : 1), &stats = forward ? write_slot(1) : read_slot(weight ? 2 : 4);
    if (std::string fault = heads_fault(w.heads, w.kv_heads, w.head_dim, qkv); !fault.empty()) return fault;
    if (std::string fault = extent_fault(forward ? write_slot(0) : read_slot(0), 2, qkv.type.shape[2], "rows of q, k and v");
        !fault.empty())
      return fault;
    if (w.phase == Phase::kI)
      if (std::string fault = extent_fault(write_slot(0), 2, qkv.type.shape[2], "the gradient of q, k and v"); !fault.empty())
        return fault;
    if (std::string fault = extent_fault(stats, 2, static_cast<int64_t>(w.heads) + w.kv_heads, "1/rms of each head of q and k");
        !fault.empty())
      return fault;
    if (stats.type.dtype != DType::f32)
      return fmt::format("%{} is {}, and statistics are f32", stats.name, name_of(stats.type.dtype));
    for (const size_t i : {size_t{0}, size_t{1}})
      if (std::string fault = extent_fault(weight ? write_slot(i) : read_slot((forward ? 1 : 2) + i),
                                           w.over == SumOver::kTokens ? 2 : 0, w.head_dim, "as wide as a head");
          !fault.empty())
        return fault;
    return w.epsilon > 0 ? "" : fmt::format("epsilon={} is not positive", w.epsilon);
  };
  const auto of_split = [&](const SplitHeads& w) -> std::string {
    const bool forward = w.phase == Phase::kF;
    const Slot &qkv = forward ? read_slot(0) : write_slot(0), &q = forward ? write_slot(0) : read_slot(0),
               &kv = forward ? write_slot(1) : read_slot(1);
    if (std::string fault = heads_fault(w.heads, w.kv_heads, w.head_dim, qkv, w.v_dim); !fault.empty()) return fault;
    if (std::string fault = extent_fault(q, 2, static_cast<int64_t>(w.heads) * w.head_dim, "a row of every head"); !fault.empty())
      return fault;
    return extent_fault(kv, 2, static_cast<int64_t>(w.kv_heads) * (w.head_dim + value_dim_of(w)),
                        "a key and a value of every kv head");
  };
  const auto of_block = [&](const AttentionBlock& w) -> std::string {
    if (std::string fault = document_fault(w.packed, w.document); !fault.empty()) return fault;
    if (std::string fault = window_fault(w.window); !fault.empty()) return fault;
    const bool forward = w.phase == Phase::kF;
    if (w.heads < 1 || w.kv_heads < 1 || w.head_dim < 1 || w.heads % w.kv_heads != 0 ||
        std::max({w.heads, w.kv_heads, w.head_dim}) > kMaxHeads)
      return fmt::format("heads={} kv_heads={} head_dim={}: positive numbers up to {}, and every kv head serves as many heads",
                         w.heads, w.kv_heads, w.head_dim, kMaxHeads);
    if (w.partial && (w.carry || w.carry_kv)) return "partial results are kept apart: they are not carried";
    if (forward && w.carry_kv) return "carry_kv: keys and values have a gradient in backward only";
    if (std::string fault = values_fault(w.v_dim); !fault.empty()) return fault;
    const int64_t both = static_cast<int64_t>(w.head_dim) + value_dim_of(w), keys = w.kv_heads * both;
    const int64_t queries = static_cast<int64_t>(w.heads) * w.head_dim, outs = static_cast<int64_t>(w.heads) * value_dim_of(w);
    const Slot &q = read_slot(forward ? 0 : 3), &kv = read_slot(forward ? 1 : 4), &o = forward ? write_slot(0) : read_slot(1),
               &sums = forward ? write_slot(1) : read_slot(2);
    for (const Slot* rows : {&q, forward ? &q : &write_slot(0)})
      if (std::string fault = extent_fault(*rows, 2, queries, "a row of every head"); !fault.empty()) return fault;
    for (const Slot* rows : {&o, forward ? &o : &read_slot(0)})
      if (std::string fault = extent_fault(*rows, 2, outs, "a row of every head"); !fault.empty()) return fault;
    if (std::string fault = extent_fault(kv, 2, keys, "a key and a value of every kv head"); !fault.empty()) return fault;
    if (std::string fault = extent_fault(sums, 1, w.heads, "one a head"); !fault.empty()) return fault;
    if (forward && w.partial)
      if (std::string fault = extent_fault(sums, 3, 2, "a maximum and a sum"); !fault.empty()) return fault;
    if (sums.type.dtype != DType::f32) return fmt::format("%{} is {}, and statistics are f32", sums.name, name_of(sums.type.dtype));
    if (forward && o.type.dtype != DType::f32)
      return fmt::format("%{} is {}: a block's output is f32, and rounded once at the end", o.name, name_of(o.type.dtype));
    if (forward) return "";
    const int64_t gradient = w.partial ? w.heads * both : keys;
    return extent_fault(write_slot(1), 2, gradient, w.partial ? "the gradients by query head" : "the gradient of keys and values");
  };
  const auto of_merge = [&](const AttentionMerge& w) -> std::string {
    if (w.heads < 1 || w.kv_heads < 1 || w.head_dim < 1 || w.heads % w.kv_heads != 0 ||
        std::max({w.heads, w.kv_heads, w.head_dim}) > kMaxHeads)
      return fmt::format("heads={} kv_heads={} head_dim={}: positive numbers up to {}, and every kv head serves as many heads",
                         w.heads, w.kv_heads, w.head_dim, kMaxHeads);
    if (w.phase == Phase::kF && w.keys) return "keys: keys and values have a gradient in backward only";
    if (std::string fault = values_fault(w.v_dim); !fault.empty()) return fault;
    const int64_t d = w.head_dim, v = value_dim_of(w), row = w.phase == Phase::kF ? v : w.keys ? d + v : d;
    const int64_t in = static_cast<int64_t>(w.heads) * row, out = w.keys ? static_cast<int64_t>(w.kv_heads) * row : in;
    const size_t each = w.phase == Phase::kF ? 2 : 1;
    for (size_t i = 0; i < op_.reads.size(); i += each) {
      if (std::string fault = extent_fault(read_slot(i), 2, in, "the rows of every head"); !fault.empty()) return fault;
      if (read_slot(i).type.dtype != DType::f32)
        return fmt::format("%{} is {}: parts of a sum are f32", read_slot(i).name, name_of(read_slot(i).type.dtype));
      if (each == 1) continue;
      if (std::string fault = extent_fault(read_slot(i + 1), 1, w.heads, "one a head"); !fault.empty()) return fault;
      if (std::string fault = extent_fault(read_slot(i + 1), 3, 2, "a maximum and a sum"); !fault.empty()) return fault;
    }
    if (each == 2 && write_slot(1).type.dtype != DType::f32)
      return fmt::format("%{} is {}, and statistics are f32", write_slot(1).name, name_of(write_slot(1).type.dtype));
    return extent_fault(write_slot(0), 2, out, "the rows of the result");
  };
  const auto of_latent = [&](const LatentHeads& w) -> std::string {
    if (std::min({w.heads, w.nope, w.rope, w.v_dim}) < 1 || std::max({w.heads, w.nope, w.rope, w.v_dim}) > kMaxHeads)
      return fmt::format("heads={} nope={} rope={} v_dim={}: positive numbers up to {}", w.heads, w.nope, w.rope, w.v_dim,
                         kMaxHeads);
    if (w.rope % 2 != 0) return fmt::format("rope={}: rotation takes pairs", w.rope);
    const bool forward = w.phase == Phase::kF;
    const auto part = [&](size_t i) -> const Slot& { return forward ? read_slot(i) : write_slot(i); };
    const int64_t heads = w.heads, depth = int64_t{w.nope} + w.rope;
    if (std::string fault = extent_fault(part(0), 2, heads * depth, "a row of every head of q"); !fault.empty()) return fault;
    if (std::string fault = extent_fault(part(1), 2, heads * (int64_t{w.nope} + w.v_dim), "a key's part and a value of every head");
        !fault.empty())
      return fault;
    if (std::string fault = extent_fault(part(2), 2, w.rope, "the rotated part of every key"); !fault.empty()) return fault;
    return extent_fault(forward ? write_slot(0) : read_slot(0), 2, heads * (2 * depth + w.v_dim), "q, k and v of every head");
  };
  const auto of_rope = [&](const Rope& w) -> std::string {
    if (w.head_dim % 2 != 0) return fmt::format("head_dim={}: rotation takes pairs", w.head_dim);
    return heads_fault(w.heads, w.kv_heads, w.head_dim, read_slot(0));
  };
  const auto integers = [&](std::initializer_list<const Slot*> slots) -> std::string {
    for (const Slot* s : slots)
      if (s->type.dtype != DType::i32)
        return fmt::format("%{} is {}, and numbers of experts and rows are i32", s->name, name_of(s->type.dtype));
    return "";
  };
  const auto of_activation = [&](const Activation& w) -> std::string {
    const bool forward = w.phase == Phase::kF;
    if (w.counted) {
      const Slot& counts = read_slot(forward ? 1 : 2);
      if (read_slot(0).type.shape.rank != 3)
        return fmt::format("%{} has {} dims, and rows of experts have 3", read_slot(0).name, read_slot(0).type.shape.rank);
      if (std::string fault = integers({&counts}); !fault.empty()) return fault;
      for (const Slot* s : {forward ? &read_slot(0) : &read_slot(1), &write_slot(0)})
        if (std::string fault = extent_fault(*s, 1, read_slot(0).type.shape[1], "a row for each"); !fault.empty()) return fault;
    }
    if (w.rows < 0 || (w.rows > 0 && !w.counted)) return fmt::format("rows={}: expected of rows that are counted", w.rows);
    if (!w.swiglu) return "";
    const Slot &u = forward ? read_slot(0) : read_slot(1), &a = forward ? write_slot(0) : read_slot(0);
    if (std::string fault = extent_fault(u, u.type.shape.rank - 1, 2 * a.type.shape.last(), "a gate for each"); !fault.empty())
      return fault;
    return forward ? "" : extent_fault(write_slot(0), u.type.shape.rank - 1, u.type.shape.last(), "the gradient of gate and up");
  };
  const auto over_fault = [&](SumOver over, Phase phase, bool accumulates) -> std::string {
    if (over == SumOver::kAll) return "";
    if (phase != Phase::kW) return "only a sum over tokens, of phase W, is over tokens or sequences alone";
    if (over == SumOver::kTokens && accumulates)
      return "sums of one micro-batch are not added to others: that is for over=sequences";
    for (const SlotId sum : over == SumOver::kTokens ? op_.writes : std::vector<SlotId>(op_.reads.begin(), op_.reads.begin() + 1)) {
      if (std::string fault = extent_fault(slot(sum), 1, 1, "a sum for each sequence"); !fault.empty()) return fault;
      if (slot(sum).type.dtype != DType::f32)
        return fmt::format("%{} is {}, and sums that are to be added up are f32", slot(sum).name, name_of(slot(sum).type.dtype));
    }
    return "";
  };
  const auto groups_fault = [&](int groups, int groups_chosen, const Slot& logits, const Slot& choice) -> std::string {
    const int64_t experts = logits.type.shape.last(), top_k = choice.type.shape.last();
    if (top_k > experts) return fmt::format("%{} has {} experts of %{}'s {}", choice.name, top_k, logits.name, experts);
    if (groups < 1 || experts % groups != 0 || groups_chosen < 1 || groups_chosen > groups ||
        top_k > groups_chosen * (experts / groups))
      return fmt::format("groups={} groups_chosen={}: {} experts of %{} in whole groups, of which {} are chosen", groups,
                         groups_chosen, experts, logits.name, top_k);
    return "";
  };
  const auto bias_fault = [&](bool biased) -> std::string {
    if (!biased || read_slot(1).type.dtype == DType::f32) return "";
    return fmt::format("%{} is {}, and biases are f32", read_slot(1).name, name_of(read_slot(1).type.dtype));
  };
  const auto of_choose = [&](const ChooseExperts& w) -> std::string {
    if (w.phase != Phase::kF) return "experts are chosen going forward";
    if (std::string fault = groups_fault(w.groups, w.groups_chosen, read_slot(0), write_slot(0)); !fault.empty()) return fault;
    if (std::string fault = bias_fault(w.biased); !fault.empty()) return fault;
    return integers({&write_slot(0)});
  };
  const auto of_route = [&](const Route& w) -> std::string {
    const bool forward = w.phase == Phase::kF;
    const Slot &logits = read_slot(forward ? 0 : 1), &choice = forward ? write_slot(1) : read_slot(2);
    const Shape& l = logits.type.shape;
    if (!(w.factor > 0) || !(w.balance >= 0) || !(w.z_loss >= 0))
      return fmt::format("factor={} balance={} z_loss={}: a factor is positive, and no loss is negative", w.factor, w.balance,
                         w.z_loss);
    if (std::string fault = groups_fault(w.groups, w.groups_chosen, logits, choice); !fault.empty()) return fault;
    if (w.tokens < 1 || w.tokens > kMaxTokens) return fmt::format("tokens={}: a mean is of 1 to {} tokens", w.tokens, kMaxTokens);
    if (w.sequence < 0 || w.sequence > kMaxTokens)
      return fmt::format("sequence={}: a sequence has up to {} tokens", w.sequence, kMaxTokens);
    if (!forward) return integers({&choice});
    if (std::string fault = bias_fault(w.biased); !fault.empty()) return fault;
    if (w.reads_chosen()) {
      const Slot& chosen = read_slot(w.biased ? 2 : 1);
      if (std::string fault = extent_fault(chosen, 1, w.sequence, "what all parts of a sequence chose"); !fault.empty())
        return fault;
      if (std::string fault = integers({&chosen}); !fault.empty()) return fault;
    }
    const Slot& counts = write_slot(2);
    const Shape& c = counts.type.shape;
    if (c[0] * c[2] != l.last())
      return fmt::format("%{} counts {} experts on each of {} ranks, and there are {}", counts.name, c[2], c[0], l.last());
    if (c[1] != 1 && (c[1] % l[0] != 0 || c[1] / l[0] > kContractionLeaves))
      return fmt::format("%{} counts {} parts of {} sequences: one of all, or up to {} of each", counts.name, c[1], l[0],
                         kContractionLeaves);
    return integers({&choice, &counts});
  };
  const auto rows_fault = [&](const Slot& rows, const Slot& choice, int experts, int64_t capacity) -> std::string {
    const Shape &r = rows.type.shape, &c = choice.type.shape;
    if (experts < c[2]) return fmt::format("experts={}, and a token goes to {}", experts, c[2]);
    if (capacity == 0 && r[0] * r[1] < c.elements())
      return fmt::format("%{} has {} rows, and {} tokens go to {} experts each", rows.name, r[0] * r[1], c[0] * c[1], c[2]);
    if (const int64_t most = capacity == 0 ? 0 : most_rows(c, experts, capacity); r[0] * r[1] < most)
      return fmt::format("%{} has {} rows, and {} sequences fill {} with capacity={}", rows.name, r[0] * r[1], c[0], most,
                         capacity);
    return integers({&choice});
  };
  const auto of_load = [&](const ExpertLoad&) -> std::string {
    const Slot& load = write_slot(0);
    if (load.type.dtype != DType::f32) return fmt::format("%{} is {}, and loads are f32", load.name, name_of(load.type.dtype));
    return integers({&read_slot(0)});
  };
  const auto of_dispatch = [&](const Dispatch& w) -> std::string {
    const bool forward = w.phase == Phase::kF;
    return rows_fault(forward ? write_slot(0) : read_slot(0), read_slot(1), w.experts, w.capacity);
  };
  const auto of_combine = [&](const Combine& w) -> std::string {
    const bool forward = w.phase == Phase::kF;
    const Slot &rows = read_slot(forward ? 0 : 1), &choice = read_slot(forward ? 2 : 3);
    if (!forward && !(write_slot(0).type.shape == rows.type.shape))
      return fmt::format("%{} and %{} have other extents", write_slot(0).name, rows.name);
    return rows_fault(rows, choice, w.experts, w.capacity);
  };
  const auto of_gate = [&](const Gate& w) -> std::string {
    return extent_fault(read_slot(w.phase == Phase::kF ? 1 : 2), 2, 1, "a number a token");
  };
  const auto of_grouped = [&](const GroupedLinear& w) -> std::string {
    const Slot &counts = read_slot(2), &rows = read_slot(0), &weight = w.phase == Phase::kW ? write_slot(0) : read_slot(1),
               &other = w.phase == Phase::kW ? read_slot(1) : write_slot(0);
    const Shape& c = counts.type.shape;
    if (c[0] != 1 || rows.type.shape[0] != 1 || other.type.shape[0] != 1)
      return fmt::format("%{} is of {} groups of experts, and a rank multiplies by one", rows.name, rows.type.shape[0]);
    if (std::string fault = extent_fault(weight, 0, c[2], "a weight for each expert that is counted"); !fault.empty()) return fault;
    if (std::string fault = extent_fault(other, 1, rows.type.shape[1], "a row for each"); !fault.empty()) return fault;
    if (w.sources < 1 || c[1] % w.sources != 0)
      return fmt::format("sources={}: %{} counts {} parts of their tokens", w.sources, counts.name, c[1]);
    if (w.rows < 0 || w.rows > rows.type.shape[1])
      return fmt::format("rows={} of %{}, which has {}", w.rows, rows.name, rows.type.shape[1]);
    if (has_scales(rows.type.dtype) || has_scales(read_slot(1).type.dtype))
      for (const size_t i : {size_t{0}, size_t{1}})
        if (std::string fault = grouped_scales_fault(read_slot(i), read_slot(i + 3), i == 1 && w.phase != Phase::kW);
            !fault.empty())
          return fault;
    return integers({&counts});
  };
  const auto of_residual = [&](const Residual& w) -> std::string { return over_fault(w.over, w.phase, w.accumulate); };
  const auto of_norm = [&](const Norm& w) -> std::string {
    if (std::string fault = over_fault(w.over, w.phase, w.accumulate); !fault.empty()) return fault;
    if (w.over == SumOver::kSequences) return "";
    const Slot& stats = w.phase == Phase::kF ? write_slot(1) : read_slot(w.phase == Phase::kI ? 3 : 2);
    return extent_fault(stats, stats.type.shape.rank - 1, w.rms ? 1 : 2, w.rms ? "1/rms" : "mean and 1/std");
  };
  const auto of_regroup = [&](const Regroup& w) -> std::string {
    const Slot &whole = w.join ? write_slot(0) : read_slot(0), &parted = w.join ? read_slot(0) : write_slot(0);
    const int64_t here = parted.type.shape[0], width = parted.type.shape[3];
    if (w.parts < 1 || here < 1 || w.parts % here != 0) return fmt::format("%{} has {} of {} parts", parted.name, here, w.parts);
    if (w.copies == 1) return extent_fault(whole, 2, here * width, "a row of its parts");
    const int64_t d = w.head_dim, groups = w.kv_heads;
    if (w.copies < 1 || w.copies > kContractionLeaves || d < 1 || groups < 1 || here != w.parts || w.parts != groups * w.copies)
      return fmt::format("parts={} copies={} kv_heads={} head_dim={}: each copy of a kv head is one part, and there are at most {}",
                         w.parts, w.copies, w.kv_heads, w.head_dim, kContractionLeaves);
    const int64_t queries = width - 2 * d;  // of a part
    if (queries < d || queries % d != 0)
      return fmt::format("%{} has parts of {} rows, and a part is queries, a key and a value of {} each", parted.name, width, d);
    return extent_fault(whole, 2, groups * (w.copies * queries + 2 * d), "queries, keys and values of its parts");
  };
  const auto of_strips = [&](const Strips& w) -> std::string {
    const auto n = static_cast<int64_t>(op_.reads.size());
    if (n < 2 || n > kMaxStrips) return fmt::format("{} strips: 2 to {} are put together", n, kMaxStrips);
    for (const SlotId read : op_.reads)
      if (slot(read).type.dtype != write_slot(0).type.dtype)
        return fmt::format("%{} is {}, and the result {}", slot(read).name, name_of(slot(read).type.dtype),
                           name_of(write_slot(0).type.dtype));
    for (const SlotId read : op_.reads)
      if (std::string fault = extent_fault(write_slot(0), 1, slot(read).type.shape[1] * (w.sum ? 1 : n),
                                           w.sum ? "a sum of strips" : "strips one behind the other");
          !fault.empty())
        return fault;
    return w.step == 1 || w.step == -1 ? "" : fmt::format("step={}: ranks in their order, 1 or -1", w.step);
  };
  const auto of_positions = [&](const Positions& w) -> std::string {
    const Slot &table = w.phase == Phase::kF ? read_slot(1) : write_slot(0), &x = read_slot(0);
    if (table.type.shape[0] >= x.type.shape[1]) return "";
    return fmt::format("%{} has {} rows for {} tokens", table.name, table.type.shape[0], x.type.shape[1]);
  };
  const auto of_loss = [&](const CrossEntropy& w) -> std::string {
    if (w.chunks < 1) return fmt::format("chunks={}: at least one", w.chunks);
    if (w.tokens < 1 || w.tokens > kMaxTokens) return fmt::format("tokens={}: a mean is of 1 to {} targets", w.tokens, kMaxTokens);
    if (w.part == CrossEntropy::Part::kSum) return extent_fault(write_slot(0), 2, 2, "a sum and the target's logit");
    if (w.part == CrossEntropy::Part::kGrad) return extent_fault(read_slot(3), 2, 2, "a sum and the target's logit");
    return "";
  };
  const auto of_dropout = [&](const Dropout& w) -> std::string {
    return w.p >= 0 && w.p < 1 ? "" : fmt::format("p={}: a share of elements below 1", w.p);
  };
  const auto of_linear = [&](const Linear& w) -> std::string {
    if (w.chunks != 1) {
      const Slot& part = w.phase == Phase::kI ? write_slot(0) : read_slot(0);
      const Slot* whole = part.view ? &segment_.slots[static_cast<size_t>(part.view->base)] : nullptr;
      if (w.chunks < 1 || whole == nullptr || part.type.shape.rank != 3 || whole->type.shape.rank != 3 ||
          whole->type.shape[1] != w.chunks * part.type.shape[1])
        return fmt::format("chunks={}: %{} is no view of one of so many equal parts of each sequence of tokens", w.chunks,
                           part.name);
    }
    const bool scaled = has_scales(read_slot(0).type.dtype) || has_scales(read_slot(1).type.dtype);
    if (w.strips != 1 || w.turn != 0 || w.carry) {
      const Shape &x = read_slot(0).type.shape, &y = write_slot(0).type.shape;
      const bool gathers = x.rank == 3 && x[1] * w.strips == y[1], scatters = x.rank == 3 && y[1] * w.strips == x[1];
      if (w.strips < 2 || w.strips > kMaxStrips || w.phase == Phase::kW || w.chunks != 1 || scaled || gathers == scatters)
        return fmt::format("strips={}: one of %{} and %{} has all tokens, the other one of 2 to {} strips of them, in phase F or I",
                           w.strips, read_slot(0).name, write_slot(0).name, kMaxStrips);
      if (scatters && (w.bias || w.carry)) return "a rank's summand of a strip stands alone: no bias, and no strip beside it";
      return "";
    }
    if (!scaled) return "";
    for (const size_t i : {size_t{0}, size_t{1}})
      if (std::string fault = scales_fault(read_slot(i), read_slot(i + 2)); !fault.empty()) return fault;
    return "";
  };
  const auto of_kernel = [&](const Kernel& w) -> std::string {
    if (std::string fault = kernel_fault(op_, w); !fault.empty()) return fault;
    if (meaning_of(w) == KernelMeaning::kFit) return fit_fault();
    if (w.counted) return counted_fault(w);
    if (meaning_of(w) != KernelMeaning::kClipFactor) return "";
    const auto one = [](const Slot& s, DType dtype) { return s.type.dtype == dtype && s.type.shape.elements() == 1; };
    if (op_.reads.size() == 2 && op_.writes.size() == 1 && one(read_slot(0), DType::f64) && one(read_slot(1), DType::f32) &&
        one(write_slot(0), DType::f32))
      return "";
    return "takes (%squared_norm f64[1], %bound f32[1]) -> (%factor f32[1])";
  };
  if (const OptimizerRow* row = update_of(op_.work)) return state_fault(*row);
  return std::visit(Overload{of_kernel,  of_linear,   of_attention, of_head_norm, of_split,
                             of_block,   of_merge,    of_rope,      of_latent,    of_activation,
                             of_norm,    of_residual, of_positions, of_loss,      of_dropout,
                             of_regroup, of_route,    of_choose,    of_load,      of_dispatch,
                             of_grouped, of_combine,  of_strips,    of_gate,      [](const auto&) { return std::string(); }},
                    op_.work);
}

/// State in blocks has the types of the optimizer's row, and a scale for each block of what is updated.
std::string Builder::state_fault(const OptimizerRow& row) const {
  if (!has_blocks(row)) return "";
  const int64_t n = slot(op_.reads[1]).type.shape.elements();
  for (size_t i = 0; i < row.state.size(); ++i) {
    const OptimizerState& state = row.state[i];
    const Slot& held = slot(op_.reads[2 + i]);
    if (held.type.dtype != state.dtype)
      return fmt::format("%{} is {}, and {} of {} is {}", held.name, name_of(held.type.dtype), state.name, row.name,
                         name_of(state.dtype));
    if (state.by_block && held.type.shape.elements() != state.elements(n))
      return fmt::format("%{} has {} elements: {} elements of %{} are {} blocks of {}", held.name, held.type.shape.elements(), n,
                         slot(op_.reads[1]).name, state.elements(n), kMomentBlock);
  }
  return "";
}

/// A write lies over no read, except exactly over one that it is said to replace or may replace.
std::string Builder::aliases_fault() const {
  for (const Written& w : equation.writes) {
    const Window out = window_of(segment_, w.slot);
    if (w.replaces && !bound_apart(out, window_of(segment_, w.replaces)) && !same_window(out, window_of(segment_, w.replaces)))
      return fmt::format("%{} must be written in place of %{}", slot(w.slot).name, slot(w.replaces).name);
    if (w.replaces || equation.may_alias) continue;
    for (size_t i = 0; i < equation.reads.size(); ++i) {
      const Window in = window_of(segment_, equation.reads[i].slot);
      const bool allowed = i < 32 && (equation.may_replace >> i) & 1 && same_window(in, out);
      if (!allowed && in.root == out.root && in.begin < out.begin + out.length && out.begin < in.begin + in.length)
        return fmt::format("%{} overwrites %{} while the op still reads it", slot(w.slot).name, slot(equation.reads[i].slot).name);
    }
  }
  return "";
}

/// What `derive` found: a placement, or why there is none.
struct Derived {
  Placement place;
  bool may_be_partial = false;
  std::string refusal;
};

class TypeChecker {
 public:
  TypeChecker(const Plan& plan, const Segment& segment, Report& report) : plan_(plan), segment_(segment), report_(report) {}

  void run() {
    for (const Step& step : segment_.steps)
      if (const Op* op = std::get_if<Op>(&step); op != nullptr && !report_.full()) check(*op);
  }

 private:
  const Type& type(SlotId slot) const { return segment_.slots[slot.index()].type; }
  const std::string& name(SlotId slot) const { return segment_.slots[slot.index()].name; }
  Placement place(SlotId slot, int axis) const { return type(slot).place[static_cast<size_t>(axis)]; }
  const std::string& axis_name(int axis) const { return plan_.mesh.axes[static_cast<size_t>(axis)].name; }
  int axes() const { return static_cast<int>(plan_.mesh.axes.size()); }
  bool split(int axis) const { return plan_.mesh.axes[static_cast<size_t>(axis)].size > 1; }

  template <class... T>
  void fault(const Op& op, Rule rule, fmt::format_string<T...> format, T&&... values) {
    report_.add(rule, -1, op_name(segment_, op), fmt::format(format, std::forward<T>(values)...));
  }

  void check(const Op& op);
  void check_written(const Op& op, const Equation& equation, const Written& w);
  void check_scale(const Op& op, const Equation& equation, const Written& w);
  void check_micro(const Op& op, const Equation& equation, const Written& w);
  void check_optimizer(const Op& op, const OptimizerRow& row);
  void check_factor(const Op& op, SlotId factor, SlotId parameter = {});
  void check_agreed(const Op& op);
  void check_collective(const Op& op, const Collective& c);
  void check_collective_shapes(const Op& op, const Collective& c);
  void check_counts(const Op& op, const Collective& c);
  void check_packed(const Op& op);
  void check_crossing(const Op& op, const Shape& home);
  void check_weighed(const Op& op);
  void check_cut(const Op& op, const Collective& c);
  void check_regroup(const Op& op, const Regroup& w);
  void check_load(const Op& op);
  void check_fill(const Op& op, const Fill& fill);
  int cut_within(SlotId slot, int axis, const Comm& comm) const;
  Placement grouped_result(const Op& op, const Collective& c, int axis);
  Placement collective_result(const Op& op, const Collective& c, int axis);
  bool counts_its_own(const Op& op, Placement declared, int axis) const;
  bool takes_own_part(const Op& op, int axis) const;
  void check_own_part(const Op& op);
  void check_capacity(const Op& op);
  bool may_be_whole(const Op& op, Placement derived, Placement declared, int axis) const;
  Derived derive(const Equation& equation, const Written& w, int axis) const;
  Equation with_rows_cut(Equation equation, int axis) const;
  Derived derive_block(const Equation& equation, const Written& w, int axis) const;
  bool cuts_queries(const Equation& equation, int axis) const;
  void check_block(const Op& op, const Equation& equation, const AttentionBlock& block);
  void check_merge(const Op& op, const AttentionMerge& merge);
  Derived derive_strip(const Equation& equation, const Written& w, int axis) const;
  void check_strips(const Op& op);
  void check_positions(const Op& op);
  void check_packed_positions(const Op& op, SlotId x);
  Derived derive_sharded(const Equation& equation, const Written& w, int axis, char letter) const;
  Derived derive_partial(const Equation& equation, const Written& w, int axis, bool contracts) const;
  bool used(const Written& w, size_t read) const { return read >= 32 || (w.uses >> read) & 1; }
  std::string placed(SlotId slot, int axis) const {
    return fmt::format("%{} is {}", name(slot), placement_name(place(slot, axis)));
  }

  const Plan& plan_;
  const Segment& segment_;
  Report& report_;
};

void TypeChecker::check(const Op& op) {
  if (const auto* c = std::get_if<Collective>(&op.work)) return check_collective(op, *c);
  if (std::holds_alternative<Send>(op.work) || std::holds_alternative<Recv>(op.work)) return;  // rule 6 compares both sides
  if (std::holds_alternative<LoadBatch>(op.work)) return check_load(op);
  if (const auto* sum = std::get_if<SumScalars>(&op.work)) {
    if (sum->factor == Rational(0))
      return fault(op, Rule::kTypes, "%{} is 0 whatever is summed: the factor is 0", name(op.writes[0]));
    if (sum->factor.num < -kMaxTokens || sum->factor.num > kMaxTokens || sum->factor.den > kMaxTokens)
      return fault(op, Rule::kTypes, "the factor {}/{}: numerator and denominator are at most {}", sum->factor.num, sum->factor.den,
                   kMaxTokens);
  }
  if (const auto* f = std::get_if<Fill>(&op.work)) return check_fill(op, *f);
  if (const auto* w = std::get_if<Regroup>(&op.work)) return check_regroup(op, *w);
  if (const auto* w = std::get_if<Positions>(&op.work)) {
    const Type& table = type(w->phase == Phase::kF ? op.reads[1] : op.writes[0]);
    const int64_t tokens = logical_shape(type(op.reads[0]), plan_.mesh)[1], rows = logical_shape(table, plan_.mesh)[0];
    if (tokens > rows) fault(op, Rule::kTypes, "a table of {} positions for sequences of {} tokens", rows, tokens);
  }
  if (const auto* w = std::get_if<Route>(&op.work); w != nullptr && w->sequence != 0)
    if (const int64_t tokens = logical_shape(type(op.reads[w->phase == Phase::kF ? 0 : 1]), plan_.mesh)[1]; w->sequence != tokens)
      fault(op, Rule::kTypes, "sequence={}, and sequences have {} tokens", w->sequence, tokens);
  check_capacity(op);
  if (std::holds_alternative<Copy>(op.work)) check_own_part(op);
  if (const auto* w = std::get_if<CrossEntropy>(&op.work)) {
    const int64_t columns = logical_shape(type(op.reads[0]), plan_.mesh).last();
    if (w->words < 0 || w->words > columns)
      fault(op, Rule::kTypes, "words={}, and the vocabulary has {} columns", w->words, columns);
  }
  if (const OptimizerRow* row = update_of(op.work)) return check_optimizer(op, *row);
  Builder builder(segment_, op);
  builder.build();
  if (std::holds_alternative<Strips>(op.work) || builder.equation.strips > 1)
    builder.equation.strip_axis = strip_axis(segment_, op, plan_.mesh);
  if (std::holds_alternative<CrossEntropy>(op.work) && builder.equation.reads.back().dims == "k") {
    const SlotId scale = builder.equation.reads.back().slot;
    check_factor(op, scale);
    if (!type(scale).scale.denominator.empty()) fault(op, Rule::kTypes, "the loss scale %{} must be at scale 1", name(scale));
  }
  for (const Written& w : builder.equation.writes) check_written(op, builder.equation, w);
  check_agreed(op);
  check_positions(op);
  if (const auto* block = std::get_if<AttentionBlock>(&op.work)) check_block(op, builder.equation, *block);
  if (const auto* merge = std::get_if<AttentionMerge>(&op.work)) check_merge(op, *merge);
  check_strips(op);
  const auto* kernel = std::get_if<Kernel>(&op.work);
  if (kernel == nullptr || !is_believed(*kernel)) return;
  for (const auto* operands : {&op.reads, &op.writes})
    for (const SlotId slot : *operands)
      if (type(slot).scale.factor != Rational(1))  // a named denominator may be its very purpose: unscaling
        fault(op, Rule::kTypes, "%{} has scale {}, of which a kernel by name alone cannot know", name(slot),
              scale_name(type(slot).scale));
}

void TypeChecker::check_written(const Op& op, const Equation& equation, const Written& w) {
  for (int axis = 0; axis < axes(); ++axis) {
    if (!split(axis)) continue;
    const Derived derived = derive(equation, w, axis);
    if (!derived.refusal.empty()) {
      fault(op, Rule::kTypes, "along {}: {}", axis_name(axis), derived.refusal);
      continue;
    }
    const Placement declared = place(w.slot, axis);
    if (w.trusted || declared == derived.place || (derived.may_be_partial && declared.is_partial())) continue;
    if (may_be_whole(op, derived.place, declared, axis) || counts_its_own(op, declared, axis) || takes_own_part(op, axis)) continue;
    const bool unread =
        declared.is_shard() && !equation.tokens_in_rows && std::ranges::none_of(equation.reads, [&](const Operand& r) {
          return r.dims.find(w.dims[static_cast<size_t>(declared.dim)]) != std::string::npos;
        });
    if (unread && derived.place.kind == Place::kReplicate) continue;  // rows of a sharded embedding: the rank makes its own only
    const char* hint = derived.place.is_partial() && declared.kind == Place::kReplicate
                           ? "; it must be reduced before it is read as replicated"
                           : "";
    fault(op, Rule::kTypes, "along {}: %{} is declared {}, but its reads make it {}{}", axis_name(axis), name(w.slot),
          placement_name(declared), placement_name(derived.place), hint);
  }
  if (w.trusted) return;
  check_scale(op, equation, w);
  check_micro(op, equation, w);
}

/// An expert takes at most one row of each token of a sequence, whichever ranks have the tokens.
void TypeChecker::check_capacity(const Op& op) {
  const auto check = [&](SlotId choice, int64_t capacity) {
    if (const int64_t tokens = logical_shape(type(choice), plan_.mesh)[1]; capacity < 0 || capacity > tokens)
      fault(op, Rule::kTypes, "capacity={}: an expert takes up to {} rows of a sequence, one of each token", capacity, tokens);
  };
  if (const auto* route = std::get_if<Route>(&op.work))
    check(route->phase == Phase::kF ? op.writes[1] : op.reads[2], route->capacity);
  else if (const auto* dispatch = std::get_if<Dispatch>(&op.work))
    check(op.reads[1], dispatch->capacity);
  else if (const auto* combine = std::get_if<Combine>(&op.work))
    check(op.reads[combine->phase == Phase::kF ? 2 : 3], combine->capacity);
}

/// The summands of stages that sent theirs to one another: rule 4 proves that nothing is missing, and nothing there twice.
bool TypeChecker::may_be_whole(const Op& op, Placement derived, Placement declared, int axis) const {
  return std::holds_alternative<Add>(op.work) && type(op.writes[0]).micro == Micro::kSum && role_axis(plan_) == axis &&
         derived.is_partial() && declared.kind == Place::kReplicate;
}

/// A stage's summand of a squared norm: of gradients that several stages hold it counts some, and the others count theirs. Rule 4
/// proves that each element is counted once.
bool TypeChecker::counts_its_own(const Op& op, Placement declared, int axis) const {
  return std::holds_alternative<SquaredNorm>(op.work) && role_axis(plan_) == axis && declared.is_partial();
}

/// A copy of the rank's part of what every rank along the axis has.
bool TypeChecker::takes_own_part(const Op& op, int axis) const {
  return std::holds_alternative<Copy>(op.work) && type(op.reads[0]).micro == Micro::kSlice &&
         place(op.reads[0], axis).kind == Place::kReplicate && place(op.writes[0], axis).is_shard();
}

/// A copy has the extents of its source, less what it leaves to other ranks. The part is one piece of the dim: no later axis cuts the
/// dim within it.
void TypeChecker::check_own_part(const Op& op) {
  Shape expected = type(op.reads[0]).shape;
  for (int axis = 0; axis < axes(); ++axis) {
    if (!split(axis) || !takes_own_part(op, axis)) continue;
    const int dim = place(op.writes[0], axis).dim, size = plan_.mesh.axes[static_cast<size_t>(axis)].size;
    for (int inner = axis + 1; inner < axes(); ++inner)
      if (split(inner) && place(op.reads[0], inner) == Placement::shard(dim))
        fault(op, Rule::kTypes, "along {}: the rank's part of dim {} of %{} is in pieces, for {} cuts the dim", axis_name(axis),
              dim, name(op.reads[0]), axis_name(inner));
    if (dim < expected.rank && expected[dim] % size == 0) expected[dim] /= size;
  }
  if (expected != type(op.reads[0]).shape && type(op.reads[0]).dtype != type(op.writes[0]).dtype)
    fault(op, Rule::kTypes, "%{} is {}, and %{} {}: a part of a tensor is copied as it is", name(op.writes[0]),
          name_of(type(op.writes[0]).dtype), name(op.reads[0]), name_of(type(op.reads[0]).dtype));
  if (type(op.writes[0]).shape != expected)
    fault(op, Rule::kTypes, "%{} has other extents than a copy of %{}, or of the rank's part of it", name(op.writes[0]),
          name(op.reads[0]));
}

/// Whether the axis cuts the sequence of an attention.
bool TypeChecker::cuts_queries(const Equation& equation, int axis) const {
  return equation.queries != 0 && std::ranges::any_of(equation.reads, [&](const Operand& r) {
           const Placement p = place(r.slot, axis);
           return p.is_shard() && r.dims[static_cast<size_t>(p.dim)] == equation.queries;
         });
}

/// An attention whose queries are this rank's part of a sequence. Its keys are the rank's own part, a block that came round a ring
/// (local), or the whole, of which each rank's queries then give the gradient a summand. That every block is met, and comes home, is
/// proved by rules 3 and 4 (plan/verify_backward.cpp).
Derived TypeChecker::derive_block(const Equation& equation, const Written& w, int axis) const {
  Placement keys = Placement::replicate();
  bool first = true;
  for (size_t i = 0; i < equation.reads.size(); ++i) {
    const Operand& r = equation.reads[i];
    const Placement p = place(r.slot, axis);
    if (const auto at = r.dims.find(equation.queries); at != std::string::npos) {
      if (p != Placement::shard(static_cast<int>(at)))
        return {{}, false, fmt::format("{}, while other operands are this rank's part of the sequence", placed(r.slot, axis))};
      continue;
    }
    if (!used(w, i)) continue;
    const bool whole = p.kind == Place::kReplicate || (p.is_partial() && r.pass == Pass::kTerm);
    const bool block = p.kind == Place::kLocal || p == Placement::shard(1);
    if (!whole && !block)
      return {{},
              false,
              fmt::format("{}: keys are the rank's part of the sequence, a block of a ring, or whole", placed(r.slot, axis))};
    if (!first && r.pass == Pass::kTerm && p != (keys.kind == Place::kReplicate ? Placement::partial() : keys))
      return {{}, false, fmt::format("{}, and its keys are {}", placed(r.slot, axis), placement_name(keys))};
    if (first) keys = p;
    first = false;
  }
  if (const auto out = w.dims.find(equation.queries); out != std::string::npos)
    return {Placement::shard(static_cast<int>(out)), false, ""};
  return {keys.kind == Place::kReplicate ? Placement::partial() : keys, false, ""};
}

/// A block that the plan says is of the rank `turn` further along has come that way, and no other has.
void TypeChecker::check_block(const Op& op, const Equation& equation, const AttentionBlock& block) {
  int cut = -1;
  const SlotId kv = op.reads[block.phase == Phase::kF ? 1 : 4];
  for (int axis = 0; axis < axes(); ++axis) {
    if (!split(axis)) continue;
    if (!cuts_queries(equation, axis)) {
      const Placement p = place(kv, axis);
      if (p == Placement::shard(1))
        fault(op, Rule::kTypes, "along {}: {}, and the queries are not cut: they see a part of the keys", axis_name(axis),
              placed(kv, axis));
      continue;
    }
    if (cut >= 0 && place(kv, axis).kind != Place::kReplicate)
      fault(op, Rule::kTypes, "the sequence is cut along {} and {}: blocks go round one axis", axis_name(cut), axis_name(axis));
    cut = axis;
    const int size = plan_.mesh.axes[static_cast<size_t>(axis)].size;
    const bool travelled = place(kv, axis).kind == Place::kLocal;
    if (block.turn <= -size || block.turn >= size || travelled != (block.turn != 0))
      fault(op, Rule::kTypes, "along {}: turn={} with {}: a block of another rank is local, and of one of {} ranks",
            axis_name(axis), block.turn, placed(kv, axis), size);
    const int64_t tokens = logical_shape(type(op.reads[block.phase == Phase::kF ? 0 : 3]), plan_.mesh)[1];
    if (place(kv, axis).kind == Place::kReplicate && type(kv).shape[1] != tokens)
      fault(op, Rule::kTypes, "along {}: {} with {} tokens, and the sequence has {}", axis_name(axis), placed(kv, axis),
            type(kv).shape[1], tokens);
    if (place(kv, axis).kind != Place::kReplicate && type(kv).shape[1] * size != tokens)
      fault(op, Rule::kTypes, "along {}: {} with {} tokens of {} on each of {} ranks", axis_name(axis), placed(kv, axis),
            type(kv).shape[1], tokens, size);
  }
  if (cut < 0 && block.turn != 0) fault(op, Rule::kTypes, "turn={}, and no axis cuts the sequence", block.turn);
}

/// What asks for positions has as many tokens as the plan's order can place.
void TypeChecker::check_positions(const Op& op) {
  const auto* block = std::get_if<AttentionBlock>(&op.work);
  const auto* attention = std::get_if<Attention>(&op.work);
  const bool asks = block || attention || std::holds_alternative<Rope>(op.work) || std::holds_alternative<Positions>(op.work) ||
                    std::holds_alternative<LatentHeads>(op.work);
  if (!asks) return;
  const size_t rows = block != nullptr && block->phase == Phase::kI ? 3 : 0;
  check_packed_positions(op, op.reads[rows]);
  const int64_t tokens = logical_shape(type(op.reads[rows]), plan_.mesh)[1], granule = plan_.token_order.granule();
  if (tokens % granule != 0)
    fault(op, Rule::kTypes, "%{} is of sequences of {} tokens, and the order of tokens takes multiples of {}", name(op.reads[rows]),
          tokens, granule);
}

/// Positions in documents are of the sequences that the rank's rows `x` belong to, and of the whole of each.
void TypeChecker::check_packed_positions(const Op& op, SlotId x) {
  const auto at = positions_read(op);
  if (!at) return;
  const SlotId positions = op.reads[*at];
  const Type &of = type(positions), &rows = type(x);
  const int64_t tokens = logical_shape(rows, plan_.mesh)[1];
  if (of.dtype != DType::i32) fault(op, Rule::kTypes, "%{} is {}, and positions are i32", name(positions), name_of(of.dtype));
  if (of.micro != Micro::kSlice || of.scale != Scale{})
    fault(op, Rule::kTypes, "%{} must be micro:slice at scale 1", name(positions));
  if (of.shape[0] != rows.shape[0] || of.shape[1] != tokens)
    fault(op, Rule::kTypes, "%{} is of {} sequences of {} tokens, and %{} is of {} of {}", name(positions), of.shape[0],
          of.shape[1], name(x), rows.shape[0], tokens);
  for (int axis = 0; axis < axes(); ++axis) {
    if (!split(axis)) continue;
    const Placement wanted =
        place(x, axis) == Placement::shard(0) || place(x, axis).kind == Place::kLocal ? place(x, axis) : Placement::replicate();
    if (place(positions, axis) != wanted)
      fault(op, Rule::kTypes, "along {}: {}, and positions of the sequences of %{} are {}", axis_name(axis),
            placed(positions, axis), name(x), placement_name(wanted));
  }
}

/// One operand of each rank along the axis that cuts the sequence, or one of the whole.
void TypeChecker::check_merge(const Op& op, const AttentionMerge& merge) {
  const size_t n = op.reads.size() / (merge.phase == Phase::kF ? 2 : 1);
  int64_t ranks = 1;
  for (int axis = 0; axis < axes(); ++axis)
    if (split(axis) && place(op.reads[0], axis) == Placement::shard(1)) ranks *= plan_.mesh.axes[static_cast<size_t>(axis)].size;
  if (n > 16) fault(op, Rule::kTypes, "merges {} parts: the tree over a sequence has 16 leaves", n);
  if (n != 1 && (static_cast<int64_t>(n) != ranks || (merge.step != 1 && merge.step != -1)))
    fault(op, Rule::kTypes, "merges {} parts with step={}, and {} ranks cut the sequence: one of each, step=1 or step=-1", n,
          merge.step, ranks);
}

/// The axis along which ranks have strips. A product of a strip by a slice of the weight: where that slice makes columns of the result, the
/// strip, the rank's own or one that came round, fills its rows; where it is contracted, the result is a summand of another rank's strip.
/// Strips put together are those of all ranks. That each is there once, and is of the rank that the op says, is proved by rules 3 and 4.
Derived TypeChecker::derive_strip(const Equation& equation, const Written& w, int axis) const {
  const Operand& x = equation.reads[0];
  const auto wanted = [&](SlotId slot, Placement p, std::string_view why) {
    return place(slot, axis) == p ? "" : fmt::format("{}, and {} is {}", placed(slot, axis), why, placement_name(p));
  };
  if (equation.strips == 1) {  // Strips
    const bool sum = place(w.slot, axis).is_shard();
    for (const Operand& r : equation.reads) {
      const bool own = !sum && r.slot == x.slot;
      if (auto fault = wanted(r.slot, own ? Placement::shard(1) : Placement::local(), own ? "the rank's own strip" : "a strip");
          !fault.empty())
        return {{}, false, std::move(fault)};
    }
    return {sum ? Placement::shard(1) : Placement::replicate(), false, ""};
  }
  const Operand& weight = equation.reads[1];
  const char cut = weight.dims[static_cast<size_t>(place(weight.slot, axis).dim)];
  if (cut != w.dims.back()) {
    if (auto fault = wanted(x.slot, Placement::shard(2), "a slice of what is contracted"); !fault.empty())
      return {{}, false, std::move(fault)};
    return {Placement::local(), false, ""};
  }
  if (type(x.slot).shape[1] > type(w.slot).shape[1])
    return {{}, false, fmt::format("%{} has all tokens, and each rank makes columns of its own of them", name(x.slot))};
  if (auto fault = wanted(x.slot, equation.turn == 0 ? Placement::shard(1) : Placement::local(), "a strip of that turn");
      !fault.empty())
    return {{}, false, std::move(fault)};
  for (size_t i = 2; i < equation.reads.size(); ++i) {  // bias, and strips before
    const Operand& term = equation.reads[i];
    const auto columns = static_cast<int>(term.dims.size()) - 1;
    if (auto fault = wanted(term.slot, Placement::shard(columns), "a slice of columns"); !fault.empty())
      return {{}, false, std::move(fault)};
  }
  return {Placement::shard(2), false, ""};
}

void TypeChecker::check_strips(const Op& op) {
  const auto* linear = std::get_if<Linear>(&op.work);
  const bool put_together = std::holds_alternative<Strips>(op.work);
  if (!put_together && (linear == nullptr || linear->strips == 1)) return;
  if (strip_axis(segment_, op, plan_.mesh) < 0)
    return fault(op, Rule::kTypes, "along no axis do {} ranks have strips of %{}",
                 put_together ? op.reads.size() : static_cast<size_t>(linear->strips), name(op.reads[0]));
  if (linear != nullptr && (linear->turn <= -linear->strips || linear->turn >= linear->strips))
    fault(op, Rule::kTypes, "turn={} of {} strips", linear->turn, linear->strips);
}

/// The equation along an axis that cuts tokens, in which rows of them are cut as the tokens are.
Equation TypeChecker::with_rows_cut(Equation equation, int axis) const {
  const auto cuts_tokens = [&](const Operand& r) {
    const Placement p = place(r.slot, axis);
    return p.is_shard() && (r.dims[static_cast<size_t>(p.dim)] == 'b' || r.dims[static_cast<size_t>(p.dim)] == 's');
  };
  const auto by = std::ranges::find_if(equation.reads, cuts_tokens);
  equation.tokens_in_rows = false;
  if (by == equation.reads.end()) return equation;
  const char letter = by->dims[static_cast<size_t>(place(by->slot, axis).dim)];
  for (Operand& r : equation.reads) std::ranges::replace(r.dims, 'r', letter);
  for (Written& w : equation.writes) std::ranges::replace(w.dims, 'r', letter);
  return equation;
}

Derived TypeChecker::derive(const Equation& equation, const Written& w, int axis) const {
  if (equation.tokens_in_rows) {
    const Equation cut = with_rows_cut(equation, axis);
    return derive(cut, cut.writes[static_cast<size_t>(&w - equation.writes.data())], axis);
  }
  if (cuts_queries(equation, axis)) return derive_block(equation, w, axis);
  if (equation.strip_axis == axis) return derive_strip(equation, w, axis);
  char letter = 0;
  bool any_partial = false, any_local = false;
  std::string contracted;
  for (size_t i = 0; i < equation.reads.size(); ++i) {
    const Operand& r = equation.reads[i];
    if (!used(w, i)) continue;
    const Placement p = place(r.slot, axis);
    if (p.is_partial()) {
      if (r.pass == Pass::kNonlinear)
        return {{}, false, fmt::format("%{} is an unreduced sum, and the op is not linear in it: reduce it first", name(r.slot))};
      any_partial = true;
    }
    any_local |= p.kind == Place::kLocal;
    for (const char c : r.dims)
      if (w.dims.find(c) == std::string::npos) contracted += c;
    if (!p.is_shard() || w.trusted) continue;
    const char c = r.dims[static_cast<size_t>(p.dim)];
    if (equation.frozen.find(c) != std::string::npos)
      return {{}, false, fmt::format("%{} is shard({}), and the op needs that dim whole", name(r.slot), p.dim)};
    const bool sum_of_scalars = w.dims == "k" && r.pass != Pass::kFactor;
    if (letter != 0 && letter != c && !sum_of_scalars)
      return {{}, false, fmt::format("%{} is shard({}), which does not go with the other operands", name(r.slot), p.dim)};
    letter = c;
  }
  if (w.trusted) return {place(w.slot, axis), false, ""};
  if (letter != 0) return derive_sharded(equation, w, axis, letter);
  if (any_partial) return derive_partial(equation, w, axis, !contracted.empty());
  if (any_local) return {Placement::local(), !contracted.empty(), ""};
  return {Placement::replicate(), false, ""};
}

Derived TypeChecker::derive_sharded(const Equation& equation, const Written& w, int axis, char letter) const {
  const auto out = w.dims.find(letter);
  const bool contracted = out == std::string::npos || (w.dims == "k" && letter == 'k');
  const bool reduces_all = w.dims == "k" && (equation.loose == "abcd");  // sums of scalars and norms: every dim is contracted
  for (size_t i = 0; i < equation.reads.size(); ++i) {
    const Operand& r = equation.reads[i];
    if (!used(w, i)) continue;
    const Placement p = place(r.slot, axis);
    if (p.is_shard()) continue;
    if (p.kind == Place::kPartial && contracted && r.pass == Pass::kTerm) continue;  // an old value that is accumulated
    if (p.kind != Place::kReplicate) return {{}, false, fmt::format("{}, while another operand is sharded", placed(r.slot, axis))};
    if (reduces_all || r.dims.find(letter) != std::string::npos)
      return {{}, false, fmt::format("{}, while another operand is sharded on the same dim", placed(r.slot, axis))};
    if (contracted && r.pass == Pass::kTerm)
      return {{}, false, fmt::format("%{} is whole, so the sum over ranks would hold it once per rank", name(r.slot))};
  }
  return {contracted ? Placement::partial() : Placement::shard(static_cast<int>(out)), false, ""};
}

Derived TypeChecker::derive_partial(const Equation& equation, const Written& w, int axis, bool contracts) const {
  int factors = 0, partial_factors = 0;
  SlotId local;
  for (size_t i = 0; i < equation.reads.size(); ++i) {
    const Operand& r = equation.reads[i];
    if (!used(w, i) || r.pass != Pass::kFactor) continue;
    ++factors;
    partial_factors += place(r.slot, axis).is_partial();
    if (place(r.slot, axis).kind == Place::kLocal) local = r.slot;
  }
  // Each coordinate's own summand, added to a sum of such summands.
  const bool own_summand = local && partial_factors == 0 && contracts;
  if (local && !own_summand) return {{}, false, fmt::format("{}, while another operand is partial", placed(local, axis))};
  if (partial_factors > 1) return {{}, false, "a product of two unreduced sums is not the sum of the products: reduce one first"};
  for (size_t i = 0; i < equation.reads.size(); ++i) {
    const Operand& r = equation.reads[i];
    if (!used(w, i) || r.pass != Pass::kTerm) continue;
    if (place(r.slot, axis).is_partial() == (factors == 0 || partial_factors == 1 || own_summand)) continue;
    return {
        {},
        false,
        fmt::format("{}, while another term is an unreduced sum: whole terms would be added once per rank", placed(r.slot, axis))};
  }
  return {Placement::partial(), false, ""};
}

Scale product(const Scale& a, const Scale& b) {
  return {a.factor * b.factor, a.denominator.empty() ? b.denominator : a.denominator};
}

void TypeChecker::check_scale(const Op& op, const Equation& equation, const Written& w) {
  Scale derived;
  const auto* ce = std::get_if<CrossEntropy>(&op.work);
  if (ce != nullptr && w.dims == "bsV") {
    const Slot& targets_here = segment_.slots[equation.reads[1].slot.index()];  // of all tokens, or a view of those of some
    const Slot& all = targets_here.view ? segment_.slots[static_cast<size_t>(targets_here.view->base)] : targets_here;
    const int64_t of_micro_batch = logical_shape(all.type, plan_.mesh).elements();
    if (of_micro_batch > kMaxTokens / plan_.micro_batches)
      return fault(op, Rule::kTypes, "a step has more than {} targets", kMaxTokens);
    const int64_t targets = of_micro_batch * plan_.micro_batches;
    derived.factor = Rational(ce->tokens, targets);
    const bool scaled = equation.reads.back().dims == "k";
    if (scaled) derived.denominator = kLossScale;
    if (type(w.slot).scale != derived)
      fault(op, Rule::kTypes, "%{} is declared at scale {}, but a division by {} of the step's {} targets leaves scale {}",
            name(w.slot), scale_name(type(w.slot).scale), ce->tokens, targets, scale_name(derived));
    return;
  }
  bool have_term = false;
  for (const Pass pass : {Pass::kFactor, Pass::kTerm})
    for (size_t i = 0; i < equation.reads.size(); ++i) {
      const Operand& r = equation.reads[i];
      if (!used(w, i) || r.pass != pass) continue;
      const Scale& s = type(r.slot).scale;
      if (pass == Pass::kFactor) {
        if (!derived.denominator.empty() && !s.denominator.empty())
          return fault(op, Rule::kTypes, "two operands have a named denominator");
        derived = product(derived, s);
        have_term = true;
        continue;
      }
      if (!have_term) derived = s;
      have_term = true;
      if (s != derived)
        return fault(op, Rule::kTypes, "%{} has scale {}, the other terms {}", name(r.slot), scale_name(s), scale_name(derived));
    }
  for (size_t i = 0; i < equation.reads.size(); ++i) {
    const Operand& r = equation.reads[i];
    if (!used(w, i) || r.pass != Pass::kNonlinear || type(r.slot).scale == Scale{}) continue;
    if (std::holds_alternative<SquaredNorm>(op.work) && i == 0) {
      derived = product(type(r.slot).scale, type(r.slot).scale);
      continue;
    }
    if (std::holds_alternative<SquaredNorm>(op.work) && type(r.slot).scale == type(equation.reads[0].slot).scale) continue;
    return fault(op, Rule::kTypes, "%{} has scale {}, and the op is not linear in it", name(r.slot),
                 scale_name(type(r.slot).scale));
  }
  if (type(w.slot).scale != derived)
    fault(op, Rule::kTypes, "%{} is declared at scale {}, but its reads make it {}", name(w.slot), scale_name(type(w.slot).scale),
          scale_name(derived));
}

void TypeChecker::check_micro(const Op& op, const Equation& equation, const Written& w) {
  bool slice = false, sum = false;
  for (size_t i = 0; i < equation.reads.size(); ++i) {
    if (!used(w, i)) continue;
    const Micro m = type(equation.reads[i].slot).micro;
    slice |= m == Micro::kSlice;
    sum |= m == Micro::kSum;
  }
  Micro derived = slice ? Micro::kSlice : sum ? Micro::kSum : Micro::kNone;
  if (equation.sums_micro && slice) derived = Micro::kSum;
  if (std::holds_alternative<SquaredNorm>(op.work) && type(w.slot).micro != Micro::kSlice)
    return;  // of a complete sum: rule 4 asks for it
  if (slice && sum && !equation.sums_micro)
    return fault(op, Rule::kTypes, "it mixes one micro-batch with a sum over micro-batches");
  if (type(w.slot).micro != derived)
    fault(op, Rule::kTypes, "%{} is declared micro:{}, but its reads make it micro:{}", name(w.slot), name_of(type(w.slot).micro),
          name_of(derived));
}

/// Gradient, parameter and moments agree element by element: each rank updates what it holds with a gradient that is whole.
/// Where ranks have other parts of a parameter, or other values of it, they have other blocks of it: these are no part of one tensor.
void TypeChecker::check_optimizer(const Op& op, const OptimizerRow& row) {
  const SlotId grad = op.reads[0], param = op.reads[1];
  const size_t parameters = 1 + row.state.size();
  for (int axis = 0; axis < axes(); ++axis) {
    if (!split(axis)) continue;
    if (place(grad, axis).is_partial()) {
      fault(op, Rule::kGradients, "along {}: the gradient %{} was never reduced", axis_name(axis), name(grad));
      continue;
    }
    const bool copy_of_own = place(grad, axis).kind == Place::kReplicate && place(param, axis).kind == Place::kLocal;
    if (place(grad, axis) != place(param, axis) && !copy_of_own)
      fault(op, Rule::kGradients, "along {}: the gradient {} and the parameter {}", axis_name(axis), placed(grad, axis),
            placed(param, axis));
    for (size_t i = 0; i < parameters; ++i) {
      const bool by_block = i > 0 && row.state[i - 1].by_block;
      const Placement wanted = by_block ? block_placement(place(param, axis)) : place(param, axis);
      if (place(op.reads[1 + i], axis) != wanted)
        fault(op, Rule::kTypes, "along {}: {}, the parameter {}{}", axis_name(axis), placed(op.reads[1 + i], axis),
              placement_name(place(param, axis)),
              by_block ? fmt::format(": its blocks are {}", placement_name(wanted)) : std::string());
    }
    for (size_t i = 0; i < parameters; ++i)
      if (place(op.writes[i], axis) != place(op.reads[1 + i], axis))
        fault(op, Rule::kTypes, "along {}: {}, but it was {}", axis_name(axis), placed(op.writes[i], axis),
              placement_name(place(op.reads[1 + i], axis)));
  }
  Scale wanted;  // what the factor divides out
  if (op.reads.size() > 1 + parameters) {
    check_factor(op, op.reads[1 + parameters], param);
    wanted.denominator = type(op.reads[1 + parameters]).scale.denominator;
  }
  if (type(grad).scale != wanted)
    fault(op, Rule::kGradients, "the gradient %{} has scale {}: it must be {} {}", name(grad), scale_name(type(grad).scale),
          scale_name(wanted), wanted == Scale{} ? "before an update" : "as that of its factor");
  if (type(grad).micro == Micro::kSlice) fault(op, Rule::kGradients, "the gradient %{} is of one micro-batch", name(grad));
  for (size_t i = 0; i < parameters; ++i)
    if (type(op.writes[i]).micro != Micro::kNone || type(op.writes[i]).scale != Scale{} || type(op.reads[1 + i]).scale != Scale{})
      fault(op, Rule::kTypes, "%{} is state: it must be micro:none at scale 1", name(op.writes[i]));
}

/// One number, the same on every rank: ranks that scaled their gradients apart would part for good. Those that have parted, with
/// parameters of their own along an axis that is not the stages', may.
void TypeChecker::check_factor(const Op& op, SlotId factor, SlotId parameter) {
  const auto apart = [&](int axis) {
    return parameter && place(parameter, axis).kind == Place::kLocal && place(factor, axis).kind == Place::kLocal &&
           plan_.mesh.axes[static_cast<size_t>(axis)].name != "pp";
  };
  for (int axis = 0; axis < axes(); ++axis)
    if (split(axis) && place(factor, axis).kind != Place::kReplicate && !apart(axis))
      fault(op, Rule::kGradients, "along {}: the factor {}, and every rank must have the same", axis_name(axis),
            placed(factor, axis));
  const Type& t = type(factor);
  if (t.dtype != DType::f32 || t.shape.elements() != 1 || t.scale.factor != Rational(1) || t.micro == Micro::kSlice)
    fault(op, Rule::kTypes, "the factor %{} must be one f32 at scale 1", name(factor));
}

/// How counts of rows are placed: partial sums of rows have one count.
Placement counted_as(Placement of_rows) { return of_rows.is_partial() ? Placement::replicate() : of_rows; }

/// Scales of fp8: the largest size of a shard is that of the tensor only once the ranks have agreed on it, and what is rounded is
/// placed as it was.
void TypeChecker::check_agreed(const Op& op) {
  const size_t first = first_scales(op.work);
  const bool scaled = first != 0 && has_scales(type(op.reads[0]).dtype), grouped = std::holds_alternative<GroupedLinear>(op.work);
  const auto* kernel = std::get_if<Kernel>(&op.work);
  const KernelMeaning meaning = kernel != nullptr ? meaning_of(*kernel) : KernelMeaning::kNone;
  const bool largest = meaning == KernelMeaning::kLargest, scale = meaning == KernelMeaning::kScale;
  for (int axis = 0; axis < axes(); ++axis) {
    if (!split(axis)) continue;
    if (scaled)
      for (const size_t i : {size_t{0}, size_t{1}}) {
        const SlotId s = op.reads[first + i];
        if (place(s, axis).is_partial())
          fault(op, Rule::kTypes, "along {}: the scales %{} are those of one rank's part: reduce what they are for by max",
                axis_name(axis), name(s));
        else if (grouped && place(s, axis) != place(op.reads[i], axis))
          fault(op, Rule::kTypes, "along {}: {}, and {}: blocks are where their elements are", axis_name(axis),
                placed(op.reads[i], axis), placed(s, axis));
      }
    if (largest)
      for (const SlotId x : op.reads)
        if (place(x, axis).is_shard() && place(op.writes[0], axis).kind == Place::kReplicate)
          fault(op, Rule::kTypes, "along {}: {}, and the largest of one part is declared that of the whole", axis_name(axis),
                placed(x, axis));
    if ((scale || rounds(op.work)) && place(op.writes[0], axis) != place(op.reads[0], axis))
      fault(op, Rule::kTypes, "along {}: {}, but {}", axis_name(axis), placed(op.writes[0], axis), placed(op.reads[0], axis));
    if (kernel == nullptr || !kernel->counted) continue;
    if (place(op.writes[1], axis) != place(op.reads[0], axis))
      fault(op, Rule::kTypes, "along {}: {}, and {}: blocks are where their elements are", axis_name(axis),
            placed(op.reads[0], axis), placed(op.writes[1], axis));
    const bool slices = place(op.reads[0], axis) == Placement::shard(2);  // of every row: their number is one
    if (place(op.reads[1], axis) != (slices ? Placement::replicate() : counted_as(place(op.reads[0], axis))))
      fault(op, Rule::kTypes, "along {}: {}, and {}: rows are counted where they are", axis_name(axis), placed(op.reads[0], axis),
            placed(op.reads[1], axis));
  }
  if (!rounds(op.work)) return;
  const Type &x = type(op.reads[0]), &q = type(op.writes[0]);
  if (q.micro != x.micro || q.scale != x.scale || !(q.shape == x.shape))
    fault(op, Rule::kTypes, "%{} is %{} rounded, and must have its shape, scale and micro", name(op.writes[0]), name(op.reads[0]));
}

/// x[b,s,w] and y[n,s,b,v]: rows are their parts in order, and each part is cut within. So an axis that cuts x along w cuts y along n or
/// along v; where one axis does the first and one the second, the second cuts within the slices of the first.
void TypeChecker::check_regroup(const Op& op, const Regroup& w) {
  const SlotId x = w.join ? op.writes[0] : op.reads[0], y = w.join ? op.reads[0] : op.writes[0];
  int by_part = -1;
  for (int axis = 0; axis < axes(); ++axis) {
    if (!split(axis)) continue;
    const Placement whole = place(x, axis), parted = place(y, axis);
    bool good = whole.kind == parted.kind;
    if (good && whole.is_shard()) {
      const int dim = parted.dim;
      good = whole.dim == 0 ? dim == 2 : whole.dim == 1 ? dim == 1 : dim == 0 || dim == 3;
      if (dim == 0) by_part = axis;
    }
    if (!good)
      fault(op, Rule::kTypes, "along {}: {}, and {}: parts of rows keep sequences and tokens where they are", axis_name(axis),
            placed(x, axis), placed(y, axis));
  }
  for (int axis = 0; axis < by_part; ++axis)
    if (split(axis) && place(y, axis) == Placement::shard(3))
      fault(op, Rule::kTypes, "along {}: {} cuts each part of %{}, and {} the parts: the mesh's later axes cut within slices",
            axis_name(by_part), axis_name(axis), name(y), axis_name(by_part));
  if (const int64_t parts = logical_shape(type(y), plan_.mesh)[0]; parts != w.parts)
    fault(op, Rule::kTypes, "%{} has {} parts over all ranks, and the op makes {}", name(y), parts, w.parts);
  if (type(x).scale != type(y).scale || type(x).micro != type(y).micro || type(x).dtype != type(y).dtype)
    fault(op, Rule::kTypes, "%{} and %{} have one scale, one micro-batch part and one element type", name(x), name(y));
}

void TypeChecker::check_load(const Op& op) {
  const Type& t = type(op.writes[0]);
  for (int axis = 0; axis < axes(); ++axis)
    if (split(axis) && t.place[static_cast<size_t>(axis)].is_partial())
      fault(op, Rule::kTypes, "along {}: %{} cannot be partial", axis_name(axis), name(op.writes[0]));
  if (t.dtype != DType::i32) fault(op, Rule::kTypes, "%{} must be i32", name(op.writes[0]));
  const LoadBatch& load = std::get<LoadBatch>(op.work);
  if (load.positions && (load.targets || !load.packed))
    fault(op, Rule::kTypes, "%{} are positions in packed documents: the op is packed, and loads no targets", name(op.writes[0]));
  if (t.micro != Micro::kSlice || t.scale != Scale{})
    fault(op, Rule::kTypes, "%{} must be micro:slice at scale 1", name(op.writes[0]));
}

/// Zero is zero under every placement and scale; another value is what it says only where ranks are not summed.
void TypeChecker::check_fill(const Op& op, const Fill& fill) {
  if (fill.value == 0) return;
  const Type& t = type(op.writes[0]);
  for (int axis = 0; axis < axes(); ++axis)
    if (split(axis) && t.place[static_cast<size_t>(axis)].is_partial())
      fault(op, Rule::kTypes, "along {}: %{} is partial, so {} would be added once per rank", axis_name(axis), name(op.writes[0]),
            fill.value);
  if (t.scale != Scale{}) fault(op, Rule::kTypes, "%{} must have scale 1", name(op.writes[0]));
}

void TypeChecker::check_collective(const Op& op, const Collective& c) {
  const SlotId src = op.reads[0], dst = op.writes[0];
  const Comm& comm = plan_.comms[c.comm.index()];
  for (int axis = 0; axis < axes(); ++axis) {
    if (!split(axis)) continue;
    const size_t before = report_.count();
    const Placement result = comm.axes.contains(axis) ? collective_result(op, c, axis) : place(src, axis);
    if (report_.count() == before && place(dst, axis) != result)
      fault(op, Rule::kTypes, "along {}: %{} is declared {}, but {} of {} data makes it {}", axis_name(axis), name(dst),
            placement_name(place(dst, axis)), kind_of(op.work), placement_name(place(src, axis)), placement_name(result));
  }
  if (type(src).scale != type(dst).scale)
    fault(op, Rule::kTypes, "%{} is declared at scale {}, but a collective leaves scale {}", name(dst), scale_name(type(dst).scale),
          scale_name(type(src).scale));
  if (type(src).micro != type(dst).micro)
    fault(op, Rule::kTypes, "%{} is micro:{}, %{} micro:{}", name(src), name_of(type(src).micro), name(dst),
          name_of(type(dst).micro));
  if (type(src).dtype != type(dst).dtype) fault(op, Rule::kTypes, "%{} and %{} have different element types", name(src), name(dst));
  check_collective_shapes(op, c);
  check_counts(op, c);
}

/// Packed rows move by the counts of both sides: each is placed as the rows that it counts, and there is room for all rows of all
/// ranks, or for `room` of each: that no more go is shown where the router is known (rule 4). With less, there is room for those of one rank,
/// so that each message has its place; that a step with more does not stand is shown there too.
void TypeChecker::check_packed(const Op& op) {
  const SlotId rows[] = {op.reads[0], op.writes[0]}, counts[] = {op.reads[1], op.reads[2]};
  const Shape &from = type(rows[0]).shape, &to = type(rows[1]).shape;
  for (const SlotId slot : {rows[0], rows[1], counts[0], counts[1]})
    if (type(slot).shape.rank != 3)
      return fault(op, Rule::kTypes, "%{} has {} dims: rows and counts of experts have 3", name(slot), type(slot).shape.rank);
  for (size_t i = 0; i < 2; ++i) {
    const Type &r = type(rows[i]), &n = type(counts[i]);
    if (n.dtype != DType::i32) fault(op, Rule::kTypes, "%{} is {}, and counts of rows are i32", name(counts[i]), name_of(n.dtype));
    if (n.shape[0] != r.shape[0])
      fault(op, Rule::kTypes, "%{} counts {} groups of rows, and %{} has {}", name(counts[i]), n.shape[0], name(rows[i]),
            r.shape[0]);
    for (int axis = 0; axis < axes(); ++axis)
      if (split(axis) && place(counts[i], axis) != counted_as(place(rows[i], axis)))
        fault(op, Rule::kTypes, "along {}: {}, and {}: rows are counted where they are", axis_name(axis), placed(rows[i], axis),
              placed(counts[i], axis));
  }
  const int64_t groups = std::max(from[0], to[0]);
  if (from[2] != to[2])
    fault(op, Rule::kTypes, "%{} has rows of {} elements, and %{} of {}", name(rows[0]), from[2], name(rows[1]), to[2]);
  if (type(counts[0]).shape.elements() != type(counts[1]).shape.elements())
    fault(op, Rule::kTypes, "%{} and %{} count other numbers of parts", name(counts[0]), name(counts[1]));
  const Shape &home = from[0] == groups ? from : to, &away = from[0] == groups ? to : from;
  const int64_t room = std::get<Collective>(op.work).room;
  if (room < 0) return fault(op, Rule::kTypes, "room={}: 0 where all rows may go to one rank, else the most that do", room);
  const auto& c = std::get<Collective>(op.work);
  if (c.algorithm == Algorithm::kHierarchical && (c.per_node < 1 || groups % c.per_node != 0))
    return fault(op, Rule::kTypes, "per_node={}: rows go by node where each of the nodes has as many of the {} ranks", c.per_node,
                 groups);
  const int64_t most = room > 0 ? room : home[0] * home[1];
  check_crossing(op, home);
  // How many all ranks together send follows from the router (`check_room`).
  if (away[0] != 1 || away[1] < most)
    fault(op, Rule::kTypes, "{} rows of each of {} ranks may come, and there is room for {}", most, groups, away[0] * away[1]);
}

/// A token's rows cross to a node once where they go by node to experts. A token crosses to no more nodes than there are, and, unless rows are
/// dropped, in the place of no more rows than it has experts. That the choice laid out the rows is shown where the router is known (rule 4).
void TypeChecker::check_crossing(const Op& op, const Shape& home) {
  const auto& c = std::get<Collective>(op.work);
  if (!crosses_once(op)) {
    if (c.across != 0) fault(op, Rule::kTypes, "across={} of an op that reads no choice of experts", c.across);
    return;
  }
  const Type& choice = type(op.reads[3]);
  const auto levels = row_levels(segment_, op);
  if (!levels || !levels->goes)
    return fault(op, Rule::kTypes, "reads the choice %{}, and its rows do not go to experts by node", name(op.reads[3]));
  if (choice.dtype != DType::i32 || choice.shape.rank != 3)
    return fault(op, Rule::kTypes, "%{} is {} of {} dims: choices of experts are i32 of 3", name(op.reads[3]),
                 name_of(choice.dtype), choice.shape.rank);
  if (crosses_weighed(op)) check_weighed(op);
  const int64_t others = levels->nodes - 1, tokens = choice.shape[0] * choice.shape[1], k = choice.shape[2];
  const int64_t most = std::min(home[0] * home[1] / levels->nodes, tokens) * others;
  const int64_t least = c.room > 0 ? 0 : tokens / levels->nodes * others;
  if (c.across < least || c.across > most)
    fault(op, Rule::kTypes, "across={}: of {} tokens with {} experts each {} to {} cross to {} other nodes", c.across, tokens, k,
          least, most, others);
}

/// Tokens cross with weights in the place of rows that the last op to write them has made as products of both, by this choice. What is read
/// has not changed since.
void TypeChecker::check_weighed(const Op& op) {
  const SlotId rows = op.reads[0], choice = op.reads[3], weights = op.reads[4], tokens = op.reads[5];
  const auto root = [&](SlotId slot) { return window_of(segment_, slot).root; };
  const Op* maker = nullptr;
  SlotId changed;
  for (const Step& step : segment_.steps) {
    const Op* before = std::get_if<Op>(&step);
    if (before == nullptr) continue;
    if (before == &op) break;
    for (const SlotId write : before->writes) {
      if (root(write) == root(rows)) maker = before, changed = SlotId();
      for (const SlotId read : {choice, weights, tokens})
        if (root(write) == root(read)) changed = read;
    }
  }
  const auto* combine = maker != nullptr ? std::get_if<Combine>(&maker->work) : nullptr;
  if (combine == nullptr || combine->phase != Phase::kI || maker->writes[0] != rows || maker->reads[0] != tokens ||
      maker->reads[2] != weights || maker->reads[3] != choice)
    return fault(op, Rule::kValues,
                 "sends %{} with %{} in the place of %{}, and no combine of this segment has made it of them by %{}", name(tokens),
                 name(weights), name(rows), name(choice));
  if (changed)
    fault(op, Rule::kValues, "sends %{} with %{} in the place of %{}, and %{} has changed since that was made", name(tokens),
          name(weights), name(rows), name(changed));
  if (type(weights).dtype != DType::f32)
    fault(op, Rule::kTypes, "%{} is {}, and weights that cross are f32", name(weights), name_of(type(weights).dtype));
  if (type(tokens).dtype != type(rows).dtype)
    fault(op, Rule::kTypes, "%{} is {} and %{} {}: a product is rounded as the rows are", name(tokens), name_of(type(tokens).dtype),
          name(rows), name_of(type(rows).dtype));
}

/// Rows that a buffer counts are moved by their counts.
void TypeChecker::check_counts(const Op& op, const Collective& c) {
  if (moves_packed_rows(op)) return check_packed(op);
  if (c.room != 0) return fault(op, Rule::kTypes, "room={} of an op that moves no counted rows", c.room);
  const auto count = [&](SlotId slot) { return segment_.slots[slot.index()].count; };
  const SlotId sent = count(op.reads[0]), came = count(op.writes[0]);
  const SlotId used = op.reads.size() > 1 ? op.reads[1] : SlotId();
  if (c.kind != CollectiveKind::kAllToAll || (!sent && !came && !used)) return;
  const std::string axis = axes_text(plan_, plan_.comms[c.comm.index()].axes);
  if (!sent || !came)
    return fault(op, Rule::kTypes, "along {}: of %{} and %{} only one counts its rows", axis, name(op.reads[0]),
                 name(op.writes[0]));
  if (used != sent)
    fault(op, Rule::kTypes, "along {}: the rows of %{} are counted by %{}, and {}", axis, name(op.reads[0]), name(sent),
          used ? fmt::format("they are moved by %{}", name(used)) : "it reads no counts");
}

/// Of the axes that share a dim of `slot` with `axis`, one that cuts within its slices and does not take part in the collective:
/// the mesh's later axes cut the slices of the earlier ones. -1: `axis` is the innermost.
int TypeChecker::cut_within(SlotId slot, int axis, const Comm& comm) const {
  for (int inner = axis + 1; inner < axes(); ++inner)
    if (split(inner) && !comm.axes.contains(inner) && place(slot, inner) == place(slot, axis)) return inner;
  return -1;
}

/// Groups of stages hold tensors of their own. What each rank of a group gave is whole within the group: rule 4 proves of a sum
/// over micro-batches that nothing is missing. Of anything else the whole is the group's alone, and so local.
Placement TypeChecker::grouped_result(const Op& op, const Collective& c, int axis) {
  const Placement in = place(op.reads[0], axis);
  const bool sum = in.is_partial() && c.kind == CollectiveKind::kAllReduce;
  const bool copy = c.kind == CollectiveKind::kBroadcast && (in.kind == Place::kLocal || in.kind == Place::kReplicate);
  if (!sum && !copy)
    fault(op, Rule::kTypes, "along {}: %{} is {}, and {} over some stages makes no whole of it", axis_name(axis), name(op.reads[0]),
          placement_name(in), kind_of(op.work));
  return sum && type(op.reads[0]).micro == Micro::kSum ? Placement::replicate() : Placement::local();
}

Placement TypeChecker::collective_result(const Op& op, const Collective& c, int axis) {
  const Placement in = place(op.reads[0], axis), declared = place(op.writes[0], axis);
  const std::string& src = name(op.reads[0]);
  const Comm& comm = plan_.comms[c.comm.index()];
  if (group_size(plan_.mesh, comm) < plan_.mesh.size(comm.axes)) return grouped_result(op, c, axis);
  for (const SlotId slot : {op.reads[0], op.writes[0]})
    if (place(slot, axis).is_shard())
      if (const int inner = cut_within(slot, axis, comm); inner >= 0) {
        fault(op, Rule::kTypes,
              "along {}: {} cuts dim {} of %{} within the slices of {}, and only the innermost cut is gathered, made or moved",
              axis_name(axis), axis_name(inner), place(slot, axis).dim, name(slot), axis_name(axis));
        return declared;
      }
  switch (c.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
      if (in.is_partial() && c.kind == CollectiveKind::kAllReduce) return Placement::replicate();
      if (in.is_partial()) return declared.is_shard() ? declared : Placement::shard(0);
      if (in.kind == Place::kReplicate)
        fault(op, Rule::kTypes, "along {}: %{} is already whole, and the sum would be {} times too large", axis_name(axis), src,
              plan_.mesh.axes[static_cast<size_t>(axis)].size);
      else
        fault(op, Rule::kTypes, "along {}: %{} is {}, and summing unlike parts has no meaning", axis_name(axis), src,
              placement_name(in));
      break;
    case CollectiveKind::kAllGather:
      if (in.is_shard()) return Placement::replicate();
      fault(op, Rule::kTypes, "along {}: %{} is {}, and only shards can be gathered", axis_name(axis), src, placement_name(in));
      break;
    case CollectiveKind::kBroadcast:
      if (in.kind == Place::kLocal || in.kind == Place::kReplicate) return Placement::replicate();
      fault(op, Rule::kTypes, "along {}: %{} is {}, and a broadcast would drop the other ranks' parts", axis_name(axis), src,
            placement_name(in));
      break;
    case CollectiveKind::kAllToAll:
      if (in.is_shard() && declared.is_shard() && in.dim != declared.dim) return declared;
      fault(op, Rule::kTypes, "along {}: an all_to_all moves a shard to another dim, but %{} is {} and %{} {}", axis_name(axis),
            src, placement_name(in), name(op.writes[0]), placement_name(declared));
      break;
  }
  return declared;
}

void TypeChecker::check_collective_shapes(const Op& op, const Collective& c) {
  const Window src = window_of(segment_, op.reads[0]), dst = window_of(segment_, op.writes[0]);
  const Comm& comm = plan_.comms[c.comm.index()];
  const int64_t n = group_size(plan_.mesh, comm);
  const auto sizes = [&](int64_t in, int64_t out) {
    if (in != out)
      fault(op, Rule::kTypes, "{} over {} ranks: %{} has {} elements and %{} {}", kind_of(op.work), n, name(op.reads[0]),
            src.length, name(op.writes[0]), dst.length);
  };
  const int64_t strips = strips_of(plan_.mesh, comm, c.kind, type(op.reads[0]), type(op.writes[0]));
  const auto shard_of = [&](const Window& part, const Window& whole, SlotId part_slot, SlotId whole_slot) {
    const bool own_storage = part.root != whole.root;
    const bool shard_view = part.root == whole.root && part.begin == whole.begin && part.shard == (whole.shard | comm.axes);
    if (own_storage || n == 1) return;
    if (strips > 1)
      fault(op, Rule::kTypes, "%{} is cut in {} strips, so %{} must have storage of its own", name(whole_slot), strips,
            name(part_slot));
    else if (!shard_view)
      fault(op, Rule::kTypes, "%{} must be the rank's shard of %{} or have storage of its own", name(part_slot), name(whole_slot));
  };
  if (moves_packed_rows(op)) return;  // `check_packed`
  switch (c.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kAllToAll: sizes(src.length, dst.length); break;
    case CollectiveKind::kReduceScatter:
      sizes(src.length, dst.length * n);
      shard_of(dst, src, op.writes[0], op.reads[0]);
      break;
    case CollectiveKind::kAllGather:
      sizes(src.length * n, dst.length);
      shard_of(src, dst, op.reads[0], op.writes[0]);
      break;
  }
  if (c.kind == CollectiveKind::kBroadcast && (c.root < 0 || c.root >= n))
    fault(op, Rule::kTypes, "root {} of a group of {}", c.root, n);
  if (n == 1) return;
  if (c.kind == CollectiveKind::kAllReduce || c.kind == CollectiveKind::kBroadcast) {
    if (type(op.reads[0]).shape != type(op.writes[0]).shape)
      fault(op, Rule::kTypes, "%{} and %{} have other extents", name(op.reads[0]), name(op.writes[0]));
  } else {
    check_cut(op, c);
  }
}

/// Extents fit the dims that are cut and joined. An all_to_all moves flat parts, which are contiguous only along a dim before which
/// every extent is 1.
void TypeChecker::check_cut(const Op& op, const Collective& c) {
  const SlotId src = op.reads[0], dst = op.writes[0];
  const AxisSet over = plan_.comms[c.comm.index()].axes;
  const int64_t n = group_size(plan_.mesh, plan_.comms[c.comm.index()]);
  const auto dim_of = [&](SlotId slot) {  // along which the group's ranks hold slices; -1: none, or several
    int dim = -1;
    for (int axis = 0; axis < axes(); ++axis) {
      if (!split(axis) || !over.contains(axis) || !place(slot, axis).is_shard()) continue;
      if (dim >= 0 && dim != place(slot, axis).dim) return -1;
      dim = place(slot, axis).dim;
    }
    return dim;
  };
  const Shape &in = type(src).shape, &out = type(dst).shape;
  const bool joins = c.kind != CollectiveKind::kReduceScatter, cuts = c.kind != CollectiveKind::kAllGather;
  const int from = joins ? dim_of(src) : -1, to = cuts ? dim_of(dst) : -1;
  if ((joins && from < 0) || (cuts && to < 0)) {
    if (type(src).place == type(dst).place || (joins ? dim_of(src) : dim_of(dst)) >= 0) return;  // `collective_result` has said so
    return fault(op, Rule::kTypes, "%{} and %{}: one collective cuts along one dim", name(src), name(dst));
  }
  Shape expected = in;
  if (joins) expected[from] *= n;
  if (cuts && expected[to] % n == 0) expected[to] /= n;
  if (out != expected)
    return fault(op, Rule::kTypes, "%{} has other extents than {} over {} ranks makes of %{}", name(dst), kind_of(op.work), n,
                 name(src));
  if (!joins || !cuts) return;
  const auto contiguous = [&](SlotId slot, int dim) {
    for (int d = 0; d < dim; ++d)
      if (type(slot).shape[d] != 1)
        fault(op, Rule::kTypes,
              "%{} is cut along dim {}, but dim {} before it has {} elements: parts of an all_to_all are contiguous", name(slot),
              dim, d, type(slot).shape[d]);
  };
  contiguous(dst, from);
  contiguous(src, to);
}

}  // namespace

bool rounds(const Work& work) {
  const auto* kernel = std::get_if<Kernel>(&work);
  return kernel != nullptr && meaning_of(*kernel) == KernelMeaning::kRounding;
}

size_t first_scales(const Work& work) {
  if (std::holds_alternative<Linear>(work)) return 2;
  return std::holds_alternative<GroupedLinear>(work) ? 3 : 0;
}

std::string operand_fault(const Plan&, const Segment& segment, const Op& op) { return Builder(segment, op).build(); }

std::vector<Aliasing> aliasing_of(const Segment& segment, const Op& op) {
  Builder builder(segment, op);
  builder.build();
  const Equation& e = builder.equation;
  std::vector<Aliasing> found;
  for (const Written& w : e.writes)
    for (size_t i = 0; i < e.reads.size(); ++i) {
      const SlotId read = e.reads[i].slot;
      const Window in = window_of(segment, read), out = window_of(segment, w.slot);
      const auto bound = [&](const Window& x) { return segment.slots[static_cast<size_t>(x.root)].kind == SlotKind::kBound; };
      if (in.root == out.root || !bound(in) || !bound(out)) continue;  // `operand_fault` has judged those
      const bool may = e.may_alias || (i < 32 && (e.may_replace >> i) & 1);
      if (w.replaces == read)
        found.push_back({read, w.slot, Aliasing::Kind::kMust});
      else if (!may && !w.replaces)
        found.push_back({read, w.slot, Aliasing::Kind::kMustNot});
    }
  return found;
}

namespace {

/// Sequences are packed for every op that goes by positions, or for none: rotary positions that go on over the end of a document, or an
/// attention that looks past it, fit no loss of the documents.
void check_packed(const Plan& plan, Report& report) {
  const Op *packed = nullptr, *whole = nullptr;
  const Segment* of = nullptr;
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps) {
      const Op* op = std::get_if<Op>(&step);
      const auto is_packed = op == nullptr ? std::nullopt : packed_of(op->work);
      if (!is_packed) continue;
      if (*is_packed)
        packed = packed != nullptr ? packed : op;
      else if (whole == nullptr)
        whole = op, of = &segment;
    }
  if (packed != nullptr && whole != nullptr)
    report.add(
        Rule::kValues, -1, op_name(*of, *whole),
        fmt::format("knows no documents, and {} is of packed ones: all of a plan's batches, positions and attentions are, or none",
                    packed->label));
}

}  // namespace

void check_types(const Plan& plan, Report& report) {
  for (const Segment& segment : plan.segments) TypeChecker(plan, segment, report).run();
  check_packed(plan, report);
}

}  // namespace shardlab::verifying
