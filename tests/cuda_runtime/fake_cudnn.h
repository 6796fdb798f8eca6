// A cuDNN of this process: keeps descriptors as they are described, refuses what is incomplete, proposes the engines that it is
// told to, and carries a graph out on host memory, operation by operation, from its descriptors alone. Ranks on threads of their own
// share it, as they share the library: every call holds its lock.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/cuda/cudnn_api.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

class FakeCudnn final : public gpu::CudnnApi {
 public:
  /// What it proposes for every graph, the best first. A status other than 0 is that of its plan.
  struct Engine {
    int64_t workspace = 0;
    gpu::CudnnStatus status = 0;
  };

  int64_t version() override { return installed; }
  std::string describe(gpu::CudnnStatus status) override;
  gpu::CudnnStatus create(gpu::CudnnHandle* handle) override;
  gpu::CudnnStatus destroy(gpu::CudnnHandle handle) override;
  gpu::CudnnStatus set_stream(gpu::CudnnHandle handle, void* stream) override;
  gpu::CudnnStatus create_descriptor(int kind, gpu::CudnnDescriptor* descriptor) override;
  gpu::CudnnStatus destroy_descriptor(gpu::CudnnDescriptor descriptor) override;
  gpu::CudnnStatus set_attribute(gpu::CudnnDescriptor descriptor, int name, int type, int64_t count, const void* elements) override;
  gpu::CudnnStatus get_attribute(gpu::CudnnDescriptor descriptor, int name, int type, int64_t requested, int64_t* count,
                                 void* elements) override;
  gpu::CudnnStatus finalize(gpu::CudnnDescriptor descriptor) override;
  /// Runs at once on the null stream, else as work of the FakeStream that the handle was given.
  gpu::CudnnStatus execute(gpu::CudnnHandle handle, gpu::CudnnDescriptor plan, gpu::CudnnDescriptor pack) override;

  int64_t installed = 91900;
  std::vector<Engine> engines{{}};
  std::function<void()> when_made;  ///< runs as a handle is made
  gpu::CudnnStatus create_status = 0, graph_status = 0, execute_status = 0;
  std::string log;  ///< "tensor 1: 901=[9] 902=[1,2,64,64]", a line a finished descriptor
  int executed = 0;
  size_t live_descriptors() const { return descriptors_.size(); }
  size_t live_handles() const { return handles_.size(); }

 private:
  struct Attribute {
    int type = 0;
    int64_t count = 0;
    std::vector<std::byte> bytes;
  };
  struct Descriptor {
    int kind = 0, number = 0;
    bool finished = false;
    size_t engine = 0;  ///< of an engine configuration and of a plan
    std::map<int, Attribute> attributes;
  };
  struct Values;
  class Run;

  Descriptor* find(gpu::CudnnDescriptor descriptor);
  static bool complete(const Descriptor& d);
  void write_down(const Descriptor& d);

  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Descriptor>> descriptors_;
  std::map<void*, std::pair<std::unique_ptr<int>, void*>> handles_;  ///< and the stream of each
  int made_ = 0;
};

}  // namespace shardlab::testing
