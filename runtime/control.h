// The processes of one group, and what they tell one another beside what the ranks send: who is there, what all must agree on, how
// a step went, and that somebody has failed.
//
//   ControlServer server(2, {}, token);            // in the process that started the group
//   Control control(server.endpoint(), token, process, 2, 60);   // in each process
//   const auto all = control.gather("what this process says");   // by process; every process gets the same
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <typeindex>
#include <vector>

#include "plan/base/result.h"
#include "plan/base/world_error.h"
#include "runtime/socket.h"

namespace shardlab::runtime {

/// Why a group ends.
struct GroupFailure {
  enum class Kind : uint8_t {
    kSaid,         ///< a process has said so, in `message`
    kGone,         ///< `process` has ended without a word
    kSilent,       ///< the others have not come within the time-out of `process`
    kUnreachable,  ///< the machine of `process` gives no sign of life: a link is down, or the machine is
  } kind = Kind::kSaid;
  int process = -1;
  std::string message = {}, hint = {};
  /// What `message` says of `process`.
  enum class Knows : uint8_t { kNothing, kRank, kOp } knows = Knows::kNothing;
};

/// Seconds without a sign of life of another machine after which its processes count as out of reach: 15, and at most half of the
/// time-out, so that a lost link is named before the ranks that wait for it time out. At least 2, since the system counts seconds.
double silence_within(double timeout_s);

/// Serves a group from a thread of its own: puts together what is gathered, and tells everybody of a failure. One for each group,
/// in the process that starts the others.
class ControlServer {
 public:
  /// `token` is what a process must know to join. `timeout_s` is the longest wait of the group's ranks; it bounds the silence of a
  /// machine (`silence_within`). Throws WorldError where `endpoint` cannot be listened at.
  ControlServer(int processes, Endpoint endpoint, std::string token, double timeout_s = 60);
  ~ControlServer();
  ControlServer(const ControlServer&) = delete;

  const Endpoint& endpoint() const { return endpoint_; }
  /// The group's first failure; of a process that has ended, with what another has told of it since. None while all goes well.
  std::optional<GroupFailure> failure() const;
  /// Tells the group of a failure that the starting process sees. Where `message` is empty, the group says what it knows.
  void fail(GroupFailure failure);

 private:
  struct Peer {
    FileDescriptor socket;
    int process = -1;  ///< -1: has not said who it is
    bool left = false;
    std::string in, out;  ///< bytes of frames that are not complete, or not sent
  };
  void serve();
  void finish();
  bool read(Peer& peer);
  bool take(Peer& peer, uint32_t kind, std::string_view payload);
  void announce(GroupFailure failure);
  void answer();

  const int processes_;
  Endpoint endpoint_;
  const std::string token_;
  const double silence_s_;
  FileDescriptor listener_, wake_read_, wake_write_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<int, std::string> gathered_;  ///< of the round under way, by process
  std::set<int> left_;                   ///< processes that have said goodbye, whose connection may be closed since
  mutable std::mutex mutex_;             ///< guards the three below
  std::optional<GroupFailure> failure_;
  std::optional<GroupFailure> asked_to_fail_;
  bool ends_ = false;
  std::thread thread_;
};

/// One process's part of the group. `gather` is called by one thread, in the same order in every process.
class Control {
 public:
  /// Joins the group. Throws WorldError where nobody answers within `timeout_s`, which later is the longest that `gather` waits.
  Control(const Endpoint& server, const std::string& token, int process, int processes, double timeout_s);
  ~Control();
  Control(const Control&) = delete;
  /// The longest that `gather` waits from now on.
  void set_timeout(double seconds) { timeout_s_ = seconds; }

  int process() const { return process_; }
  int processes() const { return processes_; }
  /// This machine's address by which it reaches the server, and so by which others reach this machine.
  const std::string& address() const { return address_; }

  /// What every process gives, by process, once all have given. Throws WorldError when the group fails or the time-out passes.
  std::vector<std::string> gather(std::string_view own);
  void barrier() { gather({}); }

  /// Ends the group: every process hears of it. The first failure counts. Safe from any thread.
  void fail(const std::string& message, const std::string& hint = {});

  /// What lives as long as this process's part of the group, made when first asked for: a library that can be started once in a process.
  /// Called by the thread that gathers. It is destroyed while the group can still gather.
  template <class T, class Make>
  T& kept(const Make& make) {
    std::shared_ptr<void>& place = kept_[std::type_index(typeid(T))];
    if (place == nullptr) place = std::shared_ptr<T>(make());
    return *static_cast<T*>(place.get());
  }

  /// What a listener knows of a failure that nobody has said: who was at what.
  struct Known {
    std::string text = {};
    GroupFailure::Knows knows = GroupFailure::Knows::kNothing;
  };
  /// Is told once of the group's failure, from another thread. `leave` waits until a call has ended.
  using Listener = std::function<Known(const GroupFailure&)>;
  int listen(Listener listener);
  void leave(int listener);

 private:
  void receive();
  void on_failure(GroupFailure failure);
  void send(uint32_t kind, std::string_view payload);

  const int process_, processes_;
  const double silence_s_;  ///< after which the machine of the server counts as out of reach
  std::atomic<double> timeout_s_;
  std::string address_;
  FileDescriptor socket_;
  std::mutex sending_;
  std::mutex calling_;  ///< held while listeners are called
  std::map<int, Listener> listeners_;
  int next_listener_ = 0;
  std::mutex mutex_;  ///< guards the four below
  std::condition_variable changed_;
  std::optional<std::vector<std::string>> answer_;
  std::optional<GroupFailure> failure_;
  bool leaving_ = false;
  std::map<std::type_index, std::shared_ptr<void>> kept_;
  std::thread thread_;
};

/// Refuses (ExitCode::kUsage) what is not the same in every process of the group, by its name: pairs of a name and a value, as many
/// and in the same order everywhere.
Result<void> check_alike(Control& control, const std::vector<std::pair<std::string, std::string>>& facts);

/// Values one after the other in a string, for `Control::gather`.
template <class T>
void put(std::string& to, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
inline void put_text(std::string& to, std::string_view text) {
  put(to, static_cast<uint64_t>(text.size()));
  to.append(text);
}

/// Takes them out again. Throws WorldError where the text is too short: the other process is of another version.
class Taking {
 public:
  explicit Taking(std::string_view from) : from_(from) {}
  template <class T>
  T take() {
    T value{};
    const std::string_view bytes = take_bytes(sizeof value);
    __builtin_memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string_view take_bytes(size_t n) {
    if (n > from_.size()) throw WorldError("a process of the group has said less than it should", "start all from one program");
    const std::string_view bytes = from_.substr(0, n);
    from_.remove_prefix(n);
    return bytes;
  }
  std::string_view take_text() { return take_bytes(take<uint64_t>()); }
  bool done() const { return from_.empty(); }

 private:
  std::string_view from_;
};

}  // namespace shardlab::runtime
