// What the papers say of memory and messages, evaluated from the configuration, against the plan of every case of the grid.
#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "plan/collective_steps.h"
#include "plan/memory.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/laws/replay.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::legal_cases;
using testing::sample_of;

/// Elements that a rank of a stage holds of a model cut by tp, and how many tensors they are.
struct Elements {
  int64_t count = 0, tensors = 0;
};
Elements elements_of(const Case& c, int64_t layers, bool first, bool last) {
  const Model& m = c.model;
  const int64_t t = c.layout.tp, h = m.hidden, norm = m.is_llama() ? h : 2 * h;
  Elements n;
  const auto add = [&](int64_t times, int64_t elements) { n.count += times * elements, n.tensors += times; };
  for (const int64_t rows : {m.qkv_rows(), m.up_rows()}) {
    add(layers, rows / t * h);
    if (!m.is_llama()) add(layers, rows / t);
  }
  for (const int64_t columns : {m.heads * m.head_dim, m.ffn}) {
    add(layers, h * columns / t);
    if (!m.is_llama()) add(layers, h);
  }
  add(2 * layers, norm);
  if (first) add(1, m.vocab / t * h);
  if (first && !m.is_llama()) add(1, m.max_positions * h);
  if (last) add(1, norm);
  if (last && !(first && m.tied_embeddings)) add(1, m.vocab / t * h);
  return n;
}

/// Most micro-batches between the first unit's forward and its backward, counted in the program.
int64_t most_in_flight(const Plan& plan, const Role& role) {
  std::set<int> live;
  size_t most = 0;
  for (const Item& item : role.program) {
    const Call* call = std::get_if<Call>(&item);
    if (call == nullptr || call->layer < 0) continue;
    const std::string& name = plan.segments[call->segment.index()].name;
    if (name.starts_with("layer.F")) live.insert(call->micro_batch);
    most = std::max(most, live.size());
    if (name.starts_with("layer.B")) live.erase(call->micro_batch);
  }
  return static_cast<int64_t>(most);
}

TEST_CASE("the grid is legal and covers every choice") {
  const std::vector<Case>& cases = legal_cases();
  CHECK(cases.size() == 8568);
  std::set<std::string> names;
  for (const Case& c : cases) {
    INFO(c.name);
    REQUIRE(check(c).ok());
    names.insert(c.name);
  }
  CHECK(names.size() == cases.size());
}

TEST_CASE("the norm is not added over a number of stages that halving-doubling cannot serve") {
  Case c;
  for (const Case& legal : legal_cases())
    if (legal.layout.pp == 3 && legal.layout.dp == 2 && legal.train.grad_norm && !legal.canonical) c = legal;
  REQUIRE(c.layout.pp == 3);
  c.layout.collective_algorithm = AlgorithmChoice::kRing;
  CHECK(check(c).ok());
  c.layout.collective_algorithm = AlgorithmChoice::kHalvingDoubling;
  const Result<void> refused = check(c);
  REQUIRE(!refused.ok());
  CHECK(refused.error().message.find("pp=3") != std::string::npos);
  c.train.grad_norm = false;
  CHECK(check(c).ok());
}

TEST_CASE("peak, classes and wire bytes of the plan equal its replay") {
  for (const Case& c : sample_of(legal_cases(), 3)) {
    INFO(c.name);
    REQUIRE(difference_from_replay(plan_of(c)) == "");
  }
}

/// Layers of a stage: the first stages have one more where they do not divide.
int64_t layers_of(const Case& c, int64_t stage) {
  return c.model.layers / c.layout.pp + (stage < c.model.layers % c.layout.pp ? 1 : 0);
}

