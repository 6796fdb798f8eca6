// ZeRO-3's gathers and scatters from the configuration, and what ZeRO++ makes of them.
//
// Formula, of a bucket of n elements over N ranks in D nodes of G, e bytes an element, B = N blocks of at most 256 elements in all:
//   gathers    each sends (N - 1) e n; with quantised weights (N - 1) (n + 4 B); backward's with a secondary shard D (G - 1) e n
//   scatters   with quantised gradients (N - 1) (n / 2 + 4 B) a micro-batch; in two hops D (G - 1) (n / 2 + 4 B) within nodes and
//              (D - 1) (n / 2 + 4 B) between them (halving and doubling sends a part as often as its way has bits)
//   memory     a secondary shard e n / G of each bucket that backward gathers; codes and scales of the largest bucket: n + 4 B of
//              parameters, twice n / 2 of gradients, and twice 4 B of each bucket
// Units: bytes.
// Source: Wang et al., "ZeRO++" (2023), sections 3.1 to 3.3.
#include <algorithm>
#include <bit>

#include "simulator/closed_form_parts.h"

namespace shardlab::simulator::forms {
namespace {

int64_t scales_of(const BucketForm& b) { return b.ranks * ((b.elements / b.ranks + kScaleBlock - 1) / kScaleBlock); }

/// Bytes that the n ranks of a group send together in an all-to-all of which each rank holds `bytes`.
int64_t exchanged(const Case& c, int64_t n, int64_t bytes) {
  const bool doubling = !c.canonical && c.layout.collective_algorithm == AlgorithmChoice::kHalvingDoubling;
  return doubling ? n / 2 * (std::bit_width(static_cast<uint64_t>(n)) - 1) * bytes : (n - 1) * bytes;
}

void add_gathers(const Case& c, const State& state, const Part& part, int64_t stage, ZeroPlusPlusForm& form) {
  const ZeroPlusPlus& z = c.layout.zero_plus_plus;
  const int64_t n = c.layout.shard_ranks(), width = Widths(c).value;
  const std::vector<GatherTimes> times = gathers_of(c, state, part, stage);
  int64_t codes = 0, scales = 0;
  for (size_t i = 0; i < times.size(); ++i) {
    const BucketForm& b = state.buckets[i];
    const int64_t from_node = z.secondary > 0 ? times[i].backward : 0;
    const int64_t bytes = z.weights ? b.elements + 4 * scales_of(b) : width * b.elements;
    form.gathered += (times[i].all - from_node) * (n - 1) * bytes;
    if (from_node > 0) {
      form.gathered_in_node += from_node * (n / z.secondary) * (z.secondary - 1) * width * b.elements;
      form.messages += held(b.elements / z.secondary, width);
    }
    if (is_shared(b, part)) continue;
    codes = std::max(codes, b.elements);
    scales = std::max(scales, scales_of(b));
  }
  if (!z.weights) return;
  form.messages += held(codes, 1) + held(scales);
  form.gather_workspace = width < 4 ? held(kBlock) : 0;
}

void add_scatters(const Case& c, const State& state, ZeroPlusPlusForm& form) {
  const int64_t n = c.layout.shard_ranks(), g = c.layout.zero_plus_plus.secondary, nodes = g > 0 ? n / g : 0;
  int64_t codes = 0;
  for (const BucketForm& b : state.buckets) {
    const int64_t bytes = b.elements / 2 + 4 * scales_of(b);
    codes = std::max(codes, b.elements / 2);
    form.messages += 2 * held(scales_of(b));
    if (g == 0) {
      form.scattered += exchanged(c, n, bytes);
    } else {
      form.scattered_in_node += nodes * exchanged(c, g, bytes);
      form.scattered_across += g * exchanged(c, nodes, bytes / g);
    }
  }
  if (codes == 0) return;
  form.messages += 2 * held(codes, 1);
  const auto sum = [](int64_t ranks) {  // a tree over the blocks of so many parts: the blocks, and their addresses
    return held(ranks * std::max<int64_t>(2, kBlock / ranks / 2 * 2)) + aligned(8 * ranks);
  };
  form.scatter_workspace = g == 0 ? sum(n) : std::max(sum(g), sum(nodes));
}

}  // namespace

ZeroPlusPlusForm zero_plus_plus_of(const Case& c, const State& state, const Part& part, int64_t stage) {
  ZeroPlusPlusForm form;
  if (c.layout.zero != 3) return form;
  add_gathers(c, state, part, stage, form);
  if (c.layout.zero_plus_plus.gradients) add_scatters(c, state, form);
  if (c.backend == "cuda") form.scatter_workspace = form.gather_workspace = 0;  // a GPU's kernels need none
  return form;
}

}  // namespace shardlab::simulator::forms
