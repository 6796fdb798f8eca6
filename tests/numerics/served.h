// A parameter server whose workers run apart, in one process and in no time: what each server applied, and when, is read from logs.
// Written apart from strategies, runtime and kernels, on top of the reference trainer; canonical order throughout.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "plan/case.h"
#include "runtime/arrivals.h"
#include "tests/namespaces.h"
#include "tests/numerics/reference/trainer.h"

namespace shardlab::testing {

/// Dropout and tied embeddings are not emulated; the number of workers is a power of two.
class ServedEmulation {
 public:
  /// `tokens(step)` are those of all workers, in order.
  ServedEmulation(const Case& config, std::function<std::vector<int32_t>(int64_t step)> tokens);

  /// Runs `steps` steps by the logs, one a server. False where they leave a worker waiting.
  bool run(std::span<const ArrivalLog> logs, int64_t steps);

  /// What the servers have of a parameter, by the model's order.
  std::vector<float> value(size_t parameter) const;
  const std::vector<ModelParameter>& parameters() const { return part_.parameters(); }
  /// A worker's part of a step's loss.
  float loss(int worker, int64_t step) const { return losses_[static_cast<size_t>(worker)][static_cast<size_t>(step)]; }

 private:
  using Vector = std::vector<float>;
  struct Bucket {
    std::vector<size_t> parameters;  ///< by index in the model, in the order in which they lie
    size_t elements = 0;             ///< padding included
    bool decays = true;
  };
  struct Service {
    Vector value, m, v;            ///< of a slice
    size_t updates = 0;            ///< made
    int64_t gradients = 0;         ///< applied
    std::vector<int64_t> applied;  ///< by worker
  };
  struct Worker {
    std::vector<Vector> values, gradients;  ///< by bucket, flat
    int64_t pushed = 0;
  };

  void fill_buckets();
  Vector flat(const Bucket& bucket, const reference::Tensors<float>& tensors) const;
  Service& service(size_t server, size_t bucket) { return services_[server * buckets_.size() + bucket]; }
  bool has_pulled(size_t worker);
  void compute(size_t worker);
  bool apply_next(size_t server, size_t bucket, const BucketArrivals& log);
  void update(Service& s, const Bucket& bucket, const Vector& gradient);

  Case config_;
  std::function<std::vector<int32_t>(int64_t)> tokens_;
  size_t ranks_;
  reference::Trainer<float> part_;  ///< of one worker's sequences, whose mean is over fewer: gradients are `ranks` times too large
  std::vector<Bucket> buckets_;
  std::vector<Service> services_;  ///< by server, then bucket
  std::vector<Worker> workers_;
  std::vector<Vector> losses_;
};

}  // namespace shardlab::testing
