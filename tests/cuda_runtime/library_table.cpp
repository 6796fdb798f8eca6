#include "tests/cuda_runtime/library_table.h"

#include "kernels/cuda/launches.h"
#include "kernels/cuda/library_matmul.h"
#include "plan/base/check.h"
#include "tests/cuda_runtime/fake_api.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

namespace {

std::shared_ptr<FakeCublasLt> library;
const std::function<void()>* notice = nullptr;

void queued_bias(gpu::Output y, gpu::Input bias, int64_t rows, int64_t width, gpu::Stream s) {
  static_cast<FakeStream*>(s.handle)->push([=, check = s.check] {
    gpu::emulated::add_bias(y, bias, rows, width, {nullptr, check});
  });
}

std::unique_ptr<gpu::Matmul> make(const gpu::MatmulOptions& options, gpu::LaunchCheck& check) {
  if (*notice) (*notice)();
  return gpu::library_matmul(library, options, queued_bias, check);
}

}  // namespace

LibraryTable::LibraryTable(Behind behind, std::function<void()> when_made)
    : when_made_(std::move(when_made)), kernels_(queued_kernels(behind)) {
  SHARDLAB_CHECK(library == nullptr, "there is a table already");
  fake_->queue = [](void* stream, std::function<void()> work) { static_cast<FakeStream*>(stream)->push(std::move(work)); };
  library = fake_;
  notice = &when_made_;
  kernels_.matmul = make;
}

LibraryTable::~LibraryTable() { library = nullptr; }

}  // namespace shardlab::testing
