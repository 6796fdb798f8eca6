#include "cases/recorded_case.h"

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "cases/namespaces.h"
#include "plan/base/files.h"
#include "plan/text.h"
#include "plan/verify.h"
#include "profiler/trace_file.h"
#include "profiler/trace_reader.h"

namespace shardlab::cases {
namespace {

struct TraceOnDisk {
  std::string path;    ///< empty: there is none, or none that can be used
  std::string name;    ///< for messages: "measured.trace.jsonl.gz"
  std::string digest;  ///< of the plan that it says it is of
};

class Reading {
 public:
  Reading(const CaseFiles& files, const CaseOutcome& outcome, const std::string& kept) : files_(files) {
    const bool measured = outcome.measured && kept != "none";
    const bool predicted = outcome.predicted && outcome.predicted->step_s > 0 && outcome.config.layout.world_size() <= kTraceRanks;
    find(files.measured(), measured, measured_);
    find(files.predicted(), predicted && (kept == "all" || (kept == "measured" && measured)), predicted_);
  }

  RecordedCase look() {
    if (any()) read_plan_text();
    if (any()) compare_digests();
    return std::move(out_);
  }

  RecordedCase read() {
    if (any()) read_plan_text();
    if (any()) compare_digests();
    if (any()) read_plan();
    if (any()) join(measured_, out_.measured);
    if (any()) join(predicted_, out_.predicted);
    if (!out_.measured && !out_.predicted) out_.plan.reset(), out_.programs.clear();
    return std::move(out_);
  }

 private:
  template <class... Args>
  void say(fmt::format_string<Args...> format, Args&&... args) {
    out_.problems.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
  bool any() const { return !measured_.path.empty() || !predicted_.path.empty(); }
  void drop_all() { measured_.path.clear(), predicted_.path.clear(); }

  void find(const std::string& packed, bool expected, TraceOnDisk& trace) {
    const std::string plain = packed.substr(0, packed.size() - 3);  // as earlier versions wrote it, and as it unpacks
    for (const std::string& path : {packed, plain})
      if (trace.path.empty() && is_there(path)) trace.path = path;
    trace.name = std::filesystem::path(trace.path.empty() ? packed : trace.path).filename().string();
    if (trace.path.empty() && expected) say("{} is missing", trace.name);
  }

  void read_plan_text() {
    std::ifstream file(files_.plan(), std::ios::binary);
    if (file) text_.assign(std::istreambuf_iterator<char>(file), {});
    if (file && !text_.empty()) return;
    say("plan.txt is missing: the traces beside it cannot be joined with the plan that ran");
    drop_all();
  }

  void compare_digests() {
    const std::string ours = plan_digest(text_);
    for (TraceOnDisk* trace : {&measured_, &predicted_}) {
      if (trace->path.empty()) continue;
      const auto digest = read_trace_plan(trace->path);
      if (digest.ok()) {
        trace->digest = *digest;
        vouched_ = vouched_ || *digest == ours;
      } else {
        say("{} cannot be read: {}", trace->name, digest.error().message);
        trace->path.clear();
      }
    }
    if (measured_.digest == predicted_.digest && !measured_.digest.empty() && measured_.digest != ours) {
      say("plan.txt is not the plan that ran: it is plan {}, and both traces are of plan {}; it was changed after the run", ours,
          measured_.digest);
      return drop_all();
    }
    for (TraceOnDisk* trace : {&measured_, &predicted_}) {
      if (trace->digest.empty() || trace->digest == ours) continue;
      say("{} is of plan {}, and plan.txt is plan {}: one of them was changed after the run, or is of another", trace->name,
          trace->digest, ours);
      trace->path.clear();
    }
  }

  void read_plan() {
    auto plan = parse_plan(text_, "plan.txt");
    if (!plan.ok()) {
      say("plan.txt cannot be read: {}", to_string(plan.error()));
      return drop_all();
    }
    // What a trace is known to be of was verified before it ran, by the version that ran it.
    if (const auto sound = vouched_ ? Result<void>() : verify(*plan); !sound.ok()) {
      say("plan.txt is no plan that could have run: {}", sound.error().message);
      return drop_all();
    }
    out_.plan = std::make_unique<const Plan>(std::move(*plan));
    for (size_t role = 0; role < out_.plan->roles.size(); ++role)
      out_.programs.push_back(expand_program(*out_.plan, static_cast<int>(role)));
  }

  void join(const TraceOnDisk& trace, std::optional<Trace>& into) {
    if (trace.path.empty()) return;
    auto recorded = read_trace_lines(trace.path);
    if (!recorded.ok()) return say("{} is left out: {}", trace.name, to_string(recorded.error()));
    JoinedTrace joined = join_by_text(std::move(*recorded), *out_.plan, out_.programs);
    if (joined.left_out > 0)
      say("{}: {} events are of ops that plan.txt does not have, and are left out: {}{}", trace.name, joined.left_out,
          fmt::join(joined.unknown.begin(),
                    joined.unknown.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(3, joined.unknown.size())), "; "),
          joined.unknown.size() > 3 ? fmt::format("; and {} more", joined.unknown.size() - 3) : "");
    if (!joined.trace.events.empty()) into = std::move(joined.trace);
  }

  const CaseFiles& files_;
  RecordedCase out_;
  TraceOnDisk measured_, predicted_;
  std::string text_;
  bool vouched_ = false;  ///< a trace is of the plan that plan.txt has
};

}  // namespace

RecordedCase read_recorded(const CaseFiles& files, const CaseOutcome& outcome, const std::string& kept) {
  return Reading(files, outcome, kept).read();
}

std::optional<Plan> recorded_plan(const CaseFiles& files) {
  std::ifstream file(files.plan(), std::ios::binary);
  if (!file) return std::nullopt;
  const std::string text(std::istreambuf_iterator<char>(file), {});
  auto plan = parse_plan(text, "plan.txt");
  if (!plan.ok() || !verify(*plan).ok()) return std::nullopt;
  return std::move(*plan);
}

std::vector<std::string> recorded_problems(const CaseFiles& files, const CaseOutcome& outcome, const std::string& kept) {
  return Reading(files, outcome, kept).look().problems;
}

}  // namespace shardlab::cases
