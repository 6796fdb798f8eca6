// Memory that the processes of a group share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/control.h"

namespace shardlab::runtime {

/// One block of each process of the group, which the others on the same machine see too. Has no name anywhere: when the last
/// process that uses it ends, however it does, nothing is left of it.
class SharedMemory {
 public:
  /// Takes `bytes` of zeroes for this process. Throws WorldError where the system has none.
  explicit SharedMemory(int64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  std::span<std::byte> own() const { return own_; }
  /// Lets every process of the group see what each has taken; each calls it once.
  void exchange(Control& control);
  /// Of any process, after `exchange`; empty: it is on another machine.
  std::span<std::byte> of(int process) const { return blocks_[static_cast<size_t>(process)]; }

 private:
  int file_ = -1;
  std::span<std::byte> own_;
  std::vector<std::span<std::byte>> blocks_;  ///< by process
};

}  // namespace shardlab::runtime
