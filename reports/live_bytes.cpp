#include "reports/live_bytes.h"

#include <algorithm>
#include <cctype>
#include <map>

namespace shardlab::reports {
namespace {

/// "layers.qkv" of "layer3.qkv@m2": buffers alike in all layers and micro-batches share a name.
std::string family(const std::string& name) {
  std::string out;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '@') break;
    if (std::isdigit(static_cast<unsigned char>(name[i])) != 0 && i > 0 &&
        std::isdigit(static_cast<unsigned char>(name[i - 1])) != 0)
      continue;
    out += std::isdigit(static_cast<unsigned char>(name[i])) != 0 ? '*' : name[i];
  }
  return out;
}

/// The storage that an instruction allocates or frees.
struct Change {
  std::string name;
  BufferClass kind = BufferClass::kTemporary;
  Space space = Space::kDevice;
  int64_t bytes = 0;
};

class Folder {
 public:
  Folder(const Plan& plan, const Program& program) : plan_(plan), program_(program) {}

  void start() {
    for (const Buffer& b : role().buffers)
      if (b.persistent && !b.view) apply({b.name, b.kind, b.space, aligned(b.type.bytes())}, 1);
    record(0);
  }
  void change(const Instruction& i, double at) {
    apply(change_of(i), i.kind == Instruction::Kind::kAlloc ? 1 : -1);
    record(at);
  }
  LiveCurve take(const LiveOptions& options) {
    LiveCurve out;
    out.peak_bytes = peak_;
    for (const auto& [key, bytes] : at_peak_)
      if (bytes > 0) out.items.push_back({key.first, key.second, bytes});
    std::ranges::stable_sort(out.items, std::greater(), &LiveItem::bytes);
    if (out.items.size() > options.max_items) out.items.resize(options.max_items);
    out.points = thinned(options.max_points);
    return out;
  }

 private:
  const Role& role() const { return plan_.roles[static_cast<size_t>(program_.role)]; }
  Change change_of(const Instruction& i) const {
    if (static_cast<bool>(i.buffer)) {
      const Buffer& b = plan_.roles[static_cast<size_t>(i.role)].buffers[i.buffer.index()];
      return {b.name, b.kind, b.space, aligned(b.type.bytes())};
    }
    const LocalBuffer& local = program_.locals[static_cast<size_t>(i.local)];
    const std::string name =
        i.segment != nullptr && static_cast<bool>(local.slot) ? i.segment->slots[local.slot.index()].name : "local";
    return {name, local.cls, local.space, local.bytes};
  }
  void apply(const Change& c, int sign) {
    if (c.space != Space::kDevice) return;
    live_.bytes[static_cast<size_t>(c.kind)] += sign * c.bytes;
    total_ += sign * c.bytes;
    items_[{family(c.name), c.kind}] += sign * c.bytes;
    if (total_ <= peak_) return;
    peak_ = total_;
    at_peak_ = items_;
  }
  void record(double at) {
    if (!points_.empty() && points_.back().at_s >= at) at = points_.back().at_s;
    points_.push_back({at, live_});
  }
  /// At most `most` points: of each stretch of time the highest, which keeps the peak, and the last.
  std::vector<LiveBytes> thinned(size_t most) const {
    if (points_.size() <= most) return points_;
    const double end = points_.back().at_s;
    const auto stretch = [&](const LiveBytes& p) {
      return end > 0 ? static_cast<size_t>(p.at_s / end * static_cast<double>(most / 2 - 1)) : 0;
    };
    std::vector<LiveBytes> out;
    for (size_t i = 0; i < points_.size();) {
      size_t high = i, last = i;
      for (; i < points_.size() && stretch(points_[i]) == stretch(points_[last]); ++i) {
        if (points_[i].bytes.total() > points_[high].bytes.total()) high = i;
        last = i;
      }
      out.push_back(points_[high]);
      if (last != high) out.push_back(points_[last]);
    }
    return out;
  }

  using Items = std::map<std::pair<std::string, BufferClass>, int64_t>;
  const Plan& plan_;
  const Program& program_;
  MemoryByClass live_;
  int64_t total_ = 0, peak_ = 0;
  Items items_, at_peak_;
  std::vector<LiveBytes> points_;
};

}  // namespace

LiveCurve live_curve(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step, double origin,
                     const LiveOptions& options) {
  const int role = plan.mesh.role_of(rank);
  const Program& program = programs[static_cast<size_t>(role)];
  std::vector<double> ends(program.instructions.size(), -1);  // when an op of stream 0 was done
  for (const TraceEvent& e : trace.events)
    if (e.rank == rank && e.step == step && e.kind == TraceEvent::Kind::kOp && e.stream == 0)
      ends[static_cast<size_t>(e.instruction)] = e.end - origin;
  Folder folder(plan, program);
  folder.start();
  double now = 0;
  for (const Instruction& i : program.instructions) {
    now = std::max(now, ends[static_cast<size_t>(i.id)]);
    if (i.kind != Instruction::Kind::kRun) folder.change(i, now);
  }
  LiveCurve out = folder.take(options);
  out.rank = rank;
  out.stage = plan.roles[static_cast<size_t>(role)].stage;
  return out;
}

}  // namespace shardlab::reports
