// Rules 1 and 2: each fault is a good plan with one line changed, and must be found with its own message.
#include <fmt/format.h>

#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

struct Fault {
  std::string what, from, to;
  Rule rule;
  std::string message;  ///< a part of some finding's message
};

void require_found(const std::string& good, const std::vector<Fault>& faults) {
  REQUIRE(findings_text(find_faults(parse_or_fail(good))).empty());
  for (const Fault& f : faults) {
    INFO(f.what);
    const auto findings = find_faults(parse_or_fail(replaced(good, f.from, f.to)));
    INFO("found:\n" << findings_text(findings));
    bool found = false;
    for (const Finding& finding : findings) found |= finding.rule == f.rule && finding.message.find(f.message) != std::string::npos;
    REQUIRE(found);
  }
}

}  // namespace

TEST_CASE("form: operands, views and bindings") {
  require_found(
      training_text(),
      {
          {"too few operands", "linear.F head (%x, %head) -> (%logits)", "linear.F head (%x) -> (%logits)", Rule::kForm,
           "takes (%x, %w) -> (%y), found 1 reads and 1 writes"},
          {"accumulate without an old value", "(%x, %logits, %g.head) -> (%g.head) accumulate",
           "(%x, %logits) -> (%g.head) accumulate", Rule::kForm, "takes (%x, %dy, %old) -> (%dw), found 2 reads"},
          {"accumulation elsewhere", "linear.W head (%x, %logits, %g.head) -> (%g.head) accumulate",
           "linear.W head (%x, %logits, %head) -> (%g.head) accumulate", Rule::kForm, "they are bound to different storage"},
          {"extents that do not match", "local %logits  temporary f32[2,3,8]", "local %logits  temporary f32[2,3,9]", Rule::kForm,
           "has extent 9, but dim 0 of %head, which it must equal, has 8"},
          {"a view beyond its base", "local %x       temporary f32[2,3,6] dp:S0 micro:slice view %x.part",
           "local %x       temporary f32[2,3,6] dp:S0 micro:slice view %x.part offset 1", Rule::kForm,
           "covers elements [1, 37) of %x.part, which has 36"},
          {"not in place", "(%nll, %logits) tokens=24", "(%nll, %d.x) tokens=24", Rule::kForm, "dim 2 of %d.x has extent 6"},
          {"binding of another type", "%g.head    gradient  f32[8,6] dp:P micro:sum of head",
           "%g.head    gradient  f32[8,6] micro:sum of head", Rule::kForm, "partial along dp expected, replicate found"},
          {"binding of another class", "%nll@1     metric    f32[2]", "%nll@1     buffer    f32[2]", Rule::kForm,
           "whose class differs"},
          {"a micro-batch too many", "call micro m=1", "call micro m=2", Rule::kForm, "micro-batch 2 of a plan with 2"},
          {"micro-batches of another size", "sequences_per_micro_batch 2", "sequences_per_micro_batch 4", Rule::kForm,
           "loads 2 sequences, and a micro-batch of the plan has 4 on each rank"},
          {"two parameters of one number", "decay tensor 1", "decay tensor 0", Rule::kForm,
           "parameters `table` and `head` are both tensor 0"},
      });
}

TEST_CASE("types: sums that were not reduced, or twice") {
  require_found(
      training_text(),
      {
          {"a partial embedding taken for whole", "local %x.part  temporary f32[2,3,6] dp:S0 tp:P micro:slice",
           "local %x.part  temporary f32[2,3,6] dp:S0 micro:slice", Rule::kTypes,
           "along tp: %x.part is declared replicate, but its reads make it partial; it must be reduced"},
          {"reduced over the wrong axis", "all_reduce embed.sum (%x.part) -> (%x) comm=tp",
           "all_reduce embed.sum (%x.part) -> (%x) comm=dp", Rule::kTypes,
           "along dp: %x.part is shard(0), and summing unlike parts has no meaning"},
          {"gradients reduced over tp instead of dp", "all_reduce dp.head (%part) -> (%whole) comm=dp @dp",
           "all_reduce dp.head (%part) -> (%whole) comm=tp @dp", Rule::kTypes,
           "along tp: %part is already whole, and the sum would be 2 times too large"},
          {"a gradient declared whole", "bound %g.head  gradient  f32[8,6] dp:P micro:sum\n  bound %nll",
           "bound %g.head  gradient  f32[8,6] micro:sum\n  bound %nll", Rule::kForm, "whose type differs"},
          {"head sharded on the wrong dim", "%head      parameter f32[8,6] persistent of head",
           "%head      parameter f32[8,6] tp:S0 persistent of head", Rule::kForm, "whose type differs"},
          {"gather of what is no shard", "all_reduce loss.dp (%loss) -> (%whole) comm=dp",
           "all_gather loss.dp (%loss) -> (%whole) comm=dp", Rule::kTypes,
           "along dp: %loss is partial, and only shards can be gathered"},
          {"maximum instead of sum", "all_reduce dp.table (%part) -> (%whole) comm=dp",
           "all_reduce dp.table (%part) -> (%whole) comm=dp reduce=max", Rule::kTypes, "takes the maximum of %part, a partial sum"},
      });
}

