// Narrow storage and named kernels in plans that are really executed.
#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <numeric>
#include <regex>
#include <set>
#include <sstream>

#include "kernels/compress.h"
#include "kernels/fp8.h"
#include "plan/model.h"
#include "plan/named_kernels.h"
#include "plan/work.h"
#include "runtime/named_kernels.h"
#include "tests/golden_plans.h"
#include "tests/kernels_lowp/packed.h"
#include "tests/kernels_lowp/steps.h"
#include "tests/namespaces.h"
#include "tests/paths.h"

namespace shardlab::testing {
namespace {

std::string file_text(const std::string& path) {
  std::ifstream file(testing::source_dir() + "/" + path);
  std::stringstream text;
  text << file.rdbuf();
  REQUIRE(!text.str().empty());
  return text.str();
}

/// A golden plan with buffers of these classes in `type`, statistics apart, and SGD for its optimizer.
std::string narrowed(const std::string& golden, const std::string& classes, std::string_view type) {
  std::istringstream lines(golden_plan(golden));
  const std::regex buffer("^  (bound |local )?%\\S+ +(" + classes + ") +f32\\[.*");
  const std::regex statistics("%\\S*(stats|lse|loss\\.max|loss\\.sums)");
  std::string text;
  for (std::string line; std::getline(lines, line);) {
    if (!std::regex_search(line, statistics) && std::regex_match(line, buffer)) line.replace(line.find("f32["), 3, type);
    if (line.starts_with("parameter ") && classes.find("parameter") != std::string::npos) line.replace(line.find("f32["), 3, type);
    const bool workspace = line.starts_with("  %workspace.") || line.starts_with("  %rope.table");  // made anew
    text += workspace ? "" : line + "\n";
  }
  const std::regex adamw("adamw (\\S+) \\((\\S+), (\\S+), \\S+, \\S+\\) -> \\(\\S+, \\S+, \\S+\\)");
  return std::regex_replace(text, adamw, "sgd $1 ($2, $3) -> ($3)");
}

class Text final : public BatchSource {
 public:
  void sequence(int64_t number, std::span<int32_t> out) const override {
    for (size_t i = 0; i < out.size(); ++i)
      out[i] =
          static_cast<int32_t>(random_bits({.seed = 21, .use = RandomUse::kShuffle}, static_cast<uint64_t>(number) * 100 + i) % 64);
  }
};

struct Stepped {
  std::vector<double> losses;
  std::vector<std::pair<std::string, std::vector<float>>> change;  ///< of each parameter, over one step
};

/// One step of SGD at rate 1, then two more.
Stepped stepped(const std::string& text, bool canonical) {
  const Text source;
  auto parsed = parse_plan(text);
  INFO((parsed.ok() ? std::string() : to_string(parsed.error())));
  REQUIRE(parsed.ok());
  add_workspaces(*parsed, canonical);
  const PlacedPlan placed = place(std::move(parsed).value());
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  ThreadTransport transport(kernels);
  auto made = Session::create(placed, {.learning_rate = {.peak = 1}, .timeout_s = 60, .poison = true}, transport,
                              cpu_backend(kernels, {.canonical = canonical}), &source);
  INFO((made.ok() ? std::string() : to_string(made.error())));
  REQUIRE(made.ok());
  Session& session = **made;
  session.initialise_parameters();
  Stepped result;
  const auto value = [&](const Parameter& p) { return session.parameter(p.name).value().values; };
  std::vector<std::vector<float>> before;
  for (const Parameter& p : placed.plan->parameters) before.push_back(value(p));
  for (int step = 0; step < 3; ++step) {
    result.losses.push_back(session.step(step).loss.value());
    if (step > 0) continue;
    for (size_t p = 0; p < before.size(); ++p) {
      result.change.emplace_back(placed.plan->parameters[p].name, value(placed.plan->parameters[p]));
      for (size_t i = 0; i < before[p].size(); ++i) result.change.back().second[i] -= before[p][i];
    }
  }
  return result;
}

/// |a - b| / |b|
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(double{a[i]} - double{b[i]}, 2);
    size += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / size);
}

}  // namespace

