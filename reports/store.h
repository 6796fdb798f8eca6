// The results store: one SQLite file for each run directory, appended to after every case, so that nothing measured is lost.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plan/base/pending_file.h"
#include "plan/base/result.h"
#include "plan/outcome.h"
#include "reports/metadata.h"
#include "reports/outcome_json.h"
#include "reports/run_lock.h"
#include "reports/stored_rows.h"
#include "reports/table.h"

struct sqlite3;

namespace shardlab::reports {

/// Version of the store's schema. A store of another version is refused, with what to do. The columns of `cases` are no part of it:
/// a store whose columns are those of another build is brought up to date when it is opened for writing.
inline constexpr int kStoreVersion = 3;

/// results.sqlite. Tables: `runs` (metadata as JSON), `machines`, `defaults` (what a case leaves out), `cases` (every result column, and
/// the whole outcome as JSON), `losses`, `ops`. All columns of `cases` are projections of the outcome, for SQL; reading back uses the outcome.
/// Every function throws a WorldError with a remedy when the disk is full, the file is locked or damaged.
class Store {
 public:
  /// Opens `path` for reading and writing; creates it where there is none. Refuses a store of another version, and a file that is
  /// no store. Columns of `cases` that another build wrote are made anew from the stored outcomes.
  static Result<Store> open(const std::string& path);
  /// Opens an existing store for reading; refuses when there is none, and one whose writer ended before anything was stored. What a
  /// process left that died in the middle of a commit is rolled back first.
  static Result<Store> open_existing(const std::string& path);
  /// Removes a store and its journals, if they are there. Nobody may have it open.
  static void remove(const std::string& path);

  /// Records who writes from here on; `append` gives outcomes without a program version that of the run.
  void begin_run(const RunMetadata& run);
  /// Adds or, for a case id that is already there, replaces one outcome, in one transaction. A replaced case keeps its place in the
  /// order.
  void append(const CaseOutcome& outcome);
  /// The same of many, in one transaction.
  void append(std::span<const CaseOutcome> outcomes);
  /// The same of rows of many cases that come fast: saved with others, once in an interval, and by `save`.
  void add(const StoredRows& rows);
  void save();
  void save_every(std::chrono::nanoseconds interval) { interval_ = interval; }

  /// What outcomes leave out here: of a `RowMaker` for this store.
  const CaseDefaults& defaults() const { return defaults_; }
  /// The outcome stored for this case by this build of the program.
  std::optional<CaseOutcome> recorded(std::string_view case_id, std::string_view program_version) const;
  /// Every outcome, in the order of first appending.
  std::vector<CaseOutcome> outcomes() const;
  /// The same one by one, in the memory of one.
  void for_each(const std::function<void(CaseOutcome)>& visit) const;
  int64_t size() const;
  /// The ids of every stored case, in the same order.
  std::vector<std::string> case_ids() const;
  /// Metadata of every run, oldest first.
  std::vector<RunMetadata> runs() const;

  const std::string& path() const { return path_; }

 private:
  struct Close {
    void operator()(sqlite3* handle) const;
  };
  struct Unsaved;
  struct Drop {
    void operator()(Unsaved* unsaved) const;
  };
  Store(std::unique_ptr<sqlite3, Close> handle, std::string path) : handle_(std::move(handle)), path_(std::move(path)) {}
  static Result<Store> open_with(const std::string& path, bool create);
  void create_schema();
  void create_cases();
  bool has_columns_of_this_build() const;
  void project_cases_anew();
  Result<void> read_defaults();
  void keep_new_defaults();

  std::unique_ptr<sqlite3, Close> handle_;
  CaseDefaults defaults_ = CaseDefaults::of_build();
  std::unique_ptr<Unsaved, Drop> unsaved_;
  std::chrono::nanoseconds interval_ = std::chrono::seconds(1);
  std::string path_;
  std::string program_version_;
};

/// Writes results.csv of a store, in the memory of a few rows.
void write_results_csv(const std::string& path, const Store& store);

/// The text of results.csv: every column, one row a case.
std::string csv_of(std::span<const CaseOutcome> cases);

/// Keeps results.sqlite and results.csv of one run directory in step.
class RunDirectory {
 public:
  /// Opens `results.sqlite` of the locked directory, creating it where missing, and takes away the temporary files of processes
  /// that were killed.
  static Result<RunDirectory> open(RunLock lock);
  /// Records who appends from here on.
  void begin(const RunMetadata& run);

  /// Saves one outcome: the store first, then the CSV (after every case of a sweep below 200 cases, after every hundredth part of a
  /// longer one).
  void append(const CaseOutcome& outcome);
  /// Saves many outcomes in one go, none of them half; the CSV when it has doubled, and in `finish`.
  void append(std::span<const CaseOutcome> outcomes);
  /// Whether there are more cases than are held in memory: then `add` takes rows of many that come fast, and saves them within a second
  /// or with the next; until `finish`, the last may not be saved.
  bool is_large() const { return !in_memory_; }
  void add(const StoredRows& rows);
  /// Saves what `add` took.
  void save() { store_.save(); }
  /// Brings the CSV up to date; to be called once at the end.
  void finish();
  const Store& store() const { return store_; }
  const std::string& directory() const { return lock_.directory(); }
  /// Stored cases.
  int64_t size() const { return in_memory_ ? static_cast<int64_t>(cases_.size()) : store_.size(); }
  /// Every stored case, in order: from memory, or one by one from the store where there are more than a person reads.
  void for_each(const std::function<void(const CaseOutcome&)>& visit) const;

 private:
  /// Directories of more cases than this are not held in memory, and their CSV is written as cases come.
  static constexpr size_t kInMemory = 5000;
  void leave_memory();

  RunDirectory(RunLock lock, Store store) : lock_(std::move(lock)), store_(std::move(store)) {}
  RunLock lock_;
  Store store_;
  std::string program_version_;
  LossTarget loss_target_;
  void keep(CaseOutcome outcome);
  void add_csv(const StoredRows& rows);
  bool in_memory_ = true;
  std::unique_ptr<PendingFile> csv_;  ///< rows of the cases so far, where they are not in memory
  std::string csv_text_;              ///< rows that are not written yet
  int64_t csv_rows_ = 0;
  std::vector<CaseOutcome> cases_;                    ///< every stored case, in order
  std::unordered_map<std::string, size_t> position_;  ///< of a case in `cases_`, by its id
  int64_t unwritten_ = 0;                             ///< cases appended since the CSV was written
};

}  // namespace shardlab::reports
