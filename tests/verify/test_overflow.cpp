// Room for fewer rows of experts than may come: a plan that lets a step without room leave a trace, or does not notice one, is refused.
#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/text.h"
#include "plan/verify.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

/// Two layers with experts, two micro-batches of two sequences; ranks have room for three of four sequences' rows.
Case bounded_case() {
  Case c = tiny_case(Family::kLlama);
  c.model.experts = {.count = 4, .top_k = 2, .ffn = 8, .bias_update_rate = 0.001f};
  c.layout.dp = c.layout.ep = 2;
  c.layout.expert_bound = 1.5f;
  c.train.seq_len = 8, c.train.micro_batch = 2, c.train.grad_accumulation = 2, c.train.global_batch_tokens = 64;
  c.train.ema_decay = 0.9f, c.train.clip_norm = 1;
  return c;
}

Case staged(Case c) {
  c.layout.pp = 2, c.layout.schedule = Schedule::k1F1B;
  return c;
}

Plan bounded_plan(const Case& config = bounded_case()) {
  auto plan = lower(config);
  INFO((plan.ok() ? "" : to_string(plan.error())));
  REQUIRE(plan.ok());
  return std::move(*plan);
}

Segment& segment(Plan& plan, std::string_view name) {
  const auto found = std::ranges::find(plan.segments, name, &Segment::name);
  INFO(name);
  REQUIRE(found != plan.segments.end());
  return *found;
}

SlotId slot(const Segment& s, std::string_view name) {
  const auto found = std::ranges::find(s.slots, name, &Slot::name);
  INFO(name);
  REQUIRE(found != s.slots.end());
  return SlotId(static_cast<int32_t>(found - s.slots.begin()));
}

Op& op(Segment& s, std::string_view label) {
  for (Step& step : s.steps)
    if (Op* found = std::get_if<Op>(&step); found != nullptr && found->label == label) return *found;
  FAIL("no op " << label);
  return std::get<Op>(s.steps.front());
}

/// Where the first role calls a segment, the n-th time.
size_t call_of(const Plan& plan, std::string_view name, int n = 0) {
  const std::vector<Item>& program = plan.roles[0].program;
  for (size_t i = 0; i < program.size(); ++i)
    if (const Call* call = std::get_if<Call>(&program[i]); call != nullptr && plan.segments[call->segment.index()].name == name)
      if (n-- == 0) return i;
  FAIL("no call of " << name);
  return 0;
}

void move_call(Plan& plan, size_t from, size_t to) {
  std::vector<Item>& program = plan.roles[0].program;
  const Item item = program[from];
  program.erase(program.begin() + static_cast<std::ptrdiff_t>(from));
  program.insert(program.begin() + static_cast<std::ptrdiff_t>(to), item);
}

/// What verify says first of the plan after a change.
std::string found(const std::function<void(Plan&)>& change, const Case& config = bounded_case()) {
  Plan plan = bounded_plan(config);
  change(plan);
  const std::vector<Finding> findings = find_faults(plan);
  return findings.empty() ? "" : findings[0].message;
}

constexpr std::string_view kAll = "rows.counts.there", kFitted = "rows.counts.fit", kBegin = "experts.overflow.begin",
                           kReduced = "experts.overflow.dp";

/// A plan's text, in which parts are put in the place of others.
class Text {
 public:
  explicit Text(const Case& config = bounded_case()) : text_(print(bounded_plan(config))) {}