TEST_CASE("session: a whole step on narrow storage is the fp32 step to its precision") {
  // Every op of both families, vocabulary-parallel, and with dropout, pipeline and ZeRO-1 (whose flat gradients stay f32).
  const std::pair<std::string, std::string> plans[]{{"single-gpt", "activation|temporary|gradient"},
                                                    {"single-llama", "activation|temporary|gradient"},
                                                    {"tensor-parallel", "activation|temporary|gradient"},
                                                    {"dp2-tp2-pp2-zero1-tied", "activation|temporary"}};
  for (const auto& [golden, classes] : plans)
    for (const bool canonical : {true, false}) {
      if (canonical && golden.starts_with("dp2")) continue;  // its plan accumulates in place, as canonical mode does not
      const Stepped wide = stepped(narrowed(golden, "none", "f32"), canonical);
      for (const auto& [type, tolerance] : {std::pair{"bf16", 0.03}, std::pair{"f16", 0.01}}) {
        INFO(golden << " in " << type << (canonical ? ", canonical" : ", fast"));
        const Stepped mixed = stepped(narrowed(golden, classes, type), canonical);
        REQUIRE(wide.change.size() == mixed.change.size());
        for (size_t p = 0; p < wide.change.size(); ++p) {
          INFO(wide.change[p].first);
          const double off = distance(mixed.change[p].second, wide.change[p].second);
          REQUIRE(off < tolerance);
          REQUIRE(off > 0);  // else it was not computed in narrow storage
        }
        const bool whole = golden.starts_with("single");
        const Stepped pure = whole ? stepped(narrowed(golden, classes + "|parameter", type), canonical) : mixed;
        for (size_t s = 0; s < wide.losses.size(); ++s) {
          REQUIRE(std::abs(mixed.losses[s] - wide.losses[s]) < 0.01 * wide.losses[s]);
          REQUIRE(std::abs(pure.losses[s] - wide.losses[s]) < 0.02 * wide.losses[s]);
        }
        REQUIRE(std::abs(pure.losses[2] - pure.losses[0]) > 0.025 * pure.losses[0]);  // it moved, for better or worse
      }
    }
}

TEST_CASE("session: a loss scale grows until a gradient overflows, which skips the update and backs off") {
  OneSegment s;
  s.parameters = {{"w", "f32[8]"}};
  s.persistent = {{"scale", "f32[1]"}, {"good", "i32[1]"}, {"out", "f32[8]"}, {"updates", "f32[1]"}};
  s.locals = {{"first", "f32[1]"}, {"every", "f32[1]"}, {"one", "f32[1]"}, {"g16", "f16[8]"},
              {"g32", "f32[8]"},   {"bad", "i32[1]"},   {"go", "i32[1]"}};
  s.ops = {"fill a () -> (%first) value=16384",
           "fill b () -> (%every) value=2",
           "fill c () -> (%one) value=1",
           "kernel d (%scale, %first) -> (%scale) name=start_scale",
           "kernel e (%w, %scale) -> (%g16) name=multiply",
           "kernel f (%g16, %scale) -> (%g32, %bad) name=unscale",
           "kernel g (%bad) -> (%go) name=not",
           "copy h (%g32) -> (%out) when %go",
           "add i (%updates, %one) -> (%updates) when %go",
           "kernel j (%bad, %scale, %good, %every) -> (%scale, %good) name=adjust_scale"};
  Rig rig = run_segment(s, 0);
  const std::vector<float> w = buffer(rig, "w");
  float most = 0;
  for (const float v : w) most = std::max(most, std::abs(v));
  float scale = 16384, updates = 0;
  int good = 0, skipped = 0;
  for (int step = 0; step < 12; ++step) {
    rig.session->step(step);
    if (std::isinf(Packed(DType::f16, std::vector<float>{most * scale}).values()[0])) {
      scale /= 2;
      good = 0;
      ++skipped;
    } else {
      ++updates;
      if (++good == 2) {
        scale *= 2;
        good = 0;
      }
    }
    REQUIRE(buffer(rig, "scale")[0] == scale);
    REQUIRE(buffer(rig, "updates")[0] == updates);
  }
  REQUIRE(skipped > 1);
  REQUIRE(updates > 4);
  REQUIRE(distance(buffer(rig, "out"), w) < 0.001);
}

