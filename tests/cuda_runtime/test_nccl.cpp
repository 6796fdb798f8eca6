// NCCL: the calls that a plan comes to, what the transport really calls, and the real library with one rank.
#include <fmt/format.h>

#include <algorithm>

#include "cli/pairs.h"
#include "plan/text.h"
#include "runtime/cuda/nccl_transport.h"
#include "strategies/lower.h"
#include "tests/cuda_runtime/fake_nccl.h"
#include "tests/cuda_runtime/queued_kernels.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#define SHARDLAB_TEST_NCCL_HEADER 1
#include <nccl.h>
#endif

namespace shardlab::testing {

namespace {

using Kind = cuda::NcclCall::Kind;

Case layout(int dp, int tp, int pp) {
  Case c = tiny_case();
  if (pp > 1) c = with_pipeline(c, pp, Schedule::k1F1B, 2);
  c.model.tied_embeddings = pp > 1;
  c.layout.dp = dp;
  c.layout.tp = tp;
  c.layout.zero = dp > 1 ? 1 : 0;
  c.layout.bucket_bytes = 16384;
  c.train.grad_norm = pp == 1;  // not with tied embeddings across stages
  return c;
}

const Program& program_of(const PlacedPlan& placed, int rank) {
  return placed.programs[static_cast<size_t>(placed.plan->mesh.role_of(rank))];
}

/// A call as FakeNccl writes it: without the communicator's name.
std::string without_name(const Plan& plan, const cuda::NcclCall& call) {
  std::string text = cuda::to_text(plan, call);
  const std::string name = plan.comms[call.comm.index()].name + " ";
  return text.erase(text.find(name), name.size());
}

/// A session of `placed` without storage on the fake library.
struct DryNccl {
  explicit DryNccl(const PlacedPlan& placed, RunOptions options = {}) {
    auto made = cuda::NcclTransport::create(nccl, placed, nullptr);
    INFO((made.ok() ? std::string() : to_string(made.error())));
    REQUIRE(made.ok());
    transport = std::move(*made);
    auto session_made = Session::create(placed, options, *transport, dry_backend(), &tokens);
    REQUIRE(session_made.ok());
    session = std::move(*session_made);
    after_joining = nccl.log.size();
  }
  FakeNccl nccl;
  Tokens64 tokens;
  std::unique_ptr<cuda::NcclTransport> transport;
  std::unique_ptr<Session> session;
  size_t after_joining = 0;
};

Result<std::vector<cuda::NcclOp>> calls_of(const std::string& body, int dp = 2) {
  auto parsed = parse_plan(plan_head(1, dp, 1) + body);
  INFO((parsed.ok() ? std::string() : to_string(parsed.error())));
  REQUIRE(parsed.ok());
  const PlacedPlan placed = place(std::move(*parsed));
  return cuda::nccl_calls(*placed.plan, placed.programs[0], 0);
}

}  // namespace

TEST_CASE("the NCCL calls of a plan as text") {
  const PlacedPlan placed = lowered(layout(2, 2, 2));
  std::string text;
  for (const int rank : {0, 7}) {
    const auto ops = cuda::nccl_calls(*placed.plan, program_of(placed, rank), rank);
    REQUIRE(ops.ok());
    text += fmt::format("rank {}\n{}", rank, cuda::to_text(*placed.plan, *ops));
  }
  REQUIRE_GOLDEN("streams/nccl-dp2-tp2-pp2.txt", text);
}

TEST_CASE("the transport makes the calls that the plan comes to, on each device in issue order") {
  for (const auto& [dp, tp, pp] : {std::array{2, 1, 1}, {1, 2, 1}, {1, 1, 2}, {2, 2, 2}}) {
    INFO(fmt::format("dp{} tp{} pp{}", dp, tp, pp));
    const PlacedPlan placed = lowered(layout(dp, tp, pp));
    const Plan& plan = *placed.plan;
    DryNccl dry(placed);
    REQUIRE(dry.nccl.made_in_groups == static_cast<int>(dry.nccl.handles.size()));
    REQUIRE(dry.nccl.open_groups == 0);
    constexpr int kSteps = 2;
    for (int step = 0; step < kSteps; ++step) dry.session->step(step);

    for (int rank = 0; rank < plan.mesh.world_size(); ++rank) {
      const auto ops = cuda::nccl_calls(plan, program_of(placed, rank), rank);
      REQUIRE(ops.ok());
      REQUIRE(std::ranges::is_sorted(*ops, {}, &cuda::NcclOp::instruction));
      std::vector<std::string> want;
      for (int step = 0; step < kSteps; ++step)
        for (const cuda::NcclOp& op : *ops)
          for (const cuda::NcclCall& call : op.calls) want.push_back(without_name(plan, call));
      std::vector<const void*> own;
      for (size_t c = 0; c < plan.comms.size(); ++c)
        own.push_back(dry.transport->handle(rank, CommId(static_cast<int32_t>(c))).value);
      std::vector<std::string> have;
      for (size_t i = dry.after_joining; i < dry.nccl.log.size(); ++i)
        if (std::ranges::find(own, dry.nccl.log[i].first) != own.end()) have.push_back(dry.nccl.log[i].second);
      REQUIRE(want.size() > 2);
      REQUIRE(have == want);
    }
  }
}

TEST_CASE("every yes of transport nccl makes its calls, and every pair that NCCL cannot do is refused before") {
  int stepped = 0;
  for (const LegalPair& pair : legal_pairs()) {
    if (pair.config.transport != TransportKind::kNccl) continue;
    INFO(pair.first << " with " << pair.second);
    Case c = pair.config;
    c.train.seq_len = 16;
    c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
    REQUIRE(check(c).ok());
    auto plan = lower(c);
    REQUIRE(plan.ok());
    const PlacedPlan placed = place(std::move(*plan));
    for (int rank = 0; rank < placed.plan->mesh.world_size(); ++rank) {
      const auto ops = cuda::nccl_calls(*placed.plan, program_of(placed, rank), rank);
      INFO((ops.ok() ? std::string() : to_string(ops.error())));
      REQUIRE(ops.ok());
    }
    DryNccl dry(placed);
    dry.session->step(0);
    ++stepped;
  }
  fmt::print("{} pairs on NCCL\n", stepped);
  CHECK(stepped >= 40);
}

TEST_CASE("communicators are warmed up before the first step, and destroyed or aborted once") {
  const PlacedPlan placed = lowered(layout(1, 1, 2));
  {
    DryNccl dry(placed);
    const size_t sends = static_cast<size_t>(
        std::ranges::count_if(dry.nccl.log, [](const auto& entry) { return entry.second.starts_with("send u8 x 1 to"); }));
    REQUIRE(sends == 2);  // one each way: forward, and backward
    dry.session.reset();
    const auto& handles = dry.nccl.handles;
    REQUIRE(handles.size() >= 4);
    dry.transport.reset();
    for (const auto& h : handles) REQUIRE((h->destroyed && !h->aborted));
  }
  DryNccl dry(placed);
  dry.nccl.remote_failure = 6;
  const std::string text = world_error([&] { dry.session->step(0); });
  INFO(text);
  REQUIRE(contains(text, "an earlier NCCL call: NCCL error 6: status 6"));
  dry.session.reset();
  dry.transport.reset();
  for (const auto& h : dry.nccl.handles) REQUIRE((h->aborted && !h->destroyed));
}

TEST_CASE("a call that NCCL refuses names the rank, the op and the call") {
  const PlacedPlan placed = lowered(layout(1, 2, 1));
  DryNccl dry(placed);
  dry.nccl.failure = 5;
  const std::string text = world_error([&] { dry.session->step(0); });
  INFO(text);
  REQUIRE(contains(text, "ncclAllReduce: NCCL error 5: status 5"));
  REQUIRE(contains(text, "rank "));
  REQUIRE(contains(text, "all_reduce"));
}

TEST_CASE("an exchange around a ring is one group; what NCCL cannot do is refused from the plan") {
  const std::string ring = R"(comm cp axes dp
segment s
  bound %x temporary f32[8] dp:S0
  bound %y temporary f32[8] dp:S0
  send to (%x) -> () comm=cp hop=1 cyclic
  recv to () -> (%y) comm=cp hop=-1 cyclic
role 0
  %x temporary f32[8] dp:S0 persistent
  %y temporary f32[8] dp:S0 persistent

  call s (x=%x, y=%y)
)";
  const auto ops = calls_of(ring, 4);
  INFO((ops.ok() ? std::string() : to_string(ops.error())));
  REQUIRE(ops.ok());
  REQUIRE(ops->size() == 2);
  REQUIRE((*ops)[0].calls.front().kind == Kind::kGroupStart);
  REQUIRE((*ops)[0].calls.back() == cuda::NcclCall{Kind::kSend, CommId(0), 32, DType::u8, ReduceOp::kSum, 1});
  REQUIRE((*ops)[1].calls.front() == cuda::NcclCall{Kind::kReceive, CommId(0), 32, DType::u8, ReduceOp::kSum, 3});
  REQUIRE((*ops)[1].calls.back().kind == Kind::kGroupEnd);

