// search: the best layouts for a number of devices and a batch, and why all others lost.
#include <fmt/format.h>

#include <chrono>
#include <filesystem>

#include "answers/model_shape.h"
#include "answers/search_space.h"
#include "answers/trained_keys.h"
#include "answers/words.h"
#include "cases/environment.h"
#include "cases/interrupt.h"
#include "cases/pipeline.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/search_page.h"
#include "cli/search_tables.h"
#include "cli/verbs.h"
#include "plan/base/check.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "plan/keys.h"
#include "reports/format.h"
#include "reports/html.h"
#include "reports/store.h"
#include "simulator/estimator/analytic/doubt.h"
#include "simulator/estimator/search/replayed.h"

namespace shardlab::cli {
namespace {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// The files of `--out`, the best so far in them at any time.
class Folder {
 public:
  Folder(const SearchFlags& flags, const SearchTask& task, std::string command)
      : flags_(flags), task_(task), command_(std::move(command)) {
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
    save_store(search_outcomes(task_, found));
    if (!found.best.empty()) write_file_atomically(best_sweep(), sweep_of(flags_, task_, found.best.front().point));
  }

  /// What `shardlab report` reads: the layouts as cases.
  void save_store(const std::vector<CaseOutcome>& outcomes) const {
    const std::string path = flags_.out + "/results.sqlite";
    Store::remove(path);
    auto store = Store::open(path);
    if (!store.ok()) throw WorldError(store.error().message, store.error().hint);
    store->begin_run(metadata());
    store->append(outcomes);
  }
  RunMetadata metadata() const {
    RunMetadata run = describe_environment(command_);
    run.sweep = fmt::format("search: {} on {}", task_.model_name, task_.machine.id);
    run.traces = "none";
    return run;
  }

  std::string best_sweep() const { return flags_.out + "/best.yaml"; }

 private:
  const SearchFlags& flags_;
  const SearchTask& task_;
  std::string command_;
};

/// Progress on stderr: a line that is rewritten on a terminal, elsewhere one every few seconds; a better layout at once.
class ProgressWatcher final : public search::Watcher {
 public:
  ProgressWatcher(bool terminal, Folder& folder) : terminal_(terminal), folder_(folder) {}

  bool going(const search::Counts& counts, std::span<const search::Candidate> best) override {
    const double now = watch_.seconds();
    if (now - told_ >= (terminal_ ? 0.2 : 2.0)) tell(counts, best, now);
    return !interrupt::asked().load();
  }
  void end() {
    if (terminal_ && told_ > 0) fmt::print(stderr, "\r\033[K");
  }

