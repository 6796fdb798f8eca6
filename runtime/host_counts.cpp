#include "runtime/host_counts.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace shardlab::runtime {

namespace {

constexpr int64_t kApart = 16;  ///< bytes from one set of counts to the next are a multiple of it

/// Counts by the op that made them.
struct Maker {
  int32_t instruction = -1;
  uint16_t write = 0;
  friend auto operator<=>(const Maker&, const Maker&) = default;
};

/// What the storage of a role holds: by range of bytes, the write that its value is of. Writes of other types than i32 end what was there.
class Values {
 public:
  void write(const Operand& to, const Maker& maker) {
    const auto all = storage_.find(owner_of(to));
    if (all != storage_.end()) std::erase_if(all->second, [&](const Held& held) { return overlap(held, to); });
    if (to.type->dtype == DType::i32) storage_[owner_of(to)].push_back({to.offset, to.bytes, to.shard_axes, maker});
  }
  const Maker* find(const Operand& from) const {
    const auto all = storage_.find(owner_of(from));
    if (all == storage_.end()) return nullptr;
    const auto held = std::ranges::find_if(all->second, [&](const Held& h) {
      return h.offset == from.offset && h.bytes == from.bytes && h.shard_axes == from.shard_axes;
    });
    return held == all->second.end() ? nullptr : &held->maker;
  }

 private:
  struct Held {
    int64_t offset = 0, bytes = 0;
    AxisSet shard_axes;
    Maker maker;
  };
  /// Buffers of the role and locals of calls, apart.
  static int64_t owner_of(const Operand& o) { return o.root ? int64_t{2} * o.root.value : int64_t{2} * o.local + 1; }
  /// A shard may lie anywhere in its owner.
  static bool overlap(const Held& held, const Operand& to) {
    return !held.shard_axes.empty() || !to.shard_axes.empty() ||
           (held.offset < to.offset + to.bytes && to.offset < held.offset + held.bytes);
  }
  std::unordered_map<int64_t, std::vector<Held>> storage_;
};

/// Which reads of an instruction are counts that the host needs.
std::vector<uint16_t> counts_of(const Instruction& i, const RowCounting& counting) {
  if (i.kind != Instruction::Kind::kRun) return {};
  if (moves_packed_rows(*i.op)) return {1, 2};
  if (counting.of(i) >= 0) return {static_cast<uint16_t>(RowCounting::read_of(i))};
  return {};
}

template <class Item>
std::span<const Item> of_instruction(const std::vector<Item>& items, int32_t instruction) {
  const auto found = std::ranges::equal_range(items, instruction, {}, &Item::instruction);
  return {found.begin(), found.end()};
}

}  // namespace

std::span<const CountCopy> HostCounts::made_by(int32_t instruction) const { return of_instruction(copies, instruction); }
std::span<const CountRead> HostCounts::read_by(int32_t instruction) const { return of_instruction(reads, instruction); }

Result<HostCounts> host_counts(const Plan& plan, const Program& program, const RowCounting& counting) {
  struct Wanted {
    CountRead read;
    Maker maker;
    int64_t bytes = 0;
    bool awaited = false;
  };
  if (std::ranges::all_of(program.instructions, [&](const Instruction& i) { return counts_of(i, counting).empty(); }))
    return HostCounts{};
  std::vector<Wanted> wanted;
  Values values;
  for (const Instruction& i : program.instructions) {
    if (i.kind != Instruction::Kind::kRun) continue;
    for (const uint16_t read : counts_of(i, counting)) {
      const Operand& counts = program.reads(i)[read];
      const Maker* maker = values.find(counts);
      if (maker == nullptr)
        return Error{ExitCode::kUsage,
                     fmt::format("`{}` goes by counts of rows that no single op of the step has made", describe(plan, i)),
                     "have one op of the step write all of the counts", ""};
      wanted.push_back({{i.id, read, -1}, *maker, counts.bytes, moves_packed_rows(*i.op)});
    }
    const auto reads = program.reads(i), writes = program.writes(i);
    const bool copies = std::holds_alternative<Copy>(i.op->work) && reads[0].bytes == writes[0].bytes &&
                        reads[0].type->dtype == writes[0].type->dtype;
    const Maker* source = copies ? values.find(reads[0]) : nullptr;
    const Maker copied = source != nullptr ? *source : Maker{};
    for (uint16_t w = 0; w < i.writes; ++w) values.write(writes[w], source != nullptr ? copied : Maker{i.id, w});
  }

  HostCounts out;
  std::map<Maker, CountCopy> made;
  for (const Wanted& w : wanted) {
    CountCopy& copy = made[w.maker];
    copy.instruction = w.maker.instruction, copy.write = w.maker.write, copy.bytes = w.bytes;
    if (w.awaited) copy.event = 0;
  }
  std::map<Maker, int32_t> index;
  for (auto& [maker, copy] : made) {
    copy.offset = out.bytes;
    out.bytes += (copy.bytes + kApart - 1) / kApart * kApart;
    if (copy.event == 0) copy.event = out.events++;
    index[maker] = static_cast<int32_t>(out.copies.size());
    out.copies.push_back(copy);
  }
  for (const Wanted& w : wanted) out.reads.push_back({w.read.instruction, w.read.read, index.at(w.maker)});
  return out;
}

}  // namespace shardlab::runtime