  std::string alone = ring;
  alone.erase(alone.find("  recv to"), alone.find("role 0") - alone.find("  recv to"));
  REQUIRE(contains(calls_of(alone, 4).error().message, "needs its counterpart next to it"));

  const auto reduce_scatter = [](std::string_view type, int64_t elements) {
    return fmt::format(R"(comm dp axes dp
segment s
  bound %x temporary {0}[{1}] dp:P
  local %y temporary {0}[{2}] dp:S0 view %x shard dp
  reduce_scatter sum (%x) -> (%y) comm=dp algorithm=ring
role 0
  %x temporary {0}[{1}] dp:P persistent

  call s (x=%x)
)",
                       type, elements, elements / 2);
  };
  REQUIRE(calls_of(reduce_scatter("f32", 8)).ok());
  REQUIRE(contains(calls_of(reduce_scatter("f32", 9)).error().message, "NCCL cuts 9 elements in 2 equal parts"));
  REQUIRE(contains(calls_of(reduce_scatter("i16", 8)).error().message, "NCCL does not reduce i16"));
}

TEST_CASE("what is cut along a dim within others is one NCCL call a strip, in a group") {
  const auto ops = calls_of(R"(comm dp axes dp
segment s
  bound %part temporary f32[3,2,4] dp:S1
  bound %all temporary f32[3,4,4]
  bound %sum temporary f32[3,4,4] dp:P
  all_gather up (%part) -> (%all) comm=dp
  reduce_scatter down (%sum) -> (%part) comm=dp algorithm=direct
role 0
  %part temporary f32[3,2,4] dp:S1 persistent
  %all temporary f32[3,4,4] persistent
  %sum temporary f32[3,4,4] dp:P persistent

  call s (part=%part, all=%all, sum=%sum)
)");
  REQUIRE(ops.ok());
  REQUIRE(ops->size() == 2);
  const CommId dp(0);
  const std::vector<cuda::NcclCall> gather{{Kind::kGroupStart, dp},
                                           {Kind::kAllGather, dp, 32, DType::u8, ReduceOp::kSum, -1, 0, 0},
                                           {Kind::kAllGather, dp, 32, DType::u8, ReduceOp::kSum, -1, 32, 64},
                                           {Kind::kAllGather, dp, 32, DType::u8, ReduceOp::kSum, -1, 64, 128},
                                           {Kind::kGroupEnd, dp}};
  const std::vector<cuda::NcclCall> scatter{{Kind::kGroupStart, dp},
                                            {Kind::kReduceScatter, dp, 8, DType::f32, ReduceOp::kSum, -1, 0, 0},
                                            {Kind::kReduceScatter, dp, 8, DType::f32, ReduceOp::kSum, -1, 64, 32},
                                            {Kind::kReduceScatter, dp, 8, DType::f32, ReduceOp::kSum, -1, 128, 64},
                                            {Kind::kGroupEnd, dp}};
  CHECK((*ops)[0].calls == gather);
  CHECK((*ops)[1].calls == scatter);
}

