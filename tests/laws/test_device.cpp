// A GPU's plans with their folds replayed: the grid's layouts, dealt over precisions and kinds of attention. Its kernels and libraries
// need other workspaces than the processor's; all else is the same.
#include <map>
#include <string>

#include "plan/device_scratch.h"
#include "plan/memory.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::plan_of;

/// Every eleventh case of the grid, on one GPU.
std::vector<Case> device_cases() {
  struct Kind {
    Precision precision;
    AttentionBy attention;
  };
  constexpr Kind kKinds[] = {
      {Precision::kFp32, AttentionBy::kAuto}, {Precision::kBf16, AttentionBy::kAuto}, {Precision::kBf16, AttentionBy::kOwn}};
  std::vector<Case> all;
  const std::vector<Case>& grid = testing::legal_cases();
  for (size_t i = 0; i < grid.size(); i += 11) {
    Case c = grid[i];
    const Kind& kind = kKinds[i / 11 % std::size(kKinds)];
    c.backend = BackendKind::kCuda;
    c.transport = TransportKind::kOneGpu;
    c.layout.collective_algorithm = AlgorithmChoice::kAuto;
    c.train.precision = kind.precision;
    c.attention = kind.attention;
    c.name += fmt::format(" on a GPU {} {}", name_of(kind.precision), name_of(kind.attention));
    if (check(c).ok()) all.push_back(std::move(c));
  }
  return all;
}

int64_t workspace(const Case& c) {
  const Plan plan = plan_of(c);
  int64_t bytes = 0;
  for (const Buffer& b : plan.roles[0].buffers)
    if (b.name == "workspace.compute") bytes = b.type.bytes();
  return bytes;
}

TEST_CASE("on a GPU: peak, classes and wire bytes of the plan equal its replay") {
  const std::vector<Case> cases = device_cases();
  CHECK(cases.size() > 700);
  for (const Case& c : cases) testing::require_equal(c);
}

TEST_CASE("what a GPU's kernels are lent is planned: the library's 32 MiB, cuDNN's backward, nothing of either in canonical mode") {
  constexpr int64_t kLine = 256;
  Case c;
  c.model.family = Family::kLlama;
  c.model.layers = 2;
  c.model.hidden = 64;
  c.model.heads = c.model.kv_heads = 8;
  c.model.head_dim = 8;
  c.model.ffn = 256;
  c.model.vocab = 128;
  c.train.seq_len = 64;
  c.train.micro_batch = 2;
  c.train.global_batch_tokens = 128;
  c.train.precision = Precision::kBf16;
  c.backend = BackendKind::kCuda;
  c.transport = TransportKind::kOneGpu;
  c.attention = AttentionBy::kOwn;
  REQUIRE(check(c).ok());
  REQUIRE(workspace(c) == kLibraryWorkspace + kLine);
  c.attention = AttentionBy::kAuto;
  const int64_t rows = 2 * 8 * 64;
  REQUIRE(workspace(c) == (4 * rows * 8 + kLine) + (4 * rows + kLine) + kLibraryWorkspace + kLine);
  c.model.kv_heads = 2;  // a call a sequence, and the gradients of keys and values of each query head
  REQUIRE(workspace(c) == (2 * rows * 8 + kLine) + (2 * rows + kLine) + kLibraryWorkspace + 4 * rows / 2 * 8 + kLine);
  c.attention = AttentionBy::kOwn;
  c.canonical = true;
  REQUIRE(workspace(c) == 4 * 16 * 2 * 64 + kLine);  // a norm's sums over tokens: 16 of each sequence
}

}  // namespace
}  // namespace shardlab::testing
