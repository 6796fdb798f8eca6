#include "runtime/cuda/nccl_calls.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/base/check.h"
#include "plan/collective_steps.h"
#include "runtime/cuda/nccl_api.h"
#include "runtime/packed_rows.h"

namespace shardlab::runtime::cuda {

namespace {

using Kind = NcclCall::Kind;

/// In what packed rows of a type are moved.
DType unit_of(DType rows) { return bits_of(rows) > 8 && nccl_type(rows) >= 0 ? rows : DType::u8; }

class Deriver {
 public:
  Deriver(const Plan& plan, const Program& program, int rank) : plan_(plan), program_(program), rank_(rank) {}

  Result<std::vector<NcclOp>> derive() {
    for (const Instruction& i : program_.instructions) {
      if (i.kind != Instruction::Kind::kRun) continue;
      const Work& work = i.op->work;
      if (const auto* c = std::get_if<Collective>(&work))
        SHARDLAB_TRY(collective(i, *c));
      else if (const auto* s = std::get_if<Send>(&work))
        SHARDLAB_TRY(message(i, Kind::kSend, s->comm, s->hop, s->cyclic, program_.reads(i)[0]));
      else if (const auto* r = std::get_if<Recv>(&work))
        SHARDLAB_TRY(message(i, Kind::kReceive, r->comm, r->hop, r->cyclic, program_.writes(i)[0]));
    }
    if (open_ >= 0) return alone(program_.instructions[static_cast<size_t>(ops_[static_cast<size_t>(open_)].instruction)]);
    return std::move(ops_);
  }

 private:
  Error refusal(const Instruction& i, std::string_view why, std::string_view hint) const {
    return {ExitCode::kUsage, fmt::format("`{}`: {}", describe(plan_, i), why), std::string(hint), ""};
  }
  Error alone(const Instruction& i) const {
    return refusal(i, "a message around a ring needs its counterpart next to it on its stream, as one NCCL group",
                   "put the send and the receive side by side on one stream");
  }
  /// The op of `i`, unless it is one that NCCL cannot carry out.
  Result<NcclOp*> begin(const Instruction& i) {
    if (i.predicate)
      return refusal(i, "a collective under a predicate, which the NCCL transport does not order", "use transport: one-gpu");
    ops_.push_back({i.id, i.stream, {}});
    return &ops_.back();
  }

  Result<void> collective(const Instruction& i, const Collective& c) {
    auto op = begin(i);
    if (!op.ok()) return op.error();
    const int size = group_size(plan_.mesh, plan_.comms[c.comm.index()]);
    const Operand& whole = c.kind == CollectiveKind::kAllGather ? program_.writes(i)[0] : program_.reads(i)[0];
    const DType dtype = whole.type->dtype;
    const bool packed = moves_packed_rows(*i.op);
    (*op)->counted = packed;
    const int64_t elements = packed ? std::min(whole.type->shape.elements(), program_.writes(i)[0].type->shape.elements())
                                    : whole.type->shape.elements();
    const bool reduces = c.kind == CollectiveKind::kAllReduce || c.kind == CollectiveKind::kReduceScatter;
    const bool parts = c.kind != CollectiveKind::kAllReduce && c.kind != CollectiveKind::kBroadcast;
    if (bits_of(dtype) < 8) return refusal(i, "parts may end within a byte", "view the buffer as u8");
    if (reduces && (nccl_type(dtype) < 0 || bits_of(dtype) < 16))
      return refusal(i, fmt::format("NCCL does not reduce {}", name_of(dtype)), "reduce in f32, bf16, f16, f64, i32 or i64");
    const int64_t strips =
        strips_of(plan_.mesh, plan_.comms[c.comm.index()], c.kind, *program_.reads(i)[0].type, *program_.writes(i)[0].type);
    if (parts && elements % (size * strips) != 0)
      return refusal(i, fmt::format("NCCL cuts {} elements in {} equal parts", elements / strips, size),
                     "pad the buffer to a multiple of the group's size (bucket_bytes), or use transport: one-gpu");
    const int64_t bytes = bytes_of(dtype, elements) / strips;
    auto& calls = (*op)->calls;
    switch (c.kind) {
      case CollectiveKind::kAllReduce: calls = {{Kind::kAllReduce, c.comm, elements, dtype, c.reduce, -1}}; break;
      case CollectiveKind::kReduceScatter:
        calls =
            in_strips({Kind::kReduceScatter, c.comm, elements / strips / size, dtype, c.reduce, -1}, strips, bytes, bytes / size);
        break;
      case CollectiveKind::kAllGather:
        calls = in_strips({Kind::kAllGather, c.comm, bytes / size}, strips, bytes / size, bytes);
        break;
      case CollectiveKind::kBroadcast: calls = {{Kind::kBroadcast, c.comm, bytes, DType::u8, ReduceOp::kSum, c.root}}; break;
      case CollectiveKind::kAllToAll:
        calls = {{Kind::kGroupStart, c.comm}};
        for (int peer = 0; peer < size; ++peer) {
          const DType unit = packed ? unit_of(dtype) : DType::u8;
          const int64_t part = bytes / size, at = part * peer, count = part * 8 / bits_of(unit);
          calls.push_back({Kind::kSend, c.comm, count, unit, ReduceOp::kSum, peer, at, at});
          calls.push_back({Kind::kReceive, c.comm, count, unit, ReduceOp::kSum, peer, at, at});
        }
        calls.push_back({Kind::kGroupEnd, c.comm});
        break;
    }
    return {};
  }