TEST_CASE(
    "packed rows over NCCL: messages of true sizes in their element type, none of no rows, and at the end of the room what would "
    "reach beyond") {
  const std::vector<int32_t> sent{2, 1, 0, 0, 3, 1}, received{4, 0, 0, 0, 2, 3};  // two counts a rank
  CollectiveCall call{.kind = CollectiveKind::kAllToAll, .dtype = DType::bf16};
  call.sent = sent.data(), call.received = received.data(), call.counts = 2, call.row_bytes = 10, call.source_room = 7,
  call.room = 9;
  const CommId ep(0);
  const auto message = [&](Kind kind, int peer, int64_t rows, int64_t begin, DType dtype = DType::bf16) {
    return cuda::NcclCall{kind, ep, rows * 10 / (dtype == DType::u8 ? 1 : 2), dtype, ReduceOp::kSum, peer, begin * 10, begin * 10};
  };
  const cuda::NcclCall open{Kind::kGroupStart, ep}, close{Kind::kGroupEnd, ep};
  const std::vector<cuda::NcclCall> want{open,
                                         message(Kind::kSend, 0, 3, 0),
                                         message(Kind::kReceive, 0, 4, 0),
                                         message(Kind::kSend, 2, 4, 3),
                                         message(Kind::kReceive, 2, 5, 4),
                                         close};
  CHECK(cuda::counted_calls(ep, call, 3, 1, 1) == want);
  call.room = 6;  // five rows begin at the second, on top of the first message
  CHECK(cuda::counted_calls(ep, call, 3, 1, 1)[4] == message(Kind::kReceive, 2, 5, 1));
  call.dtype = DType::f8e4m3;
  CHECK(cuda::counted_calls(ep, call, 3, 1, 1)[3] == message(Kind::kSend, 2, 4, 3, DType::u8));
}

