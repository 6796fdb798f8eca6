// Small plans, really executed: streams and edges, collectives and messages between ranks, memory, failures, parameters.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <mutex>

#include "plan/text.h"
#include "plan/wire.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

/// x grows by 1 and doubles in turn, on two streams; the result is a persistent buffer.
std::string two_streams(int rounds) {
  std::string text = plan_head(1, 1, 1, "compute side") + R"(
segment one
  bound %x temporary f32[5]
  fill one () -> (%x) value=1

segment grow
  bound %x temporary f32[5]
  bound %one temporary f32[5]
  local %y temporary f32[5] view %x
  add grow (%x, %one) -> (%y)

segment double
  bound %x temporary f32[5]
  bound %other temporary f32[5]
  local %y temporary f32[5] view %x
  copy keep (%x) -> (%other) @side
  add double (%x, %other) -> (%y) @side

role 0
  %one temporary f32[5]
  %other temporary f32[5]
  %x temporary f32[5] persistent

  alloc %one
  call one (x=%one)
  call one (x=%x)
)";
  for (int i = 0; i < rounds; ++i)
    text += "  call grow (x=%x, one=%one)\n  alloc %other\n  call double (x=%x, other=%other)\n  free %other\n";
  return text + "  free %one\n";
}

/// Each of dp ranks holds a slice of `w`; the plan gathers it, sums the gathered copies by all_reduce and scatters the sum.
std::string gather_and_reduce(int dp, int64_t slice, std::string_view algorithm) {
  return plan_head(1, dp, 1, "compute comm") + fmt::format(R"(comm dp axes dp
comm dp.sum axes dp

parameter w f32[{0}] dp:S0 stage 0 normal deviation 1 tensor 7

segment gather
  bound %w parameter f32[{0}] dp:S0
  bound %full other f32[{1}]
  bound %sum other f32[{1}] dp:P
  local %total other f32[{1}] view %sum
  bound %part other f32[{0}] dp:S0
  local %source other f32[{1}] dp:P
  local %own other f32[{0}] dp:S0 view %source shard dp

  alloc %source
  all_gather gather (%w) -> (%full) comm=dp algorithm={2} @comm
  copy keep (%full) -> (%sum)
  copy again (%full) -> (%source)
  all_reduce sum (%sum) -> (%total) comm=dp.sum algorithm={2} @comm
  reduce_scatter scatter (%source) -> (%own) comm=dp.sum algorithm={2} @comm
  copy out (%own) -> (%part)
  free %source

role 0
  %w parameter f32[{0}] dp:S0 persistent of w
  %full other f32[{1}] persistent
  %sum other f32[{1}] dp:P persistent
  %total other f32[{1}] view %sum
  %part other f32[{0}] dp:S0 persistent

  call gather (w=%w, full=%full, sum=%sum, part=%part)
)",
                                                           slice, slice * dp, algorithm);
}

/// Tokens flow down a pipeline of `pp` stages, each of which adds 1 to them (as fp32) and passes them on.
std::string relay(int pp) {
  std::string text = plan_head(pp, 1, 1, "compute pipe") + R"(comm pp axes pp

segment start
  bound %x activation f32[33] pp:L
  fill start () -> (%x) value=10
segment receive
  bound %x activation f32[33] pp:L
  recv from () -> (%x) comm=pp @pipe
segment step
  bound %x activation f32[33] pp:L
  bound %kept other f32[33] pp:L
  local %one temporary f32[33] pp:L
  alloc %one
  fill one () -> (%one) value=1
  add step (%x, %one) -> (%kept)
  free %one
segment send
  bound %x other f32[33] pp:L
  send to (%x) -> () comm=pp @pipe
)";
  for (int stage = 0; stage < pp; ++stage) {
    text += fmt::format("\nrole {}\n  %x activation f32[33] pp:L\n  %kept{} other f32[33] pp:L persistent\n\n  alloc %x\n", stage,
                        stage);
    text += stage == 0 ? "  call start (x=%x)\n" : "  call receive (x=%x)\n";
    text += fmt::format("  call step (x=%x, kept=%kept{})\n  free %x\n", stage);
    if (stage + 1 < pp) text += fmt::format("  call send (x=%kept{})\n", stage);
  }
  return text;
}