  /// The call, or one a strip, as a group. `source` and `target`: bytes of a strip of each.
  static std::vector<NcclCall> in_strips(NcclCall call, int64_t strips, int64_t source, int64_t target) {
    if (strips == 1) return {call};
    std::vector<NcclCall> calls{{Kind::kGroupStart, call.comm}};
    for (int64_t strip = 0; strip < strips; ++strip, call.source += source, call.target += target) calls.push_back(call);
    calls.push_back({Kind::kGroupEnd, call.comm});
    return calls;
  }

  Result<void> message(const Instruction& i, Kind kind, CommId comm, int hop, bool cyclic, const Operand& operand) {
    auto op = begin(i);
    if (!op.ok()) return op.error();
    const std::vector<int> members = group_of(plan_.mesh, plan_.comms[comm.index()], rank_);
    const int size = static_cast<int>(members.size());
    const int index = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
    const int peer = cyclic ? ((index + hop) % size + size) % size : index + hop;
    const NcclCall call{kind, comm, operand.bytes, DType::u8, ReduceOp::kSum, peer};
    if (open_ >= 0) {
      const NcclOp& first = ops_[static_cast<size_t>(open_)];
      const NcclCall& opened = first.calls.back();
      const bool pairs = cyclic && opened.comm == comm && opened.kind != kind && first.stream == i.stream &&
                         static_cast<size_t>(open_) + 2 == ops_.size();
      if (!pairs) return alone(program_.instructions[static_cast<size_t>(first.instruction)]);
      (*op)->calls = {call, {Kind::kGroupEnd, comm}};
      open_ = -1;
    } else if (cyclic) {
      (*op)->calls = {{Kind::kGroupStart, comm}, call};
      open_ = static_cast<int>(ops_.size()) - 1;
    } else {
      (*op)->calls = {call};
    }
    return {};
  }

  const Plan& plan_;
  const Program& program_;
  const int rank_;
  std::vector<NcclOp> ops_;
  int open_ = -1;  ///< op whose group waits for the other half of a ring's exchange
};

std::string_view verb_of(Kind kind) {
  switch (kind) {
    case Kind::kGroupStart: return "group {";
    case Kind::kGroupEnd: return "}";
    case Kind::kAllReduce: return "all_reduce";
    case Kind::kReduceScatter: return "reduce_scatter";
    case Kind::kAllGather: return "all_gather";
    case Kind::kBroadcast: return "broadcast";
    case Kind::kSend: return "send";
    case Kind::kReceive: return "receive";
  }
  return "";
}

}  // namespace

Result<std::vector<NcclOp>> nccl_calls(const Plan& plan, const Program& program, int rank) {
  return Deriver(plan, program, rank).derive();
}

std::vector<NcclCall> counted_calls(CommId comm, const CollectiveCall& call, int size, int index, int rank) {
  const std::vector<RowRun> out = rows_sent(call, size, rank), in = rows_received(call, size, rank);
  const auto own = static_cast<size_t>(index);
  SHARDLAB_CHECK(out[own].bytes == in[own].bytes, "rank {} sends itself {} bytes of rows and expects {}", rank, out[own].bytes,
                 in[own].bytes);
  const DType unit = unit_of(call.dtype);
  const auto message = [&](Kind kind, int peer, const RowRun& rows) {
    return NcclCall{kind, comm, rows.bytes * 8 / bits_of(unit), unit, ReduceOp::kSum, peer, rows.begin, rows.begin};
  };
  std::vector<NcclCall> calls{{Kind::kGroupStart, comm}};
  for (int peer = 0; peer < size; ++peer) {
    const RowRun &going = out[static_cast<size_t>(peer)], &coming = in[static_cast<size_t>(peer)];
    if (going.bytes > 0) calls.push_back(message(Kind::kSend, peer, going));
    if (coming.bytes > 0) calls.push_back(message(Kind::kReceive, peer, coming));
  }
  calls.push_back({Kind::kGroupEnd, comm});
  return calls;
}

std::string to_text(const Plan& plan, const NcclCall& call) {
  if (call.kind == Kind::kGroupStart || call.kind == Kind::kGroupEnd) return std::string(verb_of(call.kind));
  std::string text =
      fmt::format("{} {} {} x {}", verb_of(call.kind), plan.comms[call.comm.index()].name, name_of(call.dtype), call.count);
  switch (call.kind) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter: return text + (call.reduce == ReduceOp::kSum ? " sum" : " max");
    case Kind::kBroadcast:
    case Kind::kReceive: return text + fmt::format(" from {}", call.peer);
    case Kind::kSend: return text + fmt::format(" to {}", call.peer);
    default: return text;
  }
}

std::string to_text(const Plan& plan, const std::vector<NcclOp>& ops) {
  std::string out;
  for (const NcclOp& op : ops) {
    out += fmt::format("#{} @{}:", op.instruction, plan.streams[static_cast<size_t>(op.stream)]);
    for (size_t c = 0; c < op.calls.size(); ++c) out += fmt::format("{} {}", c == 0 ? "" : ";", to_text(plan, op.calls[c]));
    out += '\n';
  }
  return out;
}

}  // namespace shardlab::runtime::cuda
