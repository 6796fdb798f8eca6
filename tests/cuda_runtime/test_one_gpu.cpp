// Collectives and messages among ranks that share a device, in any order in which the device may run.
#include <fmt/format.h>

#include <numeric>

#include "plan/collective_steps.h"
#include "runtime/cuda/one_gpu_transport.h"
#include "tests/cuda_runtime/fake_api.h"
#include "tests/cuda_runtime/queued_kernels.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

/// A node of `ranks` ranks with one stream each, and what each rank keeps on the device.
struct Meetings {
  Meetings(int ranks, uint64_t seed)
      : api(seed), node(api, queued_kernels(Behind::kHost), std::vector<int>(static_cast<size_t>(ranks), 0)) {
    for (int r = 0; r < ranks; ++r) node.rank(r).prepare({.streams = 1});
    members.resize(static_cast<size_t>(ranks));
    std::iota(members.begin(), members.end(), 0);
  }
  float* floats(int rank, int64_t n) { return reinterpret_cast<float*>(node.rank(rank).reserve(Space::kDevice, n * 4)); }

  FakeApi api;
  cuda::Node node;
  std::vector<int> members;
};

constexpr int64_t kElements = 37;
float value(int rank, int64_t i, int round) { return static_cast<float>((rank + 1) * 1000 + i + round * 7); }

/// What element i of rank's result should be.
float expected(CollectiveKind kind, ReduceOp reduce, int size, int rank, int64_t i, int round, int root) {
  const auto part_of = [&](int64_t e) {
    int p = 0;
    while (part_begin(kElements, size, p + 1) <= e) ++p;
    return p;
  };
  switch (kind) {
    case CollectiveKind::kBroadcast: return value(root, i, round);
    case CollectiveKind::kAllGather: return value(part_of(i), i, round);
    case CollectiveKind::kAllToAll: return 0;
    default: break;
  }
  const int64_t e = kind == CollectiveKind::kReduceScatter ? part_begin(kElements, size, rank) + i : i;
  float sum = 0;
  for (int r = 0; r < size; ++r) sum = reduce == ReduceOp::kSum ? sum + value(r, e, round) : std::max(sum, value(r, e, round));
  return sum;
}

}  // namespace

TEST_CASE("one-gpu collectives equal their definition for every kind, size and order of the device") {
  for (const int size : {1, 2, 3, 4, 8})
    for (const CollectiveKind kind :
         {CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllGather, CollectiveKind::kBroadcast})
      for (const ReduceOp reduce : {ReduceOp::kSum, ReduceOp::kMax})
        for (const bool in_place : {true, false}) {
          INFO(size << " ranks, kind " << static_cast<int>(kind) << ", in place " << in_place);
          Meetings m(size, static_cast<uint64_t>(size) * 13 + static_cast<uint64_t>(in_place));
          cuda::OneGpuTransport transport(m.node);
          std::vector<std::vector<float>> results(static_cast<size_t>(size));
          constexpr int kRounds = 3;
          run_tasks(size, 1, [&](Task& task) {
            const int rank = task.rank();
            cuda::RankDevice& device = m.node.rank(rank);
            const auto comm = transport.join(rank, CommId(0), m.members);
            float* const source = m.floats(rank, kElements);
            const int64_t begin = part_begin(kElements, size, rank), own = part_begin(kElements, size, rank + 1) - begin;
            const bool gathers = kind == CollectiveKind::kAllGather, scatters = kind == CollectiveKind::kReduceScatter;
            float* const target = !in_place ? m.floats(rank, kElements) : scatters ? source + begin : source;
            const int64_t out = scatters ? own : kElements;
            CollectiveCall call{kind, reduce, Algorithm::kDirect, DType::f32, kElements, size - 1, nullptr, target};
            call.source = gathers && in_place ? source + begin : source;
            // Catch asserts on one thread only: what goes wrong here is thrown, and reported by whoever waits for the ranks.
            if (!comm->prepare(call).ok()) throw WorldError(fmt::format("rank {} cannot prepare", rank));
            for (int round = 0; round < kRounds; ++round) {
              std::vector<float> values;
              for (int64_t i = 0; i < kElements; ++i)
                values.push_back(gathers && !in_place ? value(rank, begin + i, round) : value(rank, i, round));
              device.copy(source, values.data(), kElements * 4, 0);
              const Moved moved = comm->collective(call, task);
              if (moved.sent_bytes != 4 * sent_elements(kind, call.algorithm, kElements, size, rank, call.root) ||
                  moved.carrier_rank != (rank == 0 ? -1 : 0))
                throw WorldError(
                    fmt::format("rank {} round {}: {} bytes, carried by {}", rank, round, moved.sent_bytes, moved.carrier_rank));
              std::vector<float> result(static_cast<size_t>(out));
              device.copy(result.data(), target, out * 4, 0);
              device.synchronise();
              for (int64_t i = 0; i < out; ++i)
                if (result[static_cast<size_t>(i)] != expected(kind, reduce, size, rank, i, round, call.root))
                  throw WorldError(
                      fmt::format("rank {} round {} element {} is {}", rank, round, i, result[static_cast<size_t>(i)]));
            }
          });
          REQUIRE_FALSE(m.api.deadlocked());
        }
}