TEST_CASE("session: clipping by the norm of what is there, and found_inf over several gradients") {
  OneSegment s;
  s.parameters = {{"a", "f32[40]"}, {"b", "f32[9]"}};
  s.persistent = {{"clipped", "f32[40]"}, {"factor", "f32[1]"}, {"calm", "f32[1]"}, {"alarm", "f32[1]"}, {"largest", "f32[1]"}};
  s.locals = {{"most", "f32[1]"}, {"norm2", "f64[1]"}, {"bad", "i32[1]"},
              {"good", "i32[1]"}, {"inf", "bf16[9]"},  {"worse", "i32[1]"}};
  s.ops = {"fill a () -> (%most) value=0.5",
           "squared_norm b (%a, %b) -> (%norm2)",
           "kernel c (%norm2, %most) -> (%factor) name=clip_factor",
           "kernel d (%a, %factor) -> (%clipped) name=multiply",
           "kernel e (%a, %b) -> (%bad) name=found_inf",
           "kernel f (%bad) -> (%good) name=not",
           "fill g () -> (%calm) value=1 when %good",
           "fill h () -> (%inf) value=3.4028235e38",
           "kernel i (%a, %inf) -> (%worse) name=found_inf",
           "fill j () -> (%alarm) value=1 when %worse",
           "kernel k (%a, %b) -> (%largest) name=amax"};
  const Rig rig = run_segment(s, 1);
  const auto a = buffer(rig, "a"), b = buffer(rig, "b"), clipped = buffer(rig, "clipped");
  double norm2 = 0;
  float most = 0;
  for (const auto& x : {a, b})
    for (const float v : x) norm2 += double{v} * double{v}, most = std::max(most, std::abs(v));
  const float factor = buffer(rig, "factor")[0];
  REQUIRE(std::abs(factor - 0.5 / std::sqrt(norm2)) < 1e-6 * factor);
  for (size_t i = 0; i < a.size(); ++i) REQUIRE(clipped[i] == a[i] * factor);
  REQUIRE(buffer(rig, "calm")[0] == 1);
  REQUIRE(buffer(rig, "alarm")[0] == 1);
  REQUIRE(buffer(rig, "largest")[0] == most);
}

TEST_CASE("session: stochastic rounding gives the same numbers under every layout") {
  std::vector<float> whole;
  for (const int dp : {1, 2, 4}) {
    for (const std::string shard : {"dp:S0", "dp:S1"}) {
      OneSegment s;
      s.dp = dp;
      const auto type = [&](std::string_view dtype) {
        return shard == "dp:S0" ? fmt::format("{}[{},6000] {}", dtype, 8 / dp, shard)
                                : fmt::format("{}[8,{}] {}", dtype, 6000 / dp, shard);
      };
      s.parameters = {{"w", type("f32")}};
      s.persistent = {{"r", type("bf16")}, {"n", type("bf16")}};
      s.ops = {"kernel round (%w) -> (%r) name=cast_stochastic", "copy nearest (%w) -> (%n)"};
      const Rig rig = run_segment(s, 3);
      const auto rounded = rig.session->gather_buffer("r").value().values;
      if (whole.empty()) {
        whole = rounded;
        REQUIRE(rounded != rig.session->gather_buffer("n").value().values);
      }
      REQUIRE(bit_difference(rounded, whole) == "");
    }
  }
}

TEST_CASE("session: one segment that rounds several parameters draws other numbers for each, and for each step") {
  const std::string text = plan_head(1, 1, 1, "compute") + R"(
parameter a f32[40] stage 0 ones tensor 1
parameter b f32[40] stage 0 ones tensor 2

segment round
  bound %x parameter f32[40]
  bound %y other bf16[40]
  local %z temporary f32[40]

  alloc %z
  add z (%x, %y) -> (%z)
  kernel round (%z) -> (%y) name=cast_stochastic
  free %z

segment start
  bound %x other f32[1]
  bound %y other bf16[40]
  bound %z other bf16[40]

  fill y () -> (%y) value=0.3
  fill z () -> (%z) value=0.3

role 0
  %a parameter f32[40] persistent of a
  %b parameter f32[40] persistent of b
  %ra other bf16[40] persistent of a
  %rb other bf16[40] persistent of b
  %one other f32[1] persistent

  call start (x=%one, y=%ra, z=%rb)
  call round (x=%a, y=%ra)
  call round (x=%b, y=%rb)
)";
  Rig rig(text, {.timeout_s = 60});
  rig.session->initialise_parameters();
  rig.session->step(0);
  const auto first = buffer(rig, "ra");
  REQUIRE(first != buffer(rig, "rb"));
  rig.session->step(1);
  REQUIRE(first != buffer(rig, "ra"));
}

