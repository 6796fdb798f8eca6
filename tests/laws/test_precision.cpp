// Clipping and mixed precision with their folds replayed: the grid's layouts, dealt over precisions; and what the literature says of
// bytes.
#include <map>
#include <string>

#include "plan/memory.h"
#include "plan/precision.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::plan_of;

/// Every seventh case of the grid (which is coprime to the lengths of its lists) in another precision, half of them clipped.
std::vector<Case> precision_cases() {
  struct Kind {
    Precision precision;
    const char* accumulate;
  };
  constexpr Kind kKinds[] = {{Precision::kBf16, ""},
                             {Precision::kBf16, "bf16"},
                             {Precision::kFp32, ""},
                             {Precision::kFp16, "fp16"},
                             {Precision::kFp16, "fp32"}};
  std::vector<Case> all;
  const std::vector<Case>& grid = testing::legal_cases();
  for (size_t i = 0; i < grid.size(); i += 7) {
    Case c = grid[i];
    const Kind& kind = kKinds[i / 7 % std::size(kKinds)];
    c.train.precision = kind.precision;
    c.train.accumulate_dtype = kind.accumulate;
    if (c.train.precision == Precision::kFp16) c.train.loss_scale = i / 7 % 2 == 0 ? 1024.0f : 0.0f;
    c.train.clip_norm = i / 7 % 3 == 0 || c.train.precision == Precision::kFp32 ? 1.0f : 0.0f;
    c.name +=
        std::string(" ") + std::string(name_of(kind.precision)) + " " + kind.accumulate + (c.train.clip_norm > 0 ? " clipped" : "");
    // The norm that clipping wants is added over stages, whose number halving-doubling may not serve.
    if (!check(c).ok()) c.layout.collective_algorithm = AlgorithmChoice::kRing;
    all.push_back(std::move(c));
  }
  return all;
}

TEST_CASE("clipped and in 16 bits: peak, classes and wire bytes of the plan equal its replay") {
  for (const Case& c : precision_cases()) { testing::require_equal(c); }
}

TEST_CASE("mixed precision: 2 + 2 + 4 + 8 bytes a parameter, as many as in fp32") {
  // "2 Psi + 2 Psi + K Psi, K = 12": ZeRO (2020), section 3.1. Every extent is a multiple of 64, so that nothing is rounded up.
  Case c;
  Model& m = c.model;
  m.family = Family::kLlama;
  m.layers = 2;
  m.hidden = 64;
  m.heads = m.kv_heads = 16;
  m.head_dim = 4;
  m.ffn = 256;
  m.vocab = 128;
  c.train.seq_len = 64;
  const int64_t psi = parameter_count(m);
  const auto bytes = [](const Case& config, BufferClass kind) {
    int64_t sum = 0;
    const Plan plan = plan_of(config);
    for (const Buffer& b : plan.roles[0].buffers) sum += b.kind == kind && !b.view ? b.type.bytes() : 0;
    return sum;
  };
  const auto states = [&](const Case& config) {
    return std::vector<int64_t>{bytes(config, BufferClass::kParameter), bytes(config, BufferClass::kGradient),
                                bytes(config, BufferClass::kMaster), bytes(config, BufferClass::kMoment)};
  };
  CHECK(states(c) == std::vector<int64_t>{4 * psi, 4 * psi, 0, 8 * psi});
  c.train.precision = Precision::kBf16;
  CHECK(states(c) == std::vector<int64_t>{2 * psi, 4 * psi, 4 * psi, 8 * psi});
  c.train.accumulate_dtype = "bf16";
  CHECK(states(c) == std::vector<int64_t>{2 * psi, 2 * psi, 4 * psi, 8 * psi});
  c.layout.dp = 4;
  c.layout.zero = 3;
  CHECK(bytes(c, BufferClass::kParameter) == 2 * psi / 4);
  CHECK(bytes(c, BufferClass::kMaster) == 4 * psi / 4);
}

TEST_CASE("16-bit gradients without 16-bit parameters, and two types for one gradient, are refused") {
  Case c = testing::legal_cases().front();
  const auto refusal = [&] {
    const Result<void> checked = check(c);
    return checked.ok() ? std::string() : to_string(checked.error());
  };
  REQUIRE(refusal().empty());
  c.train.reduce_dtype = "bf16";
  CHECK(refusal().find("compression.kind: bf16") != std::string::npos);
  c.train.precision = Precision::kBf16;
  CHECK(refusal().empty());
  c.train.accumulate_dtype = "fp32";
  CHECK(refusal().find("reduce_dtype=bf16 with accumulate_dtype=fp32") != std::string::npos);
  c.train.reduce_dtype = "fp16";
  c.train.accumulate_dtype = "";
  CHECK(refusal().find("reduce_dtype=fp16 with precision=bf16") != std::string::npos);
  c.train.reduce_dtype = "";
  c.train.loss_scale = 1024;
  CHECK(refusal().find("loss_scale with precision=bf16") != std::string::npos);
  c.train.precision = Precision::kFp16;
  CHECK(refusal().empty());
  c.train.loss_scale = 3e7f;
  CHECK(refusal().find("is outside [1, 16777216]") != std::string::npos);
  c.train.loss_scale = 0;
  c.train.loss_scale_start = 0.5f;
  CHECK(refusal().find("loss_scale_start=0.5") != std::string::npos);
  c.train.loss_scale_start = 65536;
  c.backend = BackendKind::kCuda;
  c.transport = TransportKind::kOneGpu;
  c.layout.collective_algorithm = AlgorithmChoice::kAuto;
  CHECK(refusal() == "");
  c.backend = BackendKind::kCpu;
  c.transport = TransportKind::kThreads;
  c.train.precision = Precision::kFp4;
  CHECK(refusal().find("precision=fp4 is not implemented") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