TEST_CASE("types: scales and micro-batches") {
  require_found(training_text(), {
                                     {"loss divided by one rank's tokens", "(%nll, %logits) tokens=24", "(%nll, %logits) tokens=12",
                                      Rule::kTypes, "a division by 12 of the step's 24 targets leaves scale 1/2"},
                                     {"loss not divided by micro-batches", "(%nll, %logits) tokens=24", "(%nll, %logits) tokens=48",
                                      Rule::kTypes, "leaves scale 2"},
                                     {"a sum taken for a slice", "bound %loss  metric f32[1] dp:P micro:sum\n  local",
                                      "bound %loss  metric f32[1] dp:P micro:slice\n  local", Rule::kForm, ""},
                                 });
  // A wrong divisor that is carried honestly through the types arrives at the optimizer as a scale.
  std::string text = training_text();
  for (size_t at = 0; (at = text.find("%logits  temporary f32[2,3,8] dp:S0 micro:slice", at)) != std::string::npos; ++at)
    text.insert(text.find(" micro", at), " scale 1/2");
  const auto findings = find_faults(parse_or_fail(replaced(text, "tokens=24", "tokens=12")));
  INFO(findings_text(findings));
  REQUIRE_FALSE(findings.empty());
  REQUIRE(findings[0].message.find("%logits is declared at scale 1/2, but its reads make it 1") != std::string::npos);
}

namespace {

/// A plan of one op on a mesh of a single axis `a` of size 2. `slots` are lines of the segment.
std::string one_op(const std::string& slots, const std::string& op) {
  return "shardlab plan 1\nname one\nmesh a=2\nmicro_batches 1\nsequences_per_micro_batch 1\nperiod 1\nstreams compute\nstrategies "
         "by-hand\n"
         "comm a axes a\n\nsegment s\n" +
         slots + "\n  " + op + "\n\nrole 0\n";
}

std::string judged(const std::string& slots, const std::string& op) {
  const auto findings = find_faults(parse_or_fail(one_op(slots, op)));
  return findings.empty() ? "" : findings[0].message;
}

std::string linear_forward(const std::string& x, const std::string& w, const std::string& y) {
  return judged(
      "  bound %x activation f32[2,3,4] " + x + "\n  bound %w parameter f32[6,4] " + w + "\n  bound %y activation f32[2,3,6] " + y,
      "linear.F l (%x, %w) -> (%y)");
}

/// Types are written "dtype[shape] placements scale micro", so placements come before.
std::string with_place(std::string text) {
  for (const char* p : {"a:S0", "a:S1", "a:S2", "a:P", "a:L"}) {
    const std::string late = std::string("micro:slice ") + p;
    if (const size_t at = text.find(late); at != std::string::npos) text.replace(at, late.size(), std::string(p) + " micro:slice");
  }
  return text;
}

}  // namespace