namespace {

/// An fp8 product in phase F, I and W of operands quantised by `blocks` of 128 or by tensor.
OneSegment fp8_products(const std::string& kind) {
  OneSegment s;
  s.parameters = {{"x", "f32[2,20,256]"}, {"w", "f32[130,256]"}, {"dy", "f32[2,20,130]"}};
  s.persistent = {{"y", "f32[2,20,130]"}, {"dx", "f32[2,20,256]"}, {"dw", "f32[130,256]"}, {"back", "f32[2,20,256]"}};
  s.persistent.insert(
      s.persistent.end(),
      {{"y2", "f32[2,20,130]"}, {"dx2", "f32[2,20,256]"}, {"dw2", "f32[130,256]"}, {"dw3", "f32[130,256]"}, {"dbias", "f32[130]"}});
  s.locals = {{"x8", "f8e4m3[2,20,256]"}, {"w8", "f8e4m3[130,256]"}, {"dy8", "f8e5m2[2,20,130]"}};
  const bool blocks = kind == "blocks";
  s.locals.push_back({"sx", blocks ? "f32[2,20,2]" : "f32[1]"});
  s.locals.push_back({"sw", blocks ? "f32[2,2]" : "f32[1]"});
  s.locals.push_back({"sdy", blocks ? "f32[2,20,2]" : "f32[1]"});
  s.locals.push_back({"amax", "f32[1]"});
  const auto quantise = [&](std::string_view x, std::string_view format, std::string_view kernel) {
    if (blocks) {
      s.ops.push_back(fmt::format("kernel q.{0} (%{0}) -> (%{0}8, %s{0}) name={1} rule=opaque", x, kernel));
      return;
    }
    s.ops.push_back(fmt::format("kernel amax.{0} (%{0}) -> (%amax) name=amax", x));
    s.ops.push_back(fmt::format("kernel scale.{0} (%amax) -> (%s{0}) name=fp8_scale_{1} rule=opaque", x, format));
    s.ops.push_back(fmt::format("kernel q.{0} (%{0}, %s{0}) -> (%{0}8) name=fp8_quantise", x));
  };
  quantise("x", "e4m3", "fp8_quantise_1x128");
  quantise("w", "e4m3", "fp8_quantise_128x128");
  quantise("dy", "e5m2", "fp8_quantise_1x128");
  s.ops.insert(
      s.ops.end(),
      {"kernel.F p (%x8, %sx, %w8, %sw) -> (%y) name=fp8_linear", "kernel.I p (%dy8, %sdy, %w8, %sw) -> (%dx) name=fp8_linear",
       "kernel.W p (%x8, %sx, %dy8, %sdy) -> (%dw) name=fp8_linear", "kernel back (%x8, %sx) -> (%back) name=fp8_dequantise",
       "linear.F l (%x8, %w8, %sx, %sw) -> (%y2)", "linear.I l (%dy8, %w8, %sdy, %sw) -> (%dx2)",
       "linear.W l (%x8, %dy8, %sx, %sdy) -> (%dw2)", "linear.W m (%x8, %dy8, %sx, %sdy, %dy) -> (%dw3, %dbias) bias"});
  return s;
}

/// c[m,n] = sum over k of a[m,k] b[k,n], both with strides.
std::vector<float> product(int64_t m, int64_t n, int64_t k, const std::vector<float>& a, std::array<int64_t, 2> as,
                           const std::vector<float>& b, std::array<int64_t, 2> bs) {
  std::vector<float> c;
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t p = 0; p < k; ++p)
        sum += double{a[static_cast<size_t>(i * as[0] + p * as[1])]} * double{b[static_cast<size_t>(p * bs[0] + j * bs[1])]};
      c.push_back(static_cast<float>(sum));
    }
  return c;
}

}  // namespace