TEST_CASE("a stage holds 4 Psi of parameters and 8 Psi of moments, or 1/N of them, and its micro-batches in flight") {
  // ZeRO (2020), sections 3.1 and 5. Slices are padded to whole elements a rank, and every buffer to the alignment.
  // In flight: 1f1b min(m, p - stage), GPipe m. Narayanan et al. (2021), section 2.2.
  for (const Case& c : sample_of(legal_cases(), 3)) {
    const Plan plan = plan_of(c);
    INFO(c.name);
    for (int64_t stage = 0; stage < c.layout.pp; ++stage) {
      const Elements n = elements_of(c, layers_of(c, stage), stage == 0, stage == c.layout.pp - 1);
      const int64_t shards = c.layout.shard_ranks(), padding = n.tensors * (kAlignment + 4 * shards);
      const auto holds = [&](BufferClass cls, int64_t of_an_element, bool cut) {
        const int64_t held = standing_bytes(plan, static_cast<int>(stage), cls);
        const int64_t least = of_an_element * n.count / (cut ? shards : 1);
        REQUIRE(held >= least);
        REQUIRE(held <= least + padding * of_an_element / 4);
      };
      holds(BufferClass::kParameter, 4, c.layout.zero == 3);
      if (c.train.optimizer == Optimizer::kAdamW) holds(BufferClass::kMoment, 8, c.layout.zero > 0);
      if (c.train.optimizer == Optimizer::kLion) holds(BufferClass::kMoment, 4, c.layout.zero > 0);
      const int64_t m = c.train.grad_accumulation;
      const int64_t flying = c.layout.pp == 1 ? 1 : c.layout.schedule == Schedule::kAfab ? m : std::min(m, c.layout.pp - stage);
      REQUIRE(most_in_flight(plan, plan.roles[static_cast<size_t>(stage)]) == flying);
    }
  }
}

TEST_CASE("Lion keeps one of AdamW's two moments; moments in 8 bits are 2 bytes an element and 8 a block of 2048, to the byte") {
  // Chen et al. (2023), section 1; Dettmers et al. (2022), section 2. AdamW's plan says what is updated together: blocks are cut from it.
  int compared = 0;
  for (Case c : sample_of(legal_cases(), 5)) {
    INFO(c.name);
    const auto with = [&](Optimizer optimizer) {
      c.train.optimizer = optimizer;
      return plan_of(c);
    };
    const Plan wide = with(Optimizer::kAdamW), signs = with(Optimizer::kLion), coded = with(Optimizer::kAdamW8bit);
    for (const Plan* plan : {&signs, &coded}) REQUIRE(total_wire_bytes(*plan) == total_wire_bytes(wide));
    for (size_t role = 0; role < wide.roles.size(); ++role) {
      int64_t one = 0, eight_bits = 0;
      for (const Buffer& b : wide.roles[role].buffers) {
        if (b.kind != BufferClass::kMoment || b.view) continue;
        const int64_t n = b.type.shape.elements(), blocks = (n + 2047) / 2048;
        one += aligned(4 * n);
        eight_bits += aligned(n) + aligned(4 * blocks);
      }
      const auto held = [&](const Plan& plan) { return standing_bytes(plan, static_cast<int>(role), BufferClass::kMoment); };
      REQUIRE(held(wide) == one);
      REQUIRE(2 * held(signs) == one);
      REQUIRE(held(coded) == eight_bits);
      ++compared;
    }
  }
  REQUIRE(compared > 50);
}

