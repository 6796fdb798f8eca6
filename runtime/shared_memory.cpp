#include "runtime/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "plan/base/world_error.h"

namespace shardlab::runtime {

namespace {

/// The same for two processes that see each other's files under /proc: one system, one view of its processes.
std::string this_machine() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::array<char, 64> view{};
  const ssize_t n = ::readlink("/proc/self/ns/pid", view.data(), view.size());
  return boot + " " + std::string(view.data(), n > 0 ? static_cast<size_t>(n) : 0);
}

std::span<std::byte> map(int file, int64_t bytes) {
  void* p = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (p == MAP_FAILED)
    throw WorldError(fmt::format("{} bytes of shared memory cannot be mapped: {}", bytes, std::strerror(errno)),
                     "use fewer ranks or a smaller model, or transport: threads");
  return {static_cast<std::byte*>(p), static_cast<size_t>(bytes)};
}

}  // namespace

SharedMemory::SharedMemory(int64_t bytes) {
  file_ = ::memfd_create("shardlab", MFD_CLOEXEC);
  if (file_ < 0 || ::ftruncate(file_, bytes) != 0)
    throw WorldError(fmt::format("this machine gives no {} bytes of shared memory: {}", bytes, std::strerror(errno)),
                     "use fewer ranks or a smaller model, or transport: threads");
  own_ = map(file_, bytes);
}

SharedMemory::~SharedMemory() {
  for (const auto block : blocks_)
    if (block.data() != own_.data() && !block.empty()) ::munmap(block.data(), block.size());
  ::munmap(own_.data(), own_.size());
  if (file_ >= 0) ::close(file_);
}

void SharedMemory::exchange(Control& control) {
  std::string said;
  put_text(said, this_machine());
  put(said, static_cast<int32_t>(::getpid()));
  put(said, static_cast<int32_t>(file_));
  put(said, static_cast<int64_t>(own_.size()));
  const std::vector<std::string> all = control.gather(said);
  for (int p = 0; p < control.processes(); ++p) {
    Taking from(all[static_cast<size_t>(p)]);
    const bool here = from.take_text() == this_machine();
    const auto process = from.take<int32_t>(), file = from.take<int32_t>();
    const auto bytes = from.take<int64_t>();
    if (p == control.process() || !here) {
      blocks_.push_back(here ? own_ : std::span<std::byte>());
      continue;
    }
    const std::string path = fmt::format("/proc/{}/fd/{}", process, file);
    const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (opened < 0)
      throw WorldError(fmt::format("the memory of process {} cannot be opened ({}: {})", p, path, std::strerror(errno)),
                       "run all processes as one user, or use transport: tcp");
    try {
      blocks_.push_back(map(opened, bytes));
    } catch (...) {
      ::close(opened);
      throw;
    }
    ::close(opened);
  }
  control.barrier();  // each has opened what it needs
  ::close(std::exchange(file_, -1));
}

}  // namespace shardlab::runtime
