#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <limits>

#include "plan/op_fields.h"
#include "plan/text.h"
#include "tests/namespaces.h"
#include "tests/plan/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::parsed;
using testing::random_plan;
using testing::small_plan_text;

/// Place and message of the refusal, which always says what to do next.
std::string error_of(const std::string& text) {
  const Result<Plan> plan = parse_plan(text, "p");
  if (plan.ok()) return "parsed";
  CHECK_FALSE(plan.error().hint.empty());
  return plan.error().where + ": " + plan.error().message;
}

std::string with_line(const std::string& line) {
  return "shardlab plan 1\nmesh dp=2 tp=4\nstreams compute comm\ncomm tp axes tp\nsegment s\nbound %x activation f32[2,3]\n" +
         line + "\n";
}

TEST_CASE("the text of a plan is a golden file") { REQUIRE_GOLDEN("plan/small.plan", print(parsed(small_plan_text()))); }

TEST_CASE("a printed plan parses to the same text") {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const std::string text = print(random_plan(seed));
    REQUIRE(print(parsed(text)) == text);
  }
}

TEST_CASE("a parsed plan holds what the text says") {
  const Plan plan = parsed(small_plan_text());
  REQUIRE(plan.mesh.world_size() == 2);
  REQUIRE(plan.sequences_per_micro_batch == 2);
  REQUIRE(plan.comms[0].axes == AxisSet::of(1));
  REQUIRE(plan.parameters[0].decay);
  REQUIRE(plan.parameters[1].initial == Initial::kZeros);
  const Segment& backward = plan.segments[1];
  REQUIRE(backward.slots[4].view == View{.base = 2, .offset = 32});
  REQUIRE(backward.slots[2].type.place[1] == Placement::partial());
  REQUIRE(backward.slots[2].type.micro == Micro::kSum);
  const Role& role = plan.roles[0];
  REQUIRE(role.buffers[1].parameter == 1);
  REQUIRE(std::get<Call>(role.program[2]).binding == std::vector<BufferId>{BufferId(2), BufferId(0), BufferId(1), BufferId(3)});
  REQUIRE(std::get<Op>(plan.segments[2].steps[0]).stream == StreamId(1));
}

/// Sets every attribute to something that is not its default.
struct Unusual {
  void flag(std::string_view, bool& v) { v = true; }
  void number(std::string_view, float& v, float) { v = 0.1f + 1.0f / 3.0f; }
  void number(std::string_view, int& v, int) { v = -7; }
  void number(std::string_view, int64_t& v, int64_t) { v = int64_t{1} << 62; }
  void number(std::string_view, Rational& v, Rational) { v = Rational(-3, 16); }
  template <class E, size_t N>
  void choice(std::string_view, E& v, const std::array<std::string_view, N>&, E) {
    v = static_cast<E>(N - 1);
  }
  void text(std::string_view, std::string& v) { v = "a \"quoted\\ name\""; }
  void comm(std::string_view, CommId& v) { v = CommId(0); }
};

struct FieldValues {
  std::vector<std::string> values;
  void flag(std::string_view, bool& v) { values.push_back(v ? "1" : "0"); }
  void number(std::string_view, float& v, float) { values.push_back(fmt::format("{:x}", std::bit_cast<uint32_t>(v))); }
  template <class T>
  void number(std::string_view, T& v, T) {
    values.push_back(fmt::format("{}", v));
  }
  void number(std::string_view, Rational& v, Rational) { values.push_back(fmt::format("{}/{}", v.num, v.den)); }
  template <class E, size_t N>
  void choice(std::string_view, E& v, const std::array<std::string_view, N>&, E) {
    values.push_back(fmt::format("{}", static_cast<int>(v)));
  }
  void text(std::string_view, std::string& v) { values.push_back(v); }
  void comm(std::string_view, CommId& v) { values.push_back(fmt::format("{}", v.value)); }
};

std::vector<std::string> values_of(Work work) {
  FieldValues values;
  std::visit([&](auto& w) { op_fields(values, w); }, work);
  values.values.push_back(std::string(kind_of(work)));
  values.values.push_back(fmt::format("{}", static_cast<int>(phase_of(work))));
  return values.values;
}

