#include <sqlite3.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "plan/keys.h"
#include "plan/same_machine.h"
#include "reports/columns.h"
#include "reports/outcome_json.h"
#include "reports/store.h"
#include "tests/namespaces.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

/// A new empty folder that goes away with the test.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "shardlab-store-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const char* name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// All that an outcome says, as text: equal texts are equal outcomes.
std::string fingerprint(const CaseOutcome& o) {
  std::string out = outcome_to_json(o) + machine_to_json(o.config.machine);
  if (o.measured)
    for (const double loss : o.measured->losses) out += " " + exact_text(loss);
  for (const OpComparison& op : o.ops)
    for (const double v :
         {op.flops, op.memory_bytes, op.payload_bytes, op.predicted_s, op.measured_s, double(op.count), double(op.stage)})
      out += op.label + op.kind + exact_text(v);
  return out;
}

Store opened(const std::string& path) {
  Result<Store> store = Store::open(path);
  REQUIRE(store.ok());
  return std::move(store).value();
}

RunDirectory opened_directory(const std::string& path, const RunMetadata& run) {
  Result<RunLock> lock = RunLock::take(path, "shardlab run sweep.yaml");
  REQUIRE(lock.ok());
  Result<RunDirectory> directory = RunDirectory::open(std::move(lock).value());
  REQUIRE(directory.ok());
  directory->begin(run);
  return std::move(directory).value();
}

void sql(const std::string& path, const char* statement) {
  sqlite3* handle = nullptr;
  REQUIRE(sqlite3_open(path.c_str(), &handle) == SQLITE_OK);
  REQUIRE(sqlite3_exec(handle, statement, nullptr, nullptr, nullptr) == SQLITE_OK);
  sqlite3_close(handle);
}

/// The single value that a query gives, as text.
std::string text_of(const std::string& path, const std::string& query) {
  sqlite3* handle = nullptr;
  REQUIRE(sqlite3_open(path.c_str(), &handle) == SQLITE_OK);
  sqlite3_stmt* row = nullptr;
  REQUIRE(sqlite3_prepare_v2(handle, query.c_str(), -1, &row, nullptr) == SQLITE_OK);
  REQUIRE(sqlite3_step(row) == SQLITE_ROW);
  const std::string text = reinterpret_cast<const char*>(sqlite3_column_text(row, 0));
  sqlite3_finalize(row);
  sqlite3_close(handle);
  return text;
}

}  // namespace

TEST_CASE("what is appended is read back, bit for bit, by another opening of the file") {
  const Folder folder;
  const std::string path = folder / "results.sqlite";
  std::vector<CaseOutcome> cases = sweep_outcomes();
  cases[0].measured->losses = {5.5, std::nan(""), HUGE_VAL, -HUGE_VAL, 1.0 / 3};
  cases[1].measured->energy_j = 12.5;
  cases[1].measured->unplanned_memory = {{"context", 400'000'003}, {"other", -4096}};
  cases[1].config.train.seed = 0xffffffffffffffffull;
  cases[1].config.train.learning_rate = {
      .kind = LearningRate::Kind::kCosine, .peak = 3e-4f, .warmup_steps = 10, .total_steps = 1000, .floor = 3e-5f};
  for (CaseOutcome& o : cases) o.program_version = "0.1.0";
  {
    Store store = opened(path);
    for (const CaseOutcome& o : cases) store.append(o);
  }
  const Result<Store> again = Store::open_existing(path);
  REQUIRE(again.ok());
  const std::vector<CaseOutcome> read = again->outcomes();
  REQUIRE(read.size() == cases.size());
  for (size_t i = 0; i < cases.size(); ++i) CHECK(fingerprint(read[i]) == fingerprint(cases[i]));
  CHECK(read[1].config.train == cases[1].config.train);
  CHECK(read[1].measured->unplanned_memory == cases[1].measured->unplanned_memory);
  CHECK(read[3].config.layout == cases[3].config.layout);
  CHECK(read[3].config.model == cases[3].config.model);
}

