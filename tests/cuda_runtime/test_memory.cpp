// What a case takes of its devices beside the arenas, item by item, on devices where everything takes an amount of its own.
#include <set>

#include "runtime/cuda/memory_account.h"
#include "runtime/cuda/nccl_transport.h"
#include "strategies/lower.h"
#include "tests/cuda_runtime/fake_cudnn.h"
#include "tests/cuda_runtime/fake_nccl.h"
#include "tests/cuda_runtime/library_table.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

using cuda::MemoryAccount;
using cuda::MemoryUse;

using Items = std::vector<std::pair<MemoryUse, int64_t>>;

constexpr int64_t kGranule = 2 << 20;

/// Devices where a context, a stream and the rounding of an allocation cost something, and on which others have something too.
void make_dear(FakeApi& api) {
  api.others = 111'000'000;
  api.context_bytes = 400'000'003;
  api.stream_bytes = 70'001;
  api.granule = kGranule;
}

MemoryAccount::Meter driver_of(FakeApi& api) {
  return [&api](int device) { return std::optional(api.used(device)); };
}

int64_t sum(const Items& items) {
  int64_t total = 0;
  for (const auto& [use, bytes] : items) total += bytes;
  return total;
}

int64_t in_granules(int64_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

/// Two-byte, with heads that cuDNN takes.
Case subject() {
  Case c = tiny_case(Family::kLlama);
  c.train.precision = Precision::kBf16;
  c.train.seq_len = 8;
  c.train.micro_batch = 1;
  c.layout.dp = 2;
  c.train.global_batch_tokens = 16;
  c.backend = BackendKind::kCuda;
  c.transport = TransportKind::kOneGpu;
  c.attention = AttentionBy::kCudnn;
  return c;
}

}  // namespace

