#include "tests/laws/grid.h"

#include <fmt/format.h>

#include <span>

#include "plan/base/hash.h"
#include "tests/deal.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

/// Sizes chosen so that rounding matters: rows that are no multiple of 16 elements, buckets that no group divides, feed-forward
/// layers narrower than the residual stream, heads that together are wider or narrower than it. Every width is a multiple of 4, for
/// tp 4.
struct Shape {
  int64_t hidden, heads, kv_heads, head_dim, ffn, vocab, seq_len;
};
constexpr Shape kShapes[] = {
    {32, 4, 4, 8, 128, 64, 16},  // as in textbooks
    {12, 4, 4, 2, 20, 36, 7},    // nothing is a multiple of 64 bytes
    {20, 4, 4, 14, 12, 28, 5},   // wide heads, a narrow feed-forward layer
    {36, 8, 4, 2, 4, 1000, 3},   // the logits are most of it; hardly any feed-forward layer
    {64, 8, 8, 2, 8, 12, 33},    // the residual stream is most of it
    {4, 8, 4, 6, 52, 20, 11},    // grouped queries, wider than the residual stream
};

/// Deals values from short lists, each draw independent of the last.
class Dealer {
 public:
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[draw(values.size())];
  }
  const Shape& shape() { return kShapes[draw(std::size(kShapes))]; }

 private:
  size_t draw(size_t n) { return mix(drawn_++) % n; }
  uint64_t drawn_ = 0;
};

/// Sets what does not change the shape of a plan's program but its sizes.
void deal(Dealer& dealer, Case& c) {
  const Shape& shape = dealer.shape();
  Model& m = c.model;
  m.hidden = shape.hidden;
  m.heads = shape.heads;
  m.kv_heads = m.is_llama() ? shape.kv_heads : shape.heads;
  m.head_dim = shape.head_dim;
  m.ffn = shape.ffn;
  m.vocab = shape.vocab;
  m.layers = c.layout.pp + dealer.of({0, 0, 1, 2, 3});
  m.max_positions = m.is_llama() ? 0 : shape.seq_len + dealer.of({0, 1, 5});
  Train& t = c.train;
  t.seq_len = shape.seq_len;
  t.grad_accumulation = dealer.of({1, 2, 3, 4, 5, 6, 7, 8, 9});
  t.micro_batch = dealer.of({1, 2, 3});
  t.dropout = dealer.of({0.0f, 0.1f});
  t.optimizer = dealer.of(
      {Optimizer::kAdamW, Optimizer::kSgd, Optimizer::kAdamW, Optimizer::kLion, Optimizer::kAdamW, Optimizer::kAdamW8bit});
  t.grad_norm = dealer.of({false, true});
  Layout& l = c.layout;
  l.overlap = dealer.of({false, true});
  l.bucket_bytes = dealer.of<int64_t>({0, 1, 200, 4096, 20000, 1 << 20});
  if (l.zero == 3) {
    l.bucket_bytes = 0;
    l.fsdp = {dealer.of({1, 1, 2, 3}), dealer.of({0, 1, 1, 2}), dealer.of({true, true, false})};
  }
  l.collective_algorithm =
      dealer.of({AlgorithmChoice::kAuto, AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling, AlgorithmChoice::kDirect});
  if (c.canonical) {  // binary trees over sequences, direct sums
    t.micro_batch = dealer.of({1, 2, 4});
    if (l.dp > 1)
      t.grad_accumulation = l.zero < 2             ? dealer.of({1, 2, 4, 8})
                            : l.shard_ranks() == 3 ? 1
                            : l.replicas() > 1     ? dealer.of({1, 2, 8})
                                                   : dealer.of({1, 2, 3, 4, 7, 8});
    l.collective_algorithm = AlgorithmChoice::kDirect;
  }
  if ((l.dp % 3 == 0 || (l.pp == 3 && t.grad_norm)) && l.collective_algorithm == AlgorithmChoice::kHalvingDoubling)
    l.collective_algorithm = AlgorithmChoice::kRing;
}

struct PipelineChoice {
  int stages;
  Schedule schedule;
};
constexpr PipelineChoice kPipelines[] = {{1, Schedule::kNone}, {2, Schedule::kAfab}, {2, Schedule::k1F1B}, {3, Schedule::kAfab},
                                         {3, Schedule::k1F1B}, {4, Schedule::kAfab}, {4, Schedule::k1F1B}};
struct DataChoice {
  int ranks, zero, hybrid = 0;
};
constexpr DataChoice kData[] = {{1, 0}, {2, 0}, {3, 0}, {4, 0}, {2, 1},    {3, 1},    {4, 1},    {2, 2},   {3, 2},
                                {4, 2}, {2, 3}, {3, 3}, {4, 3}, {4, 1, 2}, {6, 2, 3}, {6, 3, 2}, {8, 3, 4}};

std::vector<Case> dealt_cases() {
  std::vector<Case> cases;
  Dealer dealer;
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const bool tied : {false, true})
      for (const PipelineChoice& pipeline : kPipelines)
        for (const DataChoice& data : kData)
          for (const int tp : {1, 2, 4})
            for (const Recompute recompute : {Recompute::kNone, Recompute::kFull})
              for (const bool canonical : {false, false, true}) {
                Case c;
                c.model.family = family;
                c.model.tied_embeddings = tied;
                c.layout.pp = pipeline.stages;
                c.layout.schedule = pipeline.schedule;
                c.layout.dp = data.ranks;
                c.layout.zero = data.zero;
                c.layout.hybrid_shard = data.hybrid;
                c.layout.tp = tp;
                c.layout.recompute = recompute;
                c.canonical = canonical;
                deal(dealer, c);
                c.name = line_of(c);
                cases.push_back(std::move(c));
              }
  return cases;
}

}  // namespace

const std::vector<Case>& legal_cases() {
  static const std::vector<Case> cases = dealt_cases();
  return cases;
}

std::vector<Case> sample_of(const std::vector<Case>& cases, uint64_t sample) {
  std::vector<Case> taken;
  for (const Case& c : cases)
    if (mix(hash_text(c.name)) % dealt(1, sample) == 0) taken.push_back(c);
  return taken;
}

std::string line_of(const Case& c) {
  const Model& m = c.model;
  const Layout& l = c.layout;
  const Train& t = c.train;
  return fmt::format(
      "{}{} L{} h{} a{}/{} d{} f{} V{} s{} | dp{}/{} zero{} tp{} pp{} {} recompute={} bucket={}{} fsdp {} {}{} {} | m{} b{} "
      "{}{}{}{}",
      name_of(m.family), m.tied_embeddings ? " tied" : "", m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.ffn, m.vocab,
      t.seq_len, l.dp, l.hybrid_shard, l.zero, l.tp, l.pp, name_of(l.schedule), name_of(l.recompute), l.bucket_bytes,
      l.overlap ? " overlap" : "", l.fsdp.unit, l.fsdp.prefetch, l.fsdp.reshard ? "" : " kept", name_of(l.collective_algorithm),
      t.grad_accumulation, t.micro_batch, name_of(t.optimizer), t.dropout > 0 ? " dropout" : "", t.grad_norm ? " norm" : "",
      c.canonical ? " canonical" : "");
}

}  // namespace shardlab::testing