float after_rounds(int rounds) {
  float x = 1;
  for (int i = 0; i < rounds; ++i) x = (x + 1) * 2;
  return x;
}

}  // namespace

TEST_CASE("two streams keep their edges under any interleaving", "[session][seeded]") {
  const std::vector<float> expected(5, after_rounds(12));
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SeededScheduler scheduler(seed);
    Rig rig(two_streams(12), {.poison = true, .scheduler = &scheduler});
    for (int64_t step = 0; step < 2; ++step) rig.session->step(step);
    REQUIRE(*rig.session->read_buffer(0, "x") == expected);
  }
  Rig rig(two_streams(12), {.poison = true});
  for (int64_t step = 0; step < 50; ++step) rig.session->step(step);
  REQUIRE(*rig.session->read_buffer(0, "x") == expected);
}

TEST_CASE("the ledger's high-water mark is the plan's peak to the byte", "[session][memory]") {
  for (const std::string& text : {two_streams(3), gather_and_reduce(3, 5, "direct"), relay(3)}) {
    Rig rig(text);
    for (int64_t step = 0; step < 3; ++step) rig.session->step(step);
    for (int rank = 0; rank < rig.plan().mesh.world_size(); ++rank) {
      const int role = rig.plan().roles.size() == 1 ? 0 : rank;
      const auto predicted = memory_peak(rig.plan(), role);
      for (int s = 0; s < kSpaces; ++s) {
        const Space space = static_cast<Space>(s);
        REQUIRE(rig.session->ledger(rank).peak(space) == predicted[static_cast<size_t>(s)].peak_bytes);
        REQUIRE(rig.session->ledger(rank).at_peak(space).bytes == predicted[static_cast<size_t>(s)].at_peak.bytes);
        REQUIRE(rig.session->ledger(rank).live(space) == predicted[static_cast<size_t>(s)].persistent_bytes);
      }
      REQUIRE(rig.session->ledger(rank).peak(Space::kDevice) > rig.session->ledger(rank).live(Space::kDevice));
    }
  }
}

TEST_CASE("collectives of a plan: values, replicas and bytes", "[session][collectives]") {
  for (const std::string_view algorithm : {"ring", "direct", "halving-doubling"})
    for (const int dp : {1, 2, 4, 8}) {
      const int64_t slice = 13;
      Rig rig(gather_and_reduce(dp, slice, algorithm), {.seed = 3});
      rig.session->initialise_parameters();
      const StepResult result = rig.session->step(0);
      const LogicalTensor w = *rig.session->parameter("w");
      REQUIRE(w.shape == Shape{slice * dp});
      REQUIRE(same_bits(rig.session->gather_buffer("full")->values, w.values));
      std::vector<float> times(w.values);
      for (float& v : times) {
        const float one = v;  // equal values: a ring adds them one by one, the others in pairs, which is exact
        for (int k = 1; k < dp && algorithm == "ring"; ++k) v += one;
        if (algorithm != "ring") v *= static_cast<float>(dp);
      }
      REQUIRE(same_bits(rig.session->gather_buffer("total")->values, times));
      REQUIRE(same_bits(rig.session->gather_buffer("part")->values, times));
      int64_t total = 0;
      for (int rank = 0; rank < dp; ++rank) {
        auto counted = rig.session->sent_by_comm(rank);
        auto planned = wire_bytes(rig.plan(), rig.plan().mesh.coordinates(rank));
        for (size_t c = 0; c < rig.plan().comms.size(); ++c) {
          REQUIRE(counted[c] == planned[rig.plan().comms[c].name]);
          total += counted[c];
        }
      }
      REQUIRE(result.sent_bytes == total);
      REQUIRE((total > 0) == (dp > 1));
    }
}

TEST_CASE("parameters do not depend on the layout and move between layouts", "[session][parameters]") {
  Rig one(gather_and_reduce(1, 24, "direct"), {.seed = 5}), four(gather_and_reduce(4, 6, "direct"), {.seed = 5}),
      other(gather_and_reduce(4, 6, "direct"), {.seed = 6});
  for (Rig* rig : {&one, &four, &other}) rig->session->initialise_parameters();
  REQUIRE(same_bits(one.session->parameter("w")->values, four.session->parameter("w")->values));
  REQUIRE_FALSE(same_bits(one.session->parameter("w")->values, other.session->parameter("w")->values));
  REQUIRE(copy_parameters(*one.session, one.plan(), *other.session).ok());
  REQUIRE(same_bits(one.session->parameter("w")->values, other.session->parameter("w")->values));
  REQUIRE(one.session->parameter("v").error().message == "the plan has no parameter called `v`");
}

