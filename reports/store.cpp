#include "reports/store.h"

#include <fmt/format.h>
#include <sqlite3.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <map>
#include <memory_resource>
#include <utility>

#include "plan/base/check.h"
#include "plan/base/files.h"
#include "plan/base/hash.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "plan/op.h"
#include "plan/same_machine.h"
#include "reports/columns.h"
#include "reports/outcome_json.h"
#include "reports/sqlite.h"

namespace shardlab::reports {

namespace {

using sqlite::Query;

constexpr int kApplicationId = 0x73686C62;  ///< "shlb", in the header of the file: tells a store from any other SQLite file
constexpr int kBusyMilliseconds = 10'000;

/// SQLite's type for a result column, by the unit it counts in.
std::string_view sql_type(Unit unit) {
  switch (unit) {
    case Unit::kBytes:
    case Unit::kCount: return "INTEGER";
    case Unit::kNone: return "";  // words, flags and small integers, each as it is
    default: return "REAL";
  }
}

/// "INSERT INTO cases (...) VALUES (...) ON CONFLICT DO UPDATE", of rows with values in these columns and NULL in the others: a replaced row
/// keeps its rowid and so its place.
std::string upsert_case_sql(std::span<const StoredRows::Cell> cells) {
  std::string names, marks, updates;
  const auto update = [&](std::string_view name) {
    if (name != "case_id") updates += fmt::format("{}\"{}\" = excluded.\"{}\"", updates.empty() ? "" : ", ", name, name);
  };
  const auto insert = [&](std::string_view name) {
    names += fmt::format("{}\"{}\"", names.empty() ? "" : ", ", name);
    marks += marks.empty() ? "?" : ", ?";
  };
  for (const StoredRows::Cell& cell : cells) insert(case_columns()[cell.column].name);
  for (const CaseColumn& c : case_columns()) update(c.name);
  for (const std::string_view name : {"machine_key", "outcome"}) insert(name), update(name);
  return fmt::format("INSERT INTO cases ({}) VALUES ({}) ON CONFLICT (case_id) DO UPDATE SET {}", names, marks, updates);
}

template <class T>
T stored(Result<T> result) {
  if (!result) throw WorldError(result.error().message, result.error().hint);
  return std::move(result).value();
}

/// Rows of one case, or of all when `case_id` is empty.
class Selection {
 public:
  Selection(sqlite3* handle, const std::string& columns_and_table, const std::string& order, std::string_view case_id)
      : statement_(handle, columns_and_table + (case_id.empty() ? "" : " WHERE case_id = ?") + " ORDER BY " + order) {
    if (!case_id.empty()) statement_.bind(1, case_id);
  }
  Query* operator->() { return &statement_; }

