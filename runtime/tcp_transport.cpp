#include "runtime/tcp_transport.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "plan/base/check.h"
#include "plan/base/world_error.h"
#include "runtime/stepped_communicator.h"

namespace shardlab::runtime {

/// One rank's end to one rank of another process.
class TcpWire final : public Wire {
 public:
  TcpWire(TcpTransport& transport, TcpChannel& channel, CommId comm, int rank, int peer, int process)
      : transport_(transport), channel_(channel), comm_(comm), rank_(rank), peer_(peer), process_(process) {}

  bool packs() const override { return true; }

  void offer(const Message& message) override {
    ++channel_.offered;
    TcpTransport::Header header = header_of(message.bytes);
    header.rehearsal = message.buffer == nullptr ? 1 : 0;
    transport_.post(process_, header, message.slices);
  }

  /// Of the time until the message is here, what went by before its first byte came is waiting for the peer.
  Arrived await_offer(int64_t bytes, Moved& moved, Task& task) override {
    const double begin = task.now();
    channel_.read_begin = begin;
    if (channel_.came.value() <= channel_.read) {
      task.wait(channel_.came, channel_.read + 1, {WaitCause::Kind::kMessage, peer_, 0});
      moved.peer_wait_s += std::clamp(channel_.began - begin, 0.0, task.now() - begin);
    }
    SHARDLAB_CHECK(channel_.bytes == bytes, "rank {} expects {} bytes of rank {}, which offers {}", rank_, bytes, peer_,
                   channel_.bytes);
    return {channel_.rehearsal ? nullptr : channel_.message.data(), true};
  }

  void release() override {
    ++channel_.read;
    TcpTransport::Header header = header_of(0);
    header.is_answer = 1;
    header.lay_s = std::max(0.0, channel_.read_begin - channel_.complete);
    transport_.post(process_, header, {});
  }

  void await_taken(Moved& moved, Task& task) override {
    if (channel_.answered.value() >= channel_.offered) return;
    const double begin = task.now();
    task.wait(channel_.answered, channel_.offered, {WaitCause::Kind::kTaken, peer_, 0});
    moved.peer_wait_s += std::min(channel_.lay_s, task.now() - begin);
  }

 private:
  TcpTransport::Header header_of(int64_t bytes) const {
    TcpTransport::Header header;
    header.comm = comm_.value;
    header.from = rank_;
    header.to = peer_;
    header.bytes = bytes;
    return header;
  }

  TcpTransport& transport_;
  TcpChannel& channel_;
  const CommId comm_;
  const int rank_, peer_, process_;
};

TcpTransport::TcpTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, double timeout_s)
    : kernels_(kernels), control_(control), ranks_here_(placed.plan->mesh.world_size() / control.processes()) {
  const Mesh& mesh = placed.plan->mesh;
  const int first = control.process() * ranks_here_;
  // Every channel is there before the first message comes.
  for (size_t c = 0; c < placed.plan->comms.size(); ++c)
    for (int rank = first; rank < first + ranks_here_; ++rank)
      for (const int peer : group_of(mesh, placed.plan->comms[c], rank))
        if (peer / ranks_here_ != control.process())
          channels_[{static_cast<int32_t>(c), rank, peer}] = std::make_unique<TcpChannel>();
  connect_all(timeout_s);
  wake_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) throw WorldError(fmt::format("no event: {}", std::strerror(errno)), "close other programs");
  thread_ = std::thread([this] { progress(); });
}

