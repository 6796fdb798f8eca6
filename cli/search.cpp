// search: the best layouts for a number of devices and a batch, and why all others lost.
#include <fmt/format.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <filesystem>

#include "cli/common.h"
#include "cli/environment.h"
#include "cli/namespaces.h"
#include "cli/search_space.h"
#include "cli/search_tables.h"
#include "cli/verbs.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "reports/format.h"
#include "simulator/search/replayed.h"

namespace shardlab::cli {
namespace {

std::atomic<bool> search_interrupted{false};

/// The first Ctrl-C ends the search with what it has found; a second one ends the program.
void end_search_on_interrupt() {
  struct sigaction action {};
  action.sa_handler = [](int) { search_interrupted.store(true); };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// The files of `--out`, the best so far in them at any time.
class Folder {
 public:
  Folder(const SearchFlags& flags, const SearchTask& task) : flags_(flags), task_(task) {
    if (flags.out.empty()) return;
    std::error_code failure;
    std::filesystem::create_directories(flags.out, failure);
    if (failure) throw WorldError(fmt::format("cannot make {}: {}", flags.out, failure.message()), "name another --out");
  }

  void save_best(std::span<const search::Candidate> best) {
    if (flags_.out.empty()) return;
    search::Found found;
    found.best.assign(best.begin(), best.end());
    write_file_atomically(flags_.out + "/results.csv", print_csv(results_table(task_, found)));
  }

  void save(const search::Found& found, double seconds) {
    if (flags_.out.empty()) return;
    write_file_atomically(flags_.out + "/results.csv", print_csv(results_table(task_, found)));
    write_file_atomically(flags_.out + "/pareto.csv", print_csv(layout_table(task_, found.front)));
    write_file_atomically(flags_.out + "/lost.csv", print_csv(loser_table(found)));
    write_file_atomically(flags_.out + "/search.json", to_json(task_, found, seconds).dump(2) + "\n");
    if (!found.best.empty()) write_file_atomically(best_sweep(), sweep_of(flags_, task_, found.best.front().point));
  }

  std::string best_sweep() const { return flags_.out + "/best.yaml"; }

 private:
  const SearchFlags& flags_;
  const SearchTask& task_;
};

/// Progress on stderr: a line that is rewritten on a terminal, elsewhere one every few seconds; a better layout at once.
class ProgressWatcher final : public search::Watcher {
 public:
  ProgressWatcher(bool terminal, Folder& folder) : terminal_(terminal), folder_(folder) {}

  bool going(const search::Counts& counts, std::span<const search::Candidate> best) override {
    const double now = watch_.seconds();
    if (now - told_ >= (terminal_ ? 0.2 : 2.0)) tell(counts, best, now);
    return !search_interrupted.load();
  }
  void end() {
    if (terminal_ && told_ > 0) fmt::print(stderr, "\r\033[K");
  }

 private:
  void tell(const search::Counts& counts, std::span<const search::Candidate> best, double now) {
    told_ = now;
    std::string text =
        fmt::format("{:.0f} % of the cuts, {} points estimated, {} dismissed",
                    100.0 * static_cast<double>(counts.cuts_done) / static_cast<double>(std::max<int64_t>(1, counts.cuts)),
                    count_text(static_cast<double>(counts.evaluated)), count_text(static_cast<double>(counts.bounded)));
    if (!best.empty()) text += fmt::format("; best so far {}: {}", seconds_text(best[0].seconds()), layout_words(best[0].point));
    if (terminal_)
      fmt::print(stderr, "\r\033[K{}", text), std::fflush(stderr);
    else
      fmt::print(stderr, "{}\n", text);
    if (!best.empty() && (saved_ < 0 || best[0].seconds() != saved_)) saved_ = best[0].seconds(), folder_.save_best(best);
  }

  bool terminal_;
  Folder& folder_;
  Stopwatch watch_;
  double told_ = 0, saved_ = -1;
};

/// At most `most` of them, the ends included, evenly between.
std::vector<search::Candidate> spread(const std::vector<search::Candidate>& front, size_t most) {
  if (front.size() <= most) return front;
  std::vector<search::Candidate> some;
  for (size_t i = 0; i < most; ++i) some.push_back(front[i * (front.size() - 1) / (most - 1)]);
  return some;
}

void print_front(const SearchTask& task, const std::vector<search::Candidate>& front) {
  constexpr size_t kMost = 12;
  if (front.size() < 2) return;
  fmt::print("\nno layout is better in all of time, memory and device time than");
  if (front.size() > kMost) fmt::print(" these {} of {} (all with --out or --format json)", kMost, front.size());
  fmt::print("\n");
  Table table = without_usual_columns(layout_table(task, spread(front, kMost)));
  table.columns.erase(table.columns.begin());  // they have no rank
  for (auto& row : table.rows) row.erase(row.begin());
  print(table, TableFormat::kTable);
}

void print_misfits(const SearchTask& task, const std::vector<search::Candidate>& misfits) {
  if (misfits.empty()) return;
  fmt::print(stderr, "\n{} {} estimated to fit and {} not, once each allocation is replayed: the first, {}, needs {} of {}\n",
             misfits.size(), misfits.size() == 1 ? "layout was" : "layouts were", misfits.size() == 1 ? "does" : "do",
             layout_words(misfits[0].point), bytes_text(misfits[0].bytes()), bytes_text(task.options.capacity_bytes));
}

void print_found(const SearchFlags& flags, const SearchTask& task, const search::Found& found, double seconds) {
  const search::Counts& n = found.counts;
  fmt::print("{}, {} parameters, on {} of {}, {} tokens a step of {}: least {}\n", task.model_name,
             count_text(static_cast<double>(task.parameters)), flags.devices, task.machine.id,
             count_text(static_cast<double>(task.space.sequences * task.space.seq_len)),
             count_text(static_cast<double>(task.space.seq_len)), name_of(task.options.objective));
  fmt::print("{} points: {} estimated, {} dismissed by bounds, {} refused, in {}\n\n", count_text(static_cast<double>(n.points)),
             count_text(static_cast<double>(n.evaluated)), count_text(static_cast<double>(n.bounded)),
             count_text(static_cast<double>(n.refused)), seconds_text(seconds));
  if (!found.best.empty()) print(without_usual_columns(layout_table(task, found.best)), TableFormat::kTable);
  print_front(task, found.front);
  fmt::print("\nwhy others lost\n");
  print(loser_table(found), TableFormat::kTable);
  for (const search::Loser& l : found.losers)
    if (found.best.empty() && l.loss == search::Loss::kTooLarge)
      fmt::print("\nnothing fits: the nearest needs {} of {} on each device; more --devices, or another axis\n",
                 bytes_text(l.bytes), bytes_text(task.options.capacity_bytes));
  if (task.options.capacity_bytes <= 0)
    fmt::print("\nthe memory of {} is not known: whether these fit is not said\n", task.machine.device.id);
  if (!found.best.empty() && found.best.front().estimate.transferred)
    fmt::print("\nbuilt on constants that nobody measured on this device: `shardlab machine show {}`\n", task.machine.id);
}

/// What a search found, with allocations replayed.
struct Ranked {
  search::Found found;
  std::vector<search::Candidate> misfits;  ///< would have been ranked, but do not fit as their allocator takes memory
};

/// Searches again for as many more as turned out not to fit, so that as many are ranked as were asked for where there are so many.
Ranked rank(const SearchTask& task, search::Watcher* watcher) {
  search::Options options = task.options;
  for (;;) {
    Ranked ranked{search::search(task.studies, task.space, options, watcher), {}};
    search::Found& found = ranked.found;
    const bool all = std::ssize(found.best) < options.top;  // there are no more
    ranked.misfits = search::replay_allocations(found.best, task.studies, options.capacity_bytes);
    if (all || found.stopped || std::ssize(found.best) >= task.options.top) {
      search::replay_allocations(found.front, task.studies, options.capacity_bytes);
      return ranked;
    }
    options.top = task.options.top + static_cast<int32_t>(ranked.misfits.size());
  }
}

Result<ExitCode> run_search(const SearchFlags& flags, const Invocation& invocation) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  const auto task = search_task(flags);
  if (!task.ok()) return task.error();
  Folder folder(flags, *task);
  ProgressWatcher watcher(stderr_is_terminal(), folder);
  end_search_on_interrupt();
  const Stopwatch watch;
  const Ranked ranked = rank(*task, &watcher);
  const search::Found& found = ranked.found;
  const double seconds = watch.seconds();
  watcher.end();
  folder.save(found, seconds);

  if (*format == TableFormat::kJson)
    fmt::print("{}\n", to_json(*task, found, seconds).dump(2));
  else if (*format == TableFormat::kTable)
    print_found(flags, *task, found, seconds);
  else
    print(layout_table(*task, found.best), *format);
  print_misfits(*task, ranked.misfits);
  if (!found.best.empty()) {
    fmt::print(stderr, "\nwhat takes its memory: shardlab memory {}\n", options_of(flags, found.best.front().point));
    if (!flags.out.empty())
      fmt::print(stderr, "the best as a sweep: shardlab run {}; all: {}/results.csv\n", folder.best_sweep(), flags.out);
  }
  if (found.stopped) {
    fmt::print(stderr, "interrupted: the best of {} points; the whole search: {}\n",
               count_text(static_cast<double>(found.counts.evaluated)), invocation.command());
    return ExitCode::kInterrupted;
  }
  return found.best.empty() ? ExitCode::kNo : ExitCode::kDone;
}

}  // namespace

void add_search(CLI::App& app, Action& action, const Invocation& invocation) {
  auto* verb = app.add_subcommand("search", "the best layouts for a number of devices and a batch, and why all others lost");
  auto flags = std::make_shared<SearchFlags>();
  add_search_flags(*verb, *flags);
  add_format(*verb, flags->format);
  verb->callback([&action, &invocation, flags] { action = [flags, &invocation] { return run_search(*flags, invocation); }; });
}

}  // namespace shardlab::cli
