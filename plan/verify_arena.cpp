// Rule 7 on an arena: what lives at the same time lies apart.
//
// Lifetimes are those of issue order. That is enough for every stream: alloc and free run on stream 0 in issue order, and rule 5
// proves that every use of a buffer comes after its alloc and before its free, whatever stream it is on.
#include <fmt/format.h>

#include <map>

#include "plan/verify.h"

namespace shardlab {
namespace {

/// The live storage, space by space, by its first byte.
class ArenaWalk {
 public:
  ArenaWalk(const Plan& plan, const Program& program, const ArenaLayout& layout)
      : plan_(plan), program_(program), role_(plan.roles[static_cast<size_t>(program.role)]), layout_(layout) {}

  std::vector<Finding> run() {
    if (layout_.buffers.size() != role_.buffers.size() || layout_.locals.size() != program_.locals.size()) {
      add("", fmt::format("the arena places {} buffers and {} locals, the role has {} and {}", layout_.buffers.size(),
                          layout_.locals.size(), role_.buffers.size(), program_.locals.size()));
      return std::move(findings_);
    }
    for (size_t b = 0; b < role_.buffers.size(); ++b)
      if (const Buffer& buffer = role_.buffers[b]; buffer.persistent && !buffer.view)
        begin(buffer.space, layout_.buffers[b], buffer.type.bytes(), "%" + buffer.name, "the start of the step");
    for (const Instruction& i : program_.instructions) {
      if (findings_.size() >= kLimit) break;
      if (i.kind != Instruction::Kind::kRun) change(i);
    }
    return std::move(findings_);
  }

 private:
  static constexpr size_t kLimit = 20;
  struct Extent {
    int64_t end = 0;
    std::string name;
  };

  void change(const Instruction& i) {
    const bool local = i.local >= 0;
    const auto at = local ? static_cast<size_t>(i.local) : i.buffer.index();
    const Space space = local ? program_.locals[at].space : role_.buffers[at].space;
    const int64_t offset = local ? layout_.locals[at] : layout_.buffers[at];
    const int64_t bytes = local ? program_.locals[at].bytes : role_.buffers[at].type.bytes();
    const std::string name = "%" + (local ? i.segment->slots[i.slot.index()].name : role_.buffers[at].name);
    if (i.kind == Instruction::Kind::kAlloc)
      begin(space, offset, bytes, name, describe(plan_, i));
    else
      end(space, offset, bytes, name, describe(plan_, i));
  }

  void begin(Space space, int64_t offset, int64_t bytes, const std::string& name, const std::string& where) {
    if (bytes == 0) return;
    const int64_t past = offset + grains(space, bytes);
    if (offset < 0 || offset % grain(space) != 0 || past > layout_.bytes[static_cast<size_t>(space)])
      add(where, fmt::format("{} is placed at [{}, {}) of a {} arena of {} bytes and a grain of {}", name, offset, past,
                             shardlab::name_of(space), layout_.bytes[static_cast<size_t>(space)], grain(space)));
    auto& live = live_[static_cast<size_t>(space)];
    const auto next = live.lower_bound(offset);
    for (auto other : {next == live.begin() ? live.end() : std::prev(next), next})
      if (other != live.end() && other->first < past && offset < other->second.end)
        return add(where, fmt::format("{} at [{}, {}) of the {} arena lies on {} at [{}, {}), which lives", name, offset, past,
                                      shardlab::name_of(space), other->second.name, other->first, other->second.end));
    live.emplace(offset, Extent{past, name});
  }

  void end(Space space, int64_t offset, int64_t bytes, const std::string& name, const std::string& where) {
    if (bytes == 0) return;
    if (live_[static_cast<size_t>(space)].erase(offset) == 0)
      add(where, fmt::format("{} ends at {} of the {} arena, where nothing lives", name, offset, shardlab::name_of(space)));
  }

  void add(std::string where, std::string message) {
    findings_.push_back({Rule::kMemory, program_.role, std::move(where), std::move(message)});
  }

  const Plan& plan_;
  const Program& program_;
  const Role& role_;
  const ArenaLayout& layout_;
  std::array<std::map<int64_t, Extent>, kSpaces> live_;
  std::vector<Finding> findings_;
};

}  // namespace

std::vector<Finding> find_overlaps(const Plan& plan, const Program& program, const ArenaLayout& layout) {
  return ArenaWalk(plan, program, layout).run();
}

}  // namespace shardlab
