// Compressed gradients from the configuration: the sizes of the literature, with padding, blocks and messages put back in.
//
// Formula, of a bucket of n elements over N ranks, b bits an element, blocks of at most 256 with a scale of 4 bytes:
//   bf16, int8   errors 4 n (1 + 1/N); sent by the group: (N - 1) (n b / 8 + 4 N blocks) twice, in an all-to-all and an all-gather
//                (an all-to-all by halving and doubling sends each part as often as its way has bits: N/2 log2 N parts in place of
//                N - 1)
//                under ZeRO-1 and 2 the all-to-all alone, and errors 4 n
//   top-k        errors 4 n; sent: (N - 1) N k (4 + 4)
//   random-k     errors 4 n; sent: 2 (N - 1) 4 k
//   one-bit-adam after its warm-up, n a multiple of 8 N: as int8 with b = 1 and one scale a slice
//   powersgd     of a matrix [R, C] at rank r: errors 4 R C, basis 4 r C; sent: 2 (N - 1) 4 r (R + C). Of vectors what plain data
//                parallelism sends
// Units: bytes.
// Source: Wang et al., "ZeRO++" (2023), section 3.3; Stich et al., "Sparsified SGD with Memory" (2018); Vogels et al., "PowerSGD"
// (2019); Tang et al., "1-bit Adam" (2021).
#include <algorithm>
#include <bit>
#include <cmath>

#include "simulator/closed_form_parts.h"