TEST_CASE("a case that is appended again replaces its row and keeps its place") {
  const Folder folder;
  Store store = opened(folder / "results.sqlite");
  std::vector<CaseOutcome> cases = sweep_outcomes();
  for (const CaseOutcome& o : cases) store.append(o);
  CaseOutcome second = cases[1];
  second.measured->losses = {1.0};
  second.ops.resize(1);
  store.append(second);
  const std::vector<CaseOutcome> read = store.outcomes();
  REQUIRE(read.size() == cases.size());
  CHECK(fingerprint(read[1]) == fingerprint(second));
  std::vector<std::string> ids;
  for (const CaseOutcome& o : cases) ids.push_back(o.case_id);
  CHECK(store.case_ids() == ids);
}

TEST_CASE("recorded finds a case of this version of the program only") {
  const Folder folder;
  Store store = opened(folder / "results.sqlite");
  RunMetadata run = sweep_report().metadata;
  store.begin_run(run);
  CaseOutcome o = small_outcome();
  o.program_version.clear();  // the run's is filled in
  store.append(o);
  const auto found = store.recorded(o.case_id, "0.1.0");
  REQUIRE(found);
  o.program_version = "0.1.0";
  CHECK(fingerprint(*found) == fingerprint(o));
  CHECK_FALSE(store.recorded(o.case_id, "0.2.0"));
  CHECK_FALSE(store.recorded("0000000000000000", "0.1.0"));
  CHECK(store.runs() == std::vector<RunMetadata>{run});
}

TEST_CASE("the columns of the store are the columns of the CSV, with the same values") {
  const Folder folder;
  const std::string path = folder / "results.sqlite";
  const CaseOutcome o = sweep_outcomes()[9];
  opened(path).append(o);
  sqlite3* handle = nullptr;
  REQUIRE(sqlite3_open(path.c_str(), &handle) == SQLITE_OK);
  sqlite3_stmt* row = nullptr;
  REQUIRE(sqlite3_prepare_v2(handle, "SELECT * FROM cases", -1, &row, nullptr) == SQLITE_OK);
  REQUIRE(sqlite3_step(row) == SQLITE_ROW);
  int at = 1;  // after `position`
  for (const CaseColumn& c : case_columns()) {
    CAPTURE(c.name);
    CHECK(c.name == sqlite3_column_name(row, at));
    const Value v = c.get(o);
    if (const double* real = std::get_if<double>(&v)) CHECK(sqlite3_column_double(row, at) == *real);
    if (const int64_t* whole = std::get_if<int64_t>(&v)) CHECK(sqlite3_column_int64(row, at) == *whole);
    if (v.index() == 0) CHECK(sqlite3_column_type(row, at) == SQLITE_NULL);
    ++at;
  }
  sqlite3_finalize(row);
  sqlite3_close(handle);
}

TEST_CASE("a newer store, a foreign file and a missing one are refused with what to do") {
  const Folder folder;
  const std::string path = folder / "results.sqlite";
  opened(path);
  sql(path, "PRAGMA user_version = 4");
  const Result<Store> newer = Store::open(path);
  REQUIRE_FALSE(newer.ok());
  CHECK(newer.error().message == path + " was written by a newer shardlab: store version 4, this program reads up to 3");
  CHECK(newer.error().hint == "use that shardlab, or choose another directory with --out");

  sql(path, "PRAGMA user_version = 0");
  for (const auto& open : {&Store::open, &Store::open_existing}) {
    const Result<Store> older = open(path);
    REQUIRE_FALSE(older.ok());
    CHECK(older.error().code == ExitCode::kUsage);
    CHECK(older.error().message == path + " was written by an older shardlab: store version 0, this program reads version 3");
    CHECK(older.error().hint == "read it with that shardlab, and run the sweep again into another directory with --out");
  }

  const std::string foreign = folder / "foreign.sqlite";
  sql(foreign, "CREATE TABLE songs (name TEXT)");
  const Result<Store> other = Store::open(foreign);
  REQUIRE_FALSE(other.ok());
  CHECK(other.error().message == foreign + " is an SQLite file, but no results store of shardlab");

  const Result<Store> missing = Store::open_existing(folder / "none.sqlite");
  REQUIRE_FALSE(missing.ok());
  CHECK(missing.error().code == ExitCode::kUsage);
}

