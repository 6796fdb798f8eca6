#include "tests/cuda_runtime/fake_nccl.h"
#include "tests/namespaces.h"

#include <fmt/format.h>

#include <cstring>

namespace shardlab::testing {

using cuda::NcclHandle;
using cuda::NcclStatus;
using cuda::StreamHandle;

namespace {
FakeNccl::Handle& of(NcclHandle handle) { return *static_cast<FakeNccl::Handle*>(handle.value); }
const char* name_of_reduction(ReduceOp reduce) { return reduce == ReduceOp::kSum ? "sum" : "max"; }
}  // namespace

NcclStatus FakeNccl::note(NcclHandle handle, std::string text) {
  const std::lock_guard lock(mutex_);
  of(handle).calls.push_back(text);
  log.emplace_back(&of(handle), std::move(text));
  return 0;
}

NcclStatus FakeNccl::unique_id(cuda::NcclId* id) {
  ++communicators_;
  std::memcpy(id->bytes.data(), &communicators_, sizeof communicators_);
  return 0;
}

NcclStatus FakeNccl::init(NcclHandle* handle, int size, const cuda::NcclId& id, int index) {
  if (when_made) when_made();
  auto made = std::make_unique<Handle>();
  std::memcpy(&made->number, id.bytes.data(), sizeof made->number);
  made->index = index;
  made->size = size;
  handle->value = made.get();
  handles.push_back(std::move(made));
  made_in_groups += open_groups > 0;
  return 0;
}

NcclStatus FakeNccl::destroy(NcclHandle handle) { return of(handle).destroyed = true, 0; }
NcclStatus FakeNccl::abort(NcclHandle handle) { return of(handle).aborted = true, 0; }
NcclStatus FakeNccl::async_error(NcclHandle, NcclStatus* status) { return *status = remote_failure, 0; }

NcclStatus FakeNccl::group_start() {
  const std::lock_guard lock(mutex_);
  ++open_groups;
  log.emplace_back(nullptr, "group {");
  return 0;
}
NcclStatus FakeNccl::group_end() {
  const std::lock_guard lock(mutex_);
  --open_groups;
  log.emplace_back(nullptr, "}");
  return 0;
}

NcclStatus FakeNccl::all_reduce(const void*, void*, int64_t count, DType dtype, ReduceOp reduce, NcclHandle handle, StreamHandle) {
  if (failure != 0) return failure;
  return note(handle, fmt::format("all_reduce {} x {} {}", name_of(dtype), count, name_of_reduction(reduce)));
}
NcclStatus FakeNccl::reduce_scatter(const void*, void*, int64_t count, DType dtype, ReduceOp reduce, NcclHandle handle,
                                    StreamHandle) {
  return note(handle, fmt::format("reduce_scatter {} x {} {}", name_of(dtype), count, name_of_reduction(reduce)));
}
NcclStatus FakeNccl::all_gather(const void*, void*, int64_t count, DType dtype, NcclHandle handle, StreamHandle) {
  return note(handle, fmt::format("all_gather {} x {}", name_of(dtype), count));
}
NcclStatus FakeNccl::broadcast(const void*, void*, int64_t count, DType dtype, int root, NcclHandle handle, StreamHandle) {
  return note(handle, fmt::format("broadcast {} x {} from {}", name_of(dtype), count, root));
}
NcclStatus FakeNccl::send(const void*, int64_t count, DType dtype, int to, NcclHandle handle, StreamHandle) {
  return note(handle, fmt::format("send {} x {} to {}", name_of(dtype), count, to));
}
NcclStatus FakeNccl::receive(void*, int64_t count, DType dtype, int from, NcclHandle handle, StreamHandle) {
  return note(handle, fmt::format("receive {} x {} from {}", name_of(dtype), count, from));
}

}  // namespace shardlab::testing
