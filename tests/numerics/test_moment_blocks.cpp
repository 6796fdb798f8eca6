// Moments in 8 bits: elements that share a scale lie together in what a rank updates, so another layout has other blocks.
//
// Under every layout the training has the bits of the reference that is given the layout's blocks, read off the plan in execution. Where
// every rank updates whole parameters these are the blocks of one rank, and so are the bits.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "plan/base/moment_codes.h"
#include "plan/optimizers.h"
#include "strategies/catalogue.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/numerics/running.h"
#include "tests/test.h"

namespace shardlab::testing::of_moment_blocks {
namespace {

using Block = reference::Trainer<float>::Block;

Subject in_8_bits(std::string_view name) {
  Subject subject = subject_named(name);
  subject.train.optimizer = Optimizer::kAdamW8bit;
  return subject;
}

/// The blocks of a case. Every element of every parameter is given a number of its own; where a rank has moments of a buffer, the buffer's
/// numbers in order, 2048 at a time, are the blocks. Padding has number 0.
std::vector<Block> blocks_of(const Case& c) {
  Running running(c);
  std::vector<std::pair<size_t, size_t>> elements{{0, 0}};
  const std::vector<ModelParameter> parameters = parameters_of(c.model);
  for (size_t p = 0; p < parameters.size(); ++p) {
    LogicalTensor numbers = running.session->parameter(parameters[p].name).value();
    for (size_t i = 0; i < numbers.values.size(); ++i) {
      numbers.values[i] = static_cast<float>(elements.size());
      elements.emplace_back(p, i);
    }
    REQUIRE(running.session->set_parameter(parameters[p].name, numbers).ok());
  }
  std::set<Block> blocks;
  const Plan& plan = *running.placed.plan;
  for (int rank = 0; rank < c.layout.world_size(); ++rank)
    for (const Buffer& buffer : plan.roles[static_cast<size_t>(plan.mesh.role_of(rank))].buffers) {
      constexpr std::string_view kSuffix = ".m_scale";
      if (!buffer.name.ends_with(kSuffix) || !buffer.persistent) continue;
      const auto numbers = running.session->read_buffer(rank, buffer.name.substr(0, buffer.name.size() - kSuffix.size())).value();
      for (size_t first = 0; first < numbers.size(); first += kMomentBlock) {
        Block block;
        for (size_t i = first; i < std::min(numbers.size(), first + kMomentBlock); ++i)
          if (numbers[i] != 0) block.push_back(elements[static_cast<size_t>(numbers[i])]);
        if (!block.empty()) blocks.insert(std::move(block));
      }
    }
  size_t covered = 0;
  for (const Block& block : blocks) covered += block.size();
  REQUIRE(covered == elements.size() - 1);  // each element is in one block, whichever rank updates it
  return {blocks.begin(), blocks.end()};
}

std::string difference_of(const Case& c, const Expected<float>& expected) {
  const auto trained = train_case(c, RandomText(c.model.vocab), kSteps);
  return trained.ok() ? differences(c, expected, *trained) : to_string(trained.error());
}

/// dp, tp, pp, zero, accumulation, and whether the optimizer is on the host.
struct Layouts {
  int dp, tp, pp, zero, accumulation;
  OffloadTo optimizer = OffloadTo::kNone;
  bool whole = false;  ///< every rank updates whole parameters
};
constexpr Layouts kLayouts[] = {{1, 1, 1, 0, 8, OffloadTo::kNone, true},
                                {2, 1, 1, 0, 4, OffloadTo::kNone, true},
                                {2, 1, 2, 0, 4, OffloadTo::kNone, true},
                                {1, 2, 1, 0, 8},
                                {2, 1, 1, 1, 4},
                                {4, 1, 1, 2, 2},
                                {4, 1, 1, 3, 2},
                                {2, 2, 2, 1, 4},
                                {1, 1, 1, 0, 8, OffloadTo::kCpu},
                                {2, 1, 1, 1, 4, OffloadTo::kNvme},
                                {2, 1, 1, 3, 4, OffloadTo::kCpu}};

Case case_of(const Layouts& l) {
  Case c;
  c.canonical = true;
  c.layout.dp = l.dp;
  c.layout.tp = l.tp;
  c.layout.pp = l.pp;
  c.layout.zero = l.zero;
  c.layout.schedule = l.pp > 1 ? Schedule::k1F1B : Schedule::kNone;
  c.layout.overlap = l.dp > 1;
  c.layout.offload.optimizer = l.optimizer;
  c.train.grad_accumulation = l.accumulation;
  return c;
}

}  // namespace

TEST_CASE("moments in 8 bits: every layout has the bits of the reference with the layout's blocks") {
  int others = 0;
  for (const char* name : {"llama adamw", "llama tied dropout clipped adamw"}) {
    const Subject subject = in_8_bits(name);
    const auto alone = expect<float>(subject);
    for (const Layouts& l : kLayouts) {
      const Case layout = case_of(l);
      const auto rows = rows_of(subject, std::span(&layout, 1));
      REQUIRE(rows.size() == 1);
      const Case& c = rows.front();
      INFO(name << ": " << c.name);
      CHECK(updates_whole_parameters(c.layout) == l.whole);
      const auto expected = expect<float>(subject, {}, false, blocks_of(c));
      const std::string difference = difference_of(c, expected);
      INFO(difference);
      CHECK(difference.empty());
      if (l.whole) CHECK(expected.parameters == alone.parameters);
      others += expected.parameters != alone.parameters;
    }
  }
  CHECK(others > 0);  // what the blocks are makes a difference
}

TEST_CASE("moments in 8 bits train nearly as moments in fp32 do") {
  for (const char* name : {"llama adamw", "gpt tied clipped, 16 sequences adamw"}) {
    const auto wide = expect<float>(subject_named(name)), narrow = expect<float>(in_8_bits(name));
    INFO(name);
    CHECK(wide.losses.front() == narrow.losses.front());
    CHECK(wide.losses.back() != narrow.losses.back());
    CHECK(narrow.losses.back() == Approx(wide.losses.back()).epsilon(0.02));
  }
}

}  // namespace shardlab::testing::of_moment_blocks