TEST_CASE("memory that nobody planned is told apart by what takes it, and adds up to all of it") {
#ifdef __SANITIZE_THREAD__
  WARN("skipped: the thread sanitizer cannot follow the fibers that the emulation runs kernels on");
  return;
#endif
  const PlacedPlan placed = lowered(subject());
  const int64_t arena = placed.arenas[0].bytes[static_cast<size_t>(Space::kDevice)];
  const int streams = static_cast<int>(placed.plan->streams.size());
  FakeApi api;
  make_dear(api);
  LibraryTable table(Behind::kEmulated, [&] { api.take(5'003); });
  FakeCudnn cudnn;
  cudnn.when_made = [&] { api.take(900'007); };
  MemoryAccount account(api, {0}, driver_of(api));
  REQUIRE(account.knows_context());
  REQUIRE(account.taken() == api.context_bytes);
  {
    RunOptions options;
    options.timeout_s = 120;
    FakeRun fake(placed, api, options, {.attention = AttentionBy::kCudnn, .cudnn = &cudnn}, table.kernels(), &account);
    INFO((fake.session.ok() ? std::string() : to_string(fake.session.error())));
    REQUIRE(fake.session.ok());
    Session& session = **fake.session;
    session.initialise_parameters();
    session.step(0);
    api.take(33'000'017);  // code that was loaded when it was first launched
    account.book(MemoryUse::kKernels);
    {
      const MemoryAccount::Taking taking(&account, MemoryUse::kRecorder, 0);
      api.take(8'000'009);
    }
    session.step(1);
    api.take(77);
    account.book(MemoryUse::kRest);

    int64_t planned = 0;
    for (int rank = 0; rank < 2; ++rank) planned += session.arena_bytes(rank, Space::kDevice);
    REQUIRE(planned == 2 * arena);
    const Items items = account.unplanned(planned);
    // Two ranks; each multiplies and attends on one stream.
    const Items expected{{MemoryUse::kContext, 400'000'003},
                         {MemoryUse::kStreams, 2 * streams * 70'001},
                         {MemoryUse::kArenas, 2 * (in_granules(arena) - arena)},
                         {MemoryUse::kMatmul, 2 * 5'003},
                         {MemoryUse::kCudnn, 2 * 900'007},
                         {MemoryUse::kRecorder, 8'000'009},
                         {MemoryUse::kKernels, 33'000'017},
                         {MemoryUse::kRest, 77}};
    REQUIRE(items == expected);
    REQUIRE(account.taken() == api.used(0) - api.others);
    REQUIRE(sum(items) == account.taken() - planned);
  }
}

TEST_CASE("communicators' memory is theirs on every device, what they reserve on the way too") {
  Case c = tiny_case();
  c.layout.dp = 2;
  c.backend = BackendKind::kCuda;
  c.transport = TransportKind::kNccl;
  auto plan = lower(c);
  REQUIRE(plan.ok());
  const PlacedPlan placed = place(std::move(*plan));
  FakeApi api(1, 2);
  make_dear(api);
  FakeNccl nccl;
  nccl.when_made = [&] { api.take(50'000'021); };
  MemoryAccount account(api, {0, 1}, driver_of(api));
  {
    cuda::Node node(api, queued_kernels(Behind::kHost), {0, 1}, &account);
    auto transport = cuda::NcclTransport::create(nccl, placed, &node);
    REQUIRE(transport.ok());
    const Tokens64 tokens;
    auto session = Session::create(placed, {}, **transport, cuda::cuda_backend(node, {}), &tokens);
    INFO((session.ok() ? std::string() : to_string(session.error())));
    REQUIRE(session.ok());
    account.book(MemoryUse::kRest);
    int64_t planned = 0;
    for (int rank = 0; rank < 2; ++rank) planned += (*session)->arena_bytes(rank, Space::kDevice);
    const Items items = account.unplanned(planned);
    const auto of = [&](MemoryUse use) {
      int64_t bytes = 0;
      for (const auto& [found, amount] : items) bytes += found == use ? amount : 0;
      return bytes;
    };
    REQUIRE(of(MemoryUse::kContext) == 2 * 400'000'003);
    REQUIRE(of(MemoryUse::kCommunicators) == static_cast<int64_t>(nccl.handles.size()) * 50'000'021);
    // The blocks that a communicator's first call works on are storage too: 256 bytes, of which an allocation makes a granule.
    REQUIRE(of(MemoryUse::kArenas) ==
            2 * in_granules(planned / 2) - planned + static_cast<int64_t>(nccl.handles.size()) * kGranule);
    REQUIRE(sum(items) == api.used(0) + api.used(1) - 2 * api.others - planned);
  }
}

TEST_CASE("without a meter of the driver's, an account begins when there are contexts") {
  FakeApi api(1, 2);
  make_dear(api);
  for (const bool half : {false, true}) {
    // NVML that is not there, or knows one device only.
    MemoryAccount account(
        api, {0, 1},
        !half ? MemoryAccount::Meter() : [&](int device) { return device == 0 ? std::optional(api.used(0)) : std::nullopt; });
    REQUIRE_FALSE(account.knows_context());
    REQUIRE(account.taken() == 0);
    {
      const MemoryAccount::Taking taking(&account, MemoryUse::kMatmul, 1);
      api.take(1'001);
    }
    account.book(MemoryUse::kRest);
    REQUIRE(account.unplanned(0) == Items{{MemoryUse::kMatmul, 1'001}});
  }
}

TEST_CASE("within what is taken by one thing another has its own part; a reading that fails is made up for") {
  FakeApi api;
  bool tells = true;
  MemoryAccount account(api, {0}, [&](int device) { return tells ? std::optional(api.used(device)) : std::nullopt; });
  api.take(1);  // between: nobody's
  {
    const MemoryAccount::Taking outer(&account, MemoryUse::kCommunicators, 0);
    api.take(20);
    {
      const MemoryAccount::Taking inner(&account, MemoryUse::kArenas, 0);
      api.take(300);
    }
    api.take(4'000);
    tells = false;
  }
  REQUIRE(account.taken() == 321);
  tells = true;
  account.book(MemoryUse::kRest);
  REQUIRE(account.unplanned(0) == Items{{MemoryUse::kArenas, 300}, {MemoryUse::kCommunicators, 20}, {MemoryUse::kRest, 4'001}});
  REQUIRE(account.taken() == 4'321);
}

TEST_CASE("what takes memory has one name each") {
  std::set<std::string_view> names;
  for (size_t i = 0; i < cuda::kMemoryUses; ++i) names.insert(name_of(static_cast<MemoryUse>(i)));
  REQUIRE(names.size() == cuda::kMemoryUses);
}

}  // namespace shardlab::testing
