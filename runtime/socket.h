// TCP connections, as the control plane and the tcp transport use them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "plan/base/result.h"

namespace shardlab::runtime {

/// A file descriptor that is closed with its owner.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int number) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileDescriptor();
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

/// Where somebody listens. `host` is a name or a number; an IPv6 number without brackets.
struct Endpoint {
  std::string host = "127.0.0.1";
  int port = 0;
};
/// "host:port", "[::1]:port".
std::string to_string(const Endpoint& endpoint);
Result<Endpoint> parse_endpoint(const std::string& text);

/// Listens on `endpoint`, whose port 0 is chosen by the system and written there. Refuses (ExitCode::kEnvironment) what the system
/// does not give.
Result<FileDescriptor> listen_at(Endpoint& endpoint);
/// Connects; tries again until `seconds` have passed, since who listens may not have begun. No delay of small messages.
Result<FileDescriptor> connect_to(const Endpoint& endpoint, double seconds);
/// The next who connects; not open where none does within `seconds`.
FileDescriptor accept_from(const FileDescriptor& listener, double seconds);

/// Both block. False: the other side has gone.
bool write_all(const FileDescriptor& socket, const void* bytes, size_t n);
bool read_all(const FileDescriptor& socket, void* bytes, size_t n);
/// Calls on it return at once instead of waiting.
void make_nonblocking(const FileDescriptor& socket);
/// This side's address, as the other side sees it.
std::string own_address(const FileDescriptor& socket);

}  // namespace shardlab::runtime