std::vector<Work> every_work() {
  std::vector<Work> all{LoadBatch{},  Embed{},       Positions{},      Norm{},           Linear{},   Rope{},    Attention{},
                        Activation{}, SplitHeads{},  AttentionBlock{}, AttentionMerge{}, Residual{}, Dropout{}, CrossEntropy{},
                        Add{},        Fill{},        SumScalars{},     SquaredNorm{},    Sgd{},      AdamW{},   Lion{},
                        AdamW8bit{},  Copy{},        Kernel{},         Collective{},     Send{},     Recv{},    Regroup{},
                        Route{},      Dispatch{},    GroupedLinear{},  Combine{},        HeadNorm{}, Strips{},  ExpertLoad{},
                        Gate{},       LatentHeads{}, ChooseExperts{}};
  for (int k = 1; k < 5; ++k) all.push_back(Collective{.kind = static_cast<CollectiveKind>(k)});
  REQUIRE(all.size() == std::variant_size_v<Work> + 4);
  return all;
}

TEST_CASE("every op survives the text with every attribute, default or not") {
  Plan plan = parsed(with_line("local %p other i32[1]"));
  Segment& segment = plan.segments[0];
  for (Work work : every_work()) {
    for (const bool unusual : {false, true}) {
      Unusual fields;
      if (unusual) {
        std::visit([&](auto& w) { op_fields(fields, w); }, work);
        std::visit(
            []<class W>(W& w) {
              if constexpr (has_phase<W>) w.phase = Phase::kW;
            },
            work);
      } else if (auto* c = std::get_if<Collective>(&work)) {
        c->comm = CommId(0);
      } else if (auto* s = std::get_if<Send>(&work)) {
        s->comm = CommId(0);
      } else if (auto* r = std::get_if<Recv>(&work)) {
        r->comm = CommId(0);
      }
      Op op{.work = work, .reads = {SlotId(0), SlotId(1)}, .writes = {SlotId(0)}, .label = "l"};
      if (unusual) op.stream = StreamId(1), op.when = SlotId(1), op.strategy = "pass one";
      segment.steps = {op};
      const Plan back = parsed(print(plan));
      const Op& read = std::get<Op>(back.segments[0].steps[0]);
      INFO(print(plan, segment, op));
      REQUIRE(values_of(read.work) == values_of(work));
      REQUIRE(read.reads == op.reads);
      REQUIRE(read.writes == op.writes);
      REQUIRE(read.stream == op.stream);
      REQUIRE(read.when == op.when);
      REQUIRE(read.strategy == op.strategy);
      REQUIRE(read.label == op.label);
    }
  }
}

TEST_CASE("floats survive the text bit by bit") {
  Plan plan = parsed(with_line("fill f () -> (%x) value=1"));
  const float denormal = std::numeric_limits<float>::denorm_min();
  for (const float v : {0.1f, 1e-45f, denormal, 3.4028235e38f, -0.0f, 1.0f / 3, std::numeric_limits<float>::infinity(),
                        std::bit_cast<float>(0x7fc00123u), std::bit_cast<float>(0xffc00000u)}) {
    std::get<Fill>(std::get<Op>(plan.segments[0].steps[0]).work).value = v;
    const Plan back = parsed(print(plan));
    REQUIRE(std::bit_cast<uint32_t>(std::get<Fill>(std::get<Op>(back.segments[0].steps[0]).work).value) ==
            std::bit_cast<uint32_t>(v));
  }
}

