#include "runtime/cuda/nccl_api.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace shardlab::runtime::cuda {

std::string nccl_version_text(int version) {
  // Before 2.9 a version was 1000 major + 100 minor + patch.
  const int major = version >= 10000 ? version / 10000 : version / 1000;
  const int minor = version >= 10000 ? version % 10000 / 100 : version % 1000 / 100;
  return fmt::format("{}.{}.{}", major, minor, version % 100);
}

int nccl_type(DType dtype) {
  switch (dtype) {
    case DType::i8: return 0;
    case DType::u8: return 1;
    case DType::i32: return 2;
    case DType::i64: return 4;
    case DType::f16: return 6;
    case DType::f32: return 7;
    case DType::f64: return 8;
    case DType::bf16: return 9;
    default: return -1;
  }
}

int nccl_reduction(ReduceOp reduce) { return reduce == ReduceOp::kSum ? 0 : 2; }

namespace {

constexpr int kOldest = 21000;

class RealNccl final : public NcclApi {
 public:
  ~RealNccl() override = default;  // the library stays: it keeps threads

  /// The name of a symbol that the library lacks; empty when it has all.
  std::string open(void* library) {
    const auto find = [&](const char* symbol, auto*& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      if (function == nullptr && missing_.empty()) missing_ = symbol;
    };
    find("ncclGetErrorString", error_string_);
    find("ncclGetVersion", version_);
    find("ncclGetUniqueId", unique_id_);
    find("ncclCommInitRank", init_);
    find("ncclCommDestroy", destroy_);
    find("ncclCommAbort", abort_);
    find("ncclCommGetAsyncError", async_error_);
    find("ncclGroupStart", group_start_);
    find("ncclGroupEnd", group_end_);
    find("ncclAllReduce", all_reduce_);
    find("ncclReduceScatter", reduce_scatter_);
    find("ncclAllGather", all_gather_);
    find("ncclBroadcast", broadcast_);
    find("ncclSend", send_);
    find("ncclRecv", receive_);
    return missing_;
  }

  std::string describe(NcclStatus status) override { return error_string_(status); }
  NcclStatus version(int* version) override { return version_(version); }
  NcclStatus unique_id(NcclId* id) override { return unique_id_(id); }
  NcclStatus init(NcclHandle* handle, int size, const NcclId& id, int index) override {
    return init_(&handle->value, size, id, index);
  }
  NcclStatus destroy(NcclHandle handle) override { return destroy_(handle.value); }
  NcclStatus abort(NcclHandle handle) override { return abort_(handle.value); }
  NcclStatus async_error(NcclHandle handle, NcclStatus* status) override { return async_error_(handle.value, status); }
  NcclStatus group_start() override { return group_start_(); }
  NcclStatus group_end() override { return group_end_(); }
  NcclStatus all_reduce(const void* source, void* target, int64_t count, DType dtype, ReduceOp reduce, NcclHandle handle,
                        StreamHandle stream) override {
    return all_reduce_(source, target, static_cast<size_t>(count), nccl_type(dtype), nccl_reduction(reduce), handle.value,
                       stream.value);
  }
  NcclStatus reduce_scatter(const void* source, void* target, int64_t count, DType dtype, ReduceOp reduce, NcclHandle handle,
                            StreamHandle stream) override {
    return reduce_scatter_(source, target, static_cast<size_t>(count), nccl_type(dtype), nccl_reduction(reduce), handle.value,
                           stream.value);
  }
  NcclStatus all_gather(const void* source, void* target, int64_t count, DType dtype, NcclHandle handle,
                        StreamHandle stream) override {
    return all_gather_(source, target, static_cast<size_t>(count), nccl_type(dtype), handle.value, stream.value);
  }
  NcclStatus broadcast(const void* source, void* target, int64_t count, DType dtype, int root, NcclHandle handle,
                       StreamHandle stream) override {
    return broadcast_(source, target, static_cast<size_t>(count), nccl_type(dtype), root, handle.value, stream.value);
  }
  NcclStatus send(const void* source, int64_t count, DType dtype, int to, NcclHandle handle, StreamHandle stream) override {
    return send_(source, static_cast<size_t>(count), nccl_type(dtype), to, handle.value, stream.value);
  }
  NcclStatus receive(void* target, int64_t count, DType dtype, int from, NcclHandle handle, StreamHandle stream) override {
    return receive_(target, static_cast<size_t>(count), nccl_type(dtype), from, handle.value, stream.value);
  }

 private:
  // NCCL's own prototypes, with its enums as int and its handles as void*.
  std::string missing_;
  const char* (*error_string_)(int) = nullptr;
  int (*version_)(int*) = nullptr;
  int (*unique_id_)(NcclId*) = nullptr;
  int (*init_)(void**, int, NcclId, int) = nullptr;
  int (*destroy_)(void*) = nullptr;
  int (*abort_)(void*) = nullptr;
  int (*async_error_)(void*, int*) = nullptr;
  int (*group_start_)() = nullptr;
  int (*group_end_)() = nullptr;
  int (*all_reduce_)(const void*, void*, size_t, int, int, void*, void*) = nullptr;
  int (*reduce_scatter_)(const void*, void*, size_t, int, int, void*, void*) = nullptr;
  int (*all_gather_)(const void*, void*, size_t, int, void*, void*) = nullptr;
  int (*broadcast_)(const void*, void*, size_t, int, int, void*, void*) = nullptr;
  int (*send_)(const void*, size_t, int, int, void*, void*) = nullptr;
  int (*receive_)(void*, size_t, int, int, void*, void*) = nullptr;
};

Error absent(std::string message) {
  return {ExitCode::kEnvironment, std::move(message), "install NCCL 2.10 or newer (libnccl.so.2), or use transport: one-gpu", ""};
}

}  // namespace

Result<std::unique_ptr<NcclApi>> real_nccl() {
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absent("NCCL is not installed: no libnccl.so.2");
  auto nccl = std::make_unique<RealNccl>();
  if (const std::string missing = nccl->open(library); !missing.empty())
    return absent(fmt::format("the NCCL that is installed lacks {}", missing));
  int version = 0;
  if (nccl->version(&version) != 0 || version < kOldest)
    return absent(fmt::format("the NCCL that is installed is {}, older than 2.10", nccl_version_text(version)));
  return std::unique_ptr<NcclApi>(std::move(nccl));
}

}  // namespace shardlab::runtime::cuda