namespace shardlab::simulator::forms {
namespace {

/// Scratch of a tree over the blocks of `ranks` parts: the blocks, and their addresses.
int64_t tree_workspace(int64_t ranks, int64_t block) { return held(ranks * block) + aligned(8 * ranks); }

CompressionForm quantised(const Case& c, const State& state) {
  const Compression& k = c.layout.compression;
  const int64_t n = c.layout.dp, bits = k.kind == CompressionKind::kBf16 ? 16 : sends_signs(c) ? 1 : k.bits;
  const bool doubling = !c.canonical && c.layout.collective_algorithm == AlgorithmChoice::kHalvingDoubling;
  // Parts that an all-to-all of a buffer of N parts sends, over all ranks: each of N (N - 1) once, or over log2 N hops half of all.
  const int64_t exchanged = doubling ? n * n / 2 * (std::bit_width(static_cast<uint64_t>(n)) - 1) : n * (n - 1);
  CompressionForm form;
  int64_t most = 0;
  for (const BucketForm& b : state.buckets) {
    const int64_t slice = b.elements / n, blocks = bits == 16 ? 0 : bits == 1 ? 1 : (slice + kScaleBlock - 1) / kScaleBlock;
    form.errors += held(b.elements) + held(slice);
    form.messages += blocks > 0 ? 2 * held(n * blocks) : 0;
    form.sent += (exchanged + n * (n - 1)) * (slice * bits / 8 + 4 * blocks);
    most = std::max(most, b.elements);
  }
  form.messages += 2 * aligned(most * bits / 8);
  form.workspace = tree_workspace(n, std::max<int64_t>(2, kBlock / n / 2 * 2));
  return form;
}

/// Under ZeRO-1 and ZeRO-2: one leg, and an error of whole gradients.
CompressionForm scattered(const Case& c, const State& state) {
  const Compression& k = c.layout.compression;
  const int64_t n = c.layout.shard_ranks(), bits = k.kind == CompressionKind::kBf16 ? 16 : k.bits;
  const bool doubling = !c.canonical && c.layout.collective_algorithm == AlgorithmChoice::kHalvingDoubling;
  const int64_t exchanged = doubling ? n * n / 2 * (std::bit_width(static_cast<uint64_t>(n)) - 1) : n * (n - 1);
  CompressionForm form;
  int64_t most = 0;
  for (const BucketForm& b : state.buckets) {
    const int64_t slice = b.elements / n, blocks = bits == 16 ? 0 : (slice + kScaleBlock - 1) / kScaleBlock;
    form.errors += held(b.elements);
    form.sent += exchanged * (slice * bits / 8 + 4 * blocks);
    most = std::max(most, b.elements);
    form.messages += 2 * held(n * blocks);
  }
  form.messages += 2 * aligned(most * bits / 8);
  form.sent *= c.layout.replicas();
  form.workspace = tree_workspace(n, std::max<int64_t>(2, kBlock / n / 2 * 2));
  return form;
}

CompressionForm sparse(const Case& c, const State& state) {
  const bool top = c.layout.compression.kind == CompressionKind::kTopK;
  const int64_t n = c.layout.dp, rows = top ? n : 1;
  CompressionForm form;
  int64_t most = 0;
  for (const BucketForm& b : state.buckets) {
    const auto share = static_cast<int64_t>(std::ceil(c.layout.compression.k * static_cast<double>(b.elements)));
    const int64_t k = std::max<int64_t>(1, std::min(b.elements, share));
    form.errors += held(b.elements);
    form.messages += held(rows * k);
    form.sent += top ? (n - 1) * n * k * 8 : 2 * (n - 1) * k * 4;
    most = std::max(most, k);
  }
  form.messages += held(rows * most);
  const int64_t scatter = tree_workspace(rows, std::max<int64_t>(1, kBlock / rows)) + aligned(8 * rows);
  form.workspace = top ? scatter : std::max(scatter, held(kBlock));
  return form;
}

struct Matrix {
  int64_t rows, columns;
};

/// The matrices whose gradients a stage reduces by themselves, on ranks that hold them whole. A table tied on one stage has two
/// gradients, which are added first unless canonical.
std::vector<Matrix> matrices_of(const Case& c, const Part& part) {
  const Model& m = c.model;
  const int64_t h = m.hidden;
  std::vector<Matrix> all;
  for (int64_t layer = 0; layer < part.layers; ++layer)
    all.insert(all.end(), {{m.qkv_rows(), h}, {h, m.heads * m.head_dim}, {m.up_rows(), h}, {h, m.ffn}});
  if (part.first) all.push_back({m.vocab, h});
  if (part.first && !m.is_llama()) all.push_back({m.max_positions, h});
  const bool added_early = m.tied_embeddings && part.first && !c.canonical;
  if (part.last && !added_early) all.push_back({m.vocab, h});
  return all;
}

/// Scratch of a canonical product over k elements.
int64_t product_workspace(int64_t k) {
  return held(8 * k) + held(std::clamp<int64_t>((int64_t{1} << 18) / k / 64 * 64, 64, 512) * k);
}

CompressionForm low_rank(const Case& c, const State& state, const Part& part) {
  const int64_t n = c.layout.dp;
  CompressionForm form;
  int64_t left = 0, right = 0, plain = state.reduced;
  for (const Matrix& m : matrices_of(c, part)) {
    const int64_t r = std::min({int64_t{c.layout.compression.rank}, m.rows, m.columns});
    form.errors += held(m.rows * m.columns) + held(r * m.columns);
    form.sent += 2 * (n - 1) * 4 * r * (m.rows + m.columns);
    plain -= m.rows * m.columns;
    left = std::max(left, m.rows * r);
    right = std::max(right, m.columns * r);
    const int64_t projection = held(std::min<int64_t>(m.rows, 128) * std::min<int64_t>(r, 64)) + product_workspace(m.columns);
    form.workspace = std::max({form.workspace, aligned(8 * m.rows * r), projection});  // which is canonical in either mode
    if (c.canonical) form.workspace = std::max({form.workspace, product_workspace(m.rows), product_workspace(r)});
  }
  form.messages = 2 * held(left) + held(right);
  form.sent += 2 * (n - 1) * 4 * plain;
  return form;
}

}  // namespace

namespace {

/// A GPU's kernels: counts of the digits of each span of 8192 elements that a selection looks at, a basis in fp64, a correction.
int64_t device_workspace(const Case& c, const State& state, const Part& part) {
  const Compression& k = c.layout.compression;
  int64_t most = 0;
  switch (k.kind) {
    case CompressionKind::kTopK:
    case CompressionKind::kRandomK:
      for (const BucketForm& b : state.buckets) most = std::max(most, lent(256 + (b.elements + 8191) / 8192 * 64));
      return most;
    case CompressionKind::kPowerSgd:
      for (const Matrix& m : matrices_of(c, part))
        most = std::max(most, lent(8 * m.rows * std::min({int64_t{k.rank}, m.rows, m.columns})));
      return most;
    case CompressionKind::kOneBitAdam: return lent(4);
    default: return 0;
  }
}

CompressionForm any_device(const Case& c, const State& state, const Part& part) {
  switch (c.layout.compression.kind) {
    case CompressionKind::kBf16:
    case CompressionKind::kInt8:
    case CompressionKind::kOneBitAdam: return c.layout.zero > 0 ? scattered(c, state) : quantised(c, state);
    case CompressionKind::kTopK:
    case CompressionKind::kRandomK: return sparse(c, state);
    case CompressionKind::kPowerSgd: return low_rank(c, state, part);
    default: return {};
  }
}

}  // namespace

CompressionForm compression_of(const Case& c, const State& state, const Part& part) {
  if (state.buckets.empty()) return {};
  CompressionForm form = any_device(c, state, part);
  if (c.backend == "cuda") form.workspace = device_workspace(c, state, part);
  return form;
}

}  // namespace shardlab::simulator::forms
