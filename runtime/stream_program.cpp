#include "runtime/stream_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace shardlab::runtime {

namespace {

using Kind = StreamAction::Kind;
using Clock = std::array<int32_t, kMaxStreams>;  ///< by stream: how many of its instructions are known to be complete

class Builder {
 public:
  Builder(const Plan& plan, const Program& program, const StreamOptions& options)
      : plan_(plan), program_(program), options_(options), streams_(plan.streams.size()) {
    out_.role = program.role;
    out_.actions.resize(program.instructions.size());
    clocks_.resize(program.instructions.size());
    places_.resize(streams_);
    for (size_t s = 0; s < streams_; ++s) places_[s].resize(program.streams[s].size() + 1);
  }

  StreamProgram build() {
    for (const Instruction& i : program_.instructions) add(i);
    number_events();
    return std::move(out_);
  }

 private:
  /// How far a stream has come after some of its instructions.
  struct Place {
    int32_t work = 0;  ///< the count at its last work, 0 for none
    Clock pending{};   ///< what the frees behind that work wait for
  };

  Kind kind_of_action(const Instruction& i) const {
    if (i.kind == Instruction::Kind::kRun) {
      const Work& work = i.op->work;
      const bool meets =
          std::holds_alternative<Collective>(work) || std::holds_alternative<Send>(work) || std::holds_alternative<Recv>(work);
      return meets ? Kind::kMeet : Kind::kLaunch;
    }
    const bool fetches = i.kind == Instruction::Kind::kFree && i.buffer &&
                         metric_named(plan_.roles[static_cast<size_t>(i.role)].buffers[i.buffer.index()].name).has_value();
    return fetches ? Kind::kFetch : options_.poison ? Kind::kLaunch : Kind::kNothing;
  }

  /// Adds to `needs` the work that the device must have finished once `stream` has come to `count`: the stream's last work up to
  /// there, and the work that the frees behind it wait for.
  void need(Clock& needs, int32_t stream, int32_t count) const {
    const Place& place = places_[static_cast<size_t>(stream)][static_cast<size_t>(count)];
    needs[static_cast<size_t>(stream)] = std::max(needs[static_cast<size_t>(stream)], place.work);
    merge(needs, place.pending);
  }
  void merge(Clock& into, const Clock& from) const {
    for (size_t s = 0; s < streams_; ++s) into[s] = std::max(into[s], from[s]);
  }
  const Clock& clock_at(size_t stream, int32_t count) const {
    return clocks_[static_cast<size_t>(program_.streams[stream][static_cast<size_t>(count - 1)])];
  }

  void add(const Instruction& i) {
    const size_t own = static_cast<size_t>(i.stream);
    const Place& before = places_[own][static_cast<size_t>(i.sequence)];
    Place& here = places_[own][static_cast<size_t>(i.sequence) + 1];
    Clock& known = known_[own];
    Clock needs = before.pending;
    for (const Wait& w : program_.waits_of(i)) need(needs, w.stream, w.count);
    for (size_t s = 0; s < streams_; ++s)
      if (s == own || needs[s] <= known[s]) needs[s] = 0;
    StreamAction& action = out_.actions[static_cast<size_t>(i.id)];
    action.kind = kind_of_action(i);
    action.first_wait = static_cast<uint32_t>(out_.waits.size());
    if (action.kind == Kind::kNothing) {
      here = {before.work, needs};
      return;
    }
    for (size_t s = 0; s < streams_; ++s)
      if (needs[s] > 0 && !implied(needs, s)) out_.waits.push_back({-1, static_cast<int32_t>(s), needs[s]});
    action.waits = static_cast<uint32_t>(out_.waits.size()) - action.first_wait;
    for (const EventWait& w : out_.waits_of(action)) merge(known, clock_at(static_cast<size_t>(w.stream), w.count));
    here = {i.sequence + 1, {}};
    known[own] = here.work;
    clocks_[static_cast<size_t>(i.id)] = known;
  }

  /// Whether another wait of the same instruction brings what is needed of stream `s`.
  bool implied(const Clock& needs, size_t s) const {
    for (size_t other = 0; other < streams_; ++other)
      if (other != s && needs[other] > 0 && clock_at(other, needs[other])[s] >= needs[s]) return true;
    return false;
  }

  /// Events in issue order of the places that record them.
  void number_events() {
    for (const EventWait& w : out_.waits) action_at(w).record = 0;
    for (StreamAction& a : out_.actions)
      if (a.record == 0) a.record = out_.events++;
    for (EventWait& w : out_.waits) w.event = action_at(w).record;
  }
  StreamAction& action_at(const EventWait& w) {
    const int32_t id = program_.streams[static_cast<size_t>(w.stream)][static_cast<size_t>(w.count - 1)];
    return out_.actions[static_cast<size_t>(id)];
  }

  const Plan& plan_;
  const Program& program_;
  const StreamOptions options_;
  const size_t streams_;
  StreamProgram out_;
  std::vector<Clock> clocks_;               ///< by instruction: complete once it is
  std::vector<std::vector<Place>> places_;  ///< by stream and count of instructions
  std::array<Clock, kMaxStreams> known_{};  ///< by stream: complete once its last work is
};

std::string_view verb_of(Kind kind) {
  switch (kind) {
    case Kind::kNothing: return "host";
    case Kind::kLaunch: return "launch";
    case Kind::kMeet: return "meet";
    case Kind::kFetch: return "fetch";
  }
  return "";
}

}  // namespace

StreamProgram stream_program(const Plan& plan, const Program& program, const StreamOptions& options) {
  return Builder(plan, program, options).build();
}

std::string to_text(const Plan& plan, const Program& program, const StreamProgram& streams) {
  std::string out = fmt::format("role {}: {} events\n", streams.role, streams.events);
  for (size_t s = 0; s < program.streams.size(); ++s) {
    out += fmt::format("stream {}\n", plan.streams[s]);
    for (const int32_t id : program.streams[s]) {
      const StreamAction& action = streams.actions[static_cast<size_t>(id)];
      for (const EventWait& w : streams.waits_of(action)) {
        const int32_t from = program.streams[static_cast<size_t>(w.stream)][static_cast<size_t>(w.count - 1)];
        out += fmt::format("  wait   e{} ({} #{})\n", w.event, plan.streams[static_cast<size_t>(w.stream)], from);
      }
      if (action.kind != Kind::kNothing)
        out += fmt::format("  {:<6} #{} {}\n", verb_of(action.kind), id,
                           describe(plan, program.instructions[static_cast<size_t>(id)]));
      if (action.record >= 0) out += fmt::format("  record e{}\n", action.record);
    }
  }
  return out;
}

std::optional<int> metric_named(std::string_view name) {
  for (size_t m = 0; m < kMetricNames.size(); ++m)
    if (kMetricNames[m] == name) return static_cast<int>(m);
  return std::nullopt;
}

}  // namespace shardlab::runtime