  /// The first `from` after the first `behind` becomes `to`.
  Text& replace(std::string_view from, std::string_view to, std::string_view behind = "") {
    INFO(behind << " " << from);
    const size_t begin = text_.find(behind);
    REQUIRE(begin != std::string::npos);
    const size_t at = text_.find(from, begin);
    REQUIRE(at != std::string::npos);
    text_.replace(at, from.size(), to);
    return *this;
  }
  Text& replace_all(std::string_view from, std::string_view to) {
    REQUIRE(text_.find(from) != std::string::npos);
    for (size_t at = 0; (at = text_.find(from, at)) != std::string::npos; at += to.size()) text_.replace(at, from.size(), to);
    return *this;
  }
  Text& before(const std::string& line, const std::string& added, std::string_view behind = "") {
    return replace(line, added + line, behind);
  }
  /// A segment of one op, in the words of a plan.
  Text& op(const std::string& name, const std::string& slots, const std::string& words) {
    return before("segment embed.F\n", "segment " + name + "\n" + slots + "\n  " + words + "\n\n");
  }
  /// Buffers of a role: what is kept from step to step, and what is of the step.
  Text& kept(const std::string& declared) { return before("  %overflowed ", "  " + declared + " persistent\n", "\nrole 0\n"); }
  Text& buffer(const std::string& name, const std::string& type, std::string_view role = "\nrole 0\n") {
    return before("  %overflowed ", "  " + name + " " + type + "\n", role)
        .before("  alloc %go\n", "  alloc " + name + "\n", role)
        .before("  free %go\n", "  free " + name + "\n", role);
  }
  /// The line of an op, or of a slot, of a segment; with no segment of a role.
  std::string line(std::string_view segment, std::string_view word) const {
    const size_t at = text_.find(" " + std::string(word) + " ", text_.find("\nsegment " + std::string(segment) + "\n")),
                 begin = text_.rfind('\n', at) + 1;
    INFO(segment << " " << word);
    REQUIRE(at != std::string::npos);
    return text_.substr(begin, text_.find('\n', at) + 1 - begin);
  }

  /// The lines of the call that binds a buffer so.
  std::string call_with(std::string_view binding) const {
    const size_t at = text_.find(binding), begin = text_.rfind("\n  call ", at) + 1;
    REQUIRE(at != std::string::npos);
    return text_.substr(begin, text_.find(")\n", at) + 2 - begin);
  }
  /// The slots of a segment.
  std::string body(const std::string& segment) const {
    const size_t begin = text_.find("\nsegment " + segment + "\n") + segment.size() + 10;
    return text_.substr(begin, text_.find("\n\n", begin) + 1 - begin);
  }

  /// What verify says of it, the first finding.
  std::string found() const {
    const auto plan = parse_plan(text_);
    INFO((plan.ok() ? "" : to_string(plan.error())));
    REQUIRE(plan.ok());
    const std::vector<Finding> findings = find_faults(*plan);
    return findings.empty() ? "" : findings[0].message;
  }

 private:
  std::string text_;
};

void replace_read(Segment& s, Op& op, std::string_view from, std::string_view to) {
  std::ranges::replace(op.reads, slot(s, from), slot(s, to));
}

}  // namespace

TEST_CASE("room for some rows: experts go by counts that end where the room does, and exchanges by all counts") {
  CHECK(found([](Plan&) {}).empty());
  CHECK(found([](Plan& p) {
          Segment& s = segment(p, "layer.F");
          for (Step& step : s.steps)
            if (Op* o = std::get_if<Op>(&step); o != nullptr && o->label != "moe.fit") replace_read(s, *o, kFitted, kAll);
        }).starts_with("goes through %rows.in.there by %rows.counts.there: up to 64 rows come, and there is room for 48."));
  int judged = 0;
  for (const char* name : {"layer.F", "layer.B"}) {
    const Plan plan = bounded_plan();
    for (const Step& step : segment(const_cast<Plan&>(plan), name).steps) {
      const Op* o = std::get_if<Op>(&step);
      if (o == nullptr || o->label == "moe.fit") continue;
      const std::string label = o->label;
      const Phase phase = phase_of(o->work);
      const auto change = [&](std::string_view from, std::string_view to) {
        return found([&](Plan& p) {
          Segment& s = segment(p, name);
          for (Step& other : s.steps)
            if (Op* same = std::get_if<Op>(&other); same != nullptr && same->label == label && phase_of(same->work) == phase)
              replace_read(s, *same, from, to);
        });
      };
      const Segment& s = segment(const_cast<Plan&>(plan), name);
      const auto reads = [&](std::string_view what) { return std::ranges::find(o->reads, slot(s, what)) != o->reads.end(); };
      INFO(name << " " << label);
      if (reads(kFitted)) {
        CHECK(change(kFitted, kAll) != "");
        ++judged;
      } else if (reads(kAll)) {
        CHECK(change(kAll, kFitted) != "");
        ++judged;
      }
    }
  }
  CHECK(judged == 12);  // products and activations, three forward and five back; four exchanges
}