TEST_CASE("a store with the columns of another build is read, brought up to date and appended to") {
  const Folder folder;
  const std::string path = folder / "results.sqlite";
  const std::vector<CaseOutcome> cases = sweep_outcomes();
  {
    Store store = opened(path);
    for (size_t i = 0; i + 1 < cases.size(); ++i) store.append(cases[i]);
  }
  sql(path, "ALTER TABLE cases DROP COLUMN loss_unigram");
  sql(path, "ALTER TABLE cases ADD COLUMN experts INTEGER");
  {
    const Result<Store> reading = Store::open_existing(path);
    REQUIRE(reading.ok());
    CHECK(reading->outcomes().size() == cases.size() - 1);  // reading needs no column
  }
  Store store = opened(path);
  store.append(cases.back());
  const std::vector<CaseOutcome> stored = store.outcomes();
  REQUIRE(stored.size() == cases.size());
  for (size_t i = 0; i < cases.size(); ++i) CHECK(fingerprint(stored[i]) == fingerprint(cases[i]));
  const std::string columns = text_of(path, "SELECT group_concat(name) FROM pragma_table_info('cases')");
  CHECK(columns.find("loss_unigram") != std::string::npos);
  CHECK(columns.find("experts") == std::string::npos);
  const std::string with_unigram = "SELECT count(*) FROM cases WHERE loss_unigram IS NOT NULL";
  const auto measured =
      std::count_if(cases.begin(), cases.end(), [](const CaseOutcome& o) { return o.measured && o.measured->loss_unigram; });
  REQUIRE(measured > 1);
  CHECK(text_of(path, with_unigram) == std::to_string(measured));
}

TEST_CASE("a file that is no database is the world's fault, and says so") {
  const Folder folder;
  const std::string path = folder / "results.sqlite";
  std::ofstream(path) << std::string(4096, 'x');
  try {
    (void)Store::open(path);
    FAIL("a file of x was opened as a store");
  } catch (const WorldError& e) {
    CHECK(std::string(e.what()).find("file is not a database") != std::string::npos);
    CHECK(e.hint().find("--out") != std::string::npos);
  }
}

TEST_CASE("a full disk keeps what was stored and names the remedy") {
  const Folder folder;
  const std::string path = folder / "results.sqlite";
  Store store = opened(path);
  store.append(sweep_outcomes()[0]);
  // The limit on file sizes stands for a full disk: the write that crosses it fails.
  struct rlimit old;
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = old;
  small.rlim_cur = std::filesystem::file_size(path);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  std::string message, hint;
  try {
    for (const CaseOutcome& o : sweep_outcomes()) store.append(o);
  } catch (const WorldError& e) {
    message = e.what();
    hint = e.hint();
  }
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  CAPTURE(message);
  CHECK(message.find(path) == 0);
  CHECK(hint.find("--resume") != std::string::npos);
  CHECK(store.outcomes().size() >= 1);
  CHECK(fingerprint(store.outcomes()[0]) == fingerprint(sweep_outcomes()[0]));
}

