#include "runtime/backend.h"

namespace shardlab::runtime {

namespace {

class DryBackend final : public Backend {
 public:
  explicit DryBackend(std::atomic<int64_t>* count) : count_(count) {}
  std::string_view name() const override { return "dry"; }
  bool has_storage() const override { return false; }
  Result<Launch> bind(const BoundOp&) override {
    if (count_ == nullptr) return Launch([](const StepState&) {});
    return Launch([count = count_](const StepState&) { count->fetch_add(1, std::memory_order_relaxed); });
  }

 private:
  std::atomic<int64_t>* const count_;
};

}  // namespace

BackendFactory dry_backend(std::atomic<int64_t>* launches) {
  return [launches](int) { return std::make_unique<DryBackend>(launches); };
}

}  // namespace shardlab::runtime
