// Builds without the CUDA toolkit.
#include "runtime/cuda/api.h"

namespace shardlab::runtime::cuda {

const gpu::Kernels* built_kernels() { return nullptr; }

Result<std::unique_ptr<Api>> real_api() {
  return Error{ExitCode::kEnvironment, "this program was built without the CUDA toolkit",
               "install the toolkit (nvcc on the PATH), build again in a fresh folder, or use --backend cpu", ""};
}

}  // namespace shardlab::runtime::cuda
