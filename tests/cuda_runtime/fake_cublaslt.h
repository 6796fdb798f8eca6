// A cuBLASLt of this process: keeps descriptors as they are described, refuses what the real one refuses, proposes the algorithms
// that it is told to, and carries a product out on host memory from its descriptors alone.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/cuda/cublaslt_api.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

class FakeCublasLt final : public gpu::CublasLtApi {
 public:
  /// What it proposes for every product, the best first.
  struct Algorithm {
    int64_t workspace = 0;
    gpu::CublasStatus status = 0;
    int64_t alignment = 1;  ///< of every array, that it asks for
  };
  /// A product that was carried out.
  struct Product {
    int64_t m = 0, n = 0, k = 0;
    bool turned_a = false, turned_b = false, bias = false, accumulate = false, tf32 = false;
    gpu::cublaslt::DataType factors{}, result{};
    size_t algorithm = 0;  ///< which of `algorithms`
    int64_t workspace = 0;
    /// "130x80x32 TN bf16 f32 +bias".
    std::string text() const;
  };

  int64_t version() override { return 130100; }
  std::string describe(gpu::CublasStatus status) override;
  gpu::CublasStatus create(gpu::CublasLtHandle* handle) override;
  gpu::CublasStatus destroy(gpu::CublasLtHandle handle) override;
  gpu::CublasStatus create_product(gpu::CublasLtDescriptor* product, gpu::cublaslt::Compute compute) override;
  gpu::CublasStatus destroy_product(gpu::CublasLtDescriptor product) override { return forget(product, Kind::kProduct); }
  gpu::CublasStatus set(gpu::CublasLtDescriptor product, gpu::cublaslt::ProductName name, const void* value, size_t bytes) override;
  gpu::CublasStatus create_layout(gpu::CublasLtDescriptor* layout, gpu::cublaslt::DataType type, int64_t rows, int64_t columns,
                                  int64_t leading) override;
  gpu::CublasStatus destroy_layout(gpu::CublasLtDescriptor layout) override { return forget(layout, Kind::kLayout); }
  gpu::CublasStatus create_preference(gpu::CublasLtDescriptor* preference) override;
  gpu::CublasStatus destroy_preference(gpu::CublasLtDescriptor preference) override {
    return forget(preference, Kind::kPreference);
  }
  gpu::CublasStatus set(gpu::CublasLtDescriptor preference, gpu::cublaslt::PreferenceName name, const void* value,
                        size_t bytes) override;
  gpu::CublasStatus propose(gpu::CublasLtHandle handle, const gpu::CublasLtCall& call, gpu::CublasLtDescriptor preference,
                            int requested, gpu::CublasLtProposal* proposals, int* found) override;
  /// Writes all over the workspace that the algorithm asked for. Runs at once, or where `queue` puts it.
  gpu::CublasStatus multiply(gpu::CublasLtHandle handle, const gpu::CublasLtCall& call, void* stream) override;

  std::vector<Algorithm> algorithms{{}};
  gpu::CublasStatus create_status = 0, multiply_status = 0;
  bool beyond_workspace = false;  ///< proposes algorithms over the limit that it was told, too
  /// Takes the work of a stream; null: it is done at once.
  std::function<void(void* stream, std::function<void()> work)> queue;
  std::vector<Product> products;  ///< in the order of the calls
  std::vector<std::string> faults;
  int proposed = 0;  ///< calls of `propose`
  size_t live_descriptors() const { return descriptors_.size(); }
  size_t live_handles() const { return handles_.size(); }

 private:
  enum class Kind { kProduct, kLayout, kPreference };
  struct Descriptor {
    Kind kind{};
    gpu::cublaslt::Compute compute{};
    gpu::cublaslt::DataType type{};
    int64_t rows = 0, columns = 0, leading = 0;
    std::map<int, uint64_t> attributes;  ///< by number
    uint64_t attribute(int name, uint64_t otherwise) const;
  };
  /// One product as the descriptors have it, looked up and checked.
  struct Checked {
    Product product;
    Descriptor a, b, d;
    const void* bias = nullptr;
  };

  gpu::CublasStatus add(gpu::CublasLtDescriptor* descriptor, Descriptor made);
  gpu::CublasStatus forget(gpu::CublasLtDescriptor descriptor, Kind kind);
  Descriptor* find(gpu::CublasLtDescriptor descriptor, Kind kind);
  gpu::CublasStatus keep(gpu::CublasLtDescriptor descriptor, Kind kind, int name, size_t size, const void* value, size_t bytes);
  gpu::CublasStatus fault(std::string what);
  /// Success, or why the descriptors of a call do not make a product.
  gpu::CublasStatus check(const gpu::CublasLtCall& call, Checked* checked);

  std::mutex mutex_;
  std::map<void*, std::unique_ptr<Descriptor>> descriptors_;
  std::map<void*, std::unique_ptr<int>> handles_;
  /// What each proposal was made for, by its number, which is the first word of its algorithm.
  struct Proposed {
    Product product;
    size_t algorithm = 0;
    std::map<int, uint64_t> preference;
  };
  std::vector<Proposed> proposals_;
};

}  // namespace shardlab::testing