TEST_CASE("every field of slots, buffers, parameters, comms and calls survives") {
  const std::string text = R"(shardlab plan 1
name "a name"
mesh pp=4 dp=2
micro_batches 3
sequences_per_micro_batch 5
period 2
streams compute "odd stream"
strategies "a b" c
comm none axes none
comm tied axes pp ends
comm both axes pp,dp

parameter w bf16[2,4] pp:L dp:S1 stages 0 3 ones deviation 0.5 tensor 4294967295

segment "s 1"
  bound %x    activation f8e4m3[2,4,6,8] dp:S3 scale -1/4 per target_tokens micro:sum host count %n
  local %n    other      i32[1]
  local %y    temporary  f32[] scale 1 per k nvme view %x offset 7 shard pp,dp

  alloc %n
  fill "" () -> (%n) value=1 @"odd stream" #"a b"
  free %n

role 2
  %base   master     f32[64] host persistent
  %part   moment     f32[2] nvme view %base offset 3 shard dp of w count %c
  %c      other      i32[1]

  call "s 1" l=2 m=1 (x=%part)
  call "s 1" ()
)";
  const Plan plan = parsed(text);
  const std::string printed = print(plan);
  REQUIRE(print(parsed(printed)) == printed);
  REQUIRE(plan.period == 2);
  REQUIRE(plan.comms[0].axes.empty());
  REQUIRE(plan.comms[1].groups == mirror_pairs(4));
  REQUIRE(plan.comms[2].axes == (AxisSet::of(0) | AxisSet::of(1)));
  REQUIRE(plan.parameters[0].stages == std::vector{0, 3});
  REQUIRE(plan.parameters[0].deviation == 0.5f);
  REQUIRE(plan.parameters[0].tensor == 4294967295u);
  const Slot& x = plan.segments[0].slots[0];
  REQUIRE(x.type.scale == Scale{Rational(-1, 4), "target_tokens"});
  REQUIRE(x.type.place[1] == Placement::shard(3));
  REQUIRE(x.count == SlotId(1));
  REQUIRE(x.space == Space::kHost);
  REQUIRE(plan.segments[0].slots[2].view == View{0, 7, AxisSet::of(0) | AxisSet::of(1)});
  const Buffer& part = plan.roles[0].buffers[1];
  REQUIRE(part.view == View{0, 3, AxisSet::of(1)});
  REQUIRE(part.count == 2);
  REQUIRE(part.parameter == 0);
  REQUIRE(plan.roles[0].buffers[0].persistent);
  REQUIRE(plan.roles[0].stage == 2);
  REQUIRE(std::get<Call>(plan.roles[0].program[0]).layer == 2);
  REQUIRE(std::get<Call>(plan.roles[0].program[1]).micro_batch == -1);
}

