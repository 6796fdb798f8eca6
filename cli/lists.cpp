// model, machine, strategies, keys: what the program knows by name.
#include <fmt/format.h>

#include <map>

#include "answers/model_shape.h"
#include "cases/environment.h"
#include "cli/common.h"
#include "cli/lists.h"
#include "cli/namespaces.h"
#include "cli/pairs.h"
#include "cli/verbs.h"
#include "plan/keys.h"
#include "reports/format.h"
#include "strategies/catalogue.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"
#include "sweeps/yaml.h"

namespace shardlab::cli {
namespace {

struct ListFlags {
  std::string name, format, assume;
  bool pairs = false;
};

std::vector<Value> model_row(const ModelConfig& c) {
  const Model& m = c.model;
  const analytic::ModelShape shape = model_shape(c);
  return {m.name,
          c.unexecuted.empty() ? std::string(name_of(m.family)) : c.type,
          parameter_count(shape),
          m.layers,
          m.hidden,
          m.heads,
          m.kv_heads,
          m.head_dim,
          m.ffn,
          m.vocab,
          m.max_positions,
          m.tied_embeddings,
          c.experts > 0 ? Value(c.experts) : Value(),
          c.experts > 0 ? Value(c.top_k) : Value(),
          active_parameter_count(shape),
          c.unexecuted.empty()};
}

const std::vector<TableColumn>& model_columns() {
  static const std::vector<TableColumn> columns{{"name"},
                                                {"family"},
                                                {"parameters", Unit::kCount},
                                                {"layers"},
                                                {"hidden"},
                                                {"heads"},
                                                {"kv_heads"},
                                                {"head_dim"},
                                                {"ffn"},
                                                {"vocab"},
                                                {"max_positions"},
                                                {"tied_embeddings"},
                                                {"experts"},
                                                {"experts_per_token", Unit::kNone, "experts a token"},
                                                {"active_parameters", Unit::kCount, "active"},
                                                {.name = "executed", .heading = "trained here"}};
  return columns;
}

/// Models as people read them: with counts in words.
Table for_people(Table table) {
  for (size_t c = 0; c < table.columns.size(); ++c) {
    if (table.columns[c].unit != Unit::kCount) continue;
    table.columns[c].right = true;
    for (auto& row : table.rows)
      if (const auto* count = std::get_if<int64_t>(&row[c])) row[c] = count_words(static_cast<double>(*count));
  }
  return table;
}

Result<ExitCode> list_all_models(const ListFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  Table table{model_columns(), {}};
  for (const std::string& name : list_models()) {
    const auto model = load_model_config(name);
    if (!model.ok()) return model.error();
    table.rows.push_back(model_row(*model));
  }
  print(*format == TableFormat::kTable ? for_people(std::move(table)) : table, *format);
  return ExitCode::kDone;
}

/// Every parameter by name, as plans and checkpoints have them.
Table parameter_table(const Model& model) {
  Table table{{{"name", Unit::kNone, "parameter"}, {"shape"}, {"elements", Unit::kNone}}, {}};
  for (const ModelParameter& p : parameters_of(model)) {
    int64_t elements = 1;
    std::string shape;
    for (const int64_t e : p.shape) elements *= e, shape += fmt::format("{}{}", shape.empty() ? "" : " x ", e);
    table.rows.push_back({p.name, shape, elements});
  }
  return table;
}

/// The same for people: what several layers have stands once, with their number.
Table parameter_summary(const Model& model) {
  Table table{{{"name", Unit::kNone, "parameter"}, {"times"}, {.name = "shape", .right = true}, {"elements", Unit::kNone}}, {}};
  const Table all = parameter_table(model);
  constexpr std::string_view kLayers = "layers.";
  std::map<std::string, size_t> known;
  for (const auto& row : all.rows) {
    std::string name = std::get<std::string>(row[0]);
    if (name.starts_with(kLayers)) name = "layers.*" + name.substr(name.find('.', kLayers.size()));
    const auto [at, is_new] = known.try_emplace(name, table.rows.size());
    if (is_new)
      table.rows.push_back({name, int64_t{1}, row[1], row[2]});
    else
      ++std::get<int64_t>(table.rows[at->second][1]);
  }
  return table;
}

/// A table of one row, standing.
Table upright(const Table& table) {
  Table out{{{"what"}, {.name = "value"}}, {}};
  for (size_t c = 0; c < table.columns.size(); ++c) {
    const TableColumn& column = table.columns[c];
    const std::string value = human_text(table.rows.at(0)[c], column.unit);
    if (!value.empty()) out.rows.push_back({column.heading.empty() ? column.name : column.heading, value});
  }
  return out;
}

/// Of what is only predicted: the elements of each kind of layer, by how layouts cut them, and of the ends.
Table layer_table(const ModelConfig& c) {
  const analytic::ModelShape s = model_shape(c);
  Table table{{{"name", Unit::kNone, "part"}, {"count"}, {"elements", Unit::kNone}}, {}};
  const auto add = [&](const std::string& kind, int64_t count, const analytic::LayerParameters& p) {
    if (count == 0) return;
    for (const auto& [name, elements] :
         {std::pair{"cut by tp", p.matrix}, {"whole on each rank", p.replicated}, {"experts", p.expert}})
      if (elements > 0) table.rows.push_back({fmt::format("{}, {}", kind, name), count, elements});
  };
  add("dense layer", s.layers - s.moe_layers(), dense_layer_parameters(s));
  if (s.moe_layers() > 0) add("layer with experts", s.moe_layers(), moe_layer_parameters(s));
  table.rows.push_back({std::string("table of tokens"), int64_t{1}, s.vocab * s.hidden});
  if (!s.tied_embeddings) table.rows.push_back({std::string("head"), int64_t{1}, s.vocab * s.hidden});
  table.rows.push_back({std::string("final norm"), int64_t{1}, s.hidden});
  return table;
}

Result<ExitCode> show_model(const ListFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  const auto model = load_model_config(flags.name, flags.assume);
  if (!model.ok()) return model.error();
  if (const auto checked = check(model_shape(*model)); !checked.ok()) return checked.error();  // before anything is multiplied
  const bool executed = model->unexecuted.empty();
  if (*format == TableFormat::kTable) {
    print(upright(for_people({model_columns(), {model_row(*model)}})), *format);
    fmt::print("{}\n", executed ? "" : fmt::format("\npredicted, not executed: {}\n", model->unexecuted));
    print(executed ? parameter_summary(model->model) : layer_table(*model), *format);
    return ExitCode::kDone;
  }
  print(executed ? parameter_table(model->model) : layer_table(*model), *format);
  return ExitCode::kDone;
}

Result<ExitCode> list_all_machines(const ListFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  Table table{{{"id"},
               {"device"},
               {"devices_per_node"},
               {"memory", Unit::kBytes},
               {"memory_bandwidth", Unit::kBytesPerSecond, "memory rate"},
               {"bf16_tflops", Unit::kNone, "bf16 Tflop/s"},
               {"link", Unit::kBytesPerSecond, "link, one way"},
               {"network", Unit::kBytesPerSecond, "network, one way"}},
              {}};
  for (const std::string& name : list_machines()) {
    const auto machine = load_machine(name);
    if (!machine.ok()) return machine.error();
    const Device& d = machine->device;
    const auto bf16 = d.peak_flops.find("bf16");
    const auto rate = [](double bytes_per_s) -> Value { return bytes_per_s > 0 ? Value(bytes_per_s) : Value(); };
    table.rows.push_back({machine->id, d.id, int64_t{machine->devices_per_node}, d.memory_bytes, rate(d.memory_bytes_per_s),
                          bf16 == d.peak_flops.end() ? Value() : Value(bf16->second / 1e12), rate(d.link_bytes_per_s),
                          rate(machine->inter_bytes_per_s)});
  }
  print(table, *format);
  return ExitCode::kDone;
}

/// Every constant of a machine with where it comes from; its counts have no provenance.
Table constants_table(const Machine& m) {
  Table table{{{"constant"}, {"value"}, {"unit"}, {"provenance"}}, {}};
  const auto add = [&](const std::string& name, const Value& value, const char* unit) {
    const auto from = m.device.provenance.find(name);
    table.rows.push_back(
        {name, value, std::string(unit), from == m.device.provenance.end() ? Value() : Value(std::string(name_of(from->second)))});
  };
  add("id", m.id, "");
  add("device", m.device.id, "");
  add("nodes", int64_t{m.nodes}, "");
  add("devices_per_node", int64_t{m.devices_per_node}, "");
  if (m.cores > 0) add("cores", int64_t{m.cores}, "");
  const auto rate = [&](const char* name, double value, const char* unit) { add(name, value > 0 ? Value(value) : Value(), unit); };
  add("memory", m.device.memory_bytes > 0 ? Value(m.device.memory_bytes) : Value(), "B");
  rate("memory_bandwidth", m.device.memory_bytes_per_s, "B/s");
  rate("link_bandwidth", m.device.link_bytes_per_s, "B/s");
  rate("inter_bandwidth", m.inter_bytes_per_s, "B/s");
  rate("power_w", m.device.power_w, "W");
  for (const auto& [precision, flops] : m.device.peak_flops) rate(("peak_flops." + precision).c_str(), flops, "flop/s");
  if (m.calibration) add("calibration", m.calibration->id, "");
  return table;
}

/// What the values of a shipped machine's file are.
constexpr const char* kMachineLegend =
    "# Names that end in _s are seconds; bandwidths and _bytes_per_s are bytes/s, one way; peak_flops are\n"
    "# flop/s, dense. Most others are factors: efficiencies and rates of the link or peak, latencies of\n"
    "# those in NCCL's model; ring_start is a, where a ring of n devices reaches 1 / (1 + a / n) of its rate.\n"
    "# provenance: datasheet; measured, on this machine; fitted, to published measurements of it;\n"
    "# transferred, from another device.\n";

/// A shipped machine with the source of every constant, a file as it reads; in the formats for programs, the constants as a table.
Result<ExitCode> show_machine(const ListFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  if (*format != TableFormat::kTable) {
    const auto machine = load_machine(flags.name);
    if (!machine.ok()) return machine.error();
    print(constants_table(*machine), *format);
    return ExitCode::kDone;
  }
  auto text = machine_text(flags.name);
  const bool shipped = text.ok();
  if (!text.ok()) {
    const auto machine = load_machine(flags.name);
    if (!machine.ok()) return machine.error();
    text = read_text_file(flags.name);
    if (!text.ok()) return text.error();
  }
  fmt::print("{}{}", shipped ? kMachineLegend : "", *text);
  return ExitCode::kDone;
}

Result<ExitCode> list_strategies(const ListFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  if (!flags.pairs) {
    print(strategy_table(), *format);
    if (*format == TableFormat::kTable)
      fmt::print(
          "\n{}\n",
          wrapped("tier: how close the training is to that on one rank. E0: bitwise equal; E1: bitwise equal with canonical: "
                  "true; E2: its error against fp64 is at most 1.5 times that of one rank; E3: different by design.\n"
                  "adds: sent or computed by one rank in addition, per step; memory: held by one rank, more or less. Psi: bytes of "
                  "one value for every parameter; N: ranks that share (dp, or hybrid_shard); t, p: tp, pp; m: micro-batches of "
                  "a step on a rank; b, s: sequences of a micro-batch, tokens of a sequence; h, f, a: width of a layer, inner "
                  "width of its feed-forward, heads; V: size of the vocabulary; R, C, r: rows and columns of a matrix, rank of "
                  "its approximation; H: steps between two outer steps; k: share of the elements that is sent.",
                  terminal_width()));
  } else if (*format == TableFormat::kJson || *format == TableFormat::kCsv) {
    print(pair_list(), *format);
  } else if (*format == TableFormat::kTable) {
    Table refused = refused_pairs();
    for (size_t c = 1; c < refused.columns.size(); ++c) refused.columns[c].wraps = true;
    fmt::print("These {} pairs do not go together, every other pair does (--format csv lists all):\n\n", refused.rows.size());
    print(refused, *format);
  } else {
    print(pair_matrix(), *format);
    fmt::print("\n");
    print(refused_pairs(), *format);
  }
  return ExitCode::kDone;
}

Result<ExitCode> list_keys(const ListFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  Table table = key_table(flags.name);
  if (table.rows.empty())
    return refusal(fmt::format("no key has `{}` in its name or its meaning", flags.name), "`shardlab keys` lists them all");
  print(table, *format);
  return ExitCode::kDone;
}

using Handler = Result<ExitCode> (*)(const ListFlags&);

void add_handler(CLI::App& parent, const char* name, const char* help, const char* argument, Handler handler, Action& action) {
  auto* verb = parent.add_subcommand(name, help);
  auto flags = std::make_shared<ListFlags>();
  flags->format = "table";
  if (argument != nullptr) verb->add_option("name", flags->name, argument)->required(handler != list_keys);
  if (handler == show_model)
    verb->add_option("--assume", flags->assume, "read a config.json of an unknown model_type as this one: llama");
  if (handler == list_strategies) verb->add_flag("--pairs", flags->pairs, "which of them go together, and why others do not");
  add_format(*verb, flags->format);
  verb->callback([&action, flags, handler] { action = [flags, handler] { return handler(*flags); }; });
}

}  // namespace

Table strategy_table() {
  Table table{{{"pass"}, {"strategy"}, {"tier"}, {"keys"}, {"adds"}, {"memory"}, {"paper"}}, {}};
  for (const size_t wide : {1, 3, 4, 5, 6}) table.columns[wide].wraps = true;
  for (const Strategy& s : catalogue())
    table.rows.push_back({std::string(s.name), std::string(s.title), std::string(name_of(s.tier)), std::string(s.keys),
                          std::string(s.adds), std::string(s.memory), std::string(s.paper)});
  return table;
}

namespace {

/// What a case has where nobody says anything; nothing where the value comes from a preset, the batch or the devices.
std::string default_of(const CaseKey& key) {
  // A key without a field holds one value alone.
  for (const std::string& text : {key.get ? key.get(Case()) : std::string(key.holds), std::string(key.get ? "" : key.words)})
    if (!text.empty() && has_form(key, text)) return text;
  return {};
}

}  // namespace

Table key_table(std::string_view part) {
  Table table{{{"key"}, {"short"}, {"values"}, {"default"}, {"meaning"}}, {}};
  for (const size_t wide : {1, 2, 4}) table.columns[wide].wraps = true;
  for (const CaseKey& key : case_keys()) {
    if (key.path.find(part) == std::string_view::npos && key.aliases.find(part) == std::string_view::npos &&
        key.help.find(part) == std::string_view::npos)
      continue;
    std::string names;
    for_each_word(key.aliases, [&](std::string_view word) { names += (names.empty() ? "" : ", ") + std::string(word); });
    table.rows.push_back({std::string(key.path), names, expected(key), default_of(key), std::string(key.help)});
  }
  return table;
}

void add_model(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("model", "models by name, and their exact parameter counts");
  verb->require_subcommand(1);
  add_handler(*verb, "list", "every model that ships with the program", nullptr, list_all_models, action);
  add_handler(*verb, "show", "one model and its parameters", "a preset or the path of a Hugging Face config.json", show_model,
              action);
}

void add_machine(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("machine", "machines by name, with the source of every constant");
  verb->require_subcommand(1);
  add_handler(*verb, "list", "every machine that ships with the program", nullptr, list_all_machines, action);
  add_handler(*verb, "show", "one machine file", "a preset or the path of a machine file", show_machine, action);
}

void add_strategies(CLI::App& app, Action& action, const Invocation&) {
  add_handler(app, "strategies", "every strategy: what it adds, what it saves, how equal it is", nullptr, list_strategies, action);
}

void add_keys(CLI::App& app, Action& action, const Invocation&) {
  add_handler(app, "keys", "every key of a sweep file: its values, its default and what it means",
              "a part of a key or of its meaning", list_keys, action);
}

}  // namespace shardlab::cli
