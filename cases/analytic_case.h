// A sweep's cases at the analytic resolution: no files of their own, saved in batches. Other frameworks are estimated; shardlab's
// own executor is read from each case's plan.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cases/namespaces.h"
#include "reports/store.h"
#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/analytic/doubt.h"
#include "sweeps/driver.h"

namespace shardlab::cases {

/// The estimate of one case as a row of results.csv. `peak_bytes` is the worst stage's live peak, `arena_bytes` what the
/// framework's allocator holds; `extrapolated` says that a constant was transferred from another device.
Prediction prediction_of(const analytic::Estimate& estimate);

/// Predicts cases. Remembers what cases of one model, machine and profile share.
class AnalyticCaseRunner final : public CaseRunner {
 public:
  AnalyticCaseRunner();
  ~AnalyticCaseRunner() override;
  CaseOutcome run(const sweeps::Point& point, Mode mode) override;

  /// Seconds that nine of ten runs like it take, of a point whose step was predicted to take `step_s`. None of shardlab's own executor,
  /// whose step is that of its plan, and where the estimate is another: of another version, or of a machine that is not known whole.
  std::optional<analytic::Between> step_between(const sweeps::Point& point, double step_s);

  /// An axis of models or machines may have a million values: what is remembered longest is forgotten then.
  static constexpr size_t kMostStudies = 32;
  size_t studies() const { return studies_.size(); }

 private:
  struct Study;
  struct Predicted {
    Prediction figures;
    int64_t device_bytes = 0;  ///< of the rank that needs most, with what no allocator sees
  };
  /// The estimate of a framework's run, with what it was made from; `study` lives until the next call.
  struct Estimated {
    Study* study;
    analytic::Point point;
    analytic::Estimate estimate;
  };
  Result<Estimated> estimate_of(const sweeps::Point& said, const analytic::ModelShape& shape);
  /// Of a framework's run.
  Result<Predicted> estimated(const sweeps::Point& said, const analytic::ModelShape& shape);
  /// Of shardlab's own executor: bytes by the case's plan, seconds by its segments. On a local machine, whose ranks share cores,
  /// seconds are estimated.
  Result<Predicted> planned(const sweeps::Point& said, const analytic::ModelShape& shape);
  Result<Study*> study_of(const Case& config, const analytic::ModelShape& shape);
  std::mutex mutex_;
  std::vector<std::unique_ptr<Study>> studies_;  ///< the one asked last at the end
};

/// Keeps outcomes in the run directory on a thread of its own, many at a time: those of half a second, or a few hundred. Rows of a large
/// directory are made on the caller's thread, which has the outcome at hand.
class BatchSink final : public ResultSink {
 public:
  /// `version` of the program is that of outcomes which do not say one.
  BatchSink(RunDirectory& directory, std::string version);
  /// Saves what is waiting. What then fails is not told: `flush` tells it.
  ~BatchSink() override;
  BatchSink(const BatchSink&) = delete;
  BatchSink& operator=(const BatchSink&) = delete;

  std::optional<CaseOutcome> recorded(std::string_view id, std::string_view version) const override;
  /// Throws why an earlier outcome could not be saved.
  void append(const CaseOutcome& outcome) override;
  /// Saves what is waiting, or throws why it cannot be saved; to be called once at the end.
  void flush();

 private:
  static constexpr size_t kBatch = 256;
  /// What is to be saved. The outcomes came before the rows.
  struct Batch {
    std::vector<CaseOutcome> outcomes;  ///< of a directory that holds its cases in memory
    StoredRows rows;
    size_t size() const { return outcomes.size() + rows.size(); }
  };
  void work();
  /// `all`: what the directory took earlier, too.
  void save(const Batch& batch, bool all);
  void tell_failure();

  RunDirectory& directory_;
  const std::string version_;
  mutable std::mutex of_directory_;  ///< one thread at a time uses the directory
  std::mutex mutex_;                 ///< guards what follows
  std::condition_variable changed_;
  Batch waiting_;
  RowMaker maker_;              ///< of the rows of `waiting_`
  bool is_large_;               ///< `RunDirectory::is_large`, once what was saved is
  std::exception_ptr failure_;  ///< that nobody was told of
  bool failed_ = false;         ///< nothing more is saved
  bool asked_ = false;          ///< all that waits is to be saved now
  bool ended_ = false;
  std::thread writer_;
};

/// Progress of many short cases: a line every two seconds.
class SparseProgress final : public ProgressSink {
 public:
  void started(const Point&, const Progress&) override {}
  void finished(const CaseOutcome& outcome, const Progress& progress) override;

 private:
  double told_ = 0;
};

}  // namespace shardlab::cases