/// Each process connects to those before it and is connected to by those behind it.
void TcpTransport::connect_all(double timeout_s) {
  const int self = control_.process(), n = control_.processes();
  Endpoint own{control_.address(), 0};
  auto listener = listen_at(own);
  if (!listener.ok()) throw WorldError(listener.error().message, listener.error().hint);
  std::string said;
  put(said, own.port);
  put(said, static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) ^ static_cast<uint64_t>(::getpid())
                                                                                                     << 40);
  put_text(said, own.host);
  const std::vector<std::string> all = control_.gather(said);
  links_.resize(static_cast<size_t>(n));
  /// Who connects says which process it is, and the number that only the group has heard.
  struct Greeting {
    int32_t process = 0, to = 0;
    uint64_t number = 0;
  };
  for (int p = 0; p < n; ++p) {
    Taking from(all[static_cast<size_t>(p)]);
    Endpoint there;
    there.port = from.take<int>();
    const Greeting greeting{self, p, from.take<uint64_t>()};
    there.host = from.take_text();
    if (p >= self) continue;
    auto socket = connect_to(there, timeout_s);
    if (!socket.ok()) throw WorldError(socket.error().message, socket.error().hint);
    if (!write_all(*socket, &greeting, sizeof greeting))
      throw WorldError(fmt::format("process {} has closed its connection", p), "");
    links_[static_cast<size_t>(p)] = std::make_unique<Link>();
    links_[static_cast<size_t>(p)]->socket = std::move(*socket);
  }
  Taking own_said(said);
  own_said.take<int>();
  const auto number = own_said.take<uint64_t>();
  for (int missing = n - 1 - self; missing > 0;) {
    FileDescriptor socket = accept_from(*listener, timeout_s);
    Greeting greeting;
    if (!socket)
      throw WorldError(fmt::format("{} processes have not connected to process {} within {:.3g} s", missing, self, timeout_s),
                       fmt::format("see that {} can be reached from their hosts", to_string(own)));
    if (!read_all(socket, &greeting, sizeof greeting) || greeting.number != number || greeting.to != self ||
        greeting.process <= self || greeting.process >= n || links_[static_cast<size_t>(greeting.process)] != nullptr)
      continue;  // a stranger
    links_[static_cast<size_t>(greeting.process)] = std::make_unique<Link>();
    links_[static_cast<size_t>(greeting.process)]->socket = std::move(socket);
    --missing;
  }
  for (const auto& link : links_)
    if (link != nullptr) make_nonblocking(link->socket);
}

TcpTransport::~TcpTransport() {
  ends_ = true;
  wake();
  if (thread_.joinable()) thread_.join();
}

