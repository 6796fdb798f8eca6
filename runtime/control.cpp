#include "runtime/control.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "plan/base/check.h"

namespace shardlab::runtime {

namespace {

enum Kind : uint32_t { kHello = 1, kGather, kFail, kBye, kAll, kFailed };

/// What precedes each message on a control connection.
struct Frame {
  uint32_t magic = 0x53484c31;  // "SHL1"
  uint32_t kind = 0;
  uint64_t bytes = 0;
};
constexpr double kMostSilence_s = 15, kLeastSilence_s = 2;
constexpr uint64_t kMostOfStranger = 4096;  ///< bytes of a message of a process that has not said who it is

/// A connection whose other machine is silent breaks: a link that is down sends no word of it. A process that is stopped does not count
/// while its machine answers; but where so much is sent to it that its buffers are full, TCP_USER_TIMEOUT may end that connection too.
void notice_silence(const FileDescriptor& socket, double silence_s) {
  constexpr int kOn = 1;
  const int whole_s = static_cast<int>(silence_s), each_s = std::max(1, whole_s / 5);
  const int probes = std::clamp(whole_s / each_s - 1, 1, 3), idle_s = whole_s - probes * each_s;
  const auto unanswered_ms = static_cast<unsigned>(silence_s * 1000);
  setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof kOn);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &each_s, sizeof each_s);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
}

/// Whether an error of a connection says that the network, or the other machine, is down.
bool is_silence(int error) { return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH; }

std::string silence_hint(double silence_s) {
  return fmt::format("its machine has been silent for {:.3g} s: see the network between the hosts", silence_s);
}

std::string framed(uint32_t kind, std::string_view payload) {
  std::string text;
  put(text, Frame{.kind = kind, .bytes = payload.size()});
  text.append(payload);
  return text;
}

std::string text_of(const GroupFailure& failure) {
  std::string text;
  put(text, failure.kind);
  put(text, failure.process);
  put_text(text, failure.message);
  put_text(text, failure.hint);
  put(text, failure.knows);
  return text;
}

GroupFailure failure_of(std::string_view text) {
  Taking from(text);
  GroupFailure failure;
  failure.kind = from.take<GroupFailure::Kind>();
  failure.process = from.take<int>();
  failure.message = from.take_text();
  failure.hint = from.take_text();
  failure.knows = from.take<GroupFailure::Knows>();
  return failure;
}

}  // namespace

double silence_within(double timeout_s) { return std::clamp(timeout_s / 2, kLeastSilence_s, kMostSilence_s); }

// ---- the server

ControlServer::ControlServer(int processes, Endpoint endpoint, std::string token, double timeout_s)
    : processes_(processes), endpoint_(std::move(endpoint)), token_(std::move(token)), silence_s_(silence_within(timeout_s)) {
  auto listener = listen_at(endpoint_);
  if (!listener.ok()) throw WorldError(listener.error().message, listener.error().hint);
  listener_ = std::move(*listener);
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) throw WorldError(fmt::format("no pipe: {}", std::strerror(errno)), "");
  wake_read_ = FileDescriptor(ends[0]);
  wake_write_ = FileDescriptor(ends[1]);
  thread_ = std::thread([this] { serve(); });
}

ControlServer::~ControlServer() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  (void)!::write(wake_write_.get(), "", 1);
  thread_.join();
}

std::optional<GroupFailure> ControlServer::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void ControlServer::fail(GroupFailure failure) {
  {
    const std::lock_guard lock(mutex_);
    asked_to_fail_ = std::move(failure);
  }
  (void)!::write(wake_write_.get(), "", 1);
}

