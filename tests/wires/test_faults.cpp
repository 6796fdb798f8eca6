// A rank's process is killed or stopped, or its host's link goes down, at a moment drawn from a seed: the rank is named with its op,
// the others with what they wait for, everything ends, nothing is left behind, and a restart trains to the bits of a run that was never
// stopped.
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <thread>

#include "kernels/kernels.h"
#include "plan/base/hash.h"
#include "runtime/backend.h"
#include "runtime/checkpoint.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/test.h"
#include "tests/wires/group.h"
#include "tests/wires/hosts.h"
#include "tests/wires/sha256.h"

namespace shardlab::testing::of_faults {
namespace {

namespace fs = std::filesystem;

constexpr int kProcesses = 4;
constexpr double kTimeout_s = 2, kLinkTimeout_s = 8;  // half of a time-out is the silence after which a host is out of reach
constexpr double kMost_s = 60;
constexpr int64_t kSaveEvery = 8, kLastSave = 240, kMore = 3;  // steps; a restart goes on for kMore of them

Case small_case() {
  Case c;
  c.canonical = true;
  c.layout.dp = 2;
  c.layout.pp = 2;
  c.layout.schedule = Schedule::k1F1B;
  c.train.grad_accumulation = 2;
  c.layout.overlap = false;
  return rows_of(subjects().front(), std::span(&c, 1)).at(0);
}

/// A session in training, of one process of a group or of one process alone.
struct Training {
  Training(const Case& c, const std::string& wire, Control* control, double timeout_s) : config(c), source(c.model.vocab) {
    auto plan = lower(c);
    if (!plan.ok()) throw WorldError(plan.error().message);
    placed = place(std::move(*plan));
    const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
    transport = wire_named(wire, kernels, placed, control, timeout_s);
    RunOptions options;
    options.timeout_s = timeout_s;
    options.control = control;
    auto made = Session::create(placed, options, *transport, cpu_backend(kernels, {c.canonical, 1}), &source);
    if (!made.ok()) throw WorldError(made.error().message);
    session = std::move(*made);
    session->initialise_parameters();
  }

  /// SHA-256 over all state, gathered.
  std::string hash() const {
    const auto states = session->states();
    if (!states.ok()) return states.error().message;
    Sha256 sum;
    for (const StateName& name : *states) {
      const auto value = session->state(name);
      if (!value.ok()) return value.error().message;
      sum.add(value->values.data(), value->values.size() * sizeof(float));
    }
    return sum.hex();
  }