TEST_CASE("room for some rows: the rows that came are judged, by the counts of those that came") {
  CHECK(found([](Plan& p) {
          Segment& s = segment(p, "layer.F");
          op(s, "moe.fit").reads[1] = slot(s, "rows.counts");
        }).find("those that have come are one") != std::string::npos);
  CHECK(found([](Plan& p) {
          Segment& s = segment(p, "layer.F");
          op(s, "moe.fit").reads[0] = slot(s, "rows.u");
        }) == "reads %rows.u, which is not live: it was not allocated, or freed before this");
  CHECK(found([](Plan& p) {
          Segment& s = segment(p, "layer.F");
          std::erase_if(s.steps, [](const Step& step) {
            const Op* o = std::get_if<Op>(&step);
            return o != nullptr && o->label == "moe.fit";
          });
        }) == "reads %rows.counts.fit before it is written");
  // Room for less than the rows of one rank has no place for its message.
  CHECK(found([](Plan& p) {
          for (const char* name : {"layer.F", "layer.B"})
            for (Slot& s : segment(p, name).slots)
              if (s.type.shape.rank == 3 && s.type.shape[1] == 48) s.type.shape[1] = 31;
          for (Buffer& b : p.roles[0].buffers)
            if (b.type.shape.rank == 3 && b.type.shape[1] == 48) b.type.shape[1] = 31;
        }) == "rows=32 of %rows.in.there, which has 31");
}

TEST_CASE("room for some rows: counts of which nothing is known cut nothing off") {
  // A kernel that the core does not know makes counts that are of no micro-batch.
  for (const auto& [segment, label] : {std::pair<std::string, std::string>{"layer.F", "moe.up"}, {"layer.B", "moe.down"}}) {
    Text text;
    const std::string head = "\nsegment " + segment + "\n", slot = text.line(segment, "%rows.counts.fit"),
                      op = text.line(segment, label),
                      loose =
                          replaced(replaced(replaced(slot, "bound %rows.counts.fit", "local %loose"), "activation", "temporary"),
                                   " micro:slice", "");
    text.replace(slot, slot + loose, head)
        .replace(op,
                 "  alloc %loose\n  kernel loosen (%rows.counts.there) -> (%loose) name=loosen rule=opaque\n" +
                     replaced(op, "%rows.counts.fit", "%loose") + "  free %loose\n",
                 head);
    INFO(segment);
    CHECK(text.found().ends_with(" by %loose, and no router is known to have counted that"));
  }
}

TEST_CASE("room for some rows: the flag is begun once, knows of every layer and micro-batch, and is the word of all ranks") {
  CHECK(found([](Plan& p) {
          p.roles[0].program.erase(p.roles[0].program.begin() + static_cast<std::ptrdiff_t>(call_of(p, kBegin)));
        }).find("experts.overflow") != std::string::npos);
  CHECK(found([](Plan& p) { move_call(p, call_of(p, kBegin), call_of(p, "layer.F")); }) != "");
  // Begun anew behind the first layer, the flag forgets it.
  CHECK(found([](Plan& p) {
          const Item begin = p.roles[0].program[call_of(p, kBegin)];
          p.roles[0].program.insert(p.roles[0].program.begin() + static_cast<std::ptrdiff_t>(call_of(p, "layer.F", 1)), begin);
        }).find("before the last fit_rows of the step: 3 of 4 have judged their rows") != std::string::npos);
  CHECK(found([](Plan& p) {
          segment(p, kReduced).name = "early";
          move_call(p, call_of(p, "early"), call_of(p, "layer.F", 2));
        }) != "");
  CHECK(found([](Plan& p) { std::get<Collective>(op(segment(p, kReduced), kReduced).work).reduce = ReduceOp::kSum; }) != "");
  CHECK(found(
            [](Plan& p) {
              p.roles[0].program.erase(p.roles[0].program.begin() +
                                       static_cast<std::ptrdiff_t>(call_of(p, "experts.overflow.dp.pp")));
            },
            staged(bounded_case())) != "");
}

TEST_CASE("room for some rows: what is kept changes where the step has no overflow, and the run goes by the same word") {
  int updates = 0;
  const Plan plan = bounded_plan();
  for (const Segment& s : plan.segments)
    for (const Step& step : s.steps) {
      const Op* o = std::get_if<Op>(&step);
      if (o == nullptr || !o->when) continue;
      INFO(s.name);
      CHECK(found([&](Plan& p) { op(segment(p, s.name), o->label).when = SlotId(); }).find("it runs under no predicate") !=
            std::string::npos);
      ++updates;
    }
  CHECK(updates >= 3);  // weights with decay and without, averages, biases of routers
  CHECK(found([](Plan& p) {
          std::get<Kernel>(op(segment(p, "go"), "go").work).name = "any";
        }).find("which is not 0 in a step that has an overflow") != std::string::npos);
  CHECK(found([](Plan& p) { std::get<Kernel>(op(segment(p, "overflowed"), "overflowed").work).name = "not"; }) != "");
  CHECK(found([](Plan& p) {
          for (Buffer& b : p.roles[0].buffers)
            if (b.name == "overflowed") b.name = "noted";
        }) == "counts of rows are cut off, and no %overflowed says whether the step stands");
}

