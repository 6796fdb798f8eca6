// The NVMe space of a rank: the file's bytes, whatever their alignment; and what a run says when the drive fails.
#include "runtime/block_store.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "plan/base/world_error.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_block_store {
namespace {

using namespace testing;

/// A folder of this test's own, gone with it.
struct Folder {
  Folder() : path(std::filesystem::temp_directory_path() / fmt::format("shardlab-offload-{}", getpid())) {
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

/// What a store holds, in memory.
class MemoryStore : public BlockStore {
 public:
  explicit MemoryStore(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {}
  void read(int64_t offset, std::span<std::byte> to) override { std::memcpy(to.data(), bytes_.data() + offset, to.size()); }
  void write(int64_t offset, std::span<const std::byte> from) override {
    std::memcpy(bytes_.data() + offset, from.data(), from.size());
  }
  bool direct() const override { return false; }

 private:
  std::vector<std::byte> bytes_;
};

/// Fails with a message once so many reads or writes have been done.
class FailingStore final : public MemoryStore {
 public:
  FailingStore(int64_t bytes, int reads, int writes) : MemoryStore(bytes), reads_(reads), writes_(writes) {}
  void read(int64_t offset, std::span<std::byte> to) override {
    if (reads_-- == 0) throw WorldError("the file ends before the read does", "look at the drive");
    MemoryStore::read(offset, to);
  }
  void write(int64_t offset, std::span<const std::byte> from) override {
    if (writes_-- == 0) throw WorldError("No space left on device", "make room");
    MemoryStore::write(offset, from);
  }

 private:
  std::atomic<int> reads_, writes_;
};

Case nvme_case() {
  Case c = small_case(Family::kGpt, 3);
  set(c, {.dp = 2, .zero = 1});
  c.layout.offload.optimizer = OffloadTo::kNvme;
  return c;
}

/// What the run says; empty when nothing fails. Rank 1's store fails.
std::string failure_of(int reads, int writes, const Case& config = nvme_case()) {
  const PlacedPlan placed = place(plan_of(config));
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  ThreadTransport transport(kernels);
  const RandomText text(68);
  RunOptions options;
  options.timeout_s = 60;
  options.block_stores = [&](int rank, int64_t bytes) -> std::unique_ptr<BlockStore> {
    if (rank == 1) return std::make_unique<FailingStore>(bytes, reads, writes);
    return std::make_unique<MemoryStore>(bytes);
  };
  try {
    auto session = Session::create(placed, options, transport, cpu_backend(kernels, {}), &text);
    REQUIRE(session.ok());
    (*session)->initialise_parameters();
    (*session)->step(0);
    (*session)->step(1);
  } catch (const WorldError& e) { return std::string(e.what()) + " | " + e.hint(); }
  return "";
}

std::vector<std::byte> noise(size_t n) {
  std::mt19937 draw(static_cast<unsigned>(n));
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(draw());
  return bytes;
}

}  // namespace

TEST_CASE("a file store begins with zeros and gives back what was written, aligned or not") {
  const Folder folder;
  const auto store = open_file_store(folder.path, 100'000);
  CHECK(std::filesystem::is_empty(folder.path));  // no name leads to the file
  std::vector<std::byte> all(100'000), expected(100'000);
  store->read(0, all);
  CHECK(all == expected);
  for (const auto& [offset, bytes] :
       {std::pair<size_t, size_t>{0, 4096}, {4096, 8192}, {5, 3}, {4090, 20}, {50'001, 40'000}, {99'999, 1}}) {
    const std::vector<std::byte> what = noise(bytes);
    store->write(static_cast<int64_t>(offset), what);
    std::ranges::copy(what, expected.begin() + static_cast<std::ptrdiff_t>(offset));
    std::vector<std::byte> back(bytes);
    store->read(static_cast<int64_t>(offset), back);
    CHECK(back == what);
  }
  store->read(0, all);
  CHECK(all == expected);
}

TEST_CASE("a store that cannot be made says where and why") {
  try {
    open_file_store("/nowhere/at/all", 4096);
    FAIL("a file in a directory that does not exist");
  } catch (const WorldError& e) {
    CHECK(std::string(e.what()).find("/nowhere/at/all") != std::string::npos);
    CHECK(std::string(e.what()).find("No such file") != std::string::npos);
    CHECK_FALSE(e.hint().empty());
  }
}

TEST_CASE("a drive without room is met when the store is made") {
  const Folder folder;
  // A process of its own, whose files may have no more than 64 KiB.
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit most{65536, 65536};
    setrlimit(RLIMIT_FSIZE, &most);
    try {
      open_file_store(folder.path, 32768);
    } catch (const WorldError&) { _exit(2); }
    try {
      open_file_store(folder.path, 1 << 20);
    } catch (const WorldError& e) {
      const bool says = std::string(e.what()).find("has no room for 1048576 bytes") != std::string::npos;
      _exit(says ? 0 : 3);
    }
    _exit(1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("a read that ends early names rank and op") {
  const std::string what = failure_of(7, 1 << 30);
  INFO(what);
  CHECK(what.find("rank 1 failed at stream nvme.read op #") != std::string::npos);
  CHECK(what.find("read copy") != std::string::npos);
  CHECK(what.find("the file ends before the read does | look at the drive") != std::string::npos);
}

TEST_CASE("a drive that fills up names rank and op") {
  // The first writes are those of the parameters' initial copies.
  const std::string what = failure_of(1 << 30, 200);
  INFO(what);
  CHECK(what.find("rank 1 failed at stream nvme.write op #") != std::string::npos);
  CHECK(what.find("write copy") != std::string::npos);
  CHECK(what.find("No space left on device | make room") != std::string::npos);
  CHECK(failure_of(1 << 30, 1 << 30) == "");
}

TEST_CASE("activations and parameters that a drive loses name rank, layer and op") {
  Case parked = small_case(Family::kGpt, 5);
  set(parked, {.dp = 2});
  parked.layout.offload.activations = OffloadTo::kNvme;
  const std::string lost = failure_of(3, 1 << 30, parked), full = failure_of(1 << 30, 3, parked);
  INFO(lost << "\n" << full);
  CHECK(lost.find("rank 1 failed at stream nvme.read op #") != std::string::npos);
  CHECK(lost.find("read.layer") != std::string::npos);
  CHECK(full.find("rank 1 failed at stream nvme.write op #") != std::string::npos);
  CHECK(full.find("layers.0 m0 park.layer") != std::string::npos);
  Case streamed = small_case(Family::kGpt, 5);
  set(streamed, {.dp = 2, .zero = 3});
  streamed.layout.offload = {.optimizer = OffloadTo::kCpu, .parameters = OffloadTo::kNvme};
  const std::string unread = failure_of(2, 1 << 30, streamed);
  INFO(unread);
  CHECK(unread.find("rank 1 failed at stream nvme.read op #") != std::string::npos);
  CHECK(unread.find("read.parameters") != std::string::npos);
}

/// A session of `config` on real files in `folder`.
Result<std::unique_ptr<Session>> on_files(const PlacedPlan& placed, const std::string& folder, Transport& transport,
                                          const BatchSource& text) {
  RunOptions options;
  options.timeout_s = 60;
  options.nvme_directory = folder;
  return Session::create(placed, options, transport, cpu_backend(kernels::kernels_for_this_processor(), {}), &text);
}

TEST_CASE("a file that is cut short under a run ends it with rank, op and place") {
  const Folder folder;
  const PlacedPlan placed = place(plan_of(nvme_case()));
  ThreadTransport transport(kernels::kernels_for_this_processor());
  const RandomText text(68);
  auto session = on_files(placed, folder.path, transport, text);
  REQUIRE(session.ok());
  (*session)->initialise_parameters();
  (*session)->step(0);
  int cut = 0;  // the files have no names, but this process has them open
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (gone || target.find(folder.path.string()) != 0) continue;
    cut += ftruncate(std::stoi(entry.path().filename().string()), 0) == 0;
  }
  REQUIRE(cut == 2);
  std::string what;
  try {
    (*session)->step(1);
  } catch (const WorldError& e) { what = e.what(); }
  INFO(what);
  CHECK(what.find(" failed at stream nvme.read op #") != std::string::npos);
  CHECK(what.find("the NVMe file in `" + folder.path.string() + "` ends at") != std::string::npos);
}

TEST_CASE("a folder in which no file can be made is named with the rank that wanted one, before any step") {
  const Folder folder;
  const std::string file = (folder.path / "no folder").string();
  std::ofstream(file) << "a file";
  const PlacedPlan placed = place(plan_of(nvme_case()));
  ThreadTransport transport(kernels::kernels_for_this_processor());
  const RandomText text(68);
  std::string what;
  try {
    static_cast<void>(on_files(placed, file, transport, text));
  } catch (const WorldError& e) { what = e.what(); }
  INFO(what);
  CHECK(what.find("rank 0: no file can be made in `" + file + "`") == 0);
  CHECK(what.find("Not a directory") != std::string::npos);
}

}  // namespace shardlab::testing::of_block_store