 private:
  void tell(const search::Counts& counts, std::span<const search::Candidate> best, double now) {
    told_ = now;
    // Where layouts that were found do not fit by their plans, the space is searched again for more of them.
    if (counts.cuts_done < std::exchange(cuts_done_, counts.cuts_done)) ++searches_;
    std::string text = searches_ > 1 ? fmt::format("search {}: ", searches_) : "";
    text += fmt::format("{:.0f} % done, {} layouts estimated, {} dismissed",
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
  int64_t cuts_done_ = 0;
  int searches_ = 1;
};

std::string hours_text(double hours) {
  return hours < 48 ? fmt::format("{:.2g} hours", hours) : fmt::format("{:.0f} days", hours / 24);
}

/// Steps of the whole run that --tokens asks about.
double steps_of_run(const SearchTask& task) {
  return task.tokens / static_cast<double>(task.space.sequences) / static_cast<double>(task.space.seq_len);
}

/// Where nothing is found: why, and what comes nearest.
std::string nearest_text(const SearchFlags& flags, const SearchTask& task, const search::Found& found) {
  std::vector<std::string> given;
  for (const auto& [key, values] : flags.axes)
    if (!values.empty()) given.push_back(fmt::format("{} {}", key, values));
  const bool limited = !given.empty();
  if (found.counts.points == 0)
    return fmt::format(
        "No layout: with {} the degrees of parallelism have no product of {}. Give degrees whose product divides the number of "
        "devices.",
        fmt::join(given, ", "), fmt::join(task.space.devices, " or "));
  if (found.counts.refused == found.counts.points)
    return fmt::format("No layout of {} devices is possible; the table below says why. Take another number of --devices{}.",
                       fmt::join(task.space.devices, " or "), limited ? ", or let another axis vary" : "");
  if (!found.nearest) return "Nothing was found: the search was stopped before its end.";
  const search::Candidate& nearest = *found.nearest;
  const std::string words = layout_words(nearest.point);
  if (found.nearest_loss == search::Loss::kLate)
    return fmt::format(
        "Nothing is in time. The fastest that fits, {}, takes {} a step and ends the run {} too late: take more --devices, or "
        "raise "
        "--max-days.",
        words, brief_seconds(nearest.seconds()), hours_text((nearest.seconds() - task.options.most_s) * steps_of_run(task) / 3600));
  return fmt::format("Nothing fits. The smallest, {}, needs {} of the {} of each device: take more --devices{}.", words,
                     brief_bytes(nearest.bytes()), brief_bytes(task.options.capacity_bytes),
                     limited ? ", or let another axis vary" : "");
}

/// At most `most` of them, the ends included, evenly between.
std::vector<search::Candidate> spread(const std::vector<search::Candidate>& front, size_t most) {
  if (front.size() <= most) return front;
  std::vector<search::Candidate> some;
  for (size_t i = 0; i < most; ++i) some.push_back(front[i * (front.size() - 1) / (most - 1)]);
  return some;
}

/// `text` in lines as wide as the terminal.
void say(const std::string& text, int indent = 0) { fmt::print("{}\n", wrapped(text, terminal_width(), indent)); }

/// The answer, before everything else.
void print_answer(const SearchFlags& flags, const SearchTask& task, const search::Found& found) {
  if (found.best.empty()) {
    say(nearest_text(flags, task, found));
    return;
  }
  const search::Candidate& best = found.best.front();
  say("Best: " + answer_sentence(task, best), 6);
  const analytic::Between range = analytic::step_between(task.study_of(best.point).prepared, best.point, best.estimate);
  say(fmt::format("Nine of ten runs like it take {} to {} a step.", brief_seconds(range.low), brief_seconds(range.high)), 6);
  if (!found.tight.empty() && better(task.options.objective, found.tight.front(), found.best.front()))
    say("Better, if it fits: " + answer_sentence(task, found.tight.front()), 6);
  if (task.options.capacity_bytes <= 0)
    say(fmt::format("The memory of {} is not known: whether these layouts fit is not said.", task.machine.device.id));
}

/// What was asked, and what all numbers rest on.
void print_question(const SearchFlags& flags, const SearchTask& task, const search::Found& found, double seconds) {
  const search::Space& space = task.space;
  const search::Counts& n = found.counts;
  fmt::print("\n");
  say(fmt::format("{}, {} parameters, in {} on {} devices of {}; as {} runs it (profile {}).", task.model_name,
                  count_words(static_cast<double>(task.parameters)), name_of(space.precision), fmt::join(space.devices, " or "),
                  task.machine.id, task.studies.front().prepared.profile().describes, flags.profile));
  if (const std::string trained = trained_text(task.studies.front().prepared.shape()); !trained.empty())
    say(fmt::format("A step {}.", trained));
  say(fmt::format("A step is {} tokens: {} sequences of {} tokens.",
                  count_words(static_cast<double>(space.sequences * space.seq_len)), space.sequences, space.seq_len));
  if (task.tokens > 0)
    say(fmt::format("A run is {} tokens{}.", count_words(task.tokens),
                    task.price_note.empty() ? "; the price of a device is not known: --price USD" : ", at " + task.price_note));
  const auto words = [](int64_t n) {
    const bool thousands = n >= 10'000 && n < 1'000'000;
    return thousands ? fmt::format("{:.0f} thousand", static_cast<double>(n) / 1000) : count_words(static_cast<double>(n));
  };
  if (n.points == 0) return;
  say(fmt::format("Looked for the least {} among {} layouts in {}: {} were estimated, {} dismissed by bounds{}{}.",
                  name_of(task.options.objective), words(n.points), brief_seconds(seconds), words(n.evaluated), words(n.bounded),
                  n.refused > 0 ? fmt::format(", {} impossible", words(n.refused)) : "",
                  found.nearest ? "; what comes nearest was then looked for without that limit" : ""));
}

void print_layouts(const SearchTask& task, std::span<const search::Candidate> layouts, bool ranked) {
  const AnswerTable answer = answer_table(task, layouts, ranked);
  if (!answer.shared.empty()) say("in every row: " + answer.shared, 4);
  print(answer.table, TableFormat::kTable);
}

/// What the words of layouts stand for that were printed.
void print_legend(std::span<const search::Point> layouts) {
  constexpr std::pair<std::string_view, std::string_view> kMeanings[] = {
      {"dp", "dp data-parallel ranks"},
      {"tp", "tp tensor-parallel ranks"},
      {"pp", "pp pipeline stages"},
      {"vpp", "vpp virtual stages a rank"},
      {"cp", "cp context-parallel ranks"},
      {"ep", "ep expert-parallel ranks"},
      {"expert_tp", "etp tensor-parallel ranks that cut each expert"},
      {"zero", "zeroN stage of ZeRO"},
      {"schedule", "1f1b, interleaved, ...: pipeline schedule"},
      {"hybrid_shard", "shardN ranks that share one copy of the state"},
      {"sequence_parallel", "sp sequence parallelism"},
      {"cp_kind", "all-gather, ring, zigzag, ulysses: kind of context parallelism"},
      {"recompute", "recompute- activations computed again in backward, all (full) or of some modules"},
      {"offload", "offload: to host memory, of optimizer, activations, parameters"},
      {"bucket_bytes", "bucket- gradients reduced together"},
      {"micro_batch", "mbN sequences a micro-batch"},
      {"grad_accumulation", "xN micro-batches a step"}};
  std::string text;
  for (const auto& [key, meaning] : kMeanings) {
    const auto has = [&, key = key](const search::Point& point) {
      return std::ranges::any_of(layout_parts(point), [&](const LayoutWord& w) { return w.key == key; });
    };
    if (std::ranges::any_of(layouts, has)) text += (text.empty() ? "" : "; ") + std::string(meaning);
  }
  if (!text.empty()) say("\nlayout: " + text, 8);
}

/// Every layout that the answer names.
std::vector<search::Point> printed(const search::Found& found) {
  std::vector<search::Point> points;
  for (const search::Candidate& c : found.best) points.push_back(c.point);
  if (found.front.size() > 1)
    for (const search::Candidate& c : found.front) points.push_back(c.point);
  for (const search::Loser& l : found.losers) points.push_back(l.nearest);
  return points;
}

void print_front(const SearchTask& task, const std::vector<search::Candidate>& front) {
  constexpr size_t kMost = 6;
  if (front.size() < 2) return;
  fmt::print("\n");
  say(fmt::format(
      "The Pareto front of step time{} and memory: nothing is better in one without being worse in another.{}",
      task.studies.size() > 1 ? ", device time" : "",
      front.size() > kMost ? fmt::format(" {} of its {} layouts; all with --out or --format json.", kMost, front.size()) : ""));
  print_layouts(task, spread(front, kMost), false);
}

void print_misfits(const SearchTask& task, const std::vector<search::Candidate>& misfits) {
  if (misfits.empty()) return;
  const bool one = misfits.size() == 1;
  const std::string text =
      fmt::format("Left out: {} {} by {} estimate, but not once every allocation is replayed. {} {} and a device has {}.",
                  one ? "1 layout" : fmt::format("{} layouts", misfits.size()), one ? "fits" : "fit", one ? "its" : "their",
                  one ? "It needs" : fmt::format("The first, {}, needs", layout_words(misfits[0].point)),
                  brief_bytes(misfits[0].bytes()), brief_bytes(task.options.capacity_bytes));
  fmt::print(stderr, "\n{}\n", wrapped(text, terminal_width()));
}

void print_found(const SearchFlags& flags, const SearchTask& task, const search::Found& found, double seconds) {
  print_answer(flags, task, found);
  print_question(flags, task, found, seconds);
  if (!found.best.empty()) {
    fmt::print("\n");
    print_layouts(task, found.best, true);
    if (std::ranges::any_of(found.best, [&](const search::Candidate& c) {
          return c.point != found.best.front().point && equal_to_first(task, found.best.front(), c);
        }))
      say("\n=: as fast as the first as far as anyone can tell: predictions of what the two differ in are off by more than the "
          "difference",
          3);
  }
  print_front(task, found.front);
  if (!found.losers.empty()) {
    fmt::print("\nwhy others lost\n");
    print(loser_summary(found), TableFormat::kTable);
    if (std::ranges::any_of(found.losers, &search::Loser::is_bound)) say(">=: a lower bound; the layout was not estimated", 4);
  }
  print_legend(printed(found));
  if (!found.best.empty() && found.best.front().estimate.transferred)
    say(
        fmt::format("\nSome rates behind these figures were measured on other devices; `shardlab machine show {}` marks them "
                    "`transferred`.",
                    shell_word(flags.machine)));
}

/// The result as one self-contained page.
Result<void> write_page(const SearchFlags& flags, const SearchTask& task, const search::Found& found, double seconds,
                        RunMetadata metadata) {
  Report report;
  report.title = fmt::format("{} on {}", task.model_name, task.machine.id);
  report.metadata = std::move(metadata);
  report.cases = search_outcomes(task, found);
  report.price_usd = task.price.device_hour_usd, report.price_note = task.price_note;
  SHARDLAB_TRY(add_search(to_json(task, found, seconds), report));
  write_output(flags.html, render_html(report));
  fmt::print(stderr, "wrote {}\n", flags.html);
  return {};
}

void add_search_flags(CLI::App& verb, SearchFlags& flags) {
  flags.around = surroundings();
  add_subject_flags(verb, flags.model, flags.machine, flags.machine_file);
  verb.add_option("--devices", flags.devices, "devices to use, all of them; several numbers separated by commas are all searched")
      ->required();
  verb.add_option("--global-batch-tokens,--global_batch_tokens", flags.global_batch_tokens, "tokens of a step over all ranks")
      ->required();
  verb.add_option("--seq-len,--seq_len", flags.seq_len, "tokens of a sequence; the model's positions, at most 4096, by default");
  verb.add_option("--profile", flags.profile,
                  "the framework whose run is predicted; megatron where nobody says, on the local machine shardlab's own executor");
  verb.add_option("--assume", flags.assume, "read a config.json of an unknown model_type as this one: llama");
  verb.add_option("--set", flags.set,
                  "model.KEY=VALUE or machine.KEY=VALUE in place of what the model or machine has; may be repeated");
  verb.add_option("--objective", flags.objective, "time, memory or cost (device hours)")->default_val("time");
  verb.add_option("--top", flags.top, "layouts to rank")->default_val(10)->check(number_in(1, 100'000));
  verb.add_option(
      "--tokens", flags.tokens,
      "tokens of a whole training run: adds its days and cost; its energy and CO2 with --format json or csv, and in --out");
  verb.add_option("--max-days", flags.max_days,
                  "days that the run of --tokens may take at most; with --objective cost: the cheapest that is in time")
      ->check(number_in(0, 1e9));
  verb.add_option("--price,--device-hour-usd,--device_hour_usd", flags.price_usd,
                  "USD of one device for an hour; the machine file's list price where it has one")
      ->check(number_in(0, 1e6));
  verb.add_option("--margin", flags.margin,
                  "device memory that stays free, 5% or 4Gi; by default the 90 % error of memory predictions under the profile");
  verb.add_option("--site-overhead", flags.site_overhead,
                  "power usage effectiveness (PUE): energy of the site over that of the devices")
      ->default_val(1.5)
      ->check(number_in(1, 100));
  verb.add_option("--kg-co2-per-kwh", flags.kg_co2_per_kwh, "CO2 of the electricity, kg a kWh")
      ->default_val(0.4)
      ->check(number_in(0, 100));
  verb.add_option("--html", flags.html, "write the result as one self-contained page to this file");
  verb.add_option(
      "--out", flags.out,
      "a folder for results.csv, pareto.csv, lost.csv and best.yaml, saved as the search goes; `shardlab report` reads it");
  add_key_flags(verb, flags.axes, Flag::kAxis);
  for (const std::string_view path : kTrainedKeys) {
    const CaseKey* key = find_key(path);
    SHARDLAB_CHECK(key != nullptr, "no key has the path {}", path);
    const std::string word(key->word());
    const std::string name = hyphenated(word) == word ? "--" + word : fmt::format("--{},--{}", hyphenated(word), word);
    verb.add_option_function<std::string>(
        name, [&flags, path](const std::string& value) { flags.set.push_back(fmt::format("{}={}", path, value)); },
        flag_help(*key));
  }
}

Result<ExitCode> run_search(SearchFlags flags, const Invocation& invocation) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  const auto task = search_task(flags);
  if (!task.ok()) return task.error();
  flags.profile = task->studies.front().prepared.profile().name;  // what it is by default is said with the rest
  Folder folder(flags, *task, invocation.command());
  ProgressWatcher watcher(stderr_is_terminal(), folder);
  interrupt::ask_on_signal(invocation.command());
  const Stopwatch watch;
  const search::Ranked ranked = search::rank(task->studies, task->space, task->options, &watcher);
  const search::Found& found = ranked.found;
  const double seconds = watch.seconds();
  watcher.end();
  folder.save(found, seconds);
  if (!flags.html.empty()) SHARDLAB_TRY(write_page(flags, *task, found, seconds, folder.metadata()));

  if (*format == TableFormat::kJson)
    fmt::print("{}\n", to_json(*task, found, seconds).dump(2));
  else if (*format == TableFormat::kTable)
    print_found(flags, *task, found, seconds);
  else
    print(layout_table(*task, found.best), *format);
  std::fflush(stdout);  // the answer stands before what is said of it, where both go to one file
  print_misfits(*task, ranked.misfits);
  if (!found.best.empty()) {
    fmt::print(stderr, "\nwhat takes its memory: shardlab memory {}\n", options_of(flags, found.best.front().point));
    if (!flags.out.empty())
      fmt::print(stderr, "the best as a sweep: shardlab run {}\nall layouts: {}/results.csv\n", shell_word(folder.best_sweep()),
                 flags.out);
  }
  if (found.stopped) {
    fmt::print(stderr, "\nthese are the best of {} points alone", count_text(static_cast<double>(found.counts.evaluated)));
    interrupt::say_how_to_go_on();
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
  verb->footer("A flag of the layout limits the search: --tp 2, --tp 1,2,4, --tp 1..8, --tp '<=8'.");
  verb->callback([&action, &invocation, flags] { action = [flags, &invocation] { return run_search(*flags, invocation); }; });
}

}  // namespace shardlab::cli