TEST_CASE("room for some rows: what is kept changes in no other way than under the flag, whichever ops carry the change") {
  const std::string changes = " in a step that has an overflow too: it runs under no predicate",
                    keeps = " in a step that has an overflow too: the step has made it, and ";
  REQUIRE(Text().found().empty());
  const std::string number = "  bound %a other f32[1]\n", counter = "  bound %a other i32[1]\n";
  // A sum in place, a constant where another number was read, a number that hides among the workspaces.
  CHECK(Text()
            .op("one", number, "fill one () -> (%a) value=1")
            .op("tally", number + "  bound %b other f32[1]\n", "add tally (%a, %b) -> (%a)")
            .kept("%tally other f32[1]")
            .buffer("%one", "other f32[1]")
            .before("  call go (", "  call one (a=%one)\n  call tally (a=%tally, b=%one)\n")
            .found() == "changes %a" + changes);
  CHECK(Text()
            .op("see", number + "  bound %b metric f32[1]\n", "copy see (%a) -> (%b)")
            .op("put", number, "fill put () -> (%a) value=5")
            .kept("%tally other f32[1]")
            .kept("%seen metric f32[1]")
            .before("  call go (", "  call see (a=%tally, b=%seen)\n  call put (a=%tally)\n")
            .found() == "changes %a" + changes);
  CHECK(Text()
            .op("tally", "  bound %a workspace i32[1]\n", "kernel tally (%a) -> (%a) name=count")
            .kept("%tally workspace i32[1]")
            .before("  call go (", "  call tally (a=%tally)\n")
            .found() == "changes %a" + changes);
  // A copy is changed, and copied back: under the flag it may be. A number that is written under the flag alone is none without it.
  const auto by_copy = [&](const std::string& slots, const std::string& words, const std::string& calls) {
    return Text()
        .op("take", counter + "  bound %b other i32[1]\n", "copy take (%a) -> (%b)")
        .op("tally", counter + slots, words)
        .kept("%tally other i32[1]")
        .buffer("%copy", "other i32[1]")
        .before("  call update", calls + "  call take (a=%copy, b=%tally)\n", "  call go (")
        .found();
  };
  const std::string taken = "  call take (a=%tally, b=%copy)\n", when = "  bound %c other i32[1]\n",
                    aside = "  bound %b other i32[1]\n";
  CHECK(by_copy("", "kernel tally (%a) -> (%a) name=count", taken + "  call tally (a=%copy)\n") ==
        "keeps %a" + keeps + "take runs under no predicate");
  CHECK(by_copy(when, "kernel tally (%a) -> (%a) name=count when %c", taken + "  call tally (a=%copy, c=%go)\n").empty());
  CHECK(by_copy(aside + when, "kernel tally (%a) -> (%b) name=not when %c", "  call tally (a=%tally, b=%copy, c=%go)\n") ==
        "keeps %a" + keeps + "take runs under no predicate");
  CHECK(by_copy(aside, "kernel tally (%a) -> (%b) name=not", "  call tally (a=%tally, b=%copy)\n") ==
        "keeps %a" + keeps + "take runs under no predicate");
  // Copies of a weight and of its moments are updated, and copied back.
  const auto update_copies = [&](const std::string& name, const std::string& when) {
    Text text;
    const std::string gamma = "%final.norm.gamma", call = text.call_with("b=" + gamma + ","),
                      gradient = call.substr(call.find("a="), call.find(",") - call.find("a=")),
                      slots = text.body(call.substr(7, call.find(" (") - 7));
    std::string there, back;
    for (const auto& [cls, copy, kept] :
         {std::array<std::string, 3>{"parameter", "%p", gamma}, {"moment", "%m", gamma + ".m"}, {"moment", "%v", gamma + ".v"}}) {
      const std::string carry = "carry." + copy.substr(1);
      text.op(carry, "  bound %a " + cls + " f32[32]\n  bound %b " + cls + " f32[32]\n", "copy " + carry + " (%a) -> (%b)")
          .buffer(copy, cls + " f32[32] of final.norm.gamma");
      there += "  call " + carry + " (a=" + kept + ", b=" + copy + ")\n";
      back += "  call " + carry + " (a=" + copy + ", b=" + kept + ")\n";
    }
    return text
        .op(name, when.empty() ? replaced(slots, "  bound %f other      i32[1]\n", "") : slots,
            "adamw update (%a, %b, %c, %d, %e) -> (%b, %c, %d)" + when)
        .replace(call, there + "  call " + name + " (" + gradient + ", b=%p, c=%m, d=%v, e=%clip.factor" +
                           (when.empty() ? "" : ", f=%go") + ")\n" + back)
        .found();
  };
  CHECK(update_copies("update.copies", " when %f").empty());
  CHECK(update_copies("update.copies", "") == "keeps %a" + keeps + "carry.p runs under no predicate");
}