TEST_CASE("a parse error names line, column, the expected and the found") {
  const std::string where = "p:7:";
  REQUIRE(error_of("") == "p:1:1: expected `shardlab plan 1`, found the end of the text");
  REQUIRE(error_of("shardlab plan 2\n") == "p:1:15: the plan has version 2, and this program reads version 1");
  REQUIRE(parse_plan("shardlab plan 2\n", "p").error().hint == "print the plan again with this program: `shardlab plan CASE.yaml`");
  REQUIRE(error_of("shardlab plan 1\n") == "p:2:1: expected a line `streams compute ...`, found none");
  REQUIRE(error_of("shardlab plan 1\nmesh dp=0\n") == "p:2:6: expected a size of at least 1 for axis `dp`, found 0");
  REQUIRE(error_of(with_line("linear.F a (%x, %w) -> (%x)")) == where + "17: `%w` is not the name of a slot of the segment");
  REQUIRE(error_of(with_line("linear.F a (%x, %x) (%x)")) == where + "21: expected `->`, found `(`");
  REQUIRE(error_of(with_line("linear.F a (%x, %x) -> (%x) rms")) ==
          where + "29: expected an attribute of linear (bias, accumulate, chunks, strips, turn, carry), found `rms`");
  REQUIRE(error_of(with_line("linear.F a (%x, %x) -> (%x) bias=1")) == where + "29: expected `bias` without a value");
  REQUIRE(error_of(with_line("linear.X a (%x) -> (%x)")) == where + "1: expected an op with phase F, I or W, found `linear.X`");
  REQUIRE(error_of(with_line("copy.F a (%x) -> (%x)")) == where + "1: expected `copy`, which has no phase, found `copy.F`");
  REQUIRE(error_of(with_line("norm.F a (%x) -> (%x) epsilon=x")) == where + "31: expected a number for `epsilon`, found `x`");
  REQUIRE(error_of(with_line("all_reduce a (%x) -> (%x) comm=dp")) == where + "32: `dp` is not the name of a communicator");
  REQUIRE(error_of(with_line("send a (%x) -> ()")).starts_with(where + "18: expected `comm=` and the name of a communicator"));
  REQUIRE(error_of(with_line("copy a (%x) -> (%x) @copy")) == where + "21: `@copy` is not the name of a stream");
  REQUIRE(error_of(with_line("bound %x activation f32[2]")) ==
          where + "7: expected a new name for a slot, found `%x` a second time");
  REQUIRE(error_of(with_line("bound %y activated f32[2]")) ==
          where +
              "10: expected a class (parameter, gradient, master, moment, activation, temporary, buffer, input, metric, workspace, "
              "other), "
              "found `activated`");
  REQUIRE(error_of(with_line("bound %y activation f32[2] tp:S1")) ==
          where + "31: expected a placement (R, P, L, or S0 to S0), found `S1`");
  REQUIRE(error_of(with_line("bound %y activation f32[2] ep:P")) ==
          where + "28: `ep` is not the name of an axis of the mesh, or `micro`");
  REQUIRE(error_of(with_line("bound %y activation f32[2] view %z")) == where + "33: `%z` is not the name of a slot of the segment");
  REQUIRE(error_of(with_line("bound %y activation f32[1,2,3,4,5]")) == where + "33: expected at most 4 dims, found one more");
  REQUIRE(error_of(with_line("bound %y activation f32[-1]")) == where + "25: expected an extent of at least 0, found -1");
  REQUIRE(error_of(with_line("bound %y activation f32[1] scale 1/0")) == where + "34: expected a scale such as 1/4, found `1/0`");
  REQUIRE(error_of(with_line("copy \"a (%x) -> (%x)")) ==
          where + "6: expected the op's label, found a string without its closing quote");
  REQUIRE(error_of(with_line("role 0\ncall s (x=%b)")) == "p:8:11: `%b` is not the name of a buffer of the role");
  REQUIRE(error_of(with_line("role 0\ncall t ()")) == "p:8:6: `t` is not the name of a segment");
  REQUIRE(error_of(with_line("residul a (%x, %x) -> (%x)")) == where + "1: `residul` is not an op, did you mean `residual`?");
  REQUIRE(error_of(with_line("linaer.F a (%x, %x) -> (%x)")) == where + "1: `linaer.F` is not an op, did you mean `linear.F`?");
  REQUIRE(error_of(with_line("copy a (%x) -> (%x) @comptue")) ==
          where + "21: `@comptue` is not the name of a stream, did you mean `@compute`?");
  REQUIRE(error_of(with_line("bound %y activation f32[2 x")) == where + "27: expected `,` or `]`, found `x`");
  REQUIRE(error_of(with_line("role 0\ncall s k=1 ()")) == "p:8:8: expected `l=` (layer), `m=` (micro-batch) or `(`, found `k`");
}

TEST_CASE("no prefix and no single-character change of a plan makes the parser fail in any other way than an error") {
  const std::string text = small_plan_text();
  for (size_t n = 0; n < text.size(); n += 3) (void)parse_plan(text.substr(0, n));
  for (size_t n = 0; n < text.size(); n += 2)
    for (const char c : {'(', '\n', '%', '"', '9', ':'}) {
      std::string changed = text;
      changed[n] = c;
      if (const Result<Plan> plan = parse_plan(changed); plan.ok()) (void)print(plan.value());
    }
  SUCCEED();
}

TEST_CASE("faulty references print without harm") {
  Plan plan = parsed(small_plan_text());
  Op& op = std::get<Op>(plan.segments[2].steps[0]);
  op.reads = {SlotId(99), SlotId()};
  op.stream = StreamId(12);
  std::get<Collective>(op.work).comm = CommId();
  REQUIRE(print(plan, plan.segments[2], op) == "all_reduce dp (%?99, %?-1) -> (%sum) comm=?-1 @?12 #reduce_dp");
}

TEST_CASE("the text of a type") {
  const Mesh mesh{{{"pp", 2}, {"dp", 4}, {"tp", 2}}};
  Type t{.dtype = DType::bf16, .shape = {2, 3}};
  t.place[0] = Placement::local();
  t.place[1] = Placement::shard(0);
  t.place[2] = Placement::partial();
  t.scale = {Rational(1, 4), "target_tokens"};
  t.micro = Micro::kSlice;
  REQUIRE(print(t, mesh) == "bf16[2,3] pp:L dp:S0 tp:P scale 1/4 per target_tokens micro:slice");
  REQUIRE(print(Type{}, mesh) == "f32[]");
}

}  // namespace
}  // namespace shardlab::testing
