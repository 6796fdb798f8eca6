// Checkpoints: the state of a training run as logical tensors in a file, which any layout can take up again.
//
// Each tensor is put together over the ranks and written whole, by the parameter's stable name and the part of its state ("value",
// "m", "v"): a run saved with zero 3 on four ranks goes on with tp 2 on two. In canonical mode, where layouts agree bit for bit, so
// do the trajectories. What compressed gradients owe (error feedback) belongs to ranks and buckets: it is saved rank by rank, and
// such a run goes on under its own layout alone.
//
//   folder/step-00000010.manifest                     text: where the run stood, each tensor's place and checksum, its own checksum
//   folder/step-00000010-8c2f0a3d5be61794.tensors     row-major fp32, little-endian, one tensor after another
//
// The tensors are named by their content, synced and renamed into place before the manifest is: what has a manifest is complete,
// and a save that fails or is killed leaves every earlier checkpoint as it was.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "plan/base/result.h"
#include "plan/case.h"
#include "runtime/manifest.h"
#include "runtime/session.h"

namespace shardlab::runtime {

/// Before a run that will save: makes the folder, and refuses a plan whose state has no parameters' names. Throws WorldError when
/// the folder cannot be made.
Result<void> prepare_checkpoints(const Session& session, const std::string& folder);

/// Saves `session` after `steps` optimizer steps of `config`; returns the manifest's path. Refuses what `Session::states` and
/// `state` refuse. Throws WorldError when the disk fails, with the earlier checkpoints intact.
Result<std::string> save_checkpoint(const Session& session, const Case& config, int64_t steps, const std::string& folder);

/// Writes a checkpoint of weights alone, as they come from elsewhere; returns the manifest's path. Any case of the model begins from it,
/// at step 0, under whatever optimizer and layout. `read` gives each parameter's values, one after another. Biases of routers may be
/// among them, called by their buffers (plan/run_state.h). Throws WorldError when the disk fails.
Result<std::string> save_weights(const std::string& folder, std::span<const ModelParameter> parameters,
                                 const std::function<Result<LogicalTensor>(const ModelParameter&)>& read);

/// A checkpoint whose manifest has been read and found complete.
class Checkpoint {
 public:
  /// `path` is a manifest, or a folder whose newest one is taken. Refuses what cannot be read or is not what was written: an older
  /// checkpoint is never taken instead of a damaged one.
  static Result<Checkpoint> open(const std::string& path);

  /// Optimizer steps that are done: the number of the next one.
  int64_t steps() const { return manifest_.steps; }
  const std::string& manifest() const { return path_; }
  /// Whether there is nothing but weights in it.
  bool holds_weights_alone() const;
  /// What it has values of, in the order of names: parameters, and biases of routers, called by their buffers (plan/run_state.h).
  std::vector<std::string> parameters() const;
  /// The values of a parameter: the optimizer's fp32 copy, where there is one. Of a name of the run's state (plan/run_state.h) that
  /// state. Refuses a name that is not there, and damage.
  Result<LogicalTensor> weights(std::string_view parameter) const;
  /// The running average of a parameter (`train.ema_decay`), corrected for the steps that it has seen. Refuses a checkpoint of a run
  /// that kept none, a name that is not there, and damage.
  Result<LogicalTensor> average(std::string_view parameter) const;

  /// Gives a session the saved state; of weights alone its parameters, and the rest stays as it was made. Refuses a case that would not go on as the saved one (other data order, optimizer, precision
  /// or tensors) before anything is changed; after a damaged tensor the session's state is unusable.
  Result<void> restore(const Case& config, Session& session) const;

 private:
  Result<LogicalTensor> read(const StateName& name) const;
  Result<void> restore_biases(std::span<const StateName> names, Session& session) const;

  std::string path_;  ///< of the manifest
  Manifest manifest_;
};

}  // namespace shardlab::runtime