TEST_CASE("room for some rows: the flag is no other number, on no other stage, and of no other rows") {
  // A wider fill reaches it.
  CHECK(Text()
            .op("wipe", "  bound %a other i32[2] pp:P ep:P\n", "fill wipe () -> (%a)")
            .replace("  %experts.overflow ", "  %wide other i32[2] pp:P ep:P\n  %experts.overflow ", "\nrole 0\n")
            .replace(" i32[1] pp:P ep:P\n", " i32[1] pp:P ep:P view %wide\n", "\n  %experts.overflow ")
            .replace("view %experts.overflow\n", "view %wide\n", "\nrole 0\n")
            .replace("  alloc %experts.overflow\n", "  alloc %wide\n")
            .replace("  free %experts.overflow\n", "  free %wide\n")
            .before("  call experts.overflow.dp ", "  call wipe (a=%wide)\n")
            .found()
            .ends_with("which is not made of the flag of overflow"));
  // A step that was clipped would be made twice.
  CHECK(Text()
            .op("differs", "  bound %a other f32[1]\n  bound %b other i32[1]\n", "kernel differs (%a) -> (%b) name=not_one")
            .replace("segment overflowed\n", "segment overflowed\n  bound %c other i32[1]\n")
            .replace("overflowed (%a) -> (%b)", "overflowed (%a, %c) -> (%b)")
            .replace("  call overflowed (", "  call differs (a=%clip.factor, b=%differs)\n  call overflowed (c=%differs, ")
            .replace("  call go (a=%overflowed", "  call go (a=%experts.overflow.dp")
            .replace("  bound %a metric     i32[1]\n", "  bound %a other i32[1] pp:P\n", "segment go\n")
            .buffer("%differs", "other i32[1]")
            .found() == "the run makes steps again by %overflowed, which may be another number than 0 in a step that stands");
  CHECK(Text()
            .replace(" metric     i32[1] persistent\n", " metric i32[1]\n", "\n  %overflowed ")
            .before("  alloc %go\n", "  alloc %overflowed\n")
            .before("  free %go\n", "  free %overflowed\n")
            .found() == "the run makes steps again by %overflowed, which does not outlive the step");
  // Two stages bring flags crosswise: the stage without experts hears of a number that is always 0.
  Case c = staged(bounded_case());
  c.model.experts.dense_layers = 1;
  Text crossed(c);
  crossed.replace_all("experts.overflow.dp.pp (%a)", "meet (%a)");
  for (const std::string& end : {std::string(), std::string(".2")}) {
    const std::string role = end.empty() ? "\nrole 0\n" : "\nrole 1\n", pp = "  call experts.overflow.dp.pp" + end + " (a=",
                      flag = pp + "%experts.overflow.dp, b=%experts.overflow.dp.pp)\n", dummy = pp + "%dummy.dp, b=%dummy.pp)\n";
    crossed.buffer("%dummy", "other i32[1] pp:P ep:P", role)
        .before("  %overflowed ", "  %dummy.dp other i32[1] pp:P view %dummy\n  %dummy.pp other i32[1] view %dummy\n", role)
        .replace(flag,
                 "  call experts.overflow.begin" + end + " (a=%dummy)\n  call experts.overflow.dp" + end +
                     " (a=%dummy, b=%dummy.dp)\n" + (end.empty() ? dummy + flag : flag + dummy),
                 role)
        .replace("  call overflowed" + end + " (", "  call overflowed" + end + " (c=%dummy.pp, ", role)
        .replace("segment overflowed" + end + "\n", "segment overflowed" + end + "\n  bound %c other i32[1]\n")
        .replace("overflowed (%a) -> (%b)", "overflowed (%a, %c) -> (%b)", "segment overflowed" + end + "\n")
        .replace("  call go" + end + " (a=%overflowed", "  call go" + end + " (a=%experts.overflow.dp.pp", role)
        .replace("  bound %a metric ", "  bound %a other ", "segment go" + end + "\n");
  }
  CHECK(crossed.found().ends_with("which along pp is not the word of all ranks"));
  // Rows go into more room, which is judged; those that experts go through are judged into a flag that nobody reads.
  Text twice;
  const std::string go = twice.line("layer.F", "moe.go"), fit = twice.line("layer.F", "moe.fit"),
                    overflow = twice.line("layer.F", "%experts.overflow"), rows = twice.line("layer.F", "%rows.in.there"),
                    fitted = twice.line("layer.F", "%rows.counts.fit");
  const std::string type = overflow.substr(overflow.find(" other ") + 1);
  twice
      .replace(overflow,
               overflow + replaced(overflow, "%experts.overflow", "%other.overflow") +
                   replaced(replaced(replaced(rows, "bound %rows.in.there", "local %rows.big"), "activation", "temporary"),
                            "[1,48,", "[1,64,") +
                   replaced(replaced(fitted, "bound %rows.counts.fit", "local %fit.big"), "activation", "temporary"),
               "\nsegment layer.F\n")
      .replace(fit,
               replaced(replaced(fit, "%experts.overflow) -", "%other.overflow) -"), "%experts.overflow) n", "%other.overflow) n") +
                   "  free %fit.big\n")
      .before(go,
              "  alloc %rows.big\n" + replaced(replaced(go, "moe.go", "moe.go.big"), "%rows.in.there)", "%rows.big)") +
                  "  alloc %fit.big\n" +
                  replaced(replaced(replaced(fit, "moe.fit", "moe.fit.big"), "%rows.in.there", "%rows.big"), "%rows.counts.fit",
                           "%fit.big") +
                  "  free %rows.big\n",
              "\nsegment layer.F\n")
      .replace_all("experts.overflow=%experts.overflow)", "experts.overflow=%experts.overflow, other.overflow=%other.overflow)")
      .buffer("%other.overflow", type.substr(0, type.size() - 1))
      .before("  call embed.F", "  call experts.overflow.begin (a=%other.overflow)\n");
  CHECK(twice.found().ends_with("before the last fit_rows of the step: 4 of 8 have judged their rows"));
}

