// Parameter servers with their folds replayed: the grid's data-parallel layouts with a server on every worker's rank; and what the
// literature says of their bytes.
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "plan/memory.h"
#include "plan/wire.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::plan_of;

/// Every layout of the grid that reduces whole gradients; a third with 16-bit parameters or clipping.
std::vector<Case> served_cases() {
  std::vector<Case> all;
  for (Case c : testing::legal_cases()) {
    if (c.layout.dp == 1 || c.layout.zero > 0) continue;
    const size_t i = all.size();
    c.layout.parameter_server.servers = c.layout.dp;
    if (i % 3 == 1) c.train.precision = Precision::kBf16;
    if (i % 3 == 2) c.train.clip_norm = 1;
    c.name += " served " + std::string(name_of(c.train.precision));
    all.push_back(std::move(c));
  }
  return all;
}

TEST_CASE("parameter server: peak, classes and wire bytes of the plan equal its replay") {
  const std::vector<Case> cases = served_cases();
  CHECK(cases.size() == 1512);
  for (const Case& c : cases) testing::require_equal(c);
}

TEST_CASE("workers apart: what servers keep of their own and what is sent equal their replay") {
  int number = 0;
  for (Case& c : served_cases()) {
    if (c.layout.tp > 1 || c.layout.pp > 1 || c.model.tied_embeddings) continue;
    c.layout.parameter_server.staleness = number++ % 3;
    c.layout.overlap = true;
    c.train.grad_norm = false;
    c.train.clip_norm = 0;
    REQUIRE(check(c).ok());
    testing::require_equal(c, number % 4 == 0);
  }
  CHECK(number == 36);
}

/// A model whose parameters every number of ranks divides, so that nothing is padded.
Case even_case(int dp) {
  Case c;
  c.model = {.name = "even",
             .family = Family::kLlama,
             .layers = 2,
             .hidden = 128,
             .heads = 4,
             .kv_heads = 4,
             .head_dim = 32,
             .ffn = 256,
             .vocab = 256};
  c.train.seq_len = 8;
  c.layout.dp = c.layout.parameter_server.servers = dp;
  return c;
}

TEST_CASE("each worker pushes and pulls its parameters less its own slice, and moments are the servers'") {
  const int64_t psi = parameter_count(even_case(2).model);
  const int64_t alone = standing_bytes(plan_of(even_case(2)), 0, BufferClass::kParameter);
  for (const int dp : {2, 4, 8}) {
    const Case c = even_case(dp);
    const Plan plan = plan_of(c, true);
    const std::map<std::string, int64_t> sent = total_wire_bytes(plan);
    CHECK(sent.at("dp.grads") == 4 * psi * (dp - 1));  // over all ranks: Psi (N-1)/N each
    CHECK(sent.at("dp.parameters") == 4 * psi * (dp - 1));
    CHECK(standing_bytes(plan, 0, BufferClass::kParameter) == alone);
    CHECK(standing_bytes(plan, 0, BufferClass::kMoment) == 2 * alone / dp);
    Case apart = c;
    apart.layout.parameter_server.staleness = 1;
    const Plan own = plan_of(apart);
    CHECK(standing_bytes(own, 0, BufferClass::kMaster) == alone / dp);  // what is served
    CHECK(standing_bytes(own, 0, BufferClass::kBuffer) == alone / dp);  // and where its gradients are added up
    CHECK(total_wire_bytes(own).at("dp.grads") == 4 * psi * (dp - 1));
  }
}

TEST_CASE("a push and a pull go straight from rank to rank, whatever way collectives take") {
  for (const AlgorithmChoice choice : {AlgorithmChoice::kAuto, AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling}) {
    Case c = even_case(4);
    c.layout.collective_algorithm = choice;
    int exchanged = 0;
    const Plan plan = plan_of(c);
    for (const Segment& segment : plan.segments)
      for (const Step& step : segment.steps) {
        const Op* op = std::get_if<Op>(&step);
        const Collective* collective = op == nullptr ? nullptr : std::get_if<Collective>(&op->work);
        if (collective == nullptr || op->strategy != "parameter-server") continue;
        CHECK(collective->algorithm == Algorithm::kDirect);
        ++exchanged;
      }
    CHECK(exchanged > 0);
  }
}