TEST_CASE("what is sent: e b s h four times a layer over tp and once a boundary over pp, Psi over dp") {
  // Shoeybi et al. (2019), section 3; Narayanan et al. (2021), section 3.2; ZeRO (2020), section 7. An all-reduce of n bytes over g
  // ranks sends 2 (g - 1) n together, a reduce-scatter or all-gather (g - 1) n.
  for (const Case& c : sample_of(legal_cases(), 3)) {
    INFO(c.name);
    const std::map<std::string, int64_t> wire = total_wire_bytes(plan_of(c));
    const auto sent = [&](const std::string& comm) { return wire.contains(comm) ? wire.at(comm) : 0; };
    const Layout& l = c.layout;
    const int64_t m = c.train.grad_accumulation, tokens = c.train.micro_batch * c.train.seq_len,
                  message = 4 * tokens * c.model.hidden;
    // Full recompute repeats one of a layer's two all-reduces of forward; the loss takes three numbers a token.
    const int64_t each = c.model.layers * (l.recompute == Recompute::kFull ? 5 : 4) + 2;
    REQUIRE(sent("tp") == l.dp * m * 2 * (l.tp - 1) * (each * message + 3 * 4 * tokens));
    int64_t hops = 0;
    for (const char* comm : {"pp.fwd.even", "pp.fwd.odd", "pp.bwd.even", "pp.bwd.odd"}) hops += sent(comm);
    REQUIRE(hops == 2 * (l.pp - 1) * l.dp * l.tp * m * message);
    Elements all;
    for (int64_t stage = 0; stage < l.pp; ++stage) {
      const Elements n = elements_of(c, layers_of(c, stage), stage == 0, stage == l.pp - 1);
      all.count += n.count, all.tensors += n.tensors;
    }
    if (l.replicas() > 1 || l.dp == 1) continue;
    const int64_t each_hop = 4 * (l.dp - 1) * l.tp, volume = each_hop * all.count, padding = each_hop * l.dp * all.tensors;
    const int64_t scatters = l.zero == 0 ? 2 : l.zero == 1 ? 1 : m;
    // A tied table on one stage has two gradients, which ZeRO-2 and 3 and canonical mode reduce apart.
    const int64_t table =
        c.model.tied_embeddings && (l.zero >= 2 || c.canonical) ? each_hop * c.model.vocab / l.tp * c.model.hidden : 0;
    REQUIRE(sent("dp.grads") >= scatters * volume);
    REQUIRE(sent("dp.grads") <= scatters * (volume + padding + table));
    const int64_t gathers = l.zero == 0 ? 0 : l.zero < 3 ? 1 : (l.fsdp.reshard ? 2 : 1) * m;
    REQUIRE(sent("dp.parameters") >= (l.zero == 3 ? 1 : gathers) * volume);
    REQUIRE(sent("dp.parameters") <= gathers * (volume + padding + table));
  }
}

TEST_CASE("what a layer keeps, by kind, is what its forward leaves allocated") {
  for (const Case& c : legal_cases()) {
    if (c.layout.recompute == Recompute::kFull || c.layout.dp > 1 || c.layout.pp > 1) continue;
    INFO(c.name);
    const Plan plan = plan_of(c);
    // Korthikanti et al. (2022), section 4.1, in 4 bytes an element; the s x s scores are never kept.
    const Model& m = c.model;
    const auto of = [&](int64_t a_token) { return aligned(4 * c.train.micro_batch * c.train.seq_len * a_token); };
    const int64_t t = c.layout.tp, stream = of(m.hidden), statistics = of(m.is_llama() ? 1 : 2);
    CHECK(kept_by_layer(plan) == std::map<std::string, int64_t>{{"attn.norm.y", stream},
                                                                {"attn.norm.stats", statistics},
                                                                {"qkv", of(m.qkv_rows() / t)},
                                                                {"o", of(m.heads * m.head_dim / t)},
                                                                {"lse", of(m.heads / t)},
                                                                {"x1", stream},
                                                                {"mlp.norm.y", stream},
                                                                {"mlp.norm.stats", statistics},
                                                                {"u", of(m.up_rows() / t)},
                                                                {"a", of(m.ffn / t)},
                                                                {"y", stream}});
  }
}

TEST_CASE("a group's wire bytes depend neither on the algorithm nor on how evenly it is cut") {
  for (const int size : {2, 3, 4, 5, 8})
    for (const int64_t elements : {1, 7, 64, 1001})
      for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kHalvingDoubling, Algorithm::kDirect}) {
        if (algorithm == Algorithm::kHalvingDoubling && (size & (size - 1)) != 0) continue;
        for (const auto& [kind, passes] :
             {std::pair{CollectiveKind::kAllReduce, 2}, {CollectiveKind::kReduceScatter, 1}, {CollectiveKind::kAllGather, 1}}) {
          int64_t sent = 0;
          for (int rank = 0; rank < size; ++rank) sent += sent_elements(kind, algorithm, elements, size, rank);
          CAPTURE(size, elements, static_cast<int>(algorithm), static_cast<int>(kind));
          CHECK(sent == passes * (size - 1) * elements);
        }
      }
}

}  // namespace
}  // namespace shardlab::testing