TEST_CASE("room for some rows: a forward that runs again has as much room, or counts that end earlier") {
  Case c = bounded_case();
  c.layout.recompute = Recompute::kFull;
  Text text(c);
  REQUIRE(text.found().empty());
  // Backward has the rows, and what experts made of them halfway; rows that go all the way come a second time, in less room.
  std::string again, slots;
  const std::string layer = "layer.B";
  const std::string names[] = {"%rows.in.there", "%rows.u", "%rows.a"},
                    labels[] = {"moe.go.again", "moe.up.again", "mlp.act.again"};
  for (size_t i = 0; i < 3; ++i) {
    std::string op = replaced(text.line(layer, labels[i]), "-> (" + names[i] + ")", "-> (%less" + std::to_string(i) + ")");
    if (i > 0) op = replaced(op, "(" + names[i - 1], "(%less" + std::to_string(i - 1));
    again += "  alloc %less" + std::to_string(i) + "\n" + op;
    slots += replaced(replaced(text.line(layer, names[i]), names[i], "%less" + std::to_string(i)), "[1,48,", "[1,40,");
  }
  const std::string down = text.line(layer, "moe.down.again"), free = "  free %rows.in\n",
                    room = text.line(layer, "%rows.out.there");
  CHECK(text.before("  local %rows.u ", slots, "\nsegment layer.B\n")
            .replace(room, replaced(room, "[1,48,", "[1,40,"), "\nsegment layer.B\n")
            .replace(free, "", "\nsegment layer.B\n")
            .before("  alloc %rows.out.there\n", again, "\nsegment layer.B\n")
            .replace(down, replaced(down, "(%rows.a", "(%less2") + "  free %less0\n  free %less1\n  free %less2\n" + free)
            .found() == "reads %rows.counts.fit, which ends where 48 rows do, and %less0 has 40");
}

}  // namespace shardlab::testing