TEST_CASE("one-gpu collectives cut a dim within others strip by strip") {
  constexpr int kRanks = 3;
  constexpr int64_t kStrips = 2, kPart = 5, kWhole = kStrips * kPart * kRanks;
  Meetings m(kRanks, 11);
  cuda::OneGpuTransport transport(m.node);
  run_tasks(kRanks, 1, [&](Task& task) {
    const auto comm = transport.join(task.rank(), CommId(0), m.members);
    float *const part = m.floats(task.rank(), kStrips * kPart), *const all = m.floats(task.rank(), kWhole);
    cuda::RankDevice& device = m.node.rank(task.rank());
    std::vector<float> values(kStrips * kPart), got(kWhole);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(100 * task.rank()) + static_cast<float>(i);
    device.copy(part, values.data(), kStrips * kPart * 4, 0);
    comm->collective({CollectiveKind::kAllGather, ReduceOp::kSum, Algorithm::kDirect, DType::f32, kWhole, 0, part, all, kStrips},
                     task);
    device.copy(got.data(), all, kWhole * 4, 0);
    comm->collective(
        {CollectiveKind::kReduceScatter, ReduceOp::kSum, Algorithm::kDirect, DType::f32, kWhole, 0, all, part, kStrips}, task);
    device.copy(values.data(), part, kStrips * kPart * 4, 0);
    device.synchronise();
    for (int64_t strip = 0; strip < kStrips; ++strip)
      for (int from = 0; from < kRanks; ++from)
        for (int64_t i = 0; i < kPart; ++i)
          if (got[static_cast<size_t>((strip * kRanks + from) * kPart + i)] != static_cast<float>(100 * from + strip * kPart + i))
            throw WorldError("gathered other elements");
    for (int64_t i = 0; i < kStrips * kPart; ++i)  // every rank gathered the same
      if (values[static_cast<size_t>(i)] != static_cast<float>(kRanks * (100 * task.rank() + i)))
        throw WorldError("scattered other elements");
  });
}

TEST_CASE("a one-gpu all_to_all") {
  constexpr int kRanks = 4;
  Meetings m(kRanks, 5);
  cuda::OneGpuTransport transport(m.node);
  run_tasks(kRanks, 1, [&](Task& task) {
    const auto comm = transport.join(task.rank(), CommId(0), m.members);
    float *const source = m.floats(task.rank(), kRanks), *const target = m.floats(task.rank(), kRanks);
    std::vector<float> values;
    for (int to = 0; to < kRanks; ++to) values.push_back(static_cast<float>(10 * task.rank() + to));
    m.node.rank(task.rank()).copy(source, values.data(), kRanks * 4, 0);
    comm->collective({CollectiveKind::kAllToAll, ReduceOp::kSum, Algorithm::kDirect, DType::f32, kRanks, 0, source, target}, task);
    std::vector<float> got(kRanks);
    m.node.rank(task.rank()).copy(got.data(), target, kRanks * 4, 0);
    m.node.rank(task.rank()).synchronise();
    for (int from = 0; from < kRanks; ++from)
      if (got[static_cast<size_t>(from)] != static_cast<float>(10 * from + task.rank())) throw WorldError("a part went astray");
  });
}