TEST_CASE("a run directory keeps store and CSV in step, and resumes") {
  const Folder folder;
  const std::string run = folder / "run";
  const RunMetadata metadata = sweep_report().metadata;
  std::vector<CaseOutcome> cases = sweep_outcomes();
  for (CaseOutcome& o : cases) o.program_version = metadata.program_version;
  {
    RunDirectory directory = opened_directory(run, metadata);
    directory.append(cases[0]);
    CHECK(contents(run + "/results.csv") == print_csv(case_table({cases.data(), 1})));
  }
  RunDirectory directory = opened_directory(run, metadata);
  CHECK(directory.store().recorded(cases[0].case_id, metadata.program_version));
  for (size_t i = 1; i < cases.size(); ++i) directory.append(cases[i]);
  directory.finish();
  CHECK(contents(run + "/results.csv") == print_csv(case_table(cases)));
  CHECK(directory.store().runs().size() == 2);
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(run)) files += entry.is_regular_file();
  CHECK(files == 3);  // the lock too; no temporary file is left behind
}

TEST_CASE("a run directory has one writer, who is named to others until it lets go") {
  const Folder folder;
  const std::string run = folder / "run";
  {
    const Result<RunLock> first = RunLock::take(run, "shardlab run sweep.yaml");
    REQUIRE(first.ok());
    const Result<RunLock> second = RunLock::take(run, "shardlab run other.yaml");
    REQUIRE_FALSE(second.ok());
    CHECK(second.error().code == ExitCode::kUsage);
    CHECK(second.error().message.find(run + " is written by another run: process " + std::to_string(::getpid())) == 0);
    CHECK(second.error().message.ends_with("shardlab run sweep.yaml"));
  }
  CHECK(RunLock::take(run, "shardlab run other.yaml").ok());
}

TEST_CASE("a removed store takes its journal along, which the next of the name would be rolled back by") {
  const Folder folder;
  const std::string path = folder / "outcome.sqlite";
  opened(path).append(small_outcome());
  std::ofstream(path + "-journal") << "of a process that was killed";
  Store::remove(path);
  CHECK_FALSE(std::filesystem::exists(path));
  CHECK_FALSE(std::filesystem::exists(path + "-journal"));
  Store::remove(path);  // nothing to remove is no failure
}

TEST_CASE("many outcomes saved in one go are those saved one by one") {
  const Folder folder;
  const RunMetadata metadata = sweep_report().metadata;
  std::vector<CaseOutcome> cases = sweep_outcomes();
  for (CaseOutcome& o : cases) o.program_version = metadata.program_version;
  RunDirectory directory = opened_directory(folder / "run", metadata);
  directory.append(std::span<const CaseOutcome>(cases).first(5));
  cases[2].reason = "said again";
  directory.append(std::span<const CaseOutcome>(cases).subspan(2));  // replaces three, adds the others
  directory.finish();
  CHECK(contents(folder / "run/results.csv") == print_csv(case_table(cases)));
  const std::vector<CaseOutcome> stored = directory.store().outcomes();
  REQUIRE(stored.size() == cases.size());
  for (size_t i = 0; i < cases.size(); ++i) CHECK(fingerprint(stored[i]) == fingerprint(cases[i]));
  CHECK(directory.size() == static_cast<int64_t>(cases.size()));
  std::vector<std::string> reasons;
  directory.for_each([&](const CaseOutcome& o) { reasons.push_back(o.reason); });
  REQUIRE(reasons.size() == cases.size());
  CHECK(reasons[2] == "said again");
}

TEST_CASE("a directory of more cases than are held in memory has the same rows, and replaces rows like any other") {
  const Folder folder;
  const RunMetadata metadata = sweep_report().metadata;
  std::vector<CaseOutcome> cases;
  for (int i = 0; i < 5600; ++i) {
    CaseOutcome o = small_outcome();
    o.case_id = fmt::format("{:016x}", i), o.program_version = metadata.program_version, o.config.name = fmt::format("case {}", i);
    o.ops.clear();
    cases.push_back(std::move(o));
  }
  const std::span<const CaseOutcome> all(cases);
  {
    RunDirectory directory = opened_directory(folder / "run", metadata);
    for (const size_t first : {size_t{0}, size_t{4000}}) directory.append(all.subspan(first, first == 0 ? 4000 : 1100));
    directory.append(all.subspan(5100, 400));  // after the directory has left memory
    directory.append(cases[5500]);
    directory.append(all.subspan(5501));
    directory.finish();
    CHECK(directory.size() == 5600);
    CHECK(contents(folder / "run/results.csv") == print_csv(case_table(cases)));
  }
  cases[17].reason = "said again";
  RunDirectory directory = opened_directory(folder / "run", metadata);
  directory.append(all.subspan(17, 1));
  directory.finish();
  CHECK(directory.size() == 5600);
  CHECK(contents(folder / "run/results.csv") == print_csv(case_table(cases)));
  size_t at = 0;
  directory.for_each([&](const CaseOutcome& o) { CHECK(o.case_id == cases[at++].case_id); });
  CHECK(at == 5600);
}