TEST_CASE("session: fp8 products in every phase, per tensor and by blocks") {
  for (const std::string kind : {"tensor", "blocks"}) {
    INFO(kind);
    const Rig rig = run_segment(fp8_products(kind), 1);
    const auto x = buffer(rig, "x"), w = buffer(rig, "w"), dy = buffer(rig, "dy");
    REQUIRE(distance(buffer(rig, "back"), x) < 0.04);
    REQUIRE(distance(buffer(rig, "back"), x) > 0.001);
    // Errors of elements, 2^-4 (e5m2: 2^-3) at most and uniform, are not summed up but averaged out.
    REQUIRE(distance(buffer(rig, "y"), product(40, 130, 256, x, {256, 1}, w, {1, 256})) < 0.06);
    REQUIRE(distance(buffer(rig, "dx"), product(40, 256, 130, dy, {130, 1}, w, {256, 1})) < 0.09);
    REQUIRE(distance(buffer(rig, "dw"), product(130, 256, 40, dy, {1, 130}, x, {256, 1})) < 0.09);
    // A product of the plan's language whose factors are fp8 is the same; the gradient of its bias is a sum of what was not
    // rounded.
    for (const auto& [one, other] : {std::pair{"y", "y2"}, {"dx", "dx2"}, {"dw", "dw2"}, {"dw", "dw3"}})
      REQUIRE(buffer(rig, one) == buffer(rig, other));
    const std::vector<float> ones(40, 1.0f);
    REQUIRE(distance(buffer(rig, "dbias"), product(130, 1, 40, dy, {1, 130}, ones, {1, 1})) < 1e-6);
  }
}

TEST_CASE("session: a scale agreed over the ranks, and delayed by a step") {
  OneSegment s;
  s.dp = 2;
  s.parameters = {{"w", "f32[20] dp:S0"}};
  s.persistent = {{"scale", "f32[1]"}, {"history", "f32[4]"}, {"delayed", "f32[1]"}};
  s.locals = {{"amax", "f32[1] dp:P"}};
  s.views = {{"all", "f32[1] view %amax"}};
  s.ops = {"kernel a (%w) -> (%amax) name=amax", "all_reduce b (%amax) -> (%all) comm=dp reduce=max",
           "kernel c (%all) -> (%scale) name=fp8_scale_e4m3",
           "kernel d (%all, %history) -> (%history, %delayed) name=fp8_delayed_e5m2"};
  const Rig rig = run_segment(s, 2);
  float most = 0;
  const std::vector<float> w = rig.session->parameter("w").value().values;
  for (const float v : w) most = std::max(most, std::abs(v));
  for (const int rank : {0, 1}) {
    REQUIRE(buffer(rig, "scale", rank)[0] == kernels::fp8_scale(most, DType::f8e4m3));
    REQUIRE(buffer(rig, "delayed", rank)[0] == kernels::fp8_scale(most, DType::f8e5m2));
    REQUIRE(buffer(rig, "history", rank) == std::vector<float>{most, most, 0, 0});
  }
}

namespace {

/// Two ranks, each with a summand `g` of [2, 6n] of its own, drawn.
OneSegment two_summands(int64_t columns) {
  OneSegment s;
  s.dp = 2;
  s.parameters = {{"w", fmt::format("f32[2,{}] dp:S0", columns)}};
  s.persistent = {{"g", fmt::format("f32[2,{}] dp:P", columns)}};
  s.ops = {"kernel g (%w) -> (%g) name=copy"};
  return s;
}

}  // namespace