  const Case config;
  const RandomText source;
  PlacedPlan placed;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Session> session;
};

/// Trains until something ends it, and saves on the way.
std::string train_until_struck(const Case& c, const std::string& wire, const std::string& folder, double timeout_s,
                               Control& control) {
  Training training(c, wire, &control, timeout_s);
  const auto prepared = prepare_checkpoints(*training.session, folder);
  if (!prepared.ok()) return prepared.error().message;
  for (int64_t step = 0;; ++step) {
    training.session->step(step);
    if ((step + 1) % kSaveEvery != 0 || step >= kLastSave) continue;
    const auto saved = save_checkpoint(*training.session, c, step + 1, folder);
    if (!saved.ok()) return saved.error().message;
  }
}

/// Goes on from the newest checkpoint: the steps that are done then, and the hash of all state.
std::string train_again(const Case& c, const std::string& wire, const std::string& folder, Control& control) {
  Training training(c, wire, &control, kMost_s);
  const auto saved = Checkpoint::open(folder);
  if (!saved.ok()) return saved.error().message;
  if (const auto restored = saved->restore(c, *training.session); !restored.ok()) return restored.error().message;
  const int64_t end = saved->steps() + kMore;
  for (int64_t step = saved->steps(); step < end; ++step) training.session->step(step);
  return fmt::format("{} {}", end, training.hash());
}

/// What a run that is never stopped has at each step at which a restart may end: its hashes, by steps done. On threads of one process.
std::map<std::string, std::string> undisturbed(const Case& c) {
  const std::string lines = in_processes(1, 1, [&](size_t) {
                              Training training(c, "threads", nullptr, kMost_s);
                              std::string text;
                              for (int64_t step = 0; step < kLastSave + kMore; ++step) {
                                training.session->step(step);
                                if (step + 1 > kSaveEvery && (step + 1) % kSaveEvery == kMore)
                                  text += fmt::format("{} {}\n", step + 1, training.hash());
                              }
                              return text;
                            }).front();
  std::istringstream in(lines);
  std::map<std::string, std::string> hashes;
  for (std::string steps, hash; in >> steps >> hash;) hashes[steps] = hash;
  return hashes;
}

/// A folder that goes with its owner.
struct Folder {
  explicit Folder(const std::string& name) : path((fs::temp_directory_path() / fmt::format("{}-{}", name, ::getpid())).string()) {}
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  Folder(const Folder&) = delete;
  const std::string path;
};

/// Waits until `done`, at most a minute.
template <class Done>
bool wait_until(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(kMost_s);
  while (!done())
    if (std::chrono::steady_clock::now() > end)
      return false;
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return true;
}

/// Waits until the group trains and has saved, and then for up to 80 ms drawn from the seed.
void wait_for_moment(const std::string& folder, uint64_t seed) {
  wait_until([&] { return fs::exists(fmt::format("{}/step-{:08}.manifest", folder, kSaveEvery)); });
  std::this_thread::sleep_for(std::chrono::microseconds(mix(seed + 1000) % 80000));
}

/// What does not hold of one fault, line by line; empty: all does.
class Verdict {
 public:
  void must(bool holds, const std::string& what) {
    if (!holds) text_ += what + "\n";
  }
  /// The others have ended by themselves and in time, with words that contain `words`; nothing is left.
  void others_end(const GroupEnd& end, int victim, const std::string& words, double most_s) {
    for (int p = 0; p < kProcesses; ++p) {
      if (p == victim) continue;
      const size_t i = static_cast<size_t>(p);
      must(WIFEXITED(end.statuses[i]), fmt::format("process {} was ended by another, status {:#x}", p, end.statuses[i]));
      must(end.texts[i].starts_with("failed: ") && end.texts[i].find(words) != std::string::npos,
           fmt::format("process {} says: {}", p, end.texts[i]));
    }
    must(end.seconds < most_s, fmt::format("ended after {:.1f} s", end.seconds));
    must(end.left_behind == 0, "a process is left behind");
  }
  /// A restart has the bits of the run that was never stopped.
  void same_bits(const GroupEnd& again, const std::map<std::string, std::string>& hashes) {
    for (const std::string& text : again.texts) {
      const size_t space = text.find(' ');
      const auto expected = hashes.find(text.substr(0, space));
      must(expected != hashes.end() && text.substr(space + 1) == expected->second, "the restart ends otherwise: " + text);
    }
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::string kill_or_stop(uint64_t seed, const Case& c, const std::map<std::string, std::string>& hashes) {
  const std::string wire = seed % 2 == 0 ? "processes" : "tcp";
  const bool stops = seed % 4 >= 2;
  const auto victim = static_cast<size_t>(mix(seed) % kProcesses);
  const Folder folder("shardlab-faults");
  const auto strike = [&](const std::vector<pid_t>& processes) {
    wait_for_moment(folder.path, seed);
    ::kill(processes[victim], stops ? SIGSTOP : SIGKILL);
    if (!stops) return;
    // Whoever starts a group kills what does not end by itself: `run` does, and here the test.
    wait_until([&] { return std::ranges::all_of(processes, [&](pid_t p) { return p == processes[victim] || has_ended(p); }); });
    ::kill(processes[victim], SIGKILL);
  };
  const GroupEnd end = run_group(
      kProcesses, [&](Control& control) { return train_until_struck(c, wire, folder.path, kTimeout_s, control); }, kTimeout_s,
      kMost_s, strike);
  Verdict verdict;
  const std::string named = fmt::format("rank {} stands still at stream ", victim);
  const std::string message = end.failure ? end.failure->message : "no failure";
  verdict.must(message.find(named) != std::string::npos, "the rank and its op are not named");
  verdict.must(message.find(stops ? "its thread is stopped" : "its process has ended") != std::string::npos,
               "its state is not named");
  for (size_t rank = 0; rank < kProcesses; ++rank)
    verdict.must(rank == victim || message.find(fmt::format("rank {} stands still", rank)) == std::string::npos,
                 fmt::format("rank {} is named", rank));
  verdict.others_end(end, static_cast<int>(victim), named, kTimeout_s + 3);
  verdict.must(WIFSIGNALED(end.statuses[victim]), "the victim ended by itself");
  const GroupEnd again = run_group(
      kProcesses, [&](Control& control) { return train_again(c, wire, folder.path, control); }, kMost_s, kMost_s);
  verdict.same_bits(again, hashes);
  if (verdict.text().empty()) return "";
  return fmt::format("seed {}, {}, process {} {}: {}\n{}", seed, wire, victim, stops ? "stopped" : "killed", message,
                     verdict.text());
}

/// The first host, whose process the group's server is beside, stays: a group that loses it is named by nobody.
std::string link_down(uint64_t seed, const Case& c, const std::map<std::string, std::string>& hashes) {
  const auto victim = static_cast<size_t>(1 + mix(seed) % (kProcesses - 1));
  const Hosts::End side = seed % 2 == 0 ? Hosts::End::kHost : Hosts::End::kRouter;
  const Folder folder("shardlab-links");
  const std::string name = fmt::format("shardlab-{}", ::getpid());
  Verdict verdict;
  std::string message = "no failure";
  {
    Hosts hosts(kProcesses, name);
    std::chrono::steady_clock::time_point cut;
    const auto strike = [&](const std::vector<pid_t>&) {
      wait_for_moment(folder.path, seed);
      hosts.cut(static_cast<int>(victim), side);
    };
    const GroupEnd end = run_group(
        kProcesses, [&](Control& control) { return train_until_struck(c, "tcp", folder.path, kLinkTimeout_s, control); },
        kLinkTimeout_s, kMost_s, strike, &hosts);
    if (end.failure) message = end.failure->message;
    verdict.must(message.starts_with(fmt::format("process {} of {} is out of reach: ", victim, kProcesses)),
                 "the process is not named");
    // Between steps there is no op that it could be at.
    const std::string waited = fmt::format(": rank {} is waited for ", victim);
    const size_t at = message.find(waited);
    const std::string where = at == std::string::npos ? "" : message.substr(at + waited.size());
    const bool op = where.starts_with("by rank ") && where.find(" at stream ") < where.find(" op #") &&
                    where.find(" op #") != std::string::npos;
    verdict.must(op || where == "between steps", "the rank and the op are not named");
    verdict.others_end(end, static_cast<int>(victim), fmt::format("process {} of {} is out of reach", victim, kProcesses),
                       kLinkTimeout_s);
    const std::string& alone = end.texts[victim];
    verdict.must(
        WIFEXITED(end.statuses[victim]) && alone.find("the process that started the group is out of reach") != std::string::npos,
        "the process behind the link says: " + alone);
    hosts.mend(static_cast<int>(victim), side);
    const GroupEnd again = run_group(
        kProcesses, [&](Control& control) { return train_again(c, "tcp", folder.path, control); }, kMost_s, kMost_s, nullptr,
        &hosts);
    verdict.same_bits(again, hashes);
  }
  verdict.must(Hosts::left_of(name) == 0, "a host is left behind");
  if (verdict.text().empty()) return "";
  return fmt::format("seed {}, host {} cut at {}: {}\n{}", seed, victim, side == Hosts::End::kHost ? "its end" : "the router's end",
                     message, verdict.text());
}

}  // namespace

TEST_CASE(
    "a process that is killed or stopped is named with its op, the group ends, and a restart has the bits of a run that was never "
    "stopped") {
  const Case c = small_case();
  const auto hashes = undisturbed(c);
  REQUIRE(hashes.size() == kLastSave / kSaveEvery);
  const auto texts = in_processes(dealt(160, 16), kAtOnce, [&](size_t seed) { return kill_or_stop(seed, c, hashes); });
  for (const std::string& text : texts) CHECK(text == "");
}

// A test of its own, `wires_links`, which says where it is skipped.
TEST_CASE(
    "a host whose link goes down is named with the op that waits for it, the group ends, and a restart has the bits of a run that "
    "was never stopped",
    "[.links]") {
  if (const std::string missing = Hosts::missing(); !missing.empty()) {
    std::printf("skipped: %s\n", missing.c_str());
    std::fflush(stdout);
    std::_Exit(77);
  }
  const Case c = small_case();
  const auto hashes = undisturbed(c);
  REQUIRE(hashes.size() == kLastSave / kSaveEvery);
  const auto texts = in_processes(dealt(40, 4), kAtOnce, [&](size_t seed) { return link_down(seed, c, hashes); });
  for (const std::string& text : texts) CHECK(text == "");
}

}  // namespace shardlab::testing::of_faults