TEST_CASE("replicas that differ are reported", "[session][parameters]") {
  // `sum` is declared whole on both ranks, yet the plan fills it from each rank's own slice.
  Rig rig(plan_head(1, 2, 1) + R"(
parameter w f32[4] dp:S0 stage 0 normal deviation 1 tensor 7
segment wrong
  bound %w parameter f32[4] dp:S0
  bound %whole other f32[4]
  copy wrong (%w) -> (%whole)
role 0
  %w parameter f32[4] dp:S0 persistent of w
  %whole other f32[4] persistent
  call wrong (w=%w, whole=%whole)
)");
  rig.session->initialise_parameters();
  rig.session->step(0);
  REQUIRE(rig.session->gather_buffer("whole").error().message == "`whole` differs between its replicas on ranks 0 and 1");
}

TEST_CASE("a pipeline passes messages on", "[session][p2p]") {
  for (const int pp : {2, 5, 8}) {
    Rig rig(relay(pp), {.poison = true});
    for (int64_t step = 0; step < 20; ++step) rig.session->step(step);
    for (int stage = 0; stage < pp; ++stage) {
      REQUIRE(*rig.session->read_buffer(stage, fmt::format("kept{}", stage)) ==
              std::vector<float>(33, 11.0f + static_cast<float>(stage)));
      const int64_t sent = rig.session->sent_by_comm(stage)[0];
      REQUIRE(sent == (stage + 1 < pp ? 33 * 4 : 0));
    }
  }
}

TEST_CASE("groups along the pipeline meet apart", "[session][collectives]") {
  std::string text = plan_head(4, 1, 1) + "comm pairs axes pp groups 0,2 1,3\ncomm ends axes pp ends\n";
  for (int stage = 0; stage < 4; ++stage)
    text += fmt::format(R"(
segment start{0}
  bound %x other f32[5] pp:P
  bound %y other f32[5] pp:P

  fill x () -> (%x) value={1}
  fill y () -> (%y) value={1}
)",
                        stage, 1 << stage);
  text += R"(
segment sum
  bound %x other f32[5] pp:P
  bound %y other f32[5] pp:P
  local %xs other f32[5] pp:L view %x
  local %ys other f32[5] pp:L view %y

  all_reduce x (%x) -> (%xs) comm=pairs
  all_reduce y (%y) -> (%ys) comm=ends @comm
)";
  for (int stage = 0; stage < 4; ++stage)
    text += fmt::format(
        "\nrole {0}\n  %x other f32[5] pp:P persistent\n  %y other f32[5] pp:P persistent\n\n"
        "  call start{0} (x=%x, y=%y)\n  call sum (x=%x, y=%y)\n",
        stage);
  Rig rig(text);
  rig.session->step(0);
  const auto held = [&](int stage, std::string_view buffer) { return rig.session->read_buffer(stage, buffer)->front(); };
  for (int stage = 0; stage < 4; ++stage) {
    CHECK(held(stage, "x") == static_cast<float>((1 << stage) + (1 << (stage ^ 2))));
    CHECK(held(stage, "y") == static_cast<float>((1 << stage) + (1 << (3 - stage))));
    const auto planned = wire_bytes(rig.plan(), rig.plan().mesh.coordinates(stage));
    CHECK(rig.session->sent_by_comm(stage)[0] == planned.at("pairs"));
    CHECK(rig.session->sent_by_comm(stage)[1] == planned.at("ends"));
    CHECK(planned.at("pairs") == 20);
  }
}