TEST_CASE("moments in 8 bits have a scale for each block of what is updated, a rank's own where that is cut") {
  const auto update = [](const std::string& value, const std::string& scale, const std::string& codes, int blocks) {
    const std::string moment = fmt::format("moment {}[60,70] {}\n", codes, value),
                      scales = fmt::format("moment f32[{}] {}\n", blocks, scale);
    return judged("  bound %g gradient f32[60,70] " + value + " micro:sum\n  bound %p parameter f32[60,70] " + value +
                      "\n  bound %m " + moment + "  bound %v " + moment + "  bound %ms " + scales + "  bound %vs " + scales,
                  "adamw8bit update (%g, %p, %m, %v, %ms, %vs) -> (%p, %m, %v, %ms, %vs)");
  };
  CHECK(update("", "", "u8", 3) == "");
  CHECK(update("a:S0", "a:L", "u8", 3) == "");
  CHECK(update("a:L", "a:L", "u8", 3) == "");
  CHECK(update("a:S0", "", "u8", 3) == "along a: %ms is replicate, the parameter shard(0): its blocks are local");
  CHECK(update("", "a:L", "u8", 3) == "along a: %ms is local, the parameter replicate: its blocks are replicate");
  CHECK(update("", "", "f32", 3) == "%m is f32, and m of adamw8bit is u8");
  CHECK(update("", "", "u8", 2) == "%ms has 2 elements: 4200 elements of %p are 3 blocks of 2048");
}

TEST_CASE("types: the rules of Linear") {
  CHECK(linear_forward("", "", "") == "");
  CHECK(linear_forward("a:S0", "", "a:S0") == "");
  CHECK(linear_forward("a:S1", "", "a:S1") == "");
  CHECK(linear_forward("", "a:S0", "a:S2") == "");
  CHECK(linear_forward("a:S2", "a:S1", "a:P") == "");
  CHECK(linear_forward("a:P", "", "a:P") == "");
  CHECK(linear_forward("a:L", "a:L", "a:L") == "");
  CHECK(linear_forward("a:S2", "a:S1", "") ==
        "along a: %y is declared replicate, but its reads make it partial; it must be reduced before it is read as replicated");
  CHECK(linear_forward("a:S2", "", "a:P") == "along a: %w is replicate, while another operand is sharded on the same dim");
  CHECK(linear_forward("a:S2", "a:S0", "a:P") == "along a: %w is shard(0), which does not go with the other operands");
  CHECK(linear_forward("a:S0", "a:S0", "a:S0") == "along a: %w is shard(0), which does not go with the other operands");
  CHECK(linear_forward("a:P", "a:P", "a:P") ==
        "along a: a product of two unreduced sums is not the sum of the products: reduce one first");
  CHECK(linear_forward("a:P", "a:S0", "a:P") == "along a: %x is partial, while another operand is sharded");
  CHECK(linear_forward("", "", "a:S2") == "along a: %y is declared shard(2), but its reads make it replicate");
}

TEST_CASE("form: an op does not overwrite what it still reads") {
  CHECK(judged("  bound %x activation f32[2,3,4]\n  bound %w parameter f32[4,4]\n  local %y activation f32[2,3,4] view %x",
               "linear.F l (%x, %w) -> (%y)") == "%y overwrites %x while the op still reads it");
  CHECK(judged("  bound %x activation f32[2,3,4]\n  local %y activation f32[2,3,4] view %x", "activation.F g (%x) -> (%y)") == "");
}

TEST_CASE("types: Linear's bias is added once") {
  const std::string slots =
      "  bound %x activation f32[2,3,4] a:S2\n  bound %w parameter f32[6,4] a:S1\n  bound %b parameter f32[6]\n  bound %y "
      "activation f32[2,3,6] a:P";
  CHECK(judged(slots, "linear.F l (%x, %w, %b) -> (%y) bias") ==
        "along a: %b is whole, so the sum over ranks would hold it once per rank");
}

TEST_CASE("types: Linear's weight gradient") {
  const auto check = [](const std::string& x, const std::string& dy, const std::string& dw) {
    return judged(with_place("  bound %x activation f32[2,3,4] micro:slice " + x +
                             "\n  bound %dy activation f32[2,3,6] micro:slice " + dy + "\n") +
                      "  bound %dw gradient f32[6,4] " + dw + " micro:sum",
                  "linear.W l (%x, %dy) -> (%dw)");
  };
  CHECK(check("a:S0", "a:S0", "a:P") == "");
  CHECK(check("a:S1", "a:S1", "a:P") == "");
  CHECK(check("", "", "") == "");
  CHECK(check("", "a:S2", "a:S0") == "");
  CHECK(check("a:S2", "", "a:S1") == "");
  CHECK(check("a:L", "a:L", "a:L") == "");
  CHECK(check("a:L", "a:L", "a:P") == "");  // each coordinate's own share of a tied weight; rule 4 proves the shares
  CHECK(check("a:S0", "a:S0", "") ==
        "along a: %dw is declared replicate, but its reads make it partial; it must be reduced before it is read as replicated");
  CHECK(check("a:S0", "", "a:P") == "along a: %dy is replicate, while another operand is sharded on the same dim");
  CHECK(check("", "", "a:P") == "along a: %dw is declared partial, but its reads make it replicate");
}