TEST_CASE("session: an all-reduce in integers, exchanged as parts and summed in fp32") {
  for (const int bits : {8, 4}) {
    OneSegment s = two_summands(256);
    const std::string codes = bits == 8 ? "i8[2,256]" : "u8[2,128]";
    const std::string name = bits == 8 ? "int8" : "int4", one = bits == 8 ? "i8[1,256]" : "u8[1,128]";
    s.persistent.push_back({"sum", "f32[2,256]"});
    s.locals = {
        {"q", codes + " dp:P"},  {"qs", "f32[2,4] dp:P"},  {"p", codes},   {"ps", "f32[2,4]"},  {"part", "f32[1,256] dp:S0"},
        {"own", one + " dp:S0"}, {"os", "f32[1,4] dp:S0"}, {"all", codes}, {"alls", "f32[2,4]"}};
    s.ops.insert(s.ops.end(), {fmt::format("kernel a (%g) -> (%q, %qs) name=quantise_{} rule=trusted", name),
                               "all_to_all b (%q) -> (%p) comm=dp", "all_to_all c (%qs) -> (%ps) comm=dp",
                               fmt::format("kernel d (%p, %ps) -> (%part) name=dequantise_sum_{} rule=opaque", name),
                               fmt::format("kernel e (%part) -> (%own, %os) name=quantise_{} rule=opaque", name),
                               "all_gather f (%own) -> (%all) comm=dp", "all_gather h (%os) -> (%alls) comm=dp",
                               fmt::format("kernel i (%all, %alls) -> (%sum) name=dequantise_{} rule=opaque", name)});
    const Rig rig = run_segment(s, 1);
    const auto a = buffer(rig, "g", 0), b = buffer(rig, "g", 1);
    std::vector<float> want;
    for (size_t i = 0; i < a.size(); ++i) want.push_back(a[i] + b[i]);
    REQUIRE(buffer(rig, "sum", 0) == buffer(rig, "sum", 1));
    REQUIRE(distance(buffer(rig, "sum"), want) < (bits == 8 ? 0.02 : 0.3));
    REQUIRE(distance(buffer(rig, "sum"), want) > 0.0001);
  }
}

TEST_CASE("session: an all-reduce in bf16, by every algorithm and by parts summed in fp32") {
  for (const std::string algorithm : {"ring", "direct"}) {
    OneSegment s = two_summands(64);
    s.persistent.push_back({"sum", "bf16[2,64]"});
    s.persistent.push_back({"parts", "bf16[2,64]"});
    s.locals = {{"h", "bf16[2,64] dp:P"}, {"k", "bf16[2,64] dp:P"}, {"p", "bf16[2,64]"}, {"part", "bf16[1,64] dp:S0"}};
    s.views = {{"all", "bf16[2,64] view %h"}};
    s.ops.insert(s.ops.end(), {"copy a (%g) -> (%h)", "copy b (%g) -> (%k)",
                               fmt::format("all_reduce c (%h) -> (%all) comm=dp algorithm={}", algorithm),
                               "copy d (%all) -> (%sum)", "all_to_all e (%k) -> (%p) comm=dp",
                               "kernel f (%p) -> (%part) name=sum_rows", "all_gather h (%part) -> (%parts) comm=dp"});
    const Rig rig = run_segment(s, 1);
    Packed a(DType::bf16, buffer(rig, "g", 0)), b(DType::bf16, buffer(rig, "g", 1));
    std::vector<float> want = a.values();
    for (size_t i = 0; i < want.size(); ++i) want[i] += b.values()[i];
    for (const int rank : {0, 1}) {
      REQUIRE(bit_difference(buffer(rig, "sum", rank), a.rounded(want)) == "");
      REQUIRE(bit_difference(buffer(rig, "parts", rank), a.rounded(want)) == "");
    }
  }
}