#if !defined(__SANITIZE_ADDRESS__)
TEST_CASE("a poisoned arena catches a use after free", "[session][memory]") {
  // %x is read after it was freed; without poison the old values would still lie there and the fault stay silent.
  const std::string text = plan_head(1, 1, 1) + R"(
segment make
  bound %x temporary f32[8]
  fill make () -> (%x) value=3
segment keep
  bound %x temporary f32[8]
  bound %y other f32[8]
  copy keep (%x) -> (%y)
role 0
  %x temporary f32[8]
  %y other f32[8] persistent
  alloc %x
  call make (x=%x)
  free %x
  call keep (x=%x, y=%y)
)";
  Rig silent(text), poisoned(text, {.poison = true});
  silent.session->step(0);
  poisoned.session->step(0);
  REQUIRE(*silent.session->read_buffer(0, "y") == std::vector<float>(8, 3.0f));
  const std::vector<float> read = *poisoned.session->read_buffer(0, "y");
  for (const float v : read) {
    uint32_t bits = 0;
    std::memcpy(&bits, &v, 4);
    REQUIRE(bits == kPoison);
  }
}
#endif

namespace {

/// Sequence s is s, s+1, s+2 ... modulo 50. Fails on one sequence.
class CountingSource final : public BatchSource {
 public:
  void sequence(int64_t sequence, std::span<int32_t> out) const override {
    {
      const std::lock_guard lock(mutex_);
      asked.push_back(sequence);
    }
    if (sequence == bad) throw WorldError("the data file has vanished", "put it back");
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<int32_t>((sequence + static_cast<int64_t>(i)) % 50);
  }
  mutable std::vector<int64_t> asked;
  int64_t bad = -1;

 private:
  mutable std::mutex mutex_;
};

/// Tokens and targets of 2 micro-batches of 3 sequences on each of dp ranks, embedded with a table whose row v is v.
std::string batches(int dp) {
  std::string text = plan_head(1, dp, 1);
  text.replace(text.find("micro_batches 1"), 15, "micro_batches 2");
  text.replace(text.find("sequences_per_micro_batch 1"), 27, "sequences_per_micro_batch 3");
  text += R"(
segment load
  bound %tokens input i32[3,4] dp:S0 micro:slice
  bound %targets input i32[3,4] dp:S0 micro:slice
  load_batch tokens () -> (%tokens)
  load_batch targets () -> (%targets) targets
segment embed
  bound %tokens input i32[3,4] dp:S0 micro:slice
  bound %table parameter f32[50,1]
  bound %x activation f32[3,4,1] dp:S0 micro:slice
  embed.F embed (%tokens, %table) -> (%x)
role 0
  %tokens input i32[3,4] dp:S0 micro:slice
  %targets input i32[3,4] dp:S0 micro:slice
  %table parameter f32[50,1] persistent of table
)";
  for (int m = 0; m < 2; ++m)
    text += fmt::format(
        "  %in{0} activation f32[3,4,1] dp:S0 micro:slice persistent\n  %out{0} activation f32[3,4,1] dp:S0 micro:slice "
        "persistent\n",
        m);
  for (int m = 0; m < 2; ++m)
    text += fmt::format(
        "  alloc %tokens\n  alloc %targets\n  call load m={0} (tokens=%tokens, targets=%targets)\n"
        "  call embed m={0} (tokens=%tokens, table=%table, x=%in{0})\n  call embed m={0} (tokens=%targets, table=%table, "
        "x=%out{0})\n"
        "  free %targets\n  free %tokens\n",
        m);
  text.insert(text.find("\nsegment load"), "parameter table f32[50,1] stage 0 zeros tensor 0\n");
  return text;
}

void number_table(Session& session) {
  LogicalTensor table{Shape{50, 1}, {}};
  for (int i = 0; i < 50; ++i) table.values.push_back(static_cast<float>(i));
  REQUIRE(session.set_parameter("table", table).ok());
}

}  // namespace

TEST_CASE("a rank's sequences of a step are contiguous, and targets are the tokens shifted by one", "[session][data]") {
  const CountingSource source;
  Rig rig(batches(2), {}, &source);
  number_table(*rig.session);
  for (const int64_t step : {0, 3}) {
    rig.session->step(step);
    for (int64_t rank = 0; rank < 2; ++rank)
      for (int64_t m = 0; m < 2; ++m) {
        const auto in = *rig.session->read_buffer(static_cast<int>(rank), fmt::format("in{}", m));
        const auto out = *rig.session->read_buffer(static_cast<int>(rank), fmt::format("out{}", m));
        for (int64_t i = 0; i < 3; ++i)
          for (int64_t t = 0; t < 4; ++t) {
            const int64_t sequence = ((step * 2 + rank) * 2 + m) * 3 + i;
            REQUIRE(in[static_cast<size_t>(i * 4 + t)] == static_cast<float>((sequence + t) % 50));
            REQUIRE(out[static_cast<size_t>(i * 4 + t)] == static_cast<float>((sequence + t + 1) % 50));
          }
      }
  }
}