TEST_CASE("types: nonlinear ops refuse partial reads, linear ones keep them") {
  const auto norm = [](const std::string& p) {
    return judged("  bound %x activation f32[2,3,4] " + p + "\n  bound %g parameter f32[4]\n  bound %y activation f32[2,3,4] " + p +
                      "\n  bound %s activation f32[2,3,1]" + (p == "a:S1" ? " a:S1" : ""),
                  "norm.F n (%x, %g) -> (%y, %s) rms");
  };
  CHECK(norm("a:S1") == "");
  CHECK(norm("a:P") == "along a: %x is an unreduced sum, and the op is not linear in it: reduce it first");
  CHECK(norm("a:S2") == "along a: %x is shard(2), and the op needs that dim whole");
  const auto add = [](const std::string& a, const std::string& b, const std::string& c) {
    return judged(
        "  bound %a activation f32[4] " + a + "\n  bound %b activation f32[4] " + b + "\n  bound %c activation f32[4] " + c,
        "add j (%a, %b) -> (%c)");
  };
  CHECK(add("a:P", "a:P", "a:P") == "");
  CHECK(add("a:S0", "a:S0", "a:S0") == "");
  CHECK(add("a:P", "", "a:P") ==
        "along a: %b is replicate, while another term is an unreduced sum: whole terms would be added once per rank");
  CHECK(add("a:P scale 1/2", "a:P", "a:P scale 1/2") == "%b has scale 1, the other terms 1/2");
  CHECK(add("", "", "a:P") == "along a: %c is declared partial, but its reads make it replicate");
  CHECK(judged("  bound %u activation f32[4,6] a:P\n  bound %a activation f32[4,6] a:P", "activation.F g (%u) -> (%a)") ==
        "along a: %u is an unreduced sum, and the op is not linear in it: reduce it first");
}

TEST_CASE("types: attention, embedding and the parts of the loss") {
  const auto attention = [](const std::string& qkv, const std::string& o, const std::string& lse) {
    return judged("  bound %qkv activation f32[2,4,24] " + qkv + "\n  bound %o activation f32[2,4,8] " + o +
                      "\n  bound %lse activation f32[2,2,4] " + lse,
                  "attention.F c (%qkv) -> (%o, %lse) heads=2 kv_heads=2 head_dim=4");
  };
  CHECK(attention("a:S2", "a:S2", "a:S1") == "");
  CHECK(attention("a:S0", "a:S0", "a:S0") == "");
  CHECK(attention("a:S1", "a:S1", "a:S2") == "along a: %qkv is shard(1), and the op needs that dim whole");
  const auto embed = [](const std::string& t, const std::string& x) {
    return judged("  bound %t input i32[2,3]\n  bound %w parameter f32[5,4] " + t + "\n  bound %x activation f32[2,3,4] " + x,
                  "embed.F e (%t, %w) -> (%x)");
  };
  CHECK(embed("a:S0", "a:P") == "");
  CHECK(embed("a:S1", "a:S2") == "");
  CHECK(embed("a:S0", "") ==
        "along a: %x is declared replicate, but its reads make it partial; it must be reduced before it is read as replicated");
  CHECK(judged("  bound %t input i32[2,3] micro:slice\n  bound %d activation f32[2,3,4] micro:slice\n  bound %g gradient f32[5,4] "
               "a:S0 micro:sum",
               "embed.W e (%t, %d) -> (%g)") == "");
  CHECK(judged("  bound %l activation f32[2,3,4] a:S2\n  bound %m temporary f32[2,3] a:P",
               "cross_entropy loss (%l) -> (%m) part=max") == "");
  const std::string sum = "  bound %l activation f32[2,3,4] a:S2\n  bound %t input i32[2,3]\n  bound %m temporary f32[2,3]";
  CHECK(judged(sum + "\n  bound %s temporary f32[2,3,2] a:P", "cross_entropy loss (%l, %t, %m) -> (%s) part=sum") == "");
  CHECK(judged(sum + " a:P\n  bound %s temporary f32[2,3,2] a:P", "cross_entropy loss (%l, %t, %m) -> (%s) part=sum") ==
        "along a: %m is an unreduced sum, and the op is not linear in it: reduce it first");
  CHECK(judged(sum + "\n  bound %s temporary f32[2,3,2] a:P\n  bound %n metric f32[2]",
               "cross_entropy loss (%l, %t, %m, %s) -> (%n, %l) part=grad tokens=6") ==
        "along a: %s is an unreduced sum, and the op is not linear in it: reduce it first");
}

