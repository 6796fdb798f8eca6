// Cases trained on a fake device, for comparison with others and with the CPU.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plan/base/world_error.h"
#include "runtime/cuda/backend.h"
#include "runtime/cuda/nccl_api.h"
#include "runtime/cuda/node.h"
#include "runtime/session.h"
#include "tests/cuda_runtime/fake_api.h"
#include "tests/cuda_runtime/queued_kernels.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"

namespace shardlab::testing {

/// Losses by step and the final parameters by name.
struct Run {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> parameters;
  int64_t sent_bytes = 0;
  std::vector<int64_t> peaks, planned;  ///< of device memory, by rank: as the ops ran, and the plan's
  size_t most_pending = 0;
  int skipped = 0;                               ///< updates that were left out
  int reruns = 0;                                ///< steps that were made again for want of room for rows of experts
  std::vector<std::vector<ExpertRows>> experts;  ///< by step
  bool replicas_agree = true;
};

struct RunSettings {
  int steps = 2;      ///< of which whole periods of the plan are trained
  uint64_t seed = 1;  ///< of the order in which the device runs what it was given
  Behind kernels = Behind::kHost;
  bool forget_waits = false;  ///< the device takes no notice of waits for events
  bool nccl = false;          ///< a device for each rank, joined by NCCL, in place of one for all
  RunOptions options;
  cuda::CudaOptions cuda;  ///< canonical: the case's
};

/// Distinct tokens below 64 for every sequence; packed, random documents of five tokens on average.
class Tokens64 final : public BatchSource {
 public:
  void sequence(int64_t number, std::span<int32_t> out) const override;
  void packed(int64_t number, const PackedSequence& out) const override;
};

/// A session of `placed` on one fake GPU, or over `nccl` on one for each rank, with what it stands on.
struct FakeRun {
  FakeRun(const PlacedPlan& placed, FakeApi& api, const RunOptions& options, const cuda::CudaOptions& cuda = {},
          Behind kernels = Behind::kHost);
  /// The same on a table of kernels of the test's own, with an account of what is taken, or null.
  FakeRun(const PlacedPlan& placed, FakeApi& api, const RunOptions& options, const cuda::CudaOptions& cuda,
          const gpu::Kernels& kernels, cuda::MemoryAccount* account, cuda::NcclApi* nccl = nullptr);
  Tokens64 tokens;
  cuda::Node node;
  std::unique_ptr<Transport> transport;
  Result<std::unique_ptr<Session>> session;
};

/// Lowered for a GPU that every rank shares.
PlacedPlan lowered(const Case& config);

/// A tiny model in canonical mode, SGD at lr 1; the GPT has tied embeddings and dropout.
Case training_subject(Family family);
/// Llama with mixtures of experts: Mixtral's router with both losses; DeepSeek-V3's, with groups, biases, shared experts and a dense first
/// layer; and one that drops rows, with the gate of Qwen2-MoE.
std::vector<std::pair<std::string, Case>> mixtures();
/// The layouts of eight sequences that `subject` can be trained with, the single rank first.
std::vector<std::pair<std::string, Case>> training_layouts(const Case& subject);

/// Layouts of eight sequences in which ranks share experts, those that `subject` cannot have left out.
std::vector<std::pair<std::string, Case>> expert_layouts(const Case& subject);

/// The largest difference; every value must be finite.
double worst(const std::vector<float>& a, const std::vector<float>& b);
/// Trains on the fake GPU by the one-gpu transport, or on one for each rank over an NCCL of the tests' own. A bound on rows of experts has its
/// second runs in the arenas of the first.
Run train_on_fake(const Case& config, const RunSettings& settings);
/// Trains on device 0 of `api` by the one-gpu transport.
Run train_on_gpu(cuda::Api& api, const gpu::Kernels& kernels, const Case& config, const RunSettings& settings);
/// Trains on CPU threads.
Run train_on_cpu(const Case& config, const RunSettings& settings);

}  // namespace shardlab::testing
