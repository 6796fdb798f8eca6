// An NCCL on the fake CUDA runtime that carries its calls out. A call is work on its stream that begins when the stream has come to it, and ends
// when the work of all who take part has: streams stand still meanwhile, and nothing else orders them. Sums are taken in the canonical order,
// so that runs have the bits of other transports.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "runtime/cuda/nccl_api.h"
#include "tests/cuda_runtime/fake_api.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

class MovingNccl final : public cuda::NcclApi, private gpu::LaunchCheck {
 public:
  std::string describe(cuda::NcclStatus status) override { return "status " + std::to_string(status); }
  cuda::NcclStatus version(int* version) override { return *version = 22809, 0; }
  cuda::NcclStatus unique_id(cuda::NcclId* id) override;
  cuda::NcclStatus init(cuda::NcclHandle* handle, int size, const cuda::NcclId& id, int index) override;
  cuda::NcclStatus destroy(cuda::NcclHandle) override { return 0; }
  cuda::NcclStatus abort(cuda::NcclHandle) override { return 0; }
  cuda::NcclStatus async_error(cuda::NcclHandle, cuda::NcclStatus* status) override { return *status = 0, 0; }
  cuda::NcclStatus group_start() override;
  cuda::NcclStatus group_end() override;
  cuda::NcclStatus all_reduce(const void* source, void* target, int64_t count, DType dtype, ReduceOp reduce,
                              cuda::NcclHandle handle, cuda::StreamHandle stream) override;
  cuda::NcclStatus reduce_scatter(const void* source, void* target, int64_t count, DType dtype, ReduceOp reduce,
                                  cuda::NcclHandle handle, cuda::StreamHandle stream) override;
  cuda::NcclStatus all_gather(const void* source, void* target, int64_t count, DType dtype, cuda::NcclHandle handle,
                              cuda::StreamHandle stream) override;
  cuda::NcclStatus broadcast(const void* source, void* target, int64_t count, DType dtype, int root, cuda::NcclHandle handle,
                             cuda::StreamHandle stream) override;
  cuda::NcclStatus send(const void* source, int64_t count, DType dtype, int to, cuda::NcclHandle handle,
                        cuda::StreamHandle stream) override;
  cuda::NcclStatus receive(void* target, int64_t count, DType dtype, int from, cuda::NcclHandle handle,
                           cuda::StreamHandle stream) override;

  /// What went wrong in the work of some call: messages of unequal sizes. Empty: nothing.
  std::string fault() const;
  /// Messages between two ranks since the beginning.
  int64_t messages() const;

 private:
  enum class Kind : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast };
  /// One collective: as the ranks call it, and as far as their streams have come.
  struct Round {
    Kind kind = Kind::kAllReduce;
    int64_t count = 0;
    DType dtype = DType::u8;
    ReduceOp reduce = ReduceOp::kSum;
    int root = 0;
    std::vector<std::array<void*, 2>> buffers;  ///< source and target by index
    size_t arrived = 0;
    bool done = false;
  };
  struct Message {
    const void* source = nullptr;
    int64_t bytes = 0;
    bool here = false, taken = false;  ///< the sender's stream has come to it; the receiver has it
  };
  struct Communicator {
    int size = 0;
    std::vector<std::shared_ptr<Round>> rounds;
    std::map<std::array<int, 2>, std::vector<std::shared_ptr<Message>>> messages;  ///< by sender and receiver
  };
  struct Handle {
    std::shared_ptr<Communicator> communicator;
    int index = 0;
    size_t rounds = 0;
    std::map<int, size_t> sent, received;  ///< by peer
  };
  /// A call of a group: what its stream does when it comes there, and then.
  struct Pending {
    cuda::StreamHandle stream;
    std::function<void()> arrive;
    std::function<bool()> ready;
    std::function<void()> run;
    bool sends = false;
  };
  struct Group {
    int depth = 0;
    std::vector<Pending> calls;
  };

  void failed(std::string_view kernel, std::string_view library, int code, std::string_view text) override;
  cuda::NcclStatus meet(Round call, const void* source, void* target, cuda::NcclHandle handle, cuda::StreamHandle stream);
  void carry_out(Round& round);
  void reduce(const Round& round, int64_t begin, int64_t n, const std::vector<void*>& outs);
  std::shared_ptr<Message> message_of(Communicator& communicator, int from, int to, size_t number);
  cuda::NcclStatus submit(Pending call);
  static void issue(std::vector<Pending> calls);

  mutable std::mutex mutex_;
  std::map<int, std::shared_ptr<Communicator>> communicators_;  ///< by the number in the id
  std::vector<std::unique_ptr<Handle>> handles_;
  std::map<std::thread::id, Group> groups_;
  int ids_ = 0;
  int64_t messages_ = 0;
  std::string fault_;
};

}  // namespace shardlab::testing