 private:
  Query statement_;
};

using ById = std::map<std::string, CaseOutcome*>;

void read_losses(sqlite3* handle, std::string_view case_id, const ById& by_id) {
  for (Selection s(handle, "SELECT case_id, loss, word FROM losses", "case_id, step", case_id); s->step();) {
    const auto found = by_id.find(s->text(0));
    if (found == by_id.end() || !found->second->measured) continue;
    const std::string word = s->text(2);
    found->second->measured->losses.push_back(word == "inf" ? HUGE_VAL : word == "-inf" ? -HUGE_VAL : s->real(1));
  }
}

void read_ops(sqlite3* handle, std::string_view case_id, const ById& by_id) {
  for (Selection s(
           handle,
           "SELECT case_id, stage, label, kind, count, flops, memory_bytes, payload_bytes, predicted_s, measured_s FROM ops",
           "case_id, position", case_id);
       s->step();) {
    const auto found = by_id.find(s->text(0));
    if (found == by_id.end()) continue;
    found->second->ops.push_back({static_cast<int>(s->integer(1)), s->text(2), s->text(3), static_cast<int>(s->integer(4)),
                                  s->real(5), s->real(6), s->real(7), s->real(8), s->real(9)});
  }
}

/// One case, or all when `case_id` is empty, in the order of first appending.
std::vector<CaseOutcome> read_outcomes(sqlite3* handle, const CaseDefaults& defaults, std::string_view case_id) {
  std::map<std::string, Machine> machines;
  std::vector<CaseOutcome> out;
  for (Selection s(
           handle,
           "SELECT outcome, machine_key, (SELECT machine FROM machines m WHERE m.machine_key = cases.machine_key) FROM cases",
           "position", case_id);
       s->step();) {
    out.push_back(stored(outcome_from_json(s->text(0), defaults)));
    const auto [machine, fresh] = machines.try_emplace(s->text(1));
    if (fresh) machine->second = stored(machine_from_json(s->text(2)));
    out.back().config.machine = machine->second;
  }
  ById by_id;
  for (CaseOutcome& o : out) by_id[o.case_id] = &o;
  read_losses(handle, case_id, by_id);
  read_ops(handle, case_id, by_id);
  return out;
}

}  // namespace

void Store::Close::operator()(sqlite3* handle) const { sqlite3_close(handle); }

Result<Store> Store::open(const std::string& path) { return open_with(path, true); }

Result<Store> Store::open_existing(const std::string& path) {
  if (!is_there(path))
    return Error{ExitCode::kUsage, fmt::format("{}: no such results store", path),
                 "name a directory that `shardlab run` wrote (--out DIR)", ""};
  return open_with(path, false);
}

void Store::remove(const std::string& path) {
  // A journal without its store would be taken for that of the next store of this name.
  for (const char* part : {"", "-journal", "-wal", "-shm"}) {
    std::error_code failure;
    std::filesystem::remove(path + part, failure);
    if (failure)
      throw WorldError(fmt::format("{}{}: {} while removing it", path, part, failure.message()), "make its directory writable");
  }
}

namespace {

/// Throws where the file's pages do not hang together: a file cut short, or written by something else.
void check_integrity(sqlite3* handle, const std::string& path) {
  Query check(handle, "PRAGMA quick_check(1)");
  const std::string found = check.step() ? check.text(0) : "nothing";
  if (found != "ok") throw WorldError(fmt::format("{} is damaged: {}", path, found), sqlite::remedy(SQLITE_CORRUPT));
}

}  // namespace

/// A reader too opens for writing: a process that died in the middle of a commit left a journal, which the next one to open the
/// store plays back. Where the file may not be written SQLite opens it for reading by itself.
Result<Store> Store::open_with(const std::string& path, bool create) {
  std::error_code missing;
  const auto found = std::filesystem::symlink_status(path, missing);
  if (create && std::filesystem::is_symlink(found))
    throw WorldError(fmt::format("{} is a link: results would be written elsewhere", path),
                     "remove the link, or choose another directory with --out");
  if (const auto status = std::filesystem::status(path, missing);
      std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw WorldError(fmt::format("{} is no file", path), "choose another directory with --out");
  // One thread at a time uses a store: SQLite need not lock it for every value of a row.
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | (create ? SQLITE_OPEN_CREATE : 0);
  sqlite3* raw = nullptr;
  const int code = sqlite3_open_v2(path.c_str(), &raw, flags, nullptr);
  Store store(std::unique_ptr<sqlite3, Close>(raw), path);
  if (raw == nullptr) throw WorldError(fmt::format("{}: no memory to open the results store", path), "close other programs");
  sqlite3_extended_result_codes(raw, 1);
  sqlite3_busy_timeout(raw, kBusyMilliseconds);
  if (code != SQLITE_OK) sqlite::fail(raw, "opening the results store");
  check_integrity(raw, path);

  const auto pragma = [&](const char* name) {
    Query s(raw, fmt::format("PRAGMA {}", name));
    return s.step() ? s.integer(0) : 0;
  };
  const int64_t application = pragma("application_id"), version = pragma("user_version");
  const bool blank = application == 0 && version == 0 && [&] {
    Query s(raw, "SELECT count(*) FROM sqlite_master");
    return s.step() && s.integer(0) == 0;
  }();
  if (blank && create) {
    store.create_schema();
    return store;
  }
  if (blank)
    return Error{ExitCode::kUsage, fmt::format("{} holds no results yet: the run that made it ended before its first case", path),
                 "start the run again, with --out for this directory", ""};
  if (application != kApplicationId)
    return Error{ExitCode::kUsage, fmt::format("{} is an SQLite file, but no results store of shardlab", path),
                 "choose another directory with --out", ""};
  if (version > kStoreVersion)
    return Error{ExitCode::kUsage,
                 fmt::format("{} was written by a newer shardlab: store version {}, this program reads up to {}", path, version,
                             kStoreVersion),
                 "use that shardlab, or choose another directory with --out", ""};
  if (version < kStoreVersion)
    return Error{ExitCode::kUsage,
                 fmt::format("{} was written by an older shardlab: store version {}, this program reads version {}", path, version,
                             kStoreVersion),
                 "read it with that shardlab, and run the sweep again into another directory with --out", ""};
  SHARDLAB_TRY(store.read_defaults());
  if (create) store.keep_new_defaults();
  if (create && !store.has_columns_of_this_build()) store.project_cases_anew();
  if (!create) sqlite::execute(raw, "PRAGMA query_only = 1");
  return store;
}

Result<void> Store::read_defaults() {
  std::vector<CaseDefaults::Text> texts;
  for (Query s(handle_.get(), "SELECT key, value FROM defaults"); s.step();) texts.emplace_back(s.text(0), s.text(1));
  Result<CaseDefaults> defaults = CaseDefaults::of(texts);
  if (!defaults.ok()) return defaults.error();
  defaults_ = std::move(defaults).value();
  return {};
}

/// A key that no case of the store has is left out from here on where it is at this build's default: earlier cases are read with that.
void Store::keep_new_defaults() {
  if (defaults_.complete()) return;
  Query insert(handle_.get(), "INSERT OR IGNORE INTO defaults VALUES (?, ?)");
  for (const auto& [key, value] : defaults_.texts()) insert.bind(1, key).bind(2, value).run();
  SHARDLAB_CHECK(read_defaults().ok(), "a default of this build cannot be read");
}

bool Store::has_columns_of_this_build() const {
  std::vector<std::string> wanted{"position"}, there;
  for (const CaseColumn& c : case_columns()) wanted.emplace_back(c.name);
  wanted.insert(wanted.end(), {"machine_key", "outcome"});
  for (Query s(handle_.get(), "SELECT name FROM pragma_table_info('cases') ORDER BY cid"); s.step();) there.push_back(s.text(0));
  return there == wanted;
}

namespace {

/// Writes rows of `cases` with a statement for each set of columns that hold values. Half of the columns of an estimate are NULL: to bind
/// and read NULL for each takes a third of the time of a row.
class RowWriter {
 public:
  explicit RowWriter(sqlite3* handle) : handle_(handle) {}

  void write(const StoredRows& rows, const StoredRows::Row& row) { write(rows, row, row.machine_key, row.outcome); }
  /// With another machine and outcome than the row has.
  void write(const StoredRows& rows, const StoredRows::Row& row, std::string_view machine_key, std::string_view outcome) {
    using Kind = StoredRows::Cell::Kind;
    Query& query = query_of(row.cells);
    int index = 0;
    for (const StoredRows::Cell& cell : row.cells) {
      ++index;
      switch (cell.kind) {
        case Kind::kInteger: query.bind(index, cell.integer); break;
        case Kind::kReal: query.bind(index, cell.real); break;
        case Kind::kText: query.bind_in_place(index, rows.text(cell)); break;
      }
    }
    query.bind_in_place(index + 1, machine_key).bind_in_place(index + 2, outcome).run_bound();
  }

 private:
  struct Statement {
    std::vector<uint16_t> columns;
    Query query;
  };
  Query& query_of(std::span<const StoredRows::Cell> cells) {
    constexpr size_t kRemembered = 32;
    const auto known = std::ranges::find_if(
        statements_, [&](const auto& s) { return std::ranges::equal(s->columns, cells, {}, {}, &StoredRows::Cell::column); });
    if (known != statements_.end()) return (*known)->query;
    if (statements_.size() == kRemembered) statements_.clear();
    std::vector<uint16_t> columns;
    for (const StoredRows::Cell& cell : cells) columns.push_back(cell.column);
    statements_.emplace_back(new Statement{std::move(columns), Query(handle_, upsert_case_sql(cells))});
    return statements_.back()->query;
  }

  sqlite3* handle_;
  std::vector<std::unique_ptr<Statement>> statements_;
};

/// Writes outcomes with statements that are prepared once: preparing them takes longer than running them.
class CaseWriter {
 public:
  CaseWriter(sqlite3* handle, const CaseDefaults& defaults)
      : maker_(defaults),
        machine_(handle, "INSERT OR IGNORE INTO machines VALUES (?, ?)"),
        cases_(handle),
        no_losses_(handle, "DELETE FROM losses WHERE case_id = ?"),
        no_ops_(handle, "DELETE FROM ops WHERE case_id = ?"),
        loss_(handle, "INSERT INTO losses VALUES (?, ?, ?, ?)"),
        op_(handle, "INSERT INTO ops VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"),
        has_losses_(Query(handle, "SELECT 1 FROM losses LIMIT 1").step()),
        has_ops_(Query(handle, "SELECT 1 FROM ops LIMIT 1").step()) {}

  void write(const CaseOutcome& outcome) {
    rows_.clear();
    maker_.add(outcome, rows_);
    write(rows_);
    write_losses(outcome);
    write_ops(outcome);
  }
  /// Rows of cases without losses and ops.
  void write(const StoredRows& rows) {
    for (const auto& [key, text] : rows.machines()) machine_.bind(1, key).bind(2, text).run();
    for (size_t i = 0; i < rows.size(); ++i) {
      const StoredRows::Row row = rows.row(i);
      cases_.write(rows, row);
      const std::string_view case_id = rows.text(row.cells.front());
      if (has_losses_) no_losses_.bind(1, case_id).run();
      if (has_ops_) no_ops_.bind(1, case_id).run();
    }
  }

 private:
  void write_losses(const CaseOutcome& outcome) {
    if (!outcome.measured) return;
    has_losses_ |= !outcome.measured->losses.empty();
    for (size_t i = 0; i < outcome.measured->losses.size(); ++i) {
      const double v = outcome.measured->losses[i];
      loss_.bind(1, outcome.case_id).bind(2, static_cast<int64_t>(i)).bind(3, v).bind_null(4);
      if (!std::isfinite(v)) loss_.bind(4, std::isnan(v) ? "nan" : v < 0 ? "-inf" : "inf");
      loss_.run();
    }
  }
  void write_ops(const CaseOutcome& outcome) {
    has_ops_ |= !outcome.ops.empty();
    for (size_t i = 0; i < outcome.ops.size(); ++i) {
      const OpComparison& o = outcome.ops[i];
      op_.bind(1, outcome.case_id)
          .bind(2, static_cast<int64_t>(i))
          .bind(3, int64_t{o.stage})
          .bind(4, o.label)
          .bind(5, o.kind)
          .bind(6, int64_t{o.count});
      op_.bind(7, o.flops).bind(8, o.memory_bytes).bind(9, o.payload_bytes).bind(10, o.predicted_s).bind(11, o.measured_s).run();
    }
  }

  RowMaker maker_;
  StoredRows rows_;  ///< of the last outcome
  Query machine_;
  RowWriter cases_;
  Query no_losses_, no_ops_, loss_, op_;
  bool has_losses_, has_ops_;  ///< of any case: those of a case written before are replaced
};

}  // namespace

/// What `add` has not saved yet.
struct Store::Unsaved {
  Unsaved(sqlite3* handle, const CaseDefaults& defaults) : writer(handle, defaults) {}
  std::optional<sqlite::Transaction> transaction;
  CaseWriter writer;
  std::chrono::steady_clock::time_point saved = std::chrono::steady_clock::now();
};

void Store::Drop::operator()(Unsaved* unsaved) const { delete unsaved; }

void Store::add(const StoredRows& rows) {
  if (!unsaved_) {
    // The index of a million ids: what does not fit is read again for every row.
    sqlite::execute(handle_.get(), "PRAGMA cache_size = -49152");
    unsaved_.reset(new Unsaved(handle_.get(), defaults_));
  }
  if (!unsaved_->transaction) unsaved_->transaction.emplace(handle_.get());
  unsaved_->writer.write(rows);
  if (std::chrono::steady_clock::now() - unsaved_->saved >= interval_) save();
}

void Store::save() {
  if (!unsaved_ || !unsaved_->transaction) return;
  unsaved_->transaction->commit();
  unsaved_->transaction.reset();
  unsaved_->saved = std::chrono::steady_clock::now();
}

/// Every column of `cases` is a projection of the outcome beside it. The outcomes' own texts are kept as they are: they may hold
/// what only the other build understands.
void Store::project_cases_anew() {
  const std::vector<CaseOutcome> outcomes = read_outcomes(handle_.get(), defaults_, {});
  std::vector<std::pair<std::string, std::string>> kept;
  for (Query s(handle_.get(), "SELECT machine_key, outcome FROM cases ORDER BY position"); s.step();)
    kept.emplace_back(s.text(0), s.text(1));
  sqlite::Transaction transaction(handle_.get());
  sqlite::execute(handle_.get(), "DROP TABLE cases");
  create_cases();
  RowMaker maker(defaults_);
  RowWriter writer(handle_.get());
  StoredRows rows;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    rows.clear();
    maker.add(outcomes[i], rows);
    writer.write(rows, rows.row(0), kept[i].first, kept[i].second);
  }
  transaction.commit();
}

void Store::create_cases() {
  std::string columns;
  for (const CaseColumn& c : case_columns())
    columns += fmt::format("\"{}\" {}{}, ", c.name, sql_type(c.unit), c.name == "case_id" ? "TEXT NOT NULL UNIQUE" : "");
  sqlite::execute(
      handle_.get(),
      fmt::format("CREATE TABLE cases (position INTEGER PRIMARY KEY, {} machine_key TEXT NOT NULL, outcome TEXT NOT NULL)",
                  columns));
}

void Store::create_schema() {
  // A case takes 2 KiB: of SQLite's usual pages of 4 KiB nearly half would stay empty.
  sqlite::execute(handle_.get(), "PRAGMA page_size = 16384");
  sqlite::Transaction transaction(handle_.get());
  sqlite::execute(handle_.get(), fmt::format("PRAGMA application_id = {}", kApplicationId));
  sqlite::execute(handle_.get(), fmt::format("PRAGMA user_version = {}", kStoreVersion));
  sqlite::execute(handle_.get(), "CREATE TABLE runs (run INTEGER PRIMARY KEY, metadata TEXT NOT NULL)");
  sqlite::execute(handle_.get(), "CREATE TABLE machines (machine_key TEXT PRIMARY KEY, machine TEXT NOT NULL)");
  sqlite::execute(handle_.get(), "CREATE TABLE defaults (key TEXT PRIMARY KEY, value TEXT NOT NULL)");
  SHARDLAB_CHECK(read_defaults().ok(), "a store without defaults cannot be read");
  keep_new_defaults();
  create_cases();
  sqlite::execute(
      handle_.get(),
      "CREATE TABLE losses (case_id TEXT NOT NULL, step INTEGER NOT NULL, loss REAL, word TEXT, PRIMARY KEY (case_id, step))");
  sqlite::execute(handle_.get(),
                  "CREATE TABLE ops (case_id TEXT NOT NULL, position INTEGER NOT NULL, stage INTEGER, label TEXT, kind TEXT, count "
                  "INTEGER, flops REAL, "
                  "memory_bytes REAL, payload_bytes REAL, predicted_s REAL, measured_s REAL, PRIMARY KEY (case_id, position))");
  transaction.commit();
}

void Store::begin_run(const RunMetadata& run) {
  program_version_ = run.program_version;
  Query(handle_.get(), "INSERT INTO runs (metadata) VALUES (?)").bind(1, run_to_json(run)).run();
}

void Store::append(const CaseOutcome& outcome) { append({&outcome, 1}); }

void Store::append(std::span<const CaseOutcome> outcomes) {
  save();
  sqlite::Transaction transaction(handle_.get());
  CaseWriter writer(handle_.get(), defaults_);
  for (const CaseOutcome& given : outcomes) {
    if (!given.program_version.empty()) {
      writer.write(given);
      continue;
    }
    CaseOutcome outcome = given;
    outcome.program_version = program_version_;
    writer.write(outcome);
  }
  transaction.commit();
}

std::optional<CaseOutcome> Store::recorded(std::string_view case_id, std::string_view program_version) const {
  SHARDLAB_CHECK(!case_id.empty(), "recorded() was asked for a case without an id");
  std::vector<CaseOutcome> found = read_outcomes(handle_.get(), defaults_, case_id);
  if (found.empty() || found.front().program_version != program_version) return std::nullopt;
  return std::move(found.front());
}

std::vector<CaseOutcome> Store::outcomes() const { return read_outcomes(handle_.get(), defaults_, {}); }

std::vector<std::string> Store::case_ids() const {
  std::vector<std::string> ids;
  for (Query s(handle_.get(), "SELECT case_id FROM cases ORDER BY position"); s.step();) ids.push_back(s.text(0));
  return ids;
}

std::vector<RunMetadata> Store::runs() const {
  std::vector<RunMetadata> runs;
  for (Query s(handle_.get(), "SELECT metadata FROM runs ORDER BY run"); s.step();)
    runs.push_back(stored(run_from_json(s.text(0))));
  return runs;
}

std::string csv_of(std::span<const CaseOutcome> cases) { return print_csv(case_table(cases)); }

void Store::for_each(const std::function<void(CaseOutcome)>& visit) const {
  std::map<std::string, Machine> machines;
  const bool has_ops = Query(handle_.get(), "SELECT 1 FROM ops LIMIT 1").step();
  for (Query s(handle_.get(),
               "SELECT outcome, machine_key, (SELECT machine FROM machines m WHERE m.machine_key = cases.machine_key) FROM cases "
               "ORDER BY position");
       s.step();) {
    CaseOutcome outcome = stored(outcome_from_json(s.text(0), defaults_));
    const auto [machine, fresh] = machines.try_emplace(s.text(1));
    if (fresh) machine->second = stored(machine_from_json(s.text(2)));
    outcome.config.machine = machine->second;
    const ById one{{outcome.case_id, &outcome}};
    if (outcome.measured) read_losses(handle_.get(), outcome.case_id, one);
    if (has_ops) read_ops(handle_.get(), outcome.case_id, one);
    visit(std::move(outcome));
  }
}

int64_t Store::size() const {
  Query s(handle_.get(), "SELECT count(*) FROM cases");
  return s.step() ? s.integer(0) : 0;
}

namespace {

/// Lines of these cases, without the head that the columns make.
std::string csv_rows(std::span<const CaseOutcome> cases) {
  const std::string text = csv_of(cases);
  return text.substr(csv_of({}).size());
}

}  // namespace

void write_results_csv(const std::string& path, const Store& store) {
  constexpr size_t kRows = 256;
  PendingFile file(path);
  file.write(csv_of({}));
  std::vector<CaseOutcome> rows;
  const auto flush = [&] {
    file.write(csv_rows(rows));
    rows.clear();
  };
  store.for_each([&](CaseOutcome outcome) {
    outcome.ops.clear();
    rows.push_back(std::move(outcome));
    if (rows.size() == kRows) flush();
  });
  flush();
  file.place();
}

Result<RunDirectory> RunDirectory::open(RunLock lock) {
  const std::string directory = lock.directory();
  // Nobody else writes here: whatever has a temporary name was left by a process that was killed.
  constexpr int kBelowCases = 2;
  remove_pending_files(directory, kBelowCases, true);
  Result<Store> store = Store::open(directory + "/results.sqlite");
  if (!store) return store.error();
  RunDirectory out(std::move(lock), std::move(store).value());
  out.in_memory_ = out.store_.size() <= static_cast<int64_t>(kInMemory);
  if (out.in_memory_) out.cases_ = out.store_.outcomes();
  for (size_t i = 0; i < out.cases_.size(); ++i) out.position_.emplace(out.cases_[i].case_id, i);
  return out;
}

void RunDirectory::begin(const RunMetadata& run) {
  store_.save();
  store_.begin_run(run);
  program_version_ = run.program_version;
  loss_target_ = run.loss_target;
  bool asks_anew = false;
  for (CaseOutcome& outcome : cases_) asks_anew |= !(std::exchange(outcome.loss_target, loss_target_) == loss_target_);
  if (asks_anew) store_.append(cases_);
}

/// In the place of the case's earlier outcome, or behind all others.
void RunDirectory::keep(CaseOutcome outcome) {
  if (outcome.program_version.empty()) outcome.program_version = program_version_;
  const auto [at, fresh] = position_.try_emplace(outcome.case_id, cases_.size());
  if (fresh)
    cases_.push_back(std::move(outcome));
  else
    cases_[at->second] = std::move(outcome);
  ++unwritten_;
}

void RunDirectory::append(const CaseOutcome& given) {
  CaseOutcome outcome = given;
  outcome.loss_target = loss_target_;
  if (!in_memory_) return append(std::span<const CaseOutcome>(&outcome, 1));
  store_.append({&outcome, 1});
  keep(std::move(outcome));
  if (cases_.size() > kInMemory) return leave_memory();
  // Rewriting n rows after each of n cases is n^2: long sweeps rewrite once for every hundredth more, and in `finish`.
  if (unwritten_ >= static_cast<int64_t>(cases_.size()) / 100) finish();
}

void RunDirectory::append(std::span<const CaseOutcome> outcomes) {  // predicted without training: there is no loss to ask for
  store_.append(outcomes);
  if (!in_memory_) {
    RowMaker maker(store_.defaults());
    StoredRows rows;
    for (const CaseOutcome& given : outcomes) {
      if (!given.program_version.empty()) {
        maker.add(given, rows);
        continue;
      }
      CaseOutcome outcome = given;
      outcome.program_version = program_version_;
      maker.add(outcome, rows);
    }
    return add_csv(rows);
  }
  for (const CaseOutcome& outcome : outcomes) keep(outcome);
  if (cases_.size() > kInMemory) return leave_memory();
  if (2 * unwritten_ >= static_cast<int64_t>(cases_.size())) finish();
}

void RunDirectory::add(const StoredRows& rows) {
  SHARDLAB_CHECK(!in_memory_, "a directory of {} cases is held in memory", cases_.size());
  store_.add(rows);
  add_csv(rows);
}

void RunDirectory::add_csv(const StoredRows& rows) {
  constexpr size_t kText = 1 << 20;
  if (!csv_) return;  // a directory that was large when it was opened: rows may be replaced, and are written at the end
  csv_text_ += rows.csv();
  csv_rows_ += static_cast<int64_t>(rows.size());
  if (csv_text_.size() < kText) return;
  csv_->write(csv_text_);
  csv_text_.clear();
}

void RunDirectory::leave_memory() {
  csv_ = std::make_unique<PendingFile>(lock_.directory() + "/results.csv");
  csv_->write(csv_of(cases_));
  csv_rows_ = static_cast<int64_t>(cases_.size());
  in_memory_ = false;
  std::vector<CaseOutcome>().swap(cases_);
  position_ = {};
}

void RunDirectory::for_each(const std::function<void(const CaseOutcome&)>& visit) const {
  if (!in_memory_) return store_.for_each(visit);
  for (const CaseOutcome& outcome : cases_) visit(outcome);
}

void RunDirectory::finish() {
  store_.save();
  const std::string path = lock_.directory() + "/results.csv";
  if (in_memory_) {
    write_file_atomically(path, csv_of(cases_));
  } else if (csv_ && csv_rows_ == store_.size()) {
    csv_->write(csv_text_);
    csv_->place();
  } else {  // some rows took the place of others
    csv_.reset();
    write_results_csv(path, store_);
  }
  csv_.reset();
  csv_text_ = {};
  unwritten_ = 0;
}

}  // namespace shardlab::reports