TEST_CASE("what does not go with servers is refused with its reason") {
  const auto refused = [](int staleness, const std::function<void(Case&)>& change) {
    Case c = even_case(4);
    c.layout.parameter_server.staleness = staleness;
    REQUIRE(check(c).ok());
    change(c);
    const auto verdict = check(c);
    REQUIRE_FALSE(verdict.ok());
    CHECK_FALSE(verdict.error().hint.empty());
    return verdict.error().message;
  };
  CHECK(refused(-1, [](Case& c) { c.layout.parameter_server.servers = 2; }) ==
        "parameter_server.servers=2 with dp=4: each worker's rank serves a slice, so that all have one program");
  CHECK(refused(-1, [](Case& c) { c.layout.dp = 1; }) == "parameter_server.servers=4 with dp=1: there is one worker");
  CHECK(refused(-1, [](Case& c) { c.layout.zero = 1; }) ==
        "parameter_server.servers=4 with zero=1: servers own the optimizer's state already");
  CHECK(refused(-1, [](Case& c) { c.layout.compression.kind = CompressionKind::kInt8; }) ==
        "parameter_server.servers=4 with compression.kind=int8: what is compressed is an all-reduce");
  CHECK(refused(-1, [](Case& c) { c.layout.parameter_server.staleness = -2; }) ==
        "parameter_server.servers=4 parameter_server.staleness=-2");
  CHECK(refused(-1, [](Case& c) { c.backend = BackendKind::kCuda, c.transport = TransportKind::kNccl; }) ==
        "parameter_server.servers=4 with transport=nccl, which moves data by a way of its own");
  const std::string apart = "parameter_server.staleness=1 with ";
  const std::string of_all = ": it is found from all gradients of a step, and servers apply them as they arrive";
  CHECK(refused(1, [](Case& c) { c.layout.tp = 2; }) ==
        apart + "tp=2: a worker of several ranks would pull values of several versions");
  CHECK(refused(1, [](Case& c) { c.layout.pp = 2, c.layout.schedule = Schedule::kAfab; }) ==
        apart + "pp=2: a worker of several ranks would pull values of several versions");
  CHECK(refused(1, [](Case& c) { c.train.clip_norm = 1; }) == apart + "clip_norm" + of_all);
  CHECK(refused(1, [](Case& c) { c.train.grad_norm = true; }) == apart + "grad_norm" + of_all);
  CHECK(refused(1, [](Case& c) { c.train.precision = Precision::kFp16; }) == apart + "precision=fp16" + of_all);
  CHECK(refused(1, [](Case& c) { c.train.guard.nonfinite = GuardAction::kSkip; }) == apart + "guard" + of_all);
  CHECK(refused(1, [](Case& c) { c.model.tied_embeddings = true; }) ==
        apart + "tied embeddings: the table's gradient is a sum of two");
  CHECK(refused(1, [](Case& c) { c.layout.offload.activations = OffloadTo::kCpu; }) ==
        apart + "offload=activations=cpu: what moves is timed by the steps of one rank");
  CHECK(refused(1, [](Case& c) { c.layout.overlap = false; }) == apart + "overlap=false: a push never waits");
  CHECK(refused(1, [](Case& c) { c.checkpoint.save_every = 5; }) ==
        apart + "checkpoint: there is no moment at which all ranks have made the same steps");
}

TEST_CASE("parameters that no number of servers divides are padded, never refused") {
  for (const int dp : {3, 5, 7}) {
    Case c = even_case(dp);
    c.model.hidden = 20;
    c.model.ffn = 12;
    c.model.vocab = 28;
    testing::require_equal(c, true);
  }
}

}  // namespace
}  // namespace shardlab::testing