TEST_CASE("session: PowerSGD as the plans spell it; errors add up to what the sum lost") {
  OneSegment s = two_summands(6);
  s.parameters = {{"w", "f32[4,6] dp:S0"}};
  s.persistent = {
      {"g", "f32[4,6] dp:P"}, {"error", "f32[4,6] dp:P"}, {"m", "f32[4,6] dp:P"}, {"basis", "f32[2,6]"}, {"whole", "f32[4,6]"}};
  s.locals = {{"p", "f32[4,2] dp:P"}, {"p.hat", "f32[4,2]"}, {"q", "f32[2,6] dp:P"}};
  s.views = {{"p.all", "f32[4,2] view %p"}, {"q.all", "f32[2,6] view %q"}};
  s.ops.insert(
      s.ops.end(),
      {"kernel error (%g, %error) -> (%m) name=add", "kernel p (%m, %basis) -> (%p) name=project",
       "all_reduce p (%p) -> (%p.all) comm=dp", "kernel basis (%p.all) -> (%p.hat) name=orthogonalise",
       "linear.W q (%m, %p.hat) -> (%q)", "all_reduce q (%q) -> (%q.all) comm=dp", "linear.I product (%p.hat, %q.all) -> (%whole)",
       "kernel rest (%m, %whole) -> (%error) name=subtract_share", "kernel keep (%q.all) -> (%basis) name=copy"});
  // The basis begins at 0, like all state: its directions are made by orthogonalise.
  for (const int steps : {1, 2, 5}) {
    const Rig rig = run_segment(s, steps);
    const auto whole = buffer(rig, "whole", 0);
    REQUIRE(whole == buffer(rig, "whole", 1));
    double lost = 0, size = 0;
    for (size_t i = 0; i < whole.size(); ++i) {
      double m = 0, error = 0;
      for (const int rank : {0, 1}) {
        m += double{buffer(rig, "m", rank)[i]};
        error += double{buffer(rig, "error", rank)[i]};
      }
      REQUIRE(std::abs(m - whole[i] - error) < 1e-5);
      lost += error * error;
      size += m * m;
    }
    REQUIRE(lost > 0);
    REQUIRE(lost < size);
  }
}

TEST_CASE("session: selections and signs, with error feedback that conserves the sum over steps") {
  for (const std::string kind : {"top_k", "random_k", "sign"}) {
    INFO(kind);
    OneSegment s = two_summands(32);
    s.parameters[0].type = "f32[1,64] dp:S0";
    s.persistent = {{"g", "f32[1,64] dp:P"}, {"error", "f32[1,64] dp:P"}, {"sent", "f32[1,64]"}, {"total", "f32[1,64]"}};
    s.ops = {"kernel g (%w) -> (%g) name=copy", "kernel a (%g, %error) -> (%m) name=add"};
    s.locals = {{"m", "f32[1,64] dp:P"}, {"sum", "f32[1,64]"}};
    if (kind == "sign") {
      s.locals.insert(s.locals.end(), {{"bits", "u8[1,8] dp:S0"},
                                       {"scale", "f32[1,1] dp:S0"},
                                       {"all", "u8[2,8]"},
                                       {"scales", "f32[2,1]"},
                                       {"own", "f32[1,64] dp:P"},
                                       {"each", "f32[2,64]"}});
      s.ops.insert(s.ops.end(),
                   {"kernel b (%m) -> (%bits, %scale) name=sign_compress", "kernel c (%bits, %scale) -> (%own) name=sign_expand",
                    "kernel d (%m, %own) -> (%error) name=subtract", "all_gather e (%bits) -> (%all) comm=dp",
                    "all_gather f (%scale) -> (%scales) comm=dp", "kernel h (%all, %scales) -> (%each) name=sign_expand",
                    "kernel i (%each) -> (%sum) name=sum_rows"});
    } else {
      s.locals.insert(s.locals.end(), {{"v", "f32[1,7] dp:S0"}, {"i", "i32[1,7] dp:S0"}, {"vs", "f32[2,7]"}, {"is", "i32[2,7]"}});
      s.ops.insert(s.ops.end(), {fmt::format("kernel b (%m) -> (%v, %i) name={} rule=trusted", kind),
                                 "kernel c (%m, %i) -> (%error) name=zero_selected", "all_gather e (%v) -> (%vs) comm=dp",
                                 "all_gather f (%i) -> (%is) comm=dp", "kernel h (%vs, %is) -> (%sum) name=scatter"});
    }
    s.ops.insert(s.ops.end(), {"copy k (%sum) -> (%sent)", "add l (%total, %sum) -> (%total)"});
    const int steps = 9;
    const Rig rig = run_segment(s, steps);
    const auto total = buffer(rig, "total"), sent = buffer(rig, "sent");
    int zeros = 0;
    for (size_t i = 0; i < total.size(); ++i) {
      double gradients = 0, errors = 0;
      for (const int rank : {0, 1}) {
        gradients += steps * double{buffer(rig, "g", rank)[i]};
        errors += double{buffer(rig, "error", rank)[i]};
      }
      REQUIRE(std::abs(double{total[i]} + errors - gradients) < 1e-4);
      zeros += sent[i] == 0 ? 1 : 0;
    }
    if (kind == "top_k") REQUIRE((zeros >= 64 - 14 && zeros <= 64 - 7));
    if (kind == "random_k") REQUIRE(zeros == 64 - 7);  // both ranks drew the same
    if (kind == "sign") REQUIRE(zeros < 64);
  }
}

