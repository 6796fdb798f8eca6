// One rank of a session: its memory, its bound instructions, and the loop that runs a stream of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "plan/expert_rows.h"
#include "plan/program.h"
#include "runtime/arena.h"
#include "runtime/backend.h"
#include "runtime/crew.h"
#include "runtime/host_counts.h"
#include "runtime/session.h"
#include "runtime/stream_program.h"
#include "runtime/transport.h"

namespace shardlab::runtime {

/// One instruction with everything looked up: what a step costs beside its kernels is a loop over these.
struct BoundInstruction {
  enum class Kind : uint8_t { kLaunch, kCollective, kSend, kReceive, kAlloc, kFree, kBlockRead, kBlockWrite } kind = Kind::kLaunch;
  int32_t id = -1;
  int32_t step = 0;  ///< of the plan's period
  std::span<const Wait> waits;
  const int32_t* predicate = nullptr;  ///< runs where it is not 0; none: always
  bool settled = false;                ///< the predicate is written once a step, before this
  bool on_host = false;                ///< on a device: this thread does the work, once the device has come so far
  Launch launch;                       ///< of kLaunch
  Communicator* comm = nullptr;        ///< of kCollective, kSend, kReceive
  int32_t comm_id = -1;
  int peer = -1;                 ///< group index, of kSend and kReceive
  CollectiveCall call;           ///< of kCollective; of kSend and kBlockWrite `source`, of kReceive and kBlockRead `target`
  Space space = Space::kDevice;  ///< of kAlloc and kFree, as the four below
  BufferClass cls = BufferClass::kTemporary;
  int64_t offset = 0;  ///< also of kBlockRead and kBlockWrite: in the rank's BlockStore
  int64_t bytes = 0;   ///< also of those, and of kSend and kReceive
  const int32_t* counts =
      nullptr;           ///< of a kLaunch whose rows of experts are counted; on a device in host memory, when the step has ended
  int layer = -1;        ///< of these: which step and layer of `RowCounting`
  int micro_batch = -1;  ///< of these
  int metric = -1;       ///< of a kFree that ends the life of a metric: which
  std::span<const EventWait> events;  ///< on a device, instead of `waits`
  int32_t record = -1;                ///< on a device: the event recorded behind it, or -1
  std::span<const CountCopy> makes;   ///< on a device: counts that it makes and the host reads
  std::span<const CountRead> awaits;  ///< on a device, of packed rows: counts that the host must have first
};

/// Data that the session shares with its ranks during a step.
struct StepFrame {
  std::vector<StepState> states;  ///< by step of the plan's period
  int32_t number = 0;             ///< periods run before this one
  double begin = 0;               ///< of the period, on the clock
};

/// The role's buffer of that name.
std::optional<BufferId> find_buffer(const Role& role, std::string_view name);
/// Whether it is, or is a view of, a persistent buffer.
bool outlives_step(const Role& role, BufferId buffer);

class Rank {
 public:
  /// `storage`: memory for its arena, of the transport or of `beside`; null: its own. `beside`: the same rank of a session whose state this one
  /// goes on from, and which outlives it; none: the rank begins with zeros.
  Rank(const PlacedPlan& placed, int rank, const RunOptions& options, std::unique_ptr<Backend> backend,
       const std::array<std::byte*, kSpaces>& storage = {}, const Rank* beside = nullptr);

  /// Looks everything up. Pointers into the rank stay valid as long as it lives.
  Result<void> bind(Transport& transport, const BatchSource* source);

  /// Streams that have instructions, by StreamId; at least stream 0.
  std::vector<int> streams() const;
  /// By the thread of a stream, once, before the first step; stream 0 also makes the persistent storage live and zero.
  void enter(int stream);
  /// By the thread of stream 0, between steps: makes live what the steps write anew, where another session's steps have had its place.
  void take_arena();
  /// Before a step, while no stream runs.
  void reset();
  /// One step of one stream.
  void run(int stream, const StepFrame& frame, Task& task);

  /// For who decides itself what runs when (runtime/parameter_servers.h): the instructions of a stream; one of them carried out,
  /// without its waits; that it was, by other means; and what was sent meanwhile. Nothing is recorded of a frame below 0.
  std::span<const BoundInstruction> instructions(int stream) const { return streams_[static_cast<size_t>(stream)]->instructions; }
  void carry_out(const BoundInstruction& bound, int stream, const StepFrame& frame, Task& task);
  void note(const BoundInstruction& bound, int stream, const StepFrame& frame, double begin, const Moved& moved);
  /// Streams of a rank may send through one communicator at the same time.
  void count_sent(int32_t comm, int64_t bytes) {
    std::atomic_ref(sent_by_comm_[static_cast<size_t>(comm)]).fetch_add(bytes, std::memory_order_relaxed);
  }

  int number() const { return rank_; }
  const Role& role() const { return role_; }
  const Coordinates& coordinates() const { return at_; }
  const Ledger& ledger() const { return ledger_; }
  const Arena& arena() const { return arena_; }
  const BlockStore* store() const { return store_.get(); }  ///< none without NVMe space
  Backend& backend() { return *backend_; }
  const Backend& backend() const { return *backend_; }
  double end_of_step() const;
  /// Where the device times the ops: its reference for the step, recorded now; and what the step came to, once all have ended.
  void mark_begin();
  void report_times(int32_t step);
  /// After a step whose streams have all ended: counts the rows of experts that a device's ops have worked at.
  void count_rows_of_step();
  std::span<const int64_t> sent_by_comm() const { return sent_by_comm_; }
  /// Rows that the rank's experts have worked at in the step, the `numbers` of one step and layer after another (`RowCounting`); empty without storage.
  std::span<const int64_t> expert_rows() const { return expert_rows_; }