TEST_CASE("types: norms of gradients and collectives") {
  const auto squared = [](const std::string& g, const std::string& n) {
    return judged("  bound %g gradient f32[4] " + g + "\n  bound %n metric f64[1] " + n, "squared_norm n (%g) -> (%n)");
  };
  CHECK(squared("a:S0", "a:P") == "");
  CHECK(squared("", "") == "");
  CHECK(squared("a:L", "a:P") == "");
  CHECK(squared("a:L", "a:L") == "");
  CHECK(squared("", "a:P") == "along a: %n is declared partial, but its reads make it replicate");
  CHECK(squared("a:S0", "") ==
        "along a: %n is declared replicate, but its reads make it partial; it must be reduced before it is read as replicated");
  CHECK(squared("a:P", "") == "along a: %g is an unreduced sum, and the op is not linear in it: reduce it first");
  CHECK(judged("  bound %g gradient f32[4] a:S0\n  bound %h gradient f32[4]\n  bound %n metric f64[1] a:P",
               "squared_norm n (%g, %h) -> (%n)") == "along a: %h is replicate, while another operand is sharded on the same dim");
  const auto scatter = [](const std::string& s, const std::string& d) {
    return judged("  bound %s gradient f32[8] " + s + "\n  bound %d gradient f32[4] " + d, "reduce_scatter r (%s) -> (%d) comm=a");
  };
  CHECK(scatter("a:P", "a:S0") == "");
  CHECK(scatter("a:P", "") == "along a: %d is declared replicate, but reduce_scatter of partial data makes it shard(0)");
  CHECK(judged("  bound %s gradient f32[8] a:P\n  bound %d gradient f32[8] a:S0", "reduce_scatter r (%s) -> (%d) comm=a") ==
        "reduce_scatter over 2 ranks: %s has 8 elements and %d 8");
  const auto turn = [](const std::string& s, const std::string& d) {
    return judged("  bound %s activation f32[1,4] " + s + "\n  bound %d activation f32[2,2] " + d,
                  "all_to_all t (%s) -> (%d) comm=a");
  };
  CHECK(turn("a:S0", "a:S1") == "");
  CHECK(turn("a:S0", "a:S0") == "along a: an all_to_all moves a shard to another dim, but %s is shard(0) and %d shard(0)");
  // A gather and a scatter cut any dim; the parts of an all_to_all are contiguous, and so must be what they are parts of.
  const auto moves = [&](const std::string& kind, const std::string& s, const std::string& d) {
    return judged("  bound %s activation f32" + s + "\n  bound %d activation f32" + d, kind + " c (%s) -> (%d) comm=a");
  };
  const std::string apart = "dim 1, but dim 0 before it has 2 elements: parts of an all_to_all are contiguous";
  CHECK(moves("all_gather", "[2,4] a:S0", "[4,4]") == "");
  CHECK(moves("all_gather", "[1,2,4] a:S1", "[1,4,4]") == "");
  CHECK(moves("all_gather", "[2,2,4] a:S1", "[2,4,4]") == "");
  CHECK(moves("all_gather", "[2,2,4] a:S0", "[2,4,4]") == "%d has other extents than all_gather over 2 ranks makes of %s");
  CHECK(moves("all_gather", "[2,4] a:S0", "[2,8]") == "%d has other extents than all_gather over 2 ranks makes of %s");
  CHECK(moves("reduce_scatter", "[1,4,4] a:P", "[1,2,4] a:S1") == "");
  CHECK(moves("reduce_scatter", "[2,4] a:P", "[2,2] a:S1") == "");
  CHECK(judged("  bound %s activation f32[2,4] a:P\n  local %d activation f32[2,2] a:S1 view %s shard a",
               "reduce_scatter c (%s) -> (%d) comm=a") == "%s is cut in 2 strips, so %d must have storage of its own");
  CHECK(moves("reduce_scatter", "[4,2] a:P", "[4,1] a:S0") == "%d has other extents than reduce_scatter over 2 ranks makes of %s");
  CHECK(moves("all_to_all", "[2,4] a:S0", "[4,2] a:S1") == "%s is cut along " + apart);
  CHECK(moves("all_to_all", "[2,2] a:S1", "[1,4] a:S0") == "");
  CHECK(moves("all_to_all", "[4,2] a:S1", "[2,4] a:S0") == "%d is cut along " + apart);
  CHECK(moves("all_to_all", "[2,2] a:S1", "[2,2] a:S0") == "%d has other extents than all_to_all over 2 ranks makes of %s");
  CHECK(judged("  bound %s activation f32[4] a:P\n  local %d activation f32[4] scale 1/2 view %s",
               "all_reduce r (%s) -> (%d) comm=a") == "%d is declared at scale 1/2, but a collective leaves scale 1");
}