TEST_CASE("one-gpu exchanges of packed rows: as many to each as are counted, none and all to one among them") {
  constexpr int kRanks = 4, kWidth = 3;
  constexpr int64_t kRoom = 40, kRowBytes = kWidth * 4;
  // rows[round][from][to]
  const auto rows = [](int round, int from, int to) {
    return round == 0 ? 0 : round == 1 ? (to == 2 ? 9 : 0) : (7 * from + 3 * to + round) % 6;
  };
  const auto value = [](int round, int from, int to, int64_t i) {
    return static_cast<float>(((round * 8 + from) * 8 + to) * 100) + static_cast<float>(i);
  };
  Meetings m(kRanks, 9);
  cuda::OneGpuTransport transport(m.node);
  run_tasks(kRanks, 1, [&](Task& task) {
    const int rank = task.rank();
    const auto comm = transport.join(rank, CommId(0), m.members);
    cuda::RankDevice& device = m.node.rank(rank);
    float *const source = m.floats(rank, kRoom * kWidth), *const target = m.floats(rank, kRoom * kWidth);
    for (int round = 0; round < 6; ++round) {
      std::vector<int32_t> sent, received;
      std::vector<float> values;
      for (int peer = 0; peer < kRanks; ++peer) {
        const int going = rows(round, rank, peer), coming = rows(round, peer, rank);
        for (const int part : {going / 2, going - going / 2}) sent.push_back(part);
        for (const int part : {coming / 2, coming - coming / 2}) received.push_back(part);
        for (int64_t i = 0; i < going * kWidth; ++i) values.push_back(value(round, rank, peer, i));
      }
      values.resize(kRoom * kWidth, -1);
      device.copy(source, values.data(), kRoom * kRowBytes, 0);
      CollectiveCall call{
          CollectiveKind::kAllToAll, ReduceOp::kSum, Algorithm::kDirect, DType::f32, kRoom * kWidth, 0, source, target};
      call.sent = sent.data(), call.received = received.data(), call.counts = 2, call.row_bytes = kRowBytes;
      call.source_room = call.room = kRoom;
      if (!comm->prepare(call).ok()) throw WorldError("cannot prepare");
      const Moved moved = comm->collective(call, task);
      std::vector<float> got(kRoom * kWidth);
      device.copy(got.data(), target, kRoom * kRowBytes, 0);
      device.synchronise();
      int64_t at = 0, bytes = 0;
      for (int from = 0; from < kRanks; ++from)
        for (int64_t i = 0; i < rows(round, from, rank) * kWidth; ++i)
          if (got[static_cast<size_t>(at++)] != value(round, from, rank, i))
            throw WorldError(fmt::format("round {}: a row of rank {} went astray", round, from));
      for (int to = 0; to < kRanks; ++to) bytes += to != rank ? rows(round, rank, to) * kRowBytes : 0;
      if (moved.sent_bytes != bytes)
        throw WorldError(fmt::format("round {}: {} bytes are said to be sent, not {}", round, moved.sent_bytes, bytes));
    }
  });
  REQUIRE_FALSE(m.api.deadlocked());
}

TEST_CASE("what the one-gpu transport cannot do is refused when it is bound") {
  Meetings m(3, 1);
  cuda::OneGpuTransport transport(m.node);
  const auto comm = transport.join(0, CommId(0), m.members);
  const auto refusal = [&](const CollectiveCall& call) {
    const auto prepared = comm->prepare(call);
    return prepared.ok() ? std::string() : prepared.error().message;
  };
  REQUIRE(contains(refusal({CollectiveKind::kAllReduce, ReduceOp::kSum, Algorithm::kDirect, DType::i8, 8}), "reduces i8"));
  REQUIRE(contains(refusal({CollectiveKind::kAllGather, ReduceOp::kSum, Algorithm::kDirect, DType::f4e2m1, 8}), "within a byte"));
  REQUIRE(
      contains(refusal({CollectiveKind::kAllReduce, ReduceOp::kSum, Algorithm::kHalvingDoubling, DType::f32, 8}), "power of two"));
  REQUIRE(contains(refusal({CollectiveKind::kAllToAll, ReduceOp::kSum, Algorithm::kDirect, DType::f32, 8}), "equal parts"));
  REQUIRE(refusal({CollectiveKind::kAllReduce, ReduceOp::kSum, Algorithm::kRing, DType::bf16, 8}).empty());
}

}  // namespace shardlab::testing