TEST_CASE("experts over NCCL without storage: counts in equal parts, rows as an even route has them") {
  Case c = layout(2, 1, 1);
  c.model = tiny_case(Family::kLlama).model;
  c.model.experts = {.count = 4, .top_k = 2, .ffn = 24};
  c.layout.ep = 2;
  const PlacedPlan placed = lowered(c);
  const auto ops = cuda::nccl_calls(*placed.plan, program_of(placed, 0), 0);
  REQUIRE(ops.ok());
  int exchanges = 0;
  for (const cuda::NcclOp& op : *ops) {
    if (!op.counted) continue;
    ++exchanges;
    // Half of the rows that the rank's tokens choose go to each rank, in two reads of one message: [2, rows, h] f32.
    const int64_t elements = c.train.micro_batch * c.train.seq_len * c.model.experts.top_k * c.model.hidden / 2;
    REQUIRE(op.calls.size() == 6);
    for (size_t i = 1; i < 5; ++i) {
      CHECK(op.calls[i].count == elements);
      CHECK(op.calls[i].dtype == DType::f32);
      CHECK(op.calls[i].source == op.calls[i].peer * elements * 4);
    }
  }
  CHECK(exchanges == 8);  // of two layers
  DryNccl dry(placed);
  dry.session->step(0);
}

TEST_CASE("NCCL's numbers of types and reductions are those of its header") {
#ifdef SHARDLAB_TEST_NCCL_HEADER
  REQUIRE(cuda::nccl_type(DType::i8) == ncclInt8);
  REQUIRE(cuda::nccl_type(DType::u8) == ncclUint8);
  REQUIRE(cuda::nccl_type(DType::i32) == ncclInt32);
  REQUIRE(cuda::nccl_type(DType::i64) == ncclInt64);
  REQUIRE(cuda::nccl_type(DType::f16) == ncclFloat16);
  REQUIRE(cuda::nccl_type(DType::f32) == ncclFloat32);
  REQUIRE(cuda::nccl_type(DType::f64) == ncclFloat64);
  REQUIRE(cuda::nccl_type(DType::bf16) == ncclBfloat16);
  REQUIRE(cuda::nccl_reduction(ReduceOp::kSum) == ncclSum);
  REQUIRE(cuda::nccl_reduction(ReduceOp::kMax) == ncclMax);
  REQUIRE(sizeof(cuda::NcclId) == sizeof(ncclUniqueId));
#else
  WARN("skipped: nccl.h is not here");
#endif
}

TEST_CASE("the installed NCCL opens, or says what is missing") {
  const auto nccl = cuda::real_nccl();
  if (!nccl.ok()) {
    REQUIRE(nccl.error().code == ExitCode::kEnvironment);
    REQUIRE(!nccl.error().hint.empty());
    WARN("skipped: " << nccl.error().message);
    return;
  }
  int version = 0;
  REQUIRE((*nccl)->version(&version) == 0);
  REQUIRE(version >= 21000);
  REQUIRE(cuda::nccl_version_text(22809) == "2.28.9");
  REQUIRE(cuda::nccl_version_text(2708) == "2.7.8");
}

}  // namespace shardlab::testing