void ControlServer::serve() {
  while (true) {
    std::vector<pollfd> waits{{wake_read_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const auto& peer : peers_)
      waits.push_back({peer->socket.get(), static_cast<short>(POLLIN | (peer->out.empty() ? 0 : POLLOUT)), 0});
    ::poll(waits.data(), waits.size(), -1);
    if (waits[0].revents != 0) {
      std::array<char, 64> ignored;
      while (::read(wake_read_.get(), ignored.data(), ignored.size()) > 0) {}
      std::optional<GroupFailure> asked;
      {
        const std::lock_guard lock(mutex_);
        if (ends_) return finish();
        asked = std::exchange(asked_to_fail_, std::nullopt);
      }
      if (asked) announce(std::move(*asked));
    }
    for (size_t i = 2; i < waits.size(); ++i) {
      Peer& peer = *peers_[i - 2];
      bool there = true;
      errno = 0;
      if ((waits[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) there = read(peer);
      if (there && !peer.out.empty()) {
        const ssize_t n = ::send(peer.socket.get(), peer.out.data(), peer.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) peer.out.erase(0, static_cast<size_t>(n));
        there = n >= 0 || errno == EAGAIN || errno == EINTR;
      }
      if (there) continue;
      const bool silent = is_silence(errno);
      peer.socket = FileDescriptor();
      if (peer.process >= 0 && !peer.left)
        announce({.kind = silent ? GroupFailure::Kind::kUnreachable : GroupFailure::Kind::kGone,
                  .process = peer.process,
                  .hint = silent ? silence_hint(silence_s_) : ""});
    }
    std::erase_if(peers_, [](const auto& peer) { return !peer->socket; });
    if (waits[1].revents != 0)
      if (FileDescriptor socket = accept_from(listener_, 0)) {
        make_nonblocking(socket);
        notice_silence(socket, silence_s_);
        peers_.push_back(std::make_unique<Peer>());
        peers_.back()->socket = std::move(socket);
      }
  }
}

/// Sends what is not sent yet: the answer that ends a group is on its way to the last process while the first one leaves.
void ControlServer::finish() {
  constexpr int kPatienceMs = 1000;
  for (const auto& peer : peers_)
    while (!peer->out.empty()) {
      pollfd wait{peer->socket.get(), POLLOUT, 0};
      if (::poll(&wait, 1, kPatienceMs) <= 0) break;
      const ssize_t n = ::send(peer->socket.get(), peer->out.data(), peer->out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno != EAGAIN && errno != EINTR) break;
      if (n > 0) peer->out.erase(0, static_cast<size_t>(n));
    }
}

/// Reads what is there. False: the peer has gone, or is none of ours. Its last words may come together with its end.
bool ControlServer::read(Peer& peer) {
  std::array<char, 65536> bytes;
  bool there = true;
  while (there) {
    const ssize_t n = ::recv(peer.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    there = n > 0;
    if (there) peer.in.append(bytes.data(), static_cast<size_t>(n));
  }
  size_t at = 0;
  while (peer.in.size() - at >= sizeof(Frame)) {
    Frame frame;
    std::memcpy(&frame, peer.in.data() + at, sizeof frame);
    if (frame.magic != Frame().magic || (peer.process < 0 && frame.bytes > kMostOfStranger)) return false;
    if (peer.in.size() - at - sizeof frame < frame.bytes) break;
    if (!take(peer, frame.kind, std::string_view(peer.in).substr(at + sizeof frame, frame.bytes))) return false;
    at += sizeof frame + frame.bytes;
  }
  peer.in.erase(0, at);
  return there;
}

bool ControlServer::take(Peer& peer, uint32_t kind, std::string_view payload) {
  if (peer.process < 0) {
    if (kind != kHello || payload.size() < sizeof(int)) return false;
    Taking from(payload);
    const int process = from.take<int>();
    if (process < 0 || process >= processes_ || payload.substr(sizeof(int)) != token_) return false;
    for (const auto& other : peers_)
      if (other->process == process) return false;
    peer.process = process;
    if (const auto failed = failure()) peer.out += framed(kFailed, text_of(*failed));
    return true;
  }
  switch (kind) {
    case kGather:
      gathered_[peer.process] = payload;
      // A group that has failed gets no answers: who comes late would go on alone.
      if (std::ssize(gathered_) == processes_ && !failure()) answer();
      break;
    case kFail: announce(failure_of(payload)); return true;
    case kBye:
      peer.left = true;
      left_.insert(peer.process);
      break;
    default: return false;
  }
  for (const int process : left_)
    if (!gathered_.empty() && !gathered_.contains(process))
      announce({.message = fmt::format("process {} has left the group while others go on", process)});
  return true;
}

void ControlServer::answer() {
  std::string all;
  for (const auto& [process, bytes] : gathered_) put_text(all, bytes);
  gathered_.clear();
  const std::string message = framed(kAll, all);
  for (const auto& peer : peers_)
    if (peer->process >= 0) peer->out += message;
}

/// The first failure is told to everybody. Of a process that is gone or out of reach, the first who knows more says what it was at;
/// where no process can look at it, that is the first whose rank waits for it in an op.
void ControlServer::announce(GroupFailure failure) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) {
      const bool knows_more = failure.knows > failure_->knows && failure_->kind != GroupFailure::Kind::kSaid;
      if (failure_->message.empty() || knows_more) {
        failure_->message = failure.message, failure_->knows = failure.knows;
        if (!failure.hint.empty()) failure_->hint = failure.hint;
      }
      return;
    }
    failure_ = failure;
  }
  const std::string message = framed(kFailed, text_of(failure));
  for (const auto& peer : peers_)
    if (peer->process >= 0) peer->out += message;
}

// ---- a process

Control::Control(const Endpoint& server, const std::string& token, int process, int processes, double timeout_s)
    : process_(process), processes_(processes), silence_s_(silence_within(timeout_s)), timeout_s_(timeout_s) {
  auto socket = connect_to(server, timeout_s);
  if (!socket.ok()) throw WorldError(socket.error().message, socket.error().hint);
  socket_ = std::move(*socket);
  notice_silence(socket_, silence_s_);
  address_ = own_address(socket_);
  std::string hello;
  put(hello, process_);
  send(kHello, hello + token);
  thread_ = std::thread([this] { receive(); });
}

Control::~Control() {
  kept_.clear();
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  send(kBye, {});
  ::shutdown(socket_.get(), SHUT_RDWR);
  thread_.join();
}

void Control::send(uint32_t kind, std::string_view payload) {
  const std::lock_guard lock(sending_);
  const std::string message = framed(kind, payload);
  write_all(socket_, message.data(), message.size());  // whoever has gone is noticed by who reads
}

void Control::receive() {
  while (true) {
    Frame frame;
    std::string payload;
    errno = 0;
    bool got = read_all(socket_, &frame, sizeof frame) && frame.magic == Frame().magic;
    if (got) {
      payload.resize(frame.bytes);
      got = read_all(socket_, payload.data(), payload.size());
    }
    if (!got) {
      const bool silent = is_silence(errno);
      {
        const std::lock_guard lock(mutex_);
        if (leaving_) return;
      }
      on_failure({.message = fmt::format("the process that started the group {}", silent ? "is out of reach" : "has gone"),
                  .hint = silent ? silence_hint(silence_s_) : "start the run again"});
      return;
    }
    if (frame.kind == kFailed) {
      on_failure(failure_of(payload));
    } else if (frame.kind == kAll) {
      std::vector<std::string> answer;
      for (Taking from(payload); !from.done();) answer.emplace_back(from.take_text());
      const std::lock_guard lock(mutex_);
      answer_ = std::move(answer);
      changed_.notify_all();
    }
  }
}

/// Listeners first: what they make of it is what `gather` throws, and what the server keeps.
void Control::on_failure(GroupFailure failure) {
  const std::lock_guard calling(calling_);
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
  }
  if (failure.message.empty())
    failure.message = failure.kind == GroupFailure::Kind::kGone
                          ? fmt::format("process {} of {} has ended", failure.process, processes_)
                      : failure.kind == GroupFailure::Kind::kUnreachable
                          ? fmt::format("process {} of {} is out of reach", failure.process, processes_)
                          : fmt::format("process {} of {} has waited {:.3g} s for the others, which is the limit", process_,
                                        processes_, timeout_s_.load());
  const bool said = failure.kind == GroupFailure::Kind::kSaid;
  Known known;  // of the session that came last: the one that runs
  for (const auto& [id, listener] : listeners_)
    if (Known more = listener(failure); !more.text.empty()) known = std::move(more);
  if (!said && !known.text.empty()) failure.message += ": " + known.text, failure.knows = known.knows;
  if (!said) send(kFail, text_of({.message = failure.message, .hint = failure.hint, .knows = failure.knows}));
  const std::lock_guard lock(mutex_);
  failure_ = std::move(failure);
  changed_.notify_all();
}

