// Ranks in several processes that a launcher of MPI has started: messages go over MPI, whatever network that has.
//
// Only messages are MPI's. Order and sums of collectives are our own (runtime/stepped_communicator.h), so that the bits are those of
// every other wire. One thread of each process makes all calls: MPI moves nothing unless it is called, and spins where it waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
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

  Mpi& mpi() { return *shared_->mpi; }
  /// The next two numbers that no other line uses, the same in every process: for headers and for what follows.
  int next_tag();
  /// Calls on the progress thread, and waits. Throws what the call throws, and WorldError where it has not returned within the time-out.
  void call(const std::function<void()>& body);
  void attach(MpiLine& line);
  /// After it the line is not called any more.
  void detach(MpiLine& line);
  /// Something is to be sent.
  void wake();

 private:
  /// Outlives the world where a call never returns: its thread is left alone then.
  struct Shared {
    std::unique_ptr<Mpi> mpi;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> calls;
    std::vector<MpiLine*> lines;  ///< of the progress thread alone
    std::atomic<bool> posted{false};
    bool ends = false;
    std::function<void(const std::string&)> on_error;
  };
  static void progress(Shared& shared);

  Control& control_;
  const double timeout_s_;
  std::shared_ptr<Shared> shared_;
  std::thread thread_;
  int next_tag_ = 0;
};

class MpiTransport final : public MessageTransport, private MpiLine {
 public:
  /// Every process of the group creates one for the same plan. `world` outlives it.
  MpiTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, MpiWorld& world);
  ~MpiTransport() override;
  void post(int process, const MessageHeader& header, std::span<const Slice> slices) override;

 private:
  /// A message on its way out. It stays where it is until MPI is done with it.
  struct Outgoing {
    MessageHeader header;
    std::vector<Slice> slices;
    std::vector<std::byte> packed;  ///< of several slices
    std::vector<MpiRequest> requests;
  };
  struct Peer {
    std::mutex mutex;  ///< guards `posted`
    std::list<Outgoing> posted;
    std::list<Outgoing> under_way;
    MessageHeader header;  ///< of the message that comes
    MpiRequest header_request;
    std::vector<MpiRequest> requests;  ///< of what follows it
    MessageChannel* into = nullptr;    ///< none: the header has not come
  };

  bool advance() override;
  bool receive_some(int process, Peer& peer);
  bool send_some(int process, Peer& peer);
  void expect_header(int process, Peer& peer);
  void start(int process, Outgoing& message);
  bool done(std::vector<MpiRequest>& requests, int process);
  void check(int error, const char* what, int process) const;
  void close();

  MpiWorld& world_;
  const int tag_;
  std::vector<std::unique_ptr<Peer>> peers_;  ///< by process; none to this one
};

}  // namespace shardlab::runtime
