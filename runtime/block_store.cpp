#include "runtime/block_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "plan/base/world_error.h"

namespace shardlab::runtime {
namespace {

constexpr const char* kHint = "point the run at a directory on a drive with more room, or offload to cpu instead of nvme";

/// An open file, closed at the end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// Memory that a direct transfer may use.
struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using Blocks = std::unique_ptr<std::byte, Free>;

Blocks aligned_blocks(int64_t bytes) {
  return Blocks(static_cast<std::byte*>(std::aligned_alloc(static_cast<size_t>(kBlockBytes), static_cast<size_t>(bytes))));
}

/// A file in `directory` that no name leads to. Some file systems have none such: there it is made with a name, which
/// is taken away.
Descriptor open_unnamed(const std::string& directory, int flags) {
  Descriptor file(open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600));
  if (file || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string name = directory + "/shardlab-nvme-XXXXXX";
  file = Descriptor(mkostemp(name.data(), O_CLOEXEC | flags));
  const int why = errno;
  if (file) unlink(name.c_str());
  errno = why;
  return file;
}

class FileStore final : public BlockStore {
 public:
  FileStore(const std::string& directory, int64_t bytes) : directory_(directory) {
    file_ = open_unnamed(directory, O_DIRECT);
    direct_ = static_cast<bool>(file_);
    if (!file_) file_ = open_unnamed(directory, 0);
    if (!file_)
      throw WorldError(
          fmt::format("no file can be made in `{}` for what is offloaded to NVMe: {}", directory, std::strerror(errno)),
          "name a directory that exists and may be written to");
    if (const int why = posix_fallocate(file_.get(), 0, std::max(whole_blocks(bytes), kBlockBytes)); why != 0)
      throw WorldError(fmt::format("`{}` has no room for {} bytes offloaded to NVMe: {}", directory, bytes, std::strerror(why)),
                       kHint);
  }

  bool direct() const override { return direct_; }

  void read(int64_t offset, std::span<std::byte> to) override {
    if (fits(offset, to.data(), to.size())) return read_all(offset, to.data(), static_cast<int64_t>(to.size()));
    const int64_t begin = offset / kBlockBytes * kBlockBytes,
                  bytes = whole_blocks(offset - begin + static_cast<int64_t>(to.size()));
    const Blocks copy = aligned_blocks(bytes);
    read_all(begin, copy.get(), bytes);
    std::memcpy(to.data(), copy.get() + (offset - begin), to.size());
  }

  void write(int64_t offset, std::span<const std::byte> from) override {
    if (fits(offset, from.data(), from.size())) return write_all(offset, from.data(), static_cast<int64_t>(from.size()));
    const int64_t begin = offset / kBlockBytes * kBlockBytes,
                  bytes = whole_blocks(offset - begin + static_cast<int64_t>(from.size()));
    const Blocks copy = aligned_blocks(bytes);
    read_all(begin, copy.get(), bytes);  // what lies around
    std::memcpy(copy.get() + (offset - begin), from.data(), from.size());
    write_all(begin, copy.get(), bytes);
  }

 private:
  static bool fits(int64_t offset, const std::byte* address, size_t bytes) {
    return offset % kBlockBytes == 0 && reinterpret_cast<uintptr_t>(address) % kBlockBytes == 0 && bytes % kBlockBytes == 0;
  }

  void read_all(int64_t offset, std::byte* to, int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t n = pread(file_.get(), to + done, static_cast<size_t>(bytes - done), offset + done);
      if (n > 0)
        done += n;
      else if (n == 0)
        throw WorldError(fmt::format("the NVMe file in `{}` ends at {}, {} bytes before the end of a read", directory_,
                                     offset + done, bytes - done),
                         "see whether something else wrote to the drive, and what it says of its health");
      else if (errno != EINTR)
        throw WorldError(
            fmt::format("reading {} bytes at {} of the NVMe file in `{}`: {}", bytes, offset, directory_, std::strerror(errno)),
            "see what the system says of the drive's health");
    }
  }

  void write_all(int64_t offset, const std::byte* from, int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t n = pwrite(file_.get(), from + done, static_cast<size_t>(bytes - done), offset + done);
      if (n > 0)
        done += n;
      else if (n == 0 || errno != EINTR)
        throw WorldError(fmt::format("writing {} bytes at {} of the NVMe file in `{}`: {}", bytes, offset, directory_,
                                     n == 0 ? "nothing is taken" : std::strerror(errno)),
                         kHint);
    }
  }

  std::string directory_;
  Descriptor file_;
  bool direct_ = false;
};

}  // namespace

std::unique_ptr<BlockStore> open_file_store(const std::string& directory, int64_t bytes) {
  return std::make_unique<FileStore>(directory, bytes);
}

}  // namespace shardlab::runtime
