// comm: collectives measured on any transport as nccl-tests does, and nccl-tests' own output taken into a machine file.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "cases/case_process.h"
#include "cases/children.h"
#include "cases/environment.h"
#include "cases/interrupt.h"
#include "cases/job_place.h"
#include "cli/comm_measure.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/verbs.h"
#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "plan/base/values.h"
#include "plan/base/world_error.h"
#include "plan/op_fields.h"
#include "reports/format.h"
#include "runtime/control.h"
#include "sweeps/machines.h"
#include "sweeps/nccl_tests.h"

namespace shardlab::cli {
namespace {

struct CommFlags {
  JobPlaceFlags placement;
  std::string transport = "threads", collectives = "all", dtype = "f32", reduce = "sum", algorithm = "auto", format, output,
              machine;
  std::string launcher = "mpirun";
  std::string min_bytes = "1Ki", max_bytes = "16Mi";
  int ranks = 0, processes = 0, per_node = 0, warmup = 2, iterations = 10;
  double factor = 4, timeout_s = 60;
  bool unchecked = false;
  bool launched = false;  ///< by `--launcher` of a process that measures
  std::vector<std::string> imports;
};

constexpr const char* kLaunched = "--launched";

constexpr std::array kKinds{std::pair{"all_reduce", CollectiveKind::kAllReduce},
                            std::pair{"reduce_scatter", CollectiveKind::kReduceScatter},
                            std::pair{"all_gather", CollectiveKind::kAllGather}, std::pair{"broadcast", CollectiveKind::kBroadcast},
                            std::pair{"all_to_all", CollectiveKind::kAllToAll}};

std::string_view word_of(CollectiveKind kind) {
  return std::ranges::find(kKinds, kind, [](const auto& k) { return k.second; })->first;
}

/// The program of nccl-tests that measures the same.
std::string perf_name(CollectiveKind kind) {
  return fmt::format("{}_perf", kind == CollectiveKind::kAllToAll ? "alltoall" : word_of(kind));
}

Error unknown(const char* flag, const std::string& word, const std::string& allowed) {
  return refusal(fmt::format("{} {} is unknown", flag, word), "use " + allowed);
}

/// The value that a word of a key stands for, by the table of keys.
template <class T, size_t N>
Result<T> word_in(const char* flag, const std::string& word, const std::array<T, N>& values) {
  std::string allowed;
  for (const T value : values) {
    if (name_of(value) == word) return value;
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", name_of(value));
  }
  return unknown(flag, word, allowed);
}

Result<int64_t> bytes_in(const char* flag, const std::string& text) {
  const auto bytes = parse_count(text);
  if (!bytes || *bytes < 1 || *bytes > (int64_t{1} << 40))
    return refusal(fmt::format("{} {} is no size", flag, text), "give bytes, as 64Ki or 16Mi");
  return *bytes;
}

Result<CommOptions> options_of(const CommFlags& flags) {
  CommOptions o;
  const auto transport = word_in("--transport", flags.transport,
                                 std::array{TransportKind::kThreads, TransportKind::kProcesses, TransportKind::kTcp,
                                            TransportKind::kGloo, TransportKind::kMpi});
  if (!transport.ok()) return transport.error();
  o.transport = *transport;
  std::string allowed = "all";
  for (const auto& [name, kind] : kKinds) allowed += fmt::format(", {}", name);
  for (size_t at = 0; at <= flags.collectives.size();) {
    const size_t end = std::min(flags.collectives.find(',', at), flags.collectives.size());
    const std::string word = flags.collectives.substr(at, end - at);
    const auto found = std::ranges::find(kKinds, word, [](const auto& k) { return k.first; });
    if (word != "all" && found == kKinds.end()) return unknown("--collectives", word, allowed);
    for (const auto& [name, kind] : kKinds)
      if (word == "all" || word == name) o.kinds.push_back(kind);
    at = end + 1;
  }
  const auto dtype = word_in("--dtype", flags.dtype, std::array{DType::f32, DType::f64, DType::i32, DType::i64});
  if (!dtype.ok()) return dtype.error();
  o.dtype = *dtype;
  if (flags.reduce != "sum" && flags.reduce != "max") return unknown("--reduce", flags.reduce, "sum or max");
  o.reduce = flags.reduce == "sum" ? ReduceOp::kSum : ReduceOp::kMax;
  const auto algorithm = word_in("--algorithm", flags.algorithm,
                                 std::array{AlgorithmChoice::kAuto, AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling,
                                            AlgorithmChoice::kDirect, AlgorithmChoice::kTree, AlgorithmChoice::kHierarchical});
  if (!algorithm.ok()) return algorithm.error();
  o.algorithm = *algorithm;
  const auto least = bytes_in("--min-bytes", flags.min_bytes), most = bytes_in("--max-bytes", flags.max_bytes);
  if (!least.ok()) return least.error();
  if (!most.ok()) return most.error();
  if (*least > *most)
    return refusal(fmt::format("--min-bytes {} above --max-bytes {}", flags.min_bytes, flags.max_bytes), "swap them");
  o.min_bytes = *least, o.max_bytes = *most;
  o.factor = flags.factor, o.warmup = flags.warmup, o.iterations = flags.iterations, o.timeout_s = flags.timeout_s;
  o.check = !flags.unchecked;
  return o;
}

Table table_of(const std::vector<CommRow>& rows, const CommOptions& options) {
  Table table{{{"collective"},
               {"algorithm"},
               {.name = "bytes", .right = true},
               {.name = "elements", .right = true},
               {"type"},
               {"time_s", Unit::kSeconds, "time"},
               {"algbw", Unit::kBytesPerSecond},
               {"busbw", Unit::kBytesPerSecond},
               {.name = "wrong", .heading = "wrong elements", .right = true},
               {"in_place_time_s", Unit::kSeconds, "in place"},
               {"in_place_algbw", Unit::kBytesPerSecond, "algbw"},
               {"in_place_busbw", Unit::kBytesPerSecond, "busbw"},
               {.name = "in_place_wrong", .heading = "wrong elements", .right = true}},
              {}};
  for (const CommRow& row : rows) {
    std::vector<Value> cells{std::string(word_of(row.kind)), std::string(kAlgorithms[static_cast<size_t>(row.algorithm)]),
                             row.bytes, row.elements, std::string(name_of(options.dtype))};
    for (const std::optional<CommTime>& time : {row.apart, row.in_place}) {
      if (!time) {
        cells.insert(cells.end(), 4, Value());
        continue;
      }
      cells.insert(cells.end(),
                   {time->seconds, algbw(row.bytes, time->seconds), busbw(row.kind, options.ranks, row.bytes, time->seconds),
                    time->wrong ? Value(*time->wrong) : Value()});
    }
    table.rows.push_back(std::move(cells));
  }
  return table;
}

/// What `-J` of nccl-tests writes, so that one reader reads both; of several collectives a list.
std::string json_of(const std::vector<CommRow>& rows, const CommOptions& options, const std::vector<std::string>& hosts,
                    const std::vector<std::string>& words) {
  using nlohmann::ordered_json;
  ordered_json all = ordered_json::array();
  for (const CollectiveKind kind : options.kinds) {
    ordered_json test{{"version", 1}, {"args", ordered_json::array({perf_name(kind)})}};
    for (const std::string& word : words) test["args"].push_back(word);
    ordered_json devices = ordered_json::array();
    for (int rank = 0; rank < options.ranks; ++rank)
      devices.push_back(
          {{"rank", rank}, {"hostname", hosts[static_cast<size_t>(rank) * hosts.size() / static_cast<size_t>(options.ranks)]}});
    test["config"] = {{"transport", std::string(name_of(options.transport))},
                      {"minimum_bytes", options.min_bytes},
                      {"maximum_bytes", options.max_bytes},
                      {"step_factor", options.factor},
                      {"warmup_iters", options.warmup},
                      {"iterations", options.iterations},
                      {"validation", options.check ? 1 : 0},
                      {"devices", devices}};
    double bus_sum = 0;
    int64_t wrong_sum = 0, times = 0;
    ordered_json results = ordered_json::array();
    for (const CommRow& row : rows) {
      if (row.kind != kind) continue;
      ordered_json result{{"size", row.bytes},
                          {"count", row.elements},
                          {"type", std::string(name_of(options.dtype))},
                          {"redop", options.reduce == ReduceOp::kSum ? "sum" : "max"},
                          {"algorithm", std::string(kAlgorithms[static_cast<size_t>(row.algorithm)])}};
      for (const auto& [key, time] : {std::pair{"out_of_place", row.apart}, {"in_place", row.in_place}}) {
        result[key] = nullptr;
        if (!time) continue;
        const double bus = busbw(kind, options.ranks, row.bytes, time->seconds) * 1e-9;
        result[key] = {{"time", time->seconds * 1e6},
                       {"alg_bw", algbw(row.bytes, time->seconds) * 1e-9},
                       {"bus_bw", bus},
                       {"nwrong", nullptr}};
        if (time->wrong) result[key]["nwrong"] = *time->wrong, wrong_sum += *time->wrong;
        bus_sum += bus, ++times;
      }
      result["experiment_name"] = perf_name(kind);
      results.push_back(std::move(result));
    }
    test["results"] = std::move(results);
    test["out_of_bounds"] = {{"count", wrong_sum}, {"okay", wrong_sum == 0}};
    test["average_bus_bandwidth"] = {{"bandwidth", times > 0 ? bus_sum / static_cast<double>(times) : 0}};
    all.push_back(std::move(test));
  }
  return (all.size() == 1 ? all.front() : all).dump(1) + "\n";
}

/// In the first process: what all have measured.
Result<ExitCode> say(const std::vector<CommRow>& rows, const CommOptions& options, const CommFlags& flags,
                     const std::vector<std::string>& hosts, const Invocation& invocation) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  const std::string json = json_of(rows, options, hosts, invocation.words);
  if (!flags.output.empty()) write_file_atomically(flags.output, json);
  if (*format == TableFormat::kJson)
    fmt::print("{}", json);
  else if (*format != TableFormat::kTable)
    print(table_of(rows, options), *format);
  else {
    fmt::print(
        "{} ranks, transport {}. time: a call from one buffer into another; in place: a call within one buffer, and the\n"
        "columns after it. algbw: bytes over time; busbw: what each link carries, as nccl-tests has it. wrong elements: those of\n"
        "all ranks' results that differ from what the collective must give, in one call after the timed ones; empty: not\n"
        "checked. reduce_scatter is done in place alone, all_to_all into another buffer alone.\n\n",
        options.ranks, name_of(options.transport));
    print(table_of(rows, options), *format);
  }
  int64_t wrong = 0;
  for (const CommRow& row : rows)
    for (const std::optional<CommTime>& time : {row.apart, row.in_place})
      if (time) wrong += time->wrong.value_or(0);
  if (wrong == 0) return ExitCode::kDone;
  fmt::print(stderr, "{} elements are wrong\n", wrong);
  return ExitCode::kNo;
}

/// As one process of several that measure together.
Result<ExitCode> measure_in_group(const CommOptions& options, const CommFlags& flags, const JobPlace& placement,
                                  const Invocation& invocation) {
  std::optional<ControlServer> server;
  if (placement.rank == 0) server.emplace(placement.world_size, placement.master, placement.token, options.timeout_s);
  Control control(server ? server->endpoint() : placement.master, placement.token, placement.rank, placement.world_size,
                  options.timeout_s);
  try {
    const std::vector<std::string> hosts = control.gather(describe_environment("").host);
    const auto rows = measure_comm(options, &control);
    if (!rows.ok()) {
      control.fail(rows.error().message, rows.error().hint);
      return rows.error();
    }
    const auto said = placement.rank == 0 ? say(*rows, options, flags, hosts, invocation) : ExitCode::kDone;
    control.barrier();  // the first process serves the others until they have their rows
    return said;
  } catch (const WorldError& failure) {
    control.fail(failure.what(), failure.hint());
    throw;
  } catch (const std::exception& failure) {
    control.fail(failure.what());
    throw;
  }
}

/// Starts the processes, each with its place in the group, and waits for them.
Result<ExitCode> measure_in_processes(const CommOptions& options, int processes, const std::string& launcher,
                                      const Invocation& invocation) {
  Endpoint endpoint;
  {
    const auto listener = listen_at(endpoint);  // a port that is free
    if (!listener.ok()) return listener.error();
  }
  const std::string token = new_token();
  Children children;
  std::vector<std::string> own = invocation.words;
  own.front() = invocation.program;
  const bool launches = options.transport == TransportKind::kMpi;
  if (launches) own.emplace_back(kLaunched);
  if (launches) children.add(start_process(launched_by(launcher, processes, own), token, 0));
  for (int p = 0; !launches && p < processes; ++p) {
    const JobPlace place{.rank = p, .world_size = processes, .master = endpoint, .token = token, .by = ""};
    std::vector<std::string> words = own;
    const std::vector<std::string> more = words_of(place);
    words.insert(words.end(), more.begin(), more.end());
    children.add(start_process(words, token, children.processes.empty() ? 0 : children.processes.front()));
  }
  interrupt::set_case_group(children.processes.front());
  const bool ended = wait_for_end(children, options.timeout_s * 60);
  interrupt::set_case_group(0);
  if (!ended) throw WorldError("the processes that measure have not ended", "see that none of them is stopped");
  for (const int status : children.statuses)
    if (status != 0) return exit_code_of(status);
  return ExitCode::kDone;
}

Result<ExitCode> import(const CommFlags& flags) {
  if (flags.machine.empty())
    return refusal("--import without --machine", "name the machine whose fabric was measured, a preset or a file");
  if (flags.output.empty()) return refusal("--import without -o", "name the machine file to be written");
  const bool path = flags.machine.find('/') != std::string::npos || flags.machine.ends_with(".yaml");
  const auto text = path ? read_file(flags.machine) : machine_text(flags.machine);
  if (!text.ok()) return text.error();
  const auto machine = parse_machine(*text, flags.machine);
  if (!machine.ok()) return machine.error();
  std::vector<NcclTest> tests;
  for (const std::string& file : flags.imports) {
    const auto read = read_file(file);
    if (!read.ok()) return read.error();
    const auto found = parse_nccl_tests(*read, file);
    if (!found.ok()) return found.error();
    tests.insert(tests.end(), found->begin(), found->end());
  }
  const auto written = with_measured_fabric(*text, machine->devices_per_node, tests);
  if (!written.ok()) return written.error();
  const auto again = parse_machine(*written, flags.output);
  if (!again.ok()) return again.error();
  write_file_atomically(flags.output, *written);
  fmt::print("{}: {} with what {} {} measured of its fabric\n", flags.output, machine->id, tests.size(),
             tests.size() == 1 ? "test" : "tests");
  return ExitCode::kDone;
}

Result<ExitCode> comm(const CommFlags& flags, const Invocation& invocation) {
  if (!flags.imports.empty()) return import(flags);
  auto options = options_of(flags);
  if (!options.ok()) return options.error();
  const auto placement = find_job_place(flags.placement, process_environment());
  if (!placement.ok()) return placement.error();
  const bool mpi = options->transport == TransportKind::kMpi;
  if (flags.launched && !*placement)
    return refusal(fmt::format("the launcher `{}` gives its processes no number", flags.launcher),
                   "name a launcher of Open MPI, of MPICH or of Slurm: --launcher mpirun");
  const bool placed = *placement && (mpi || (flags.placement.any() && (*placement)->world_size > 1));
  const bool apart = options->transport != TransportKind::kThreads;
  int processes = placed ? (*placement)->world_size : flags.processes;
  if (!apart && (placed || processes > 1))
    return refusal("--transport threads in several processes", "use --transport processes, tcp or gloo");
  if (apart && !placed && processes == 1)
    return refusal(fmt::format("-n 1 with --transport {}, which joins processes", flags.transport),
                   "give -n 2 or more; ranks of one process are measured by --transport threads");
  options->ranks = flags.ranks > 0 ? flags.ranks : std::max(processes, 2);
  if (processes == 0) processes = apart ? options->ranks : 1;
  if (options->ranks % processes != 0)
    return refusal(fmt::format("{} ranks in {} processes, which cannot have as many each", options->ranks, processes),
                   "set --ranks to a multiple of the processes");
  options->per_node = flags.per_node > 0 ? flags.per_node : options->ranks / processes;
  if (options->ranks % options->per_node != 0)
    return refusal(fmt::format("{} ranks, {} on each node", options->ranks, options->per_node),
                   "set --per-node to a divisor of the ranks");
  if (placed) return measure_in_group(*options, flags, **placement, invocation);
  if (apart) return measure_in_processes(*options, processes, flags.launcher, invocation);
  const auto rows = measure_comm(*options, nullptr);
  if (!rows.ok()) return rows.error();
  return say(*rows, *options, flags, {describe_environment("").host}, invocation);
}

}  // namespace

