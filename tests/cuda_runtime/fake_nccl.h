// An NCCL that only writes down what it is asked for.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/cuda/nccl_api.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

class FakeNccl final : public cuda::NcclApi {
 public:
  /// One handle: the calls made with it in order, in the words of cuda::to_text without the communicator's name.
  struct Handle {
    int number = 0;  ///< of the communicator: in the order in which they were made
    int index = 0, size = 0;
    std::vector<std::string> calls;
    bool destroyed = false, aborted = false;
  };

  std::string describe(cuda::NcclStatus status) override { return "status " + std::to_string(status); }
  cuda::NcclStatus version(int* version) override { return *version = 22809, 0; }
  cuda::NcclStatus unique_id(cuda::NcclId* id) override;
  cuda::NcclStatus init(cuda::NcclHandle* handle, int size, const cuda::NcclId& id, int index) override;
  cuda::NcclStatus destroy(cuda::NcclHandle handle) override;
  cuda::NcclStatus abort(cuda::NcclHandle handle) override;
  cuda::NcclStatus async_error(cuda::NcclHandle handle, cuda::NcclStatus* status) override;
  cuda::NcclStatus group_start() override;
  cuda::NcclStatus group_end() override;
  cuda::NcclStatus all_reduce(const void*, void*, int64_t count, DType dtype, ReduceOp reduce, cuda::NcclHandle handle,
                              cuda::StreamHandle stream) override;
  cuda::NcclStatus reduce_scatter(const void*, void*, int64_t count, DType dtype, ReduceOp reduce, cuda::NcclHandle handle,
                                  cuda::StreamHandle stream) override;
  cuda::NcclStatus all_gather(const void*, void*, int64_t count, DType dtype, cuda::NcclHandle handle,
                              cuda::StreamHandle stream) override;
  cuda::NcclStatus broadcast(const void*, void*, int64_t count, DType dtype, int root, cuda::NcclHandle handle,
                             cuda::StreamHandle stream) override;
  cuda::NcclStatus send(const void*, int64_t count, DType dtype, int to, cuda::NcclHandle handle,
                        cuda::StreamHandle stream) override;
  cuda::NcclStatus receive(void*, int64_t count, DType dtype, int from, cuda::NcclHandle handle,
                           cuda::StreamHandle stream) override;

  /// In the order in which they were made.
  std::vector<std::unique_ptr<Handle>> handles;
  /// Calls across handles, in order: (handle, text). Groups are written with a null handle.
  std::vector<std::pair<const Handle*, std::string>> log;
  int open_groups = 0, made_in_groups = 0;
  std::function<void()> when_made;      ///< runs as a handle is made
  cuda::NcclStatus failure = 0;         ///< what the next all_reduce returns
  cuda::NcclStatus remote_failure = 0;  ///< what async_error reports

 private:
  cuda::NcclStatus note(cuda::NcclHandle handle, std::string text);
  std::mutex mutex_;
  int communicators_ = 0;
};

}  // namespace shardlab::testing