std::vector<std::string> Control::gather(std::string_view own) {
  if (processes_ == 1) return {std::string(own)};
  send(kGather, own);
  std::unique_lock lock(mutex_);
  const bool came = changed_.wait_for(lock, std::chrono::duration<double>(timeout_s_.load()), [&] { return answer_ || failure_; });
  if (!came) {
    lock.unlock();
    on_failure({.kind = GroupFailure::Kind::kSilent,
                .process = process_,
                .hint = "raise the time-out (measure.timeout) if a step may really take so long"});
    lock.lock();
  }
  // An answer that has come counts, though the group may have ended right behind it: its server goes with the first process.
  if (answer_) return *std::exchange(answer_, std::nullopt);
  throw WorldError(failure_->message, failure_->hint);
}

void Control::fail(const std::string& message, const std::string& hint) {
  send(kFail, text_of({.message = message, .hint = hint}));
}

int Control::listen(Listener listener) {
  const std::lock_guard calling(calling_);
  listeners_[next_listener_] = std::move(listener);
  return next_listener_++;
}

void Control::leave(int listener) {
  const std::lock_guard calling(calling_);
  listeners_.erase(listener);
}

Result<void> check_alike(Control& control, const std::vector<std::pair<std::string, std::string>>& facts) {
  std::string own;
  for (const auto& [name, value] : facts) put_text(own, value);
  const std::vector<std::string> all = control.gather(own);
  for (size_t p = 1; p < all.size(); ++p) {
    Taking first(all[0]), other(all[p]);
    for (const auto& [name, value] : facts) {
      const std::string_view here = first.take_text(), there = other.take_text();
      if (here != there)
        return Error{ExitCode::kUsage,
                     fmt::format("process {} has another {} than process 0: `{}`, not `{}`", p, name, there, here),
                     "start every process with one program, one case, one kind of processor and one data set", ""};
    }
  }
  return {};
}

}  // namespace shardlab::runtime
