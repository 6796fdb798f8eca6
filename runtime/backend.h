// The interface that runs the ops of one rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernels.h"
#include "plan/base/result.h"
#include "plan/interfaces.h"
#include "plan/program.h"
#include "runtime/accelerator.h"

namespace shardlab::runtime {

/// One operand with its address on this rank. `data` is null on a back end without storage.
struct Tensor {
  void* data = nullptr;
  const Type* type = nullptr;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  const Shape& shape() const { return type->shape; }
};

/// An op with everything that does not change from step to step.
struct BoundOp {
  const Plan* plan = nullptr;
  const Instruction* instruction = nullptr;
  int rank = 0;
  Coordinates at{};  ///< of the rank
  uint64_t seed = 0;
  const BatchSource* source = nullptr;
  std::vector<Tensor> reads, writes;
  std::span<std::byte> workspace;  ///< of the op's stream: `scratch_bytes` and more
  float* rope_table = nullptr;     ///< the rank's table of cosines and sines; zero until `Backend::enter_thread`
  int32_t* expert_places =
      nullptr;  ///< the layer's table in `expert.places` (plan/expert_places.h), as the table above; none: experts lie in order
  bool on_host = false;    ///< no operand is in device memory: the host does the work
  int32_t parameter = -1;  ///< ParameterId of the first operand whose storage belongs to a parameter, or -1

  const Op& op() const { return *instruction->op; }
  const Mesh& mesh() const { return plan->mesh; }
  /// Number, within the step, of the first sequence of the op's micro-batch on this rank, by `Plan::together`. `type` is the type
  /// of an operand whose dim 0 counts sequences.
  int64_t first_sequence(const Type& type) const;
  /// Sequences of one step over all ranks.
  int64_t sequences_per_step(const Type& type) const;
};

/// The numbers that change from step to step.
struct StepState {
  int64_t step = 0;     ///< which data, which random numbers
  int64_t applied = 0;  ///< updates made before this step: fewer than `step` where some were skipped
  float learning_rate = 0;
};

/// Runs one op; bound to its operands before the first step. May throw WorldError.
using Launch = std::function<void(const StepState&)>;

/// One rank's back end. `bind` is called before the first step; each launch then runs on the thread of the op's stream, those
/// of different streams at the same time.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  /// Does memory stand behind its tensors?
  virtual bool has_storage() const = 0;
  /// Refuses an op it has no kernel for. Never called for collectives, sends and receives.
  virtual Result<Launch> bind(const BoundOp& op) = 0;
  /// Called by the thread of each stream that has instructions, once everything is bound and before its first op.
  virtual void enter_thread(int stream) { static_cast<void>(stream); }
  /// Threads that compute in a launch, the calling one among them.
  virtual int threads() const { return 1; }
  /// The device that runs the launches, if launches only enqueue. None: a launch has run when it returns. Launches of ops on the
  /// host always have.
  virtual Accelerator* device() { return nullptr; }
};

/// Makes the back end of one rank.
using BackendFactory = std::function<std::unique_ptr<Backend>(int rank)>;

struct CpuOptions {
  bool canonical = false;    ///< the fixed-order matmul instead of the library's
  int threads_per_rank = 1;  ///< OpenMP threads of the library's matmul
};

/// On this processor: fp32, narrow storage (kernels/mixed.h) and kernels by name (runtime/named_kernels.h).
BackendFactory cpu_backend(const kernels::Kernels& kernels, const CpuOptions& options);

/// Does nothing but count, for rehearsals of plans and for measuring dispatch. `launches` counts over all ranks; it may be null and
/// must otherwise outlive the back ends.
BackendFactory dry_backend(std::atomic<int64_t>* launches = nullptr);

}  // namespace shardlab::runtime
