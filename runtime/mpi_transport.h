// Ranks in several processes that a launcher of MPI has started: messages go over MPI, whatever network that has.
//
// Only messages are MPI's. Order and sums of collectives are our own (runtime/stepped_communicator.h), so that the bits are those of
// every other wire. One thread of each process makes all calls: MPI moves nothing unless it is called, and spins where it waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/message_transport.h"
#include "runtime/mpi_library.h"

namespace shardlab::runtime {

/// What the progress thread moves along. Its calls come from that thread.
class MpiLine {
 public:
  virtual ~MpiLine() = default;
  /// Moves what can be moved now. False: nothing could. Throws WorldError where MPI reports an error.
  virtual bool advance() = 0;
};

/// MPI as this process has it, with the thread that calls it. Can be started once in a process.
class MpiWorld {
 public:
  /// Starts MPI in every process of the group at once. Throws WorldError where a call fails, where it takes longer than `timeout_s`, and
  /// where MPI numbers the processes otherwise than the group does.
  MpiWorld(std::unique_ptr<Mpi> mpi, Control& control, double timeout_s);
  /// Ends MPI once every process has come here. Where the group has failed MPI is left as it is: its end waits for processes that are
  /// gone, and the launcher ends what is left of the job.
  ~MpiWorld();
  MpiWorld(const MpiWorld&) = delete;

  std::shared_ptr<Mpi> mpi() const { return shared_->mpi; }
  /// The next two numbers that no other line uses, the same in every process: for headers and for what follows.
  int next_tag();
  /// Calls on the progress thread, and waits. Throws what the call throws, and WorldError where it has not returned within the time-out:
  /// a call that has not begun by then never does, and one that has may return after the caller has gone. So `body` owns what it uses.
  void call(std::function<void()> body);
  void attach(std::shared_ptr<MpiLine> line);
  /// After it the line is not called any more. Where it throws the line may be in a call that has not returned.
  void detach(const std::shared_ptr<MpiLine>& line);
  /// Something is to be sent.
  void wake();

 private:
  struct Call {
    std::function<void()> body;
    std::promise<void> done;
    bool begun = false;
  };
  /// Outlives the world where a call never returns: its thread is left alone then.
  struct Shared {
    std::shared_ptr<Mpi> mpi;
    std::vector<std::shared_ptr<MpiLine>> lines;  ///< of the progress thread alone
    std::atomic<bool> posted{false};
    std::mutex mutex;  ///< guards what follows
    std::condition_variable changed;
    std::deque<std::shared_ptr<Call>> calls;  ///< that have not begun
    bool late = false;                        ///< a call has timed out, and the thread has not been here since
    bool ends = false;
    std::function<void(const std::string&)> on_error;
  };
  static void progress(Shared& shared);
  static void carry_out(Shared& shared, std::unique_lock<std::mutex>& lock);
  void start();
  void end_thread() noexcept;

  Control& control_;
  const double timeout_s_;
  std::shared_ptr<Shared> shared_;
  std::thread thread_;
  int next_tag_ = 0;
};

class MpiTransport final : public MessageTransport {
 public:
  /// Every process of the group creates one for the same plan. `world` outlives it.
  MpiTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, MpiWorld& world);
  ~MpiTransport() override;
  void post(int process, const MessageHeader& header, std::span<const Slice> slices) override;

 private:
  class Line;
  void leave_to_mpi() noexcept;

  MpiWorld& world_;
  const std::shared_ptr<Line> line_;
};

}  // namespace shardlab::runtime
