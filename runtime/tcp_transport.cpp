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

#include "plan/base/world_error.h"

namespace shardlab::runtime {

TcpTransport::TcpTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, double timeout_s)
    : MessageTransport(kernels, placed, control) {
  connect_all(timeout_s);
  wake_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) throw WorldError(fmt::format("no event: {}", std::strerror(errno)), "close other programs");
  thread_ = std::thread([this] { progress(); });
}

/// Each process connects to those before it and is connected to by those behind it, once for each lane.
void TcpTransport::connect_all(double timeout_s) {
  const int self = control().process(), n = control().processes();
  Endpoint own{control().address(), 0};
  auto listener = listen_at(own);
  if (!listener.ok()) throw WorldError(listener.error().message, listener.error().hint);
  std::string said;
  put(said, own.port);
  put(said, static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) ^ static_cast<uint64_t>(::getpid())
                                                                                                     << 40);
  put_text(said, own.host);
  const std::vector<std::string> all = control().gather(said);
  links_.resize(static_cast<size_t>(kLanes * n));
  /// Who connects says which process it is, and the number that only the group has heard.
  struct Greeting {
    int32_t process = 0, to = 0;
    uint64_t number = 0;
    int64_t lane = 0;
  };
  for (int p = 0; p < n; ++p) {
    Taking from(all[static_cast<size_t>(p)]);
    Endpoint there;
    there.port = from.take<int>();
    Greeting greeting{self, p, from.take<uint64_t>()};
    there.host = from.take_text();
    if (p >= self) continue;
    for (greeting.lane = 0; greeting.lane < kLanes; ++greeting.lane) {
      auto socket = connect_to(there, timeout_s);
      if (!socket.ok()) throw WorldError(socket.error().message, socket.error().hint);
      if (!write_all(*socket, &greeting, sizeof greeting))
        throw WorldError(fmt::format("process {} has closed its connection", p), "");
      auto& link = links_[place_of(p, greeting.lane)] = std::make_unique<Link>();
      link->socket = std::move(*socket);
    }
  }
  Taking own_said(said);
  own_said.take<int>();
  const auto number = own_said.take<uint64_t>();
  for (int missing = kLanes * (n - 1 - self); missing > 0;) {
    FileDescriptor socket = accept_from(*listener, timeout_s);
    Greeting greeting;
    if (!socket)
      throw WorldError(
          fmt::format("{} connections of other processes have not come to process {} within {:.3g} s", missing, self, timeout_s),
          fmt::format("see that {} can be reached from their hosts", to_string(own)));
    if (!read_all(socket, &greeting, sizeof greeting) || greeting.number != number || greeting.to != self ||
        greeting.process <= self || greeting.process >= n || greeting.lane < 0 || greeting.lane >= kLanes ||
        links_[place_of(greeting.process, greeting.lane)] != nullptr)
      continue;  // a stranger
    auto& link = links_[place_of(greeting.process, greeting.lane)] = std::make_unique<Link>();
    link->socket = std::move(socket);
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

void TcpTransport::post(int process, const MessageHeader& header, std::span<const Slice> slices) {
  Link& link = *links_[place_of(process, header.is_answer != 0 ? kAnswers : kMessages)];
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
    add(&next->header, sizeof(MessageHeader));
    for (const Slice& slice : next->slices) add(slice.at, slice.bytes);
    if (n > 0) {
      msghdr message{};
      message.msg_iov = pieces.data();
      message.msg_iovlen = n;
      const ssize_t written = ::sendmsg(link.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (written < 0) return errno == EAGAIN || errno == EINTR;
      next->written += written;
    }
    int64_t whole = sizeof(MessageHeader);
    for (const Slice& slice : next->slices) whole += slice.bytes;
    if (next->written < whole) continue;
    const std::lock_guard lock(link.mutex);
    link.queue.pop_front();
  }
}

/// False: the connection is closed or broken.
bool TcpTransport::read_some(Link& link) {
  while (true) {
    const bool in_header = link.read < static_cast<int64_t>(sizeof(MessageHeader));
    std::byte* to = reinterpret_cast<std::byte*>(&link.header) + link.read;
    int64_t left = static_cast<int64_t>(sizeof(MessageHeader)) - link.read;
    if (!in_header) {
      const int64_t done = link.read - static_cast<int64_t>(sizeof(MessageHeader));
      to = link.into->message.data() + done;
      left = link.header.bytes - done;
    }
    const ssize_t n = ::recv(link.socket.get(), to, static_cast<size_t>(left), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    if (n == 0) return false;
    link.read += n;
    if (link.read < static_cast<int64_t>(sizeof(MessageHeader))) continue;
    if (in_header) link.into = &begin(link.header);
    const int64_t body = link.read - static_cast<int64_t>(sizeof(MessageHeader));
    if (body < link.header.following()) {
      arrived(*link.into, body);
      continue;
    }
    complete(link.header, *link.into);
    link.read = 0;
  }
}

}  // namespace shardlab::runtime