TEST_CASE("session: operands that do not fit are refused with the op and what it takes") {
  const auto with = [](const std::string& op) {
    OneSegment s;
    s.parameters = {{"x", "f32[2,8]"}};
    s.locals = {{"y", "f32[2,8]"}, {"n", "i32[1]"},    {"f", "f32[1]"},     {"q", "i8[2,8]"},
                {"s", "f32[2,1]"}, {"h", "bf16[2,8]"}, {"e", "f8e4m3[2,8]"}};
    s.ops = {op};
    return refusal(s);
  };
  REQUIRE(contains(with("kernel a (%x) -> (%y) name=frobnicate rule=opaque"), "no kernel called `frobnicate`"));
  REQUIRE(contains(with("kernel a (%x) -> (%y) name=add"), "takes 2 reads and 1 writes, not 1 and 1"));
  REQUIRE(contains(with("kernel a (%x, %y) -> (%h) name=multiply"), "operand of 16 elements where it takes 1"));
  REQUIRE(contains(with("kernel a (%x) -> (%f) name=found_inf"), "operand of f32 where it takes i32"));
  REQUIRE(contains(with("kernel a (%x) -> (%y, %s) name=quantise_int8"), "operand of f32 where it takes i8"));
  REQUIRE(contains(with("kernel a (%q) -> (%y) name=copy"), "i8 where it takes f32, bf16"));
  REQUIRE(contains(with("kernel a (%x) -> (%y) name=cast_stochastic"), "needs no rounding"));
  REQUIRE(contains(with("kernel a (%e, %y) -> (%h) name=fp8_dequantise"), "scales that are neither"));
  REQUIRE(contains(with("kernel a (%e, %f, %e, %f) -> (%y) name=fp8_linear"), "has no phase"));
  REQUIRE(contains(with("sum_scalars a (%h) -> (%f)"), "has no form on narrow storage"));
  REQUIRE(contains(with("copy a (%x) -> (%q)"), "converts f32 to i8"));
  REQUIRE(contains(with("squared_norm a (%h) -> (%f)"), "operand of f32 where the CPU back end takes f64"));
  REQUIRE(with("copy a (%x) -> (%h)") == "");

  OneSegment sharded;
  sharded.dp = 2;
  sharded.parameters = {{"x", "f32[2,192] dp:S1"}};
  sharded.locals = {{"q", "f8e4m3[2,192] dp:S1"}, {"s", "f32[2,2] dp:S1"}};
  sharded.ops = {"kernel a (%x) -> (%q, %s) name=fp8_quantise_1x128"};
  REQUIRE(contains(refusal(sharded), "blocks are not blocks of the whole"));
}

TEST_CASE("named kernels: kernels/README.md prints the table, and the CPU back end binds every row") {
  const std::string readme = file_text("kernels/README.md");
  std::string table = "| name | operands | what |\n|---|---|---|\n";
  std::set<std::string_view> names;
  for (const NamedKernel& row : named_kernels()) {
    table += fmt::format("| `{}` | `{}` | {} |\n", row.name, row.operands, row.what);
    REQUIRE(names.insert(row.name).second);
  }
  const size_t begin = readme.find("| name | operands |");
  REQUIRE(readme.substr(begin, readme.find("\n\n", begin) + 1 - begin) == table);
  std::set<std::string_view> bound;
  for (const KernelBinder& b : kernel_binders()) bound.insert(b.name);
  REQUIRE(bound == names);
}

}  // namespace shardlab::testing