TEST_CASE("writing into a missing directory throws and leaves nothing") {
  const Folder folder;
  CHECK_THROWS_AS(write_file_atomically(folder / "no/such/file.csv", "x"), WorldError);
}

TEST_CASE("a described machine is stored whole: what is read from a store is priced as it was") {
  Machine m;
  m.id = "described";
  m.device = {.id = "device",
              .architecture = "hopper",
              .memory_bytes = 1 << 30,
              .memory_bytes_per_s = 1e12,
              .peak_flops = {{"bf16", 1e15}},
              .link_bytes_per_s = 4e11,
              .power_w = 700,
              .constants = {{"matmul.bf16.rate", 0.7}, {"launch.start_s", 3e-6}},
              .provenance = {{"matmul.bf16.rate", Provenance::kMeasured}, {"fabric.rails_per_node", Provenance::kDatasheet}}};
  m.devices_per_node = 8, m.nodes = 4, m.inter_bytes_per_s = 5e10;
  m.fabric = {{"rails_per_node", 8}, {"oversubscription", 2}};
  const auto read = machine_from_json(machine_to_json(m));
  REQUIRE(read.ok());
  CHECK(same(*read, m));
}

TEST_CASE("a mixed machine and the needs of its stages are stored, and nothing of them of another machine") {
  CaseOutcome o;
  o.predicted.emplace();
  o.config.machine.device.peak_flops = {{"bf16", 1e12}};
  CHECK(machine_to_json(o.config.machine).find("kinds") == std::string::npos);
  CHECK(outcome_to_json(o).find("stages") == std::string::npos);
  o.config.machine.kinds = {o.config.machine, o.config.machine};
  o.config.machine.kinds[1].device.id = "other", o.config.machine.kinds[1].nodes = 3;
  o.predicted->stages = {{"one", 12, 100, 110, 200}, {"other", 20, 90, 95, 0}};
  const auto machine = machine_from_json(machine_to_json(o.config.machine));
  REQUIRE(machine.ok());
  REQUIRE(machine->kinds.size() == 2);
  CHECK(machine->kinds[1].device.id == "other");
  CHECK(machine->kinds[1].nodes == 3);
  CHECK(machine->kinds[0].device.peak_flops.at("bf16") == 1e12);
  const auto back = outcome_from_json(outcome_to_json(o));
  REQUIRE(back.ok());
  CHECK(back->predicted->stages == o.predicted->stages);
}

