// The calls of cuDNN's backend interface that shardlab makes, as an interface. The real one is opened at run time (libcudnn.so.9,
// no header needed to build); a test's keeps descriptors of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "plan/base/result.h"

namespace shardlab::gpu {

/// cudnnStatus_t. 0 is success; 3000 to 3999 say that cuDNN does not do what a description asks for.
using CudnnStatus = int;

/// A cudnnHandle_t and a cudnnBackendDescriptor_t.
using CudnnHandle = void*;
using CudnnDescriptor = void*;

/// Every call returns what cuDNN returned. Kinds, names and types are cuDNN's numbers (kernels/cuda/cudnn_names.h). One handle and
/// its descriptors are used by one thread at a time.
class CudnnApi {
 public:
  virtual ~CudnnApi() = default;
  virtual int64_t version() = 0;  ///< 91900 for 9.19.0
  virtual std::string describe(CudnnStatus status) = 0;
  virtual CudnnStatus create(CudnnHandle* handle) = 0;  ///< on the calling thread's device
  virtual CudnnStatus destroy(CudnnHandle handle) = 0;
  virtual CudnnStatus set_stream(CudnnHandle handle, void* stream) = 0;
  virtual CudnnStatus create_descriptor(int kind, CudnnDescriptor* descriptor) = 0;
  virtual CudnnStatus destroy_descriptor(CudnnDescriptor descriptor) = 0;
  virtual CudnnStatus set_attribute(CudnnDescriptor descriptor, int name, int type, int64_t count, const void* elements) = 0;
  /// `count`: how many there are; at most `requested` are written.
  virtual CudnnStatus get_attribute(CudnnDescriptor descriptor, int name, int type, int64_t requested, int64_t* count,
                                    void* elements) = 0;
  virtual CudnnStatus finalize(CudnnDescriptor descriptor) = 0;
  virtual CudnnStatus execute(CudnnHandle handle, CudnnDescriptor plan, CudnnDescriptor pack) = 0;
};

/// cuDNN as it is installed. Refuses (ExitCode::kEnvironment) where it is not, or lacks a function.
Result<std::unique_ptr<CudnnApi>> real_cudnn();

/// "9.19.0" of 91900.
std::string cudnn_version_text(int64_t version);

}  // namespace shardlab::gpu