  /// Copies bytes of a buffer, from `offset` on, to or from memory of this process. Between steps, from one thread.
  void read(BufferId buffer, int64_t offset, std::span<std::byte> to) const;
  void write(BufferId buffer, int64_t offset, std::span<const std::byte> from);
  /// Address of a buffer of the role, or null without storage; on a device, an address of its memory.
  void* address(BufferId buffer) const;
  /// Whether it is, or is a view of, a persistent buffer.
  bool persistent(BufferId buffer) const { return outlives_step(role_, buffer); }
  std::optional<BufferId> find(std::string_view buffer) const { return find_buffer(role_, buffer); }
  /// The value of "loss" or "grad_norm2" after a step, where the role has it: of one step of the period, where it holds as many.
  std::optional<double> metric(int which, int step = 0) const;
  static constexpr int kLoss = 0, kGradNorm2 = 1, kMetrics = static_cast<int>(kMetricNames.size());

 private:
  /// A stream's instructions, and how many of them it has completed in this step.
  struct Stream {
    std::vector<BoundInstruction> instructions;
    Counter completed;
    double end = 0;                    ///< of the step, seconds from its begin
    const int32_t* fetched = nullptr;  ///< on a device: a settled predicate whose value in this step is known, and ...
    bool runs = false;                 ///< ... that value
  };

  Result<void> bind_run(const Instruction& instruction, BoundInstruction& bound, Transport& transport, const BatchSource* source);
  Result<void> bind_collective(const Instruction& instruction, const Collective& work, BoundInstruction& bound,
                               Transport& transport);
  Result<void> bind_message(const Instruction& instruction, CommId comm, int hop, bool cyclic, BoundInstruction& bound,
                            Transport& transport);
  Result<void> bind_block(const Instruction& instruction, BoundInstruction& bound);
  Space space_of(const Operand& operand) const;
  int64_t offset_of(const Operand& operand) const;
  int64_t offset_of(BufferId buffer) const;
  /// The workspace of the instruction's stream; none where no op of the stream needs one.
  std::optional<BufferId> find_workspace(const Instruction& instruction) const;
  std::span<std::byte> workspace_of(const Instruction& instruction) const;
  void bind_workspace(BoundOp& op) const;
  void enter_arena();
  void bind_storage(const Instruction& instruction, BoundInstruction& bound);
  Communicator& communicator(CommId comm, Transport& transport);
  void* address(const Operand& operand) const;
  Tensor tensor(const Operand& operand) const { return {address(operand), operand.type}; }

  void bind_counts(const Instruction& instruction, BoundInstruction& bound);
  const int32_t* host_counts_of(const Instruction& instruction, size_t read) const;
  void bind_events();
  void settle_predicates();
  static bool issues(const BoundInstruction& bound);
  void await(const BoundInstruction& bound, int stream, const StepFrame& frame, Task& task);
  void await_events(const BoundInstruction& bound, int stream, Task& task);
  void await_idle(int stream, Task& task);
  void await_counts(const BoundInstruction& bound, Task& task);
  template <class Done>
  void await_device(Task& task, const Done& done);
  void fetch_counts(const BoundInstruction& bound, int stream, const StepFrame& frame);
  std::string progress() const;
  bool skipped(const BoundInstruction& bound, int stream, Task& task);
  Moved run_one(const BoundInstruction& bound, int stream, const StepFrame& frame, Task& task);
  void issue(const BoundInstruction& bound, int stream, const StepFrame& frame, Task& task);
  Moved perform(const BoundInstruction& bound, const StepState& state, Task& task);
  void record(TraceEvent::Kind kind, const BoundInstruction& bound, int stream, const StepFrame& frame, double begin, double end,
              const Moved& moved);
  void keep_metric(int which);
  void count_rows(const BoundInstruction& bound);
  /// The first of the two marks around an instruction; mark 0 is the step's reference.
  static int mark_of(const BoundInstruction& bound) { return 1 + 2 * bound.id; }

  const PlacedPlan& placed_;
  const Plan& plan_;
  const int rank_;
  const Coordinates at_;
  const Role& role_;
  const Program& program_;
  const ArenaLayout& layout_;
  const RunOptions options_;
  const std::unique_ptr<Backend> backend_;
  Accelerator* const device_;
  Arena arena_;
  std::shared_ptr<BlockStore> store_;  ///< NVMe space; none where the role has no buffer there
  const bool is_beside_;               ///< another session has the arena too, and began its state
  Ledger ledger_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<Communicator>> communicators_;  ///< by CommId; none where the rank does not use it
  std::vector<int64_t> sent_by_comm_;
  const RowCounting counting_;
  std::vector<int64_t> expert_rows_;
  std::array<std::optional<BufferId>, kMetrics> metric_buffers_;
  /// 8 bytes for each metric, its value when its buffer was freed, and for each stream's predicate; on a device, host memory that
  /// it copies to.
  std::array<std::byte, 8 * (kMetrics + kMaxStreams)> own_bytes_{};
  std::byte* host_bytes_ = own_bytes_.data();
  std::array<bool, kMetrics> metric_kept_{};
  StreamProgram stream_program_;      ///< on a device
  HostCounts host_counts_;            ///< on a device; their events follow those of the stream program
  std::byte* count_bytes_ = nullptr;  ///< on a device: host memory, of HostCounts::bytes
  std::vector<uint8_t> marked_;       ///< by instruction: whether its marks were recorded in this step. Each by its stream's thread
};

}  // namespace shardlab::runtime