TEST_CASE("one rank's failure ends the step on all ranks with its message, and the session stays ended", "[session][failure]") {
  CountingSource source;
  source.bad = 12 + 3;  // step 1 of one rank pair: rank 0, micro-batch 1
  Rig rig(batches(2), {}, &source);
  number_table(*rig.session);
  rig.session->step(0);
  const std::string error = world_error([&] { rig.session->step(1); });
  REQUIRE(error == "rank 0 failed at stream compute op #10 `m1 load tokens load_batch`: the data file has vanished");
  REQUIRE(world_error([&] { rig.session->step(2); }) == error);
}

TEST_CASE("a failed rank releases its peers within a step", "[session][failure]") {
  // Rank 1's data fails while the others wait for it in an all_reduce.
  CountingSource source;
  source.bad = 1;
  const std::string text = plan_head(1, 8, 1) + R"(comm dp axes dp
segment load
  bound %tokens input i32[1,4] dp:S0 micro:slice
  load_batch tokens () -> (%tokens)
segment reduce
  bound %x other f32[6] dp:P
  local %y other f32[6] view %x
  all_reduce sum (%x) -> (%y) comm=dp @comm
role 0
  %tokens input i32[1,4] dp:S0 micro:slice
  %x other f32[6] dp:P persistent
  alloc %tokens
  call load m=0 (tokens=%tokens)
  free %tokens
  call reduce (x=%x)
)";
  for (int repeat = 0; repeat < 10; ++repeat) {
    Rig rig(text, {}, &source);
    REQUIRE(world_error([&] { rig.session->step(0); }) ==
            "rank 1 failed at stream compute op #1 `m0 load tokens load_batch`: the data file has vanished");
  }
}

TEST_CASE("the watchdog says who waits at which op and where the others are", "[session][failure][seeded]") {
  // Stage 1 sends where it should receive: both wait for the other to read.
  const std::string text = plan_head(2, 1, 1) + R"(comm pp axes pp
segment down
  bound %x other f32[3] pp:L
  send down (%x) -> () comm=pp
segment up
  bound %x other f32[3] pp:L
  send up (%x) -> () comm=pp hop=-1
role 0
  %x other f32[3] pp:L persistent
  call down (x=%x)
role 1
  %x other f32[3] pp:L persistent
  call up (x=%x)
)";
  SeededScheduler scheduler(4);
  Rig rig(text, {.timeout_s = 30, .scheduler = &scheduler});
  const std::string error = world_error([&] { rig.session->step(0); });
  REQUIRE(contains(error, "has waited 30 s, which is the limit"));
  REQUIRE(contains(error, "rank 0: stream compute op #0 `down down send` waits for rank 1 to read what it was offered"));
  REQUIRE(contains(error, "rank 1: stream compute op #0 `up up send` waits for rank 0 to read what it was offered"));
}

TEST_CASE("a session is cancelled from outside", "[session][failure]") {
  Rig rig(gather_and_reduce(4, 8, "ring"));
  rig.session->step(0);
  rig.session->cancel("interrupted");
  REQUIRE(world_error([&] { rig.session->step(1); }) == "interrupted");
}

