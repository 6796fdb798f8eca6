// Ranks in several processes of one machine: their arenas lie in shared memory, where peers read from each other as threads do.
#pragma once

#include <memory>

#include "kernels/kernels.h"
#include "runtime/memory_wire.h"
#include "runtime/session.h"
#include "runtime/shared_memory.h"
#include "runtime/thread_transport.h"

namespace shardlab::runtime {

/// The ranks of a process are those of `local_ranks`. A process's block has its channels (by communicator, own rank that sends,
/// rank that receives), and behind them the arenas of its ranks.
class ProcessTransport final : public Transport {
 public:
  /// Every process of the group creates one for the same plan. Refuses processes of another machine. `has_storage`: ranks have
  /// values, which a rehearsal has not. `beside`: the transport of a session in whose arenas the ranks lie, and which outlives this; none: it has
  /// arenas of its own.
  static Result<std::unique_ptr<ProcessTransport>> create(const kernels::Kernels& kernels, const PlacedPlan& placed,
                                                          Control& control, bool has_storage,
                                                          const ProcessTransport* beside = nullptr);
  std::unique_ptr<Communicator> join(int rank, CommId comm, std::span<const int> members) override;
  std::byte* storage(int rank, Space space) override;

 private:
  ProcessTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, bool has_storage);
  int64_t channel_place(CommId comm, int from, int to) const;
  Channel& channel(CommId comm, int from, int to) const;

  const kernels::Kernels& kernels_;
  const PlacedPlan& placed_;
  const Control& control_;
  const bool has_storage_;
  const ProcessTransport* beside_ = nullptr;
  const int world_size_, ranks_here_;
  std::unique_ptr<SharedMemory> memory_;
};

}  // namespace shardlab::runtime