void add_comm(CLI::App& app, Action& action, const Invocation& invocation) {
  auto* verb = app.add_subcommand(
      "comm", "measures collectives on a transport, as nccl-tests does; --import takes nccl-tests' output into a machine file");
  auto flags = std::make_shared<CommFlags>();
  verb->add_option("--transport", flags->transport, "threads, processes, tcp, gloo or mpi; threads by default");
  verb->add_option("--ranks", flags->ranks, "ranks; as many as processes by default, 2 where they are threads")
      ->check(number_in(2, 4096));
  verb->add_option("-n,--processes", flags->processes, "processes to start; one a rank by default")->check(number_in(1, 4096));
  verb->add_option("--launcher", flags->launcher,
                   "with --transport mpi: the command that starts the processes, `-n N` follows; mpirun by default");
  verb->add_option("--collectives", flags->collectives,
                   "all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, separated by commas; all by default");
  verb->add_option("--algorithm", flags->algorithm, "auto, ring, halving-doubling, direct, tree or hierarchical; auto by default");
  verb->add_option("--per-node", flags->per_node, "ranks of a node, with --algorithm hierarchical; those of a process by default")
      ->check(number_in(1, 4096));
  verb->add_option("-b,--min-bytes", flags->min_bytes, "the smallest size, of the whole buffer; 1Ki by default");
  verb->add_option("-e,--max-bytes", flags->max_bytes, "the largest size; 16Mi by default");
  verb->add_option("-f,--factor", flags->factor, "from one size to the next; 4 by default")->check(number_in(1.01, 1e6));
  verb->add_option("--iterations", flags->iterations, "calls that are timed together; 10 by default")->check(number_in(1, 1e6));
  verb->add_option("--warmup", flags->warmup, "calls before; 2 by default")->check(number_in(0, 1e6));
  verb->add_option("--dtype", flags->dtype, "f32, f64, i32 or i64; f32 by default");
  verb->add_option("--reduce", flags->reduce, "sum or max; sum by default");
  verb->add_flag("--no-check", flags->unchecked, "leave out the check of every element after the timed calls");
  verb->add_option("--timeout", flags->timeout_s, "the longest that one wait may last, seconds; 60 by default")
      ->check(number_in(0.1, 1e5));
  verb->add_option("-o,--output", flags->output, "a file for the results as nccl-tests' JSON; with --import, the machine file");
  verb->add_option("--import", flags->imports, "files with what nccl-tests printed, or wrote with -J");
  verb->add_option("--machine", flags->machine, "with --import: the machine that was measured, a preset or a file");
  verb->add_flag(kLaunched, flags->launched)->group("");
  add_job_place_flags(*verb, flags->placement);
  add_format(*verb, flags->format);
  verb->callback([&action, &invocation, flags] { action = [flags, &invocation] { return comm(*flags, invocation); }; });
}

}  // namespace shardlab::cli