void TcpTransport::wake() {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

TcpChannel& TcpTransport::channel(const Key& key) {
  const auto found = channels_.find(key);
  SHARDLAB_CHECK(found != channels_.end(), "ranks {} and {} have no messages on communicator {}", std::get<1>(key),
                 std::get<2>(key), std::get<0>(key));
  return *found->second;
}

std::unique_ptr<Communicator> TcpTransport::join(int rank, CommId comm, std::span<const int> members) {
  return join_by(kernels_, rank, members, [&](int peer) -> std::unique_ptr<Wire> {
    const int process = peer / ranks_here_;
    if (process == control_.process())
      return std::make_unique<MemoryWire>(peer, inside_.at(comm, rank, peer), inside_.at(comm, peer, rank));
    return std::make_unique<TcpWire>(*this, channel({comm.value, rank, peer}), comm, rank, peer, process);
  });
}

void TcpTransport::post(int process, Header header, std::span<const Slice> slices) {
  Link& link = *links_[static_cast<size_t>(process)];
  bool first = false;
  {
    const std::lock_guard lock(link.mutex);
    first = link.queue.empty();
    link.queue.push_back({header, {slices.begin(), slices.end()}, 0});
  }
  if (first) wake();
}

/// Writes what is queued and reads what has come, until the transport ends. A connection that breaks is left: its ranks wait, and
/// the control plane says whose process has gone.
void TcpTransport::progress() {
  std::vector<pollfd> waits;
  std::vector<Link*> of_waits;
  while (!ends_) {
    waits.assign(1, {wake_.get(), POLLIN, 0});
    of_waits.assign(1, nullptr);
    for (const auto& link : links_) {
      if (link == nullptr || link->lost) continue;
      const std::lock_guard lock(link->mutex);
      waits.push_back({link->socket.get(), static_cast<short>(POLLIN | (link->queue.empty() ? 0 : POLLOUT)), 0});
      of_waits.push_back(link.get());
    }
    ::poll(waits.data(), waits.size(), -1);
    uint64_t ignored = 0;
    if (waits[0].revents != 0) (void)!::read(wake_.get(), &ignored, sizeof ignored);
    for (size_t i = 1; i < waits.size(); ++i) {
      Link& link = *of_waits[i];
      if ((waits[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) link.lost = !read_some(link);
      if (!link.lost) link.lost = !write_some(link);
    }
  }
}

/// As much of the queue as the connection takes. False: it is broken.
bool TcpTransport::write_some(Link& link) {
  while (true) {
    Outgoing* next = nullptr;
    {
      const std::lock_guard lock(link.mutex);
      if (link.queue.empty()) return true;
      next = &link.queue.front();  // stays where it is: others only push behind it
    }
    constexpr size_t kPieces = 64;
    std::array<iovec, kPieces> pieces;
    size_t n = 0;
    int64_t skip = next->written;
    const auto add = [&](const void* at, int64_t bytes) {
      const int64_t left = bytes - std::min(skip, bytes);
      if (left > 0 && n < kPieces)
        pieces[n++] = {static_cast<char*>(const_cast<void*>(at)) + (bytes - left), static_cast<size_t>(left)};
      skip -= bytes - left;
    };
    add(&next->header, sizeof(Header));
    for (const Slice& slice : next->slices) add(slice.at, slice.bytes);
    if (n > 0) {
      msghdr message{};
      message.msg_iov = pieces.data();
      message.msg_iovlen = n;
      const ssize_t written = ::sendmsg(link.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (written < 0) return errno == EAGAIN || errno == EINTR;
      next->written += written;
    }
    int64_t whole = sizeof(Header);
    for (const Slice& slice : next->slices) whole += slice.bytes;
    if (next->written < whole) continue;
    const std::lock_guard lock(link.mutex);
    link.queue.pop_front();
  }
}

/// False: the connection is closed or broken.
bool TcpTransport::read_some(Link& link) {
  while (true) {
    const bool in_header = link.read < static_cast<int64_t>(sizeof(Header));
    std::byte* to = reinterpret_cast<std::byte*>(&link.header) + link.read;
    int64_t left = static_cast<int64_t>(sizeof(Header)) - link.read;
    if (!in_header) {
      const int64_t done = link.read - static_cast<int64_t>(sizeof(Header));
      to = link.into->message.data() + done;
      left = link.header.bytes - done;
    }
    const ssize_t n = ::recv(link.socket.get(), to, static_cast<size_t>(left), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    if (n == 0) return false;
    link.read += n;
    if (link.read < static_cast<int64_t>(sizeof(Header))) continue;
    const Header& header = link.header;
    if (in_header) {
      SHARDLAB_CHECK(header.magic == Header().magic, "what came over a connection is no message: {:#x}", header.magic);
      link.into = &channel({header.comm, header.to, header.from});
      if (header.is_answer == 0) {
        link.into->began = SteadyClock().now();
        link.into->bytes = header.bytes;
        link.into->rehearsal = header.rehearsal != 0;
        if (header.rehearsal == 0) link.into->message.resize(static_cast<size_t>(header.bytes));
      }
    }
    const bool has_bytes = header.is_answer == 0 && header.rehearsal == 0;
    if (has_bytes && link.read < static_cast<int64_t>(sizeof(Header)) + header.bytes) continue;
    arrived(link);
    link.read = 0;
  }
}

void TcpTransport::arrived(Link& link) {
  TcpChannel& channel = *link.into;
  if (link.header.is_answer != 0) {
    channel.lay_s = link.header.lay_s;
    channel.answered.advance();
  } else {
    channel.complete = SteadyClock().now();
    channel.came.advance();
  }
}

}  // namespace shardlab::runtime
