#include "tests/fuzz/readers.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>
#include <string>

#include "answers/question.h"
#include "interop/frameworks.h"
#include "interop/kineto_reader.h"
#include "interop/safetensors.h"
#include "plan/base/check.h"
#include "plan/base/hash.h"
#include "plan/base/world_error.h"
#include "plan/keys.h"
#include "plan/pipeline_schedule.h"
#include "plan/routing.h"
#include "plan/text.h"
#include "plan/verify.h"
#include "plan/wire.h"
#include "profiler/gpu/activity.h"
#include "profiler/trace_reader.h"
#include "reports/outcome_json.h"
#include "reports/store.h"
#include "runtime/arrivals.h"
#include "runtime/dataset.h"
#include "runtime/manifest.h"
#include "simulator/estimator/analytic/profile.h"
#include "simulator/estimator/validate/rows.h"
#include "simulator/interpreter/machine_yaml.h"
#include "sweeps/document.h"
#include "sweeps/expression_keys.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"
#include "sweeps/nccl_tests.h"
#include "sweeps/sweep.h"
#include "tests/namespaces.h"

namespace shardlab::testing::fuzz {
namespace {

constexpr size_t kExpanded = 16;  ///< points that are resolved; more of them find nothing more

/// A file in memory that holds the bytes, by the name under which it can be opened.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : file_(memfd_create("fuzz", MFD_CLOEXEC)) {
    SHARDLAB_CHECK(file_ >= 0 && write(file_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
                   "no memory file: {}", std::strerror(errno));
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile() { close(file_); }
  int descriptor() const { return file_; }
  std::string path() const { return fmt::format("/proc/self/fd/{}", file_); }

 private:
  int file_;
};

LoadOptions load_options() {
  LoadOptions options;
  options.local_machine = []() -> Result<Machine> {
    Machine machine;
    machine.local = true;
    machine.cores = 2;
    machine.devices_per_node = 2;
    machine.device.id = "local-cpu";
    machine.device.memory_bytes = int64_t{1} << 32;
    return machine;
  };
  return options;
}

size_t points_of(const Sweep& sweep) {
  size_t points = 1;
  for (const SweepAxis& axis : sweep.content().axes)
    points = std::min<size_t>(points * std::max<size_t>(axis.rows.size(), 1), kExpanded + 1);
  return points + sweep.content().inclusions.size();
}

void read_sweep(std::string_view bytes) {
  const auto sweep = load_sweep_text(bytes, "fuzz.yaml", load_options());
  if (!sweep.ok() || points_of(*sweep) > kExpanded) return;
  for (const Resolution resolution : {Resolution::kTimeline, Resolution::kAnalytic}) {
    const auto expansion = expand(*sweep, resolution);
    if (!expansion.ok()) return;
    for (const Point& point : expansion->points) SHARDLAB_CHECK(point.id.size() == 16, "the id is `{}`", point.id);
  }
}

void read_case(std::string_view bytes) {
  const auto config = load_case_text(bytes, "fuzz.yaml", load_options());
  if (!config.ok() || config->machine.local) return;
  const std::string text = to_yaml(*config);
  const auto again = load_case_text(text, "fuzz.yaml", load_options());
  SHARDLAB_CHECK(again.ok(), "{}\n{}", to_string(again.error()), text);
  SHARDLAB_CHECK(to_yaml(*again) == text, "{}\n{}", text, to_yaml(*again));
}

void read_machine_file(std::string_view bytes) {
  const auto machine = parse_machine(bytes, "fuzz.yaml");
  if (!machine.ok()) return;
  const std::string text = to_yaml(*machine);
  const auto again = parse_machine(text, "fuzz.yaml");
  SHARDLAB_CHECK(again.ok(), "{}\n{}", to_string(again.error()), text);
  SHARDLAB_CHECK(to_yaml(*again) == text, "{}\n{}", text, to_yaml(*again));
}

void read_profile(std::string_view bytes) { (void)analytic::read_profile(bytes, "fuzz.yaml"); }

void read_expression(std::string_view bytes) {
  const auto parsed = Expression::parse(bytes, expression_vocabulary());
  const auto* expression = std::get_if<Expression>(&parsed);
  if (expression == nullptr) return;
  // A key has a value of any kind, or none.
  const auto lookup = [](std::string_view key) -> ExpressionValue {
    switch (hash_text(key) % 4) {
      case 0: return 8.0;
      case 1: return true;
      case 2: return std::string("none");
      default: return {};
    }
  };
  (void)expression->evaluate(lookup);
  (void)expression->holds(lookup);
}

void read_model(std::string_view bytes) {
  const auto config = parse_model_config(bytes, "fuzz");
  if (!config.ok()) return;
  SHARDLAB_CHECK(config->model.layers > 0 && config->model.hidden > 0, "{} layers of {}", config->model.layers,
                 config->model.hidden);
}

void read_plan(std::string_view bytes) {
  const auto plan = parse_plan(bytes);
  if (!plan.ok()) return;
  const std::string text = print(*plan);
  const auto again = parse_plan(text);
  SHARDLAB_CHECK(again.ok(), "{}\n{}", to_string(again.error()), text);
  SHARDLAB_CHECK(print(*again) == text, "{}\n{}", text, print(*again));
  if (!find_faults(*plan).empty()) return;
  for (size_t role = 0; role < plan->roles.size(); ++role)
    (void)find_unordered(*plan, expand_program(*plan, static_cast<int>(role)));
  (void)total_wire_bytes(*plan);
}

void read_schedule(std::string_view bytes) {
  const auto schedule = from_csv(bytes, "fuzz.csv");
  if (!schedule.ok()) return;
  const std::string text = to_csv(*schedule);
  const auto again = from_csv(text, "fuzz.csv");
  SHARDLAB_CHECK(again.ok() && again->placement == schedule->placement && to_csv(*again) == text, "{}", text);
  (void)print_grid(*schedule, SlotCosts::uniform(schedule->parts, 1, 1, 1));
  for (int stage = 0; stage < schedule->stages; ++stage)
    SHARDLAB_CHECK(most_held(*schedule, stage) > 0, "stage {} holds nothing:\n{}", stage, text);
}

void read_table(std::string_view bytes) {
  const validation::Resolver resolver{[](const std::string& name) { return load_model(name); },
                                      [](const std::string& name) -> Result<Machine> {
                                        static const auto machine = load_machine("hgx-h100-ndr");
                                        if (name == "hgx-h100-ndr") return machine;
                                        return Error{ExitCode::kUsage, fmt::format("no machine is named `{}`", name), {}, {}};
                                      }};
  const auto table = validation::read_rows(bytes, "fuzz.csv", resolver);
  if (!table.ok()) return;
  SHARDLAB_CHECK(table->rows.size() == table->csv.records.size(), "{} rows", table->rows.size());
  for (const validation::Row& row : table->rows) {
    if (!row.run.ok()) continue;
    const validation::Run& run = *row.run;
    SHARDLAB_CHECK(run.layout.world_size() == run.devices && run.layout.tokens_per_step() > 0, "{} ranks on {} devices",
                   run.layout.world_size(), run.devices);
  }
}

void read_trace(std::string_view bytes) {
  std::istringstream lines{std::string(bytes)};
  const auto trace = read_trace_lines(lines, "fuzz.trace.jsonl");
  if (!trace.ok()) return;
  for (const TraceEvent& e : trace->trace.events)
    SHARDLAB_CHECK(
        e.rank >= 0 && e.rank < trace->trace.world_size && e.step >= 0 && e.step < trace->trace.steps && e.instruction >= 0,
        "rank {} step {}", e.rank, e.step);
}

void read_activity(std::string_view bytes) { (void)parse_activity_lines(std::string(bytes)); }

void read_store(std::string_view bytes) {
  static const std::string folder = [] {
    std::string pattern = (std::filesystem::temp_directory_path() / "shardlab-fuzz-XXXXXX").string();
    return std::string(mkdtemp(pattern.data()));
  }();
  const std::string path = folder + "/results.sqlite";
  std::ofstream(path, std::ios::binary) << bytes;
  try {
    if (const auto store = Store::open_existing(path); store.ok()) {
      (void)store->runs();
      (void)store->case_ids();
      (void)csv_of(store->outcomes());
    }
  } catch (const WorldError&) {
    // A damaged store is said to be damaged.
  }
  Store::remove(path);
}

void read_outcome(std::string_view bytes) {
  (void)machine_from_json(bytes);
  (void)run_from_json(bytes);
  const auto outcome = outcome_from_json(bytes);
  if (!outcome.ok()) return;
  (void)csv_of({&*outcome, 1});
  const std::string text = outcome_to_json(*outcome);
  const auto again = outcome_from_json(text);
  SHARDLAB_CHECK(again.ok() && outcome_to_json(*again) == text, "{}", text);
}

/// The bytes are a manifest without its last line, which would be a checksum that no mutation meets.
void read_checkpoint(std::string_view bytes) {
  static const MemoryFile tensors(std::string(4096, '\0'));
  const auto manifest = parse_manifest(std::string(bytes) + manifest_end(bytes), "fuzz.manifest");
  (void)parse_manifest(bytes, "fuzz.manifest");
  if (!manifest.ok()) return;
  for (const auto& [name, entry] : manifest->entries) {
    const auto tensor = read_tensor(tensors.descriptor(), "fuzz.tensors", name, entry);
    if (tensor.ok())
      SHARDLAB_CHECK(tensor->values.size() * sizeof(float) == static_cast<size_t>(entry.bytes), "{} bytes", entry.bytes);
  }
}

void read_arrivals(std::string_view bytes) {
  const auto log = parse_arrivals(bytes);
  if (!log.ok()) return;
  const auto again = parse_arrivals(print(*log));
  SHARDLAB_CHECK(again.ok() && print(*again) == print(*log), "{}", print(*log));
}

void read_routes(std::string_view bytes) {
  const auto layers = parse_routes(bytes, "routes.txt");
  if (!layers.ok()) return;
  const std::string text = print_routes(*layers);
  const auto again = parse_routes(text, "routes.txt");
  SHARDLAB_CHECK(again.ok() && *again == *layers, "{}", text);
}

/// Reads every sequence of a small data set, and some of a larger one.
void train_on(const DataSource& source, std::string_view head) {
  DatasetOptions options;
  options.seq_len = static_cast<unsigned char>(head[0]) + (head[1] & 1 ? int64_t{1} << 40 : 0);
  options.vocab = head[1] & 2 ? 256 : 65536;
  options.validation_fraction = (head[1] & 4 ? 0.0 : 0.5);
  const auto data = open_dataset(source, options);
  if (!data.ok()) return;
  std::vector<int32_t> sequence(static_cast<size_t>(options.seq_len) + 1);
  for (int64_t i = 0; i < std::min<int64_t>(data->train_sequences(), 8); ++i) data->train().sequence(i, sequence);
  if (const auto validation = data->validation(); validation.ok())
    for (int64_t i = 0; i < std::min<int64_t>(data->validation_sequences(), 8); ++i) (*validation)->sequence(i, sequence);
  for (const int32_t token : sequence) SHARDLAB_CHECK(token >= 0 && token < options.vocab, "token {}", token);
}

/// Two bytes of options, then the file.
void read_tokens(std::string_view bytes) {
  if (bytes.size() < 2) return;
  const MemoryFile file(bytes.substr(2));
  train_on({.text = {}, .tokens = file.path()}, bytes);
}
void read_text(std::string_view bytes) {
  if (bytes.size() < 2) return;
  const MemoryFile file(bytes.substr(2));
  train_on({.text = file.path(), .tokens = {}}, bytes);
}

/// Settings of a framework: what is read has the form of its key, and makes a file that the sweep language reads.
void read_framework(std::string_view bytes, std::string_view framework) {
  for (const int64_t devices : {int64_t{0}, int64_t{16}}) {
    const auto imported = interop::import_file(bytes, "fuzz", framework, devices);
    if (!imported.ok()) continue;
    for (const auto& [path, value] : imported->settings) SHARDLAB_CHECK(find_key(path) != nullptr, "no key is called `{}`", path);
    const std::string text = interop::case_text(*imported, "machine: hgx-h100-ndr\n");
    const auto sweep = load_sweep_text(text, "fuzz.yaml", load_options());
    if (sweep.ok()) (void)expand(*sweep, Resolution::kAnalytic);
  }
}
void read_megatron(std::string_view bytes) { read_framework(bytes, "megatron"); }
void read_deepspeed(std::string_view bytes) { read_framework(bytes, "deepspeed"); }
void read_torchtitan(std::string_view bytes) { read_framework(bytes, "torchtitan"); }

void read_safetensors(std::string_view bytes) {
  const auto header = interop::parse_safetensors(bytes, static_cast<int64_t>(bytes.size()), "fuzz");
  if (!header.ok()) return;
  for (const auto& [name, tensor] : header->tensors) {
    SHARDLAB_CHECK(tensor.begin >= 0 && tensor.end <= static_cast<int64_t>(bytes.size()) - header->data_begin, "`{}` lies outside",
                   name);
    const std::string_view stored =
        bytes.substr(static_cast<size_t>(header->data_begin + tensor.begin), static_cast<size_t>(tensor.end - tensor.begin));
    (void)interop::narrowed(interop::widened(stored, tensor.type), tensor.type);
  }
}

/// What nccl-tests prints, and the machine file that comes of it.
void read_nccl_tests(std::string_view bytes) {
  const auto tests = parse_nccl_tests(bytes, "all_reduce_perf.txt");
  if (!tests.ok()) return;
  for (const NcclTest& test : *tests)
    SHARDLAB_CHECK(test.ranks > 0 && test.nodes > 0, "{} ranks on {} nodes", test.ranks, test.nodes);
  const auto machine = with_measured_fabric("id: m\ndevice: {memory: 1, memory_bandwidth: 1, peak_flops: {fp32: 1}}\n", 8, *tests);
  if (machine.ok()) SHARDLAB_CHECK(parse_machine(*machine, "fuzz.yaml").ok(), "{}", *machine);
}

/// A profile of PyTorch.
void read_kineto(std::string_view bytes) {
  const auto records = interop::parse_kineto(bytes, "fuzz.json");
  if (!records.ok()) return;
  const interop::BusySeconds busy = interop::busy_seconds(*records);
  SHARDLAB_CHECK(!records->steps.empty() && busy.exposed <= busy.communication * (1 + 1e-9) + 1e-9, "{} s of {} s are exposed",
                 busy.exposed, busy.communication);
}

/// What a program asks through the C interface.
void read_question(std::string_view bytes) {
  const auto memory = answers::memory_asked(bytes);
  if (memory.ok()) SHARDLAB_CHECK(!memory->flags.model.empty() && memory->flags.devices >= 0, "{} devices", memory->flags.devices);
  const auto search = answers::search_asked(bytes);
  if (search.ok()) SHARDLAB_CHECK(!search->devices.empty() && search->top > 0, "top {}", search->top);
}

constexpr std::array kReaders = {Reader{"sweep", read_sweep},
                                 Reader{"case", read_case},
                                 Reader{"machine", read_machine_file},
                                 Reader{"profile", read_profile},
                                 Reader{"expression", read_expression},
                                 Reader{"model", read_model},
                                 Reader{"plan", read_plan},
                                 Reader{"schedule", read_schedule},
                                 Reader{"nccl_tests", read_nccl_tests},
                                 Reader{"rows", read_table},
                                 Reader{"trace", read_trace},
                                 Reader{"activity", read_activity},
                                 Reader{"store", read_store},
                                 Reader{"outcome", read_outcome},
                                 Reader{"checkpoint", read_checkpoint},
                                 Reader{"arrivals", read_arrivals},
                                 Reader{"routes", read_routes},
                                 Reader{"tokens", read_tokens},
                                 Reader{"text", read_text},
                                 Reader{"megatron", read_megatron},
                                 Reader{"deepspeed", read_deepspeed},
                                 Reader{"torchtitan", read_torchtitan},
                                 Reader{"safetensors", read_safetensors},
                                 Reader{"question", read_question},
                                 Reader{"kineto", read_kineto}};

}  // namespace

std::span<const Reader> readers() { return kReaders; }

}  // namespace shardlab::testing::fuzz
