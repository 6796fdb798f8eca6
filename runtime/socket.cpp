#include "runtime/socket.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

namespace shardlab::runtime {

namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Addresses of an endpoint; none: `why` says why.
Addresses resolve(const Endpoint& endpoint, bool to_listen, std::string& why) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICSERV | (to_listen ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const int error = getaddrinfo(endpoint.host.empty() ? nullptr : endpoint.host.c_str(), fmt::format("{}", endpoint.port).c_str(),
                                &wanted, &found);
  if (error != 0) why = gai_strerror(error);
  return {error == 0 ? found : nullptr, &freeaddrinfo};
}

void set_no_delay(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (number_ >= 0) ::close(number_);
}

std::string to_string(const Endpoint& endpoint) {
  const bool v6 = endpoint.host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", endpoint.host, endpoint.port) : fmt::format("{}:{}", endpoint.host, endpoint.port);
}

Result<Endpoint> parse_endpoint(const std::string& text) {
  const size_t colon = text.rfind(':');
  Endpoint endpoint;
  const char* end = text.data() + text.size();
  const auto refuse = [&] {
    return Error{ExitCode::kUsage, fmt::format("`{}` is no address", text), "give HOST:PORT, port from 1 to 65535", ""};
  };
  if (colon == std::string::npos || colon == 0) return refuse();
  endpoint.host = text.substr(0, colon);
  if (endpoint.host.front() == '[' && endpoint.host.back() == ']')
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
  const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, endpoint.port);
  if (error != std::errc() || stop != end || endpoint.port < 1 || endpoint.port > 65535) return refuse();
  return endpoint;
}

Result<FileDescriptor> listen_at(Endpoint& endpoint) {
  std::string why = "no address";
  const Addresses addresses = resolve(endpoint, true, why);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    FileDescriptor socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    const int on = 1;
    if (socket) setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!socket || ::bind(socket.get(), a->ai_addr, a->ai_addrlen) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
      why = std::strerror(errno);
      continue;
    }
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &size);
    endpoint.port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                                      : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
    return socket;
  }
  return Error{ExitCode::kEnvironment, fmt::format("cannot listen at {}: {}", to_string(endpoint), why),
               "name an address of this machine and a port that is free", ""};
}

Result<FileDescriptor> connect_to(const Endpoint& endpoint, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  std::string why = "no address";
  do {
    const Addresses addresses = resolve(endpoint, false, why);
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      FileDescriptor socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
      if (socket && ::connect(socket.get(), a->ai_addr, a->ai_addrlen) == 0) {
        set_no_delay(socket.get());
        return socket;
      }
      why = std::strerror(errno);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (Clock::now() < deadline);
  return Error{ExitCode::kEnvironment, fmt::format("nobody answers at {}: {}", to_string(endpoint), why),
               "see that the first process runs and that its host and port can be reached from here", ""};
}

FileDescriptor accept_from(const FileDescriptor& listener, double seconds) {
  pollfd waits{listener.get(), POLLIN, 0};
  if (::poll(&waits, 1, static_cast<int>(seconds * 1e3)) <= 0) return {};
  FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket) set_no_delay(socket.get());
  return socket;
}

bool write_all(const FileDescriptor& socket, const void* bytes, size_t n) {
  const char* at = static_cast<const char*>(bytes);
  while (n > 0) {
    const ssize_t written = ::send(socket.get(), at, n, MSG_NOSIGNAL);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    at += written;
    n -= static_cast<size_t>(written);
  }
  return true;
}

bool read_all(const FileDescriptor& socket, void* bytes, size_t n) {
  char* at = static_cast<char*>(bytes);
  while (n > 0) {
    const ssize_t got = ::recv(socket.get(), at, n, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    n -= static_cast<size_t>(got);
  }
  return true;
}

void make_nonblocking(const FileDescriptor& socket) { ::fcntl(socket.get(), F_SETFL, ::fcntl(socket.get(), F_GETFL) | O_NONBLOCK); }

std::string own_address(const FileDescriptor& socket) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  std::array<char, NI_MAXHOST> host{};
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0)
    return "127.0.0.1";
  return host.data();
}

}  // namespace shardlab::runtime
