// Attention by cuDNN: a plan of its engines for each shape that it takes, and their launches.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/attention_graph.h"
#include "kernels/cuda/cudnn_api.h"
#include "kernels/cuda/kernels.h"

namespace shardlab::gpu {

/// A backend descriptor that is destroyed with its owner.
class OwnedDescriptor {
 public:
  OwnedDescriptor() = default;
  OwnedDescriptor(CudnnApi& api, CudnnDescriptor descriptor) : api_(&api), descriptor_(descriptor) {}
  OwnedDescriptor(OwnedDescriptor&& other) noexcept : api_(other.api_), descriptor_(std::exchange(other.descriptor_, nullptr)) {}
  OwnedDescriptor& operator=(OwnedDescriptor&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~OwnedDescriptor() {
    if (descriptor_ != nullptr) api_->destroy_descriptor(descriptor_);
  }
  CudnnDescriptor get() const { return descriptor_; }

 private:
  CudnnApi* api_ = nullptr;
  CudnnDescriptor descriptor_ = nullptr;
};

namespace cudnn {

/// The descriptors of a graph's tensors and operations, in the graph's order: what needs no device.
struct DescribedGraph {
  std::vector<OwnedDescriptor> tensors, modes, ops;  ///< modes: what an operation computes, described apart
};
/// Describes a graph. Refuses with the words of cuDNN, naming the tensor or operation that it does not take.
Result<DescribedGraph> describe(CudnnApi& api, const Graph& graph);

}  // namespace cudnn

/// cuDNN's attention on one stream of one rank: a handle of its own, used by one thread at a time.
class LibraryAttention {
 public:
  /// On the calling thread's device. Refuses (ExitCode::kEnvironment) where cuDNN does not start.
  static Result<std::unique_ptr<LibraryAttention>> create(CudnnApi& api);
  ~LibraryAttention();
  LibraryAttention(const LibraryAttention&) = delete;

  /// Finds an engine that takes the shape in at most `AttentionCalls::library_bytes`, and keeps its plan. Refuses (kUsage) if there
  /// is none, with the reason: the shape, the statuses of cuDNN's proposals, the bytes that they wanted.
  Result<void> prepare(const AttentionShape& shape, DType type, bool backward);

  /// Launch a plan that was prepared; `scratch`: `scratch_bytes` of the shape. Sums are in an order of cuDNN's own, which in
  /// backward differs from run to run (blocks add to dq).
  void forward(const AttentionForward& a, const Scratch& scratch, Stream s);
  void input(const AttentionInput& a, const Scratch& scratch, Stream s);
  static int64_t scratch_bytes(const AttentionShape& shape, bool backward);

  /// "cuDNN 9.19.0": what results name.
  std::string name() const;

 private:
  struct Key {
    int64_t sequences, tokens;
    int heads, kv_heads, head_dim;
    DType type;
    bool backward;
    auto operator<=>(const Key&) const = default;
  };
  struct Plan {
    cudnn::Graph graph;
    cudnn::DescribedGraph described;
    OwnedDescriptor whole, engine, plan;
    int64_t workspace = 0;
  };
  /// The arrays of a call, by role.
  struct Arrays {
    const void *qkv = nullptr, *o = nullptr, *lse = nullptr, *dout = nullptr;
    void* dqkv = nullptr;
    int64_t element = 2;  ///< bytes
    std::byte *query_sum = nullptr, *row_sum = nullptr, *workspace = nullptr;
  };

  LibraryAttention(CudnnApi& api, CudnnHandle handle) : api_(api), handle_(handle) {}
  static Key key_of(const AttentionShape& s, DType type, bool backward) {
    return {s.sequences, s.tokens, s.heads, s.kv_heads, s.head_dim, type, backward};
  }
  Result<void> choose(Plan& plan, int64_t most_workspace);
  void run(const char* name, const Key& key, const AttentionShape& shape, Arrays arrays, const Scratch& scratch, Stream s);
  CudnnStatus execute(const Plan& plan, const AttentionShape& shape, const Arrays& arrays, int64_t call);

  CudnnApi& api_;
  const CudnnHandle handle_;
  void* stream_ = nullptr;
  std::map<Key, Plan> plans_;
};

}  // namespace shardlab::gpu