TEST_CASE("stored JSON of a wrong kind is refused") {
  CHECK_FALSE(outcome_from_json("[1, 2]").ok());
  CHECK_FALSE(outcome_from_json("{\"parameters\": \"many\"}").ok());
  CHECK_FALSE(outcome_from_json("{\"status\": \"splendid\"}").ok());
  CHECK_FALSE(machine_from_json("{").ok());
  CHECK_FALSE(outcome_from_json("{\"status\": " + std::string(200'000, '[') + std::string(200'000, ']') + "}").ok());
  CHECK_FALSE(outcome_from_json("{\"config\": {\"layout.dp\": \"18446744073709551615\"}}").ok());
  CHECK_FALSE(outcome_from_json("{\"config\": {\"layout.dp\": \"4294967296\"}}").ok());
  CHECK_FALSE(outcome_from_json("{\"config\": {\"layout.dp\": 2}}").ok());
  CHECK_FALSE(outcome_from_json("{\"config\": {\"layout.ranks\": \"2\"}}").ok());
  CHECK_FALSE(outcome_from_json("{\"config\": {\"train.precision\": \"fp7\"}}").ok());
  const Result<CaseOutcome> older = outcome_from_json("{\"case_id\": \"a1\", \"config\": {\"layout.dp\": \"2\"}, \"unknown\": 3}");
  REQUIRE(older.ok());
  CHECK(older->config.layout.dp == 2);
  CHECK(older->config.layout.tp == 1);
}

TEST_CASE("a stored case leaves out the keys at their defaults: no value of a key sets another key") {
  const Case unset;
  for (const CaseKey& key : case_keys()) {
    if (key.get == nullptr) continue;
    std::vector<std::string> values = words_of(key);
    for (const char* number : {"0", "1", "2", "3", "0.5"}) values.emplace_back(number);
    for (const std::string& value : values) {
      Case changed;
      if (!has_form(key, value) || !key.set(changed, value)) continue;
      for (const CaseKey& other : case_keys())
        if (other.get != nullptr && other.path != key.path) {
          INFO(std::string(key.path) + "=" + value + " and " + std::string(other.path));
          CHECK(other.get(changed) == other.get(unset));
        }
    }
  }
}

/// `o` with a key at another value than it has by default, where the case has a word for one.
CaseOutcome with_key_changed(CaseOutcome o, const CaseKey& key) {
  std::vector<std::string> values = words_of(key);
  for (const char* text : {"3", "0.5", "true", "false", "a, \"b\""}) values.emplace_back(text);
  for (const std::string& value : values)
    if (Case c; has_form(key, value) && key.set(c, value) && key.get(c) != key.get(Case())) return key.set(o.config, value), o;
  return o;
}

TEST_CASE("rows of cases one after another are those of each case alone") {
  std::vector<CaseOutcome> cases = sweep_outcomes();
  for (const CaseKey& key : case_keys()) {
    if (key.get == nullptr) continue;
    cases.push_back(with_key_changed(small_outcome(), key));
    cases.push_back(small_outcome());
    if (key.path.starts_with("layout.")) cases.back().predicted.reset();
    if (key.path.starts_with("train.")) cases.back().measured.reset(), cases.back().reason = "said, with a \"comma\"";
  }
  const Folder folder;
  Store store = opened(folder / "results.sqlite");
  RowMaker maker(store.defaults());
  StoredRows rows;
  std::set<std::string> machines;
  for (int pass = 0; pass < 2; ++pass) {
    rows.clear();
    std::string csv;
    for (size_t i = 0; i < cases.size(); ++i) {
      cases[i].case_id = fmt::format("{:016x}", i);
      maker.add(cases[i], rows);
      std::vector<Value> values;
      for (const CaseColumn& c : case_columns()) values.push_back(c.get(cases[i]));
      add_csv_row(csv, values);
    }
    CHECK(rows.csv() == csv);
    REQUIRE(rows.size() == cases.size());
    for (const auto& [key, text] : rows.machines()) machines.insert(key);
    std::set<std::vector<uint16_t>> sets_of_columns;
    for (size_t i = 0; i < cases.size(); ++i) {
      const StoredRows::Row row = rows.row(i);
      CAPTURE(i);
      CHECK(row.outcome == outcome_to_json(cases[i]));
      CHECK(machines.contains(std::string(row.machine_key)));
      std::vector<uint16_t> columns;
      for (const StoredRows::Cell& cell : row.cells) columns.push_back(cell.column);
      sets_of_columns.insert(columns);
      auto cell = row.cells.begin();
      for (uint16_t c = 0; c < case_columns().size(); ++c) {
        const Value value = case_columns()[c].get(cases[i]);
        if (value.index() == 0) continue;
        REQUIRE(cell != row.cells.end());
        CHECK(cell->column == c);
        const Value held = cell->kind == StoredRows::Cell::Kind::kText   ? Value(std::string(rows.text(*cell)))
                           : cell->kind == StoredRows::Cell::Kind::kReal ? Value(cell->real)
                           : std::holds_alternative<bool>(value)         ? Value(cell->integer == 1)
                                                                         : Value(cell->integer);
        CHECK(exact_text(held) == exact_text(value));
        ++cell;
      }
      CHECK(cell == row.cells.end());
    }
    CHECK(sets_of_columns.size() > 5);
    // The second time every row takes the place of another.
    store.add(rows);
    store.save();
    CHECK(store.size() == static_cast<int64_t>(cases.size()));
    for (const CaseOutcome& stored : store.outcomes()) {
      CaseOutcome without = cases[static_cast<size_t>(std::stoull(stored.case_id, nullptr, 16))];
      without.ops.clear();
      if (without.measured) without.measured->losses.clear();
      REQUIRE(fingerprint(stored) == fingerprint(without));
    }
    std::ranges::reverse(cases);
  }
}

TEST_CASE("cases that come fast are saved once in an interval, and at once when asked") {
  const Folder folder;
  const std::string path = folder / "results.sqlite";
  Store store = opened(path);
  CaseOutcome outcome = sweep_outcomes().front();
  outcome.program_version = "0.1.0";
  const auto add = [&](const char* id) {
    outcome.case_id = id;
    StoredRows rows;
    RowMaker(store.defaults()).add(outcome, rows);
    store.add(rows);
  };
  store.save_every(std::chrono::hours(1));
  add("first"), add("second"), add("third");
  CHECK(opened(path).size() == 0);
  store.save();
  CHECK(opened(path).size() == 3);
  add("fourth");
  CHECK(opened(path).size() == 3);
  store.save_every(std::chrono::seconds(0));
  add("fifth");
  CHECK(opened(path).size() == 5);
  store.save_every(std::chrono::hours(1));
  add("sixth");
  outcome.case_id = "last";
  store.append(outcome);  // what was not saved yet is saved first, and keeps its place
  CHECK(opened(path).case_ids() == std::vector<std::string>{"first", "second", "third", "fourth", "fifth", "sixth", "last"});
}

TEST_CASE("a key that a stored case leaves out is what it was when the store was made") {
  const Folder folder;
  const std::string path = folder / "results.sqlite";
  CaseOutcome outcome = sweep_outcomes().front();
  outcome.case_id = "old", outcome.config.train.seed = Train().seed;
  opened(path).append(outcome);
  SECTION("another build has another default") {
    sql(path, "UPDATE defaults SET value = '77' WHERE key = 'train.seed'");
    Store store = opened(path);
    CHECK(store.outcomes().front().config.train.seed == 77);
    outcome.case_id = "new";
    store.append(outcome);
    CHECK(opened(path).recorded("new", outcome.program_version)->config.train.seed == Train().seed);
    outcome.case_id = "same", outcome.config.train.seed = 77;
    store.append(outcome);
    CHECK(opened(path).recorded("same", outcome.program_version)->config.train.seed == 77);
  }
  SECTION("the build that made the store did not have the key") {
    sql(path, "DELETE FROM defaults WHERE key = 'train.seed'");
    CHECK(opened(path).outcomes().front().config.train.seed == Train().seed);
    CHECK(text_of(path, "SELECT value FROM defaults WHERE key = 'train.seed'") == std::to_string(Train().seed));
  }
  SECTION("a default is damaged") {
    sql(path, "UPDATE defaults SET value = 'fp7' WHERE key = 'train.precision'");
    const auto refused = Store::open_existing(path);
    REQUIRE(!refused.ok());
    CHECK(refused.error().message.find("train.precision") != std::string::npos);
  }
}
