// Builds the plans that measure: a list of ops under test, each with operands as warm or as cold as a step has them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"

namespace shardlab::simulator {

/// Labels of ops that only prepare an operand; every other op of a bench is measured.
inline constexpr std::string_view kPreparation = "prepare";

/// Elements of the pools of a rank: about ten times the elements of an op, as many as a step touches between writing an activation
/// and reading it again. So an operand that was not touched on purpose has left the inner caches, and the outer cache as far as it
/// would in a step. By default 12 MiB of inputs and 6 MiB of results, for ops of a small model.
struct PoolSizes {
  int64_t inputs = 3 << 20;
  int64_t results = 3 << 19;
  int64_t passing = 1 << 20;  ///< at least the largest of the passing results
};

/// One plan of single-op segments. Operands are windows on persistent pools, taken in turn. The operands of one op, with the
/// source of a warm one, must fit the pool of inputs together.
class Bench {
 public:
  /// `axis` is the one axis of the mesh ("rank" for independent ranks, "pp" for a sender and a receiver), `ranks` its size. `dtype`
  /// is the element type of the pools; windows of the pools must have it too.
  Bench(std::string name, std::string axis, int ranks, const PoolSizes& pools = {}, DType dtype = DType::f32);

  /// Tokens of a sequence in `rows`; 64 unless said.
  void set_sequence_tokens(int64_t tokens) { sequence_tokens_ = tokens; }
  int64_t sequence_tokens(int64_t rows) const { return std::min(rows, sequence_tokens_); }
  /// [sequences, tokens, width] of the pools' element type; `rows` tokens in all.
  Type rows(int64_t rows, int64_t width) const;

  /// `type` in the pools' element type.
  Type typed(Type type) const {
    type.dtype = dtype_;
    return type;
  }

  /// An operand that no op has touched for long: a weight, a saved activation. Random values.
  BufferId cold(const Type& type);
  /// An operand that was just written, by a copy in front of the op. Random values.
  BufferId warm(const Type& type);
  /// A place for a result that the step keeps: a saved activation, a gradient of a weight. Never read.
  BufferId result(const Type& type);
  /// A place for a result that the next ops use up: a gradient of an activation. The arena of a step gives such results the same
  /// memory in every layer, so it is still in the caches. Never read.
  BufferId passing(const Type& type);
  /// Persistent state that starts at zero: optimizer moments.
  BufferId state(const Type& type);
  /// An f32 operand or result beside those of the pools' type: statistics of rows, a gradient of a weight. In pools of f32 it is
  /// `cold` or `result`, else a buffer of its own.
  BufferId side_operand(const Type& type) { return dtype_ == type.dtype ? cold(type) : state(type); }
  BufferId side_result(const Type& type) { return dtype_ == type.dtype ? result(type) : state(type); }
  /// Random f32 values, whatever the pools' type: logits of a router, a scale.
  BufferId drawn(const Type& type);
  /// Token ids i32[sequences, tokens], read once at the start of the step.
  BufferId tokens(int64_t sequences, int64_t tokens);

  /// One operand written: a buffer, or in place of read number `in_place`; with `shard` only this rank's part of that read.
  struct Write {
    BufferId buffer;
    int in_place = -1;
    bool shard = false;
  };
  /// Adds `work` to the role's program, on stream `stream`. Pending warm operands are copied in front of it.
  void op(Work work, const std::vector<BufferId>& reads, const std::vector<Write>& writes, int stream = 0, int role = 0);
  /// Adds an op to the first role that is not under test itself, and leaves pending operands to the next that is.
  void untested(Work work, const std::vector<BufferId>& reads, const std::vector<Write>& writes, int stream = 0);

  CommId comm(const std::string& name);
  int add_stream(const std::string& name);
  const Type& type_of(BufferId buffer) const { return plan_.roles[0].buffers[buffer.index()].type; }

  /// The plan, with the pool filled at the start of every step.
  Plan take();

 private:
  BufferId add_buffer(Buffer buffer);
  BufferId add_pool(const std::string& name, int64_t elements);
  BufferId window(BufferId pool, int64_t& cursor, const Type& type);
  void add_call(const std::string& segment, Work work, const std::vector<BufferId>& reads, const std::vector<Write>& writes,
                const std::string& label, int stream, std::vector<Item>& into);

  struct Copied {
    BufferId from, to;
  };

  const DType dtype_;
  int64_t sequence_tokens_ = 64;
  Plan plan_;
  BufferId noise_, inputs_, results_, passing_;
  int64_t input_cursor_ = 0, result_cursor_ = 0, passing_cursor_ = 0;
  std::vector<Copied> pending_;
  std::vector<std::vector<Item>> programs_;
};

/// f32 or i32 of these extents.
Type tensor(std::initializer_list<int64_t> extents);
Type ids(int64_t sequences, int64_t tokens);

}  // namespace shardlab::simulator