TEST_CASE("what cannot be bound is refused with the op's name", "[session][refusal]") {
  const auto refusal = [](const std::string& text) {
    auto parsed = parse_plan(text);
    REQUIRE(parsed.ok());
    const PlacedPlan placed = place(std::move(parsed).value());
    ThreadTransport transport(kernels::kernels_for_this_processor());
    const auto made = Session::create(placed, {}, transport, cpu_backend(kernels::kernels_for_this_processor(), {}), nullptr);
    return made.ok() ? std::string() : made.error().message;
  };
  REQUIRE(refusal(plan_head(1, 1, 1) + R"(
segment s
  bound %x other f32[4]
  kernel route (%x) -> (%x) name=nonesuch
role 0
  %x other f32[4] persistent
  call s (x=%x)
)") == "the CPU back end has no kernel called `nonesuch`, which `s route kernel` asks for");
  REQUIRE(refusal(plan_head(1, 1, 1) + R"(
segment s
  bound %x other i16[4]
  bound %y other f32[4]
  copy convert (%x) -> (%y)
role 0
  %x other i16[4] persistent
  %y other f32[4] persistent
  call s (x=%x, y=%y)
)") == "`s convert copy` converts i16 to f32, which the CPU back end does not");
  REQUIRE(refusal(gather_and_reduce(3, 2, "halving-doubling")) ==
          "`gather gather all_gather`: halving-doubling in a group of 3 ranks, which is no power of two");
}

TEST_CASE("the dry back end launches every op and meets every message, without memory", "[session][dry]") {
  std::atomic<int64_t> launches{0};
  auto parsed = parse_plan(gather_and_reduce(4, 1LL << 34, "ring"));  // 256 GiB a rank
  REQUIRE(parsed.ok());
  const PlacedPlan placed = place(std::move(parsed).value());
  ThreadTransport transport(kernels::kernels_for_this_processor());
  auto made = Session::create(placed, {}, transport, dry_backend(&launches), nullptr);
  REQUIRE(made.ok());
  Session& session = **made;
  session.initialise_parameters();
  const StepResult result = session.step(0);
  REQUIRE(launches == 4 * 3);
  int64_t planned = 0;
  for (const auto& [comm, bytes] : total_wire_bytes(*placed.plan)) planned += bytes;
  REQUIRE(result.sent_bytes == planned);
  REQUIRE(session.ledger(2).peak(Space::kDevice) == memory_peak(*placed.plan, 0)[0].peak_bytes);
  REQUIRE(session.parameter("w").error().message == "the dry back end holds no values, so `w` has none");
}

TEST_CASE("an op runs where its predicate is not 0", "[session]") {
  Rig rig(plan_head(1, 1, 1) + R"(
segment s
  bound %go other i32[1]
  bound %x other f32[2]
  bound %y other f32[2]
  fill never () -> (%x) value=5 when %go
  fill always () -> (%y) value=6
role 0
  %go other i32[1] persistent
  %x other f32[2] persistent
  %y other f32[2] persistent
  call s (go=%go, x=%x, y=%y)
)");
  rig.session->step(0);
  REQUIRE(*rig.session->read_buffer(0, "x") == std::vector<float>{0, 0});
  REQUIRE(*rig.session->read_buffer(0, "y") == std::vector<float>{6, 6});
}

TEST_CASE("loss and gradient norm are read where their buffers live or die", "[session]") {
  Rig rig(plan_head(2, 1, 1) + R"(
segment s
  bound %l metric f32[1] pp:L
  bound %n metric f64[1] pp:L
  local %x temporary f32[3] pp:L
  alloc %x
  fill loss () -> (%l) value=2.5
  fill x () -> (%x) value=2
  squared_norm n (%x) -> (%n)
  free %x
role 0
role 1
  %loss metric f32[1] pp:L
  %grad_norm2 metric f64[1] pp:L persistent
  alloc %loss
  call s (l=%loss, n=%grad_norm2)
  free %loss
)",
          {.poison = true});
  const StepResult result = rig.session->step(0);
  REQUIRE(result.loss == 2.5);
  REQUIRE(result.grad_norm2 == 12.0);
  REQUIRE(result.loss_by_rank == std::vector<std::optional<double>>{std::nullopt, 2.5});
}

TEST_CASE("a plan of rows counted at run time is refused by name") {
  const auto refusal = [](std::string text) {
    const Result<Plan> plan = parse_plan(text);
    if (!plan.ok()) FAIL(to_string(plan.error()));
    const PlacedPlan placed = place(*plan);
    const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
    ThreadTransport transport(kernels);
    const auto session = Session::create(placed, {}, transport, cpu_backend(kernels, {}), nullptr);
    return session.ok() ? std::string() : session.error().message;
  };
  std::string text = two_streams(1);
  CHECK(refusal(text).empty());
  std::string counted = text;
  counted.replace(counted.find("  %x temporary f32[5] persistent"), 32,
                  "  %rows other i32[1] persistent\n  %x temporary f32[5] persistent count %rows");
  CHECK(contains(refusal(counted), "role 0: %x holds as many rows as a count says at run time"));
}

}  // namespace shardlab::testing