TEST_CASE("types: a predicate is the same on all ranks") {
  const auto when = [](const std::string& flag) {
    return judged("  bound %f other " + flag + "\n  bound %a activation f32[4]\n  bound %b activation f32[4]",
                  "copy c (%a) -> (%b) when %f");
  };
  CHECK(when("i32[1]") == "");
  CHECK(when("i32[1] a:L") == "its predicate %f is local along a: it must be replicated on every axis, or ranks would part ways");
  CHECK(when("f32[1]") == "its predicate %f must be i32[1]");
}

TEST_CASE("types: kernels by rule") {
  const auto kernel = [](const std::string& rule, const std::string& a, const std::string& b, const std::string& c) {
    return judged(
        "  bound %a activation f32[4] " + a + "\n  bound %b activation f32[4] " + b + "\n  bound %c activation f32[4] " + c,
        "kernel k (%a, %b) -> (%c) name=k rule=" + rule);
  };
  CHECK(kernel("elementwise", "a:S0", "a:S0", "a:S0") == "");
  CHECK(kernel("elementwise", "a:P", "a:P", "a:P") ==
        "along a: %a is an unreduced sum, and the op is not linear in it: reduce it first");
  CHECK(kernel("linear", "a:P", "a:P", "a:P") == "");
  CHECK(kernel("linear", "a:P", "", "a:P") ==
        "along a: %b is replicate, while another term is an unreduced sum: whole terms would be added once per rank");
  CHECK(kernel("opaque", "a:S0", "", "a:L") == "");
  CHECK(kernel("opaque", "a:P", "", "a:L") == "along a: %a is an unreduced sum, and the op is not linear in it: reduce it first");
  CHECK(kernel("trusted", "a:P", "", "a:P") == "");
  CHECK(judged("  bound %a activation f32[4,2] a:S0\n  bound %b activation f32[4,3] a:S0\n  bound %c activation f32[3,2] a:P",
               "kernel k (%a, %b) -> (%c) name=k rule=contract") == "");
}

TEST_CASE("types: a kernel that the table knows is judged by its row, whatever a plan says") {
  const auto kernel = [](const std::string& a, const std::string& b, const std::string& attributes) {
    return judged(
        "  bound %a activation f32[4] " + a + "\n  bound %b activation f32[4] " + b + "\n  local %c activation f32[4] a:L",
        "kernel k (%a, %b) -> (%c) " + attributes);
  };
  CHECK(kernel("", "", "name=subtract_share") == "");
  CHECK(kernel("", "", "name=subtract_share rule=opaque") == "");
  CHECK(kernel("", "", "name=subtract_share rule=trusted") ==
        "says rule=trusted, and the kernel `subtract_share` is known: leave out `rule` (plan/named_kernels.cpp says opaque)");
  CHECK(kernel("", "", "name=subtract_share flops=3") == "says flops, and the kernel `subtract_share` is known: leave out `flops`");
  // One rank's summand may be the first operand, and no other.
  const std::string reduce = " is an unreduced sum, and the op is not linear in it: reduce it first";
  CHECK(kernel("a:P", "", "name=subtract_share") == "");
  CHECK(kernel("a:P", "a:P", "name=subtract_share") == "along a: %b" + reduce);
  CHECK(judged("  bound %a activation f32[4]\n  bound %c activation f32[4]", "kernel k (%a) -> (%c) name=subtract_share") ==
        "`subtract_share` takes (m, approximation) -> error, found 1 reads and 1 writes");
}

}  // namespace shardlab::testing
