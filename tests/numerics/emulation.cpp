#include "tests/numerics/emulation.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>

#include "plan/base/hash.h"
#include "plan/base/philox.h"
#include "tests/namespaces.h"
#include "tests/numerics/reference/order.h"

namespace shardlab::testing {
namespace {

constexpr int64_t kBlock = 256;

int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// The tree over the ranks of what read(rank) gives.
template <class Read>
float over_ranks(int64_t ranks, const Read& read) {
  return reference::tree<float>(ranks, read);
}

/// To the nearest number whose lower 16 bits are 0, ties to even.
float to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1)) & 0xffff0000u);
}

std::vector<float> sum_of(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> c(a.size());
  for (size_t i = 0; i < a.size(); ++i) c[i] = a[i] + b[i];
  return c;
}

}  // namespace

Emulation::Emulation(const Case& config)
    : config_(config),
      ranks_(config.layout.dp),
      parts_(config.layout.zero == 2 ? config.train.grad_accumulation : 1),
      sequences_(config.sequences_per_step()),
      trainer_(config.model, config.train, sequences_),
      part_(config.model, config.train, sequences_ / ranks_ / parts_) {
  fill_buckets();
}

/// From the last parameter of the model to the first, matrices and vectors apart.
void Emulation::fill_buckets() {
  const Compression& c = config_.layout.compression;
  const bool sliced = c.kind == CompressionKind::kBf16 || c.kind == CompressionKind::kInt8;
  EmulatedBucket open[2];
  const auto close = [&](EmulatedBucket& bucket) {
    if (bucket.parameters.empty()) return;
    const int64_t slice = (bucket.elements + ranks_ - 1) / ranks_;
    if (sliced)
      bucket.elements =
          rounded_up(bucket.elements, ranks_ * (c.kind == CompressionKind::kInt8 ? 2 * ((slice + kBlock - 1) / kBlock) : 1));
    const auto n = static_cast<size_t>(bucket.elements), ranks = static_cast<size_t>(ranks_);
    bucket.errors.assign(ranks, Vector(n));
    bucket.of_slices.assign(sliced && config_.layout.zero == 0 ? ranks : 0, Vector(n / ranks));
    buckets_.push_back(std::move(bucket));
    bucket = {};
  };
  for (size_t p = trainer_.values().size(); p-- > 0;) {
    const auto kind = trainer_.parameters()[p].kind;
    EmulatedBucket& bucket = open[kind == ModelParameter::Kind::kNormWeight || kind == ModelParameter::Kind::kBias];
    bucket.parameters.push_back(p);
    bucket.elements += static_cast<int64_t>(trainer_.values()[p].size());
    const bool alone = c.kind == CompressionKind::kPowerSgd && trainer_.parameters()[p].shape.size() == 2;
    if (alone || 4 * bucket.elements >= config_.layout.bucket_bytes) close(bucket);
  }
  for (EmulatedBucket& bucket : open) close(bucket);
  std::ranges::sort(buckets_, std::greater(), [](const EmulatedBucket& b) { return b.parameters.back(); });  // as they complete
}

float Emulation::step(std::span<const int32_t> tokens) {
  const float loss = trainer_.loss(tokens);
  part_.values() = trainer_.values();
  const auto share = static_cast<float>(ranks_ * parts_);  // a power of two: dividing by it rounds nothing
  std::vector<std::vector<Vector>> sums(buckets_.size());  // by bucket and part of the step
  for (int64_t part = 0; part < parts_; ++part) {
    std::vector<reference::Tensors<float>> by_rank;
    for (int64_t r = 0; r < ranks_; ++r) {
      const size_t rows = tokens.size() / static_cast<size_t>(ranks_ * parts_);
      by_rank.push_back(part_.gradients(tokens.subspan(static_cast<size_t>(part * ranks_ + r) * rows, rows)).gradients);
      for (auto& gradient : by_rank.back())
        for (float& g : gradient) g /= share;
    }
    for (size_t b = 0; b < buckets_.size(); ++b) {
      EmulatedBucket& bucket = buckets_[b];
      std::vector<Vector> flat(static_cast<size_t>(ranks_));
      for (size_t r = 0; r < flat.size(); ++r) {
        for (const size_t p : bucket.parameters) flat[r].insert(flat[r].end(), by_rank[r][p].begin(), by_rank[r][p].end());
        flat[r].resize(static_cast<size_t>(bucket.elements));
      }
      sums[b].push_back(reduce(bucket, b, std::move(flat)));
    }
  }
  reference::Tensors<float> reduced(trainer_.values().size());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Vector sum(sums[b].front().size());
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] = reference::tree<float>(parts_, [&](int64_t part) { return sums[b][static_cast<size_t>(part)][i]; });
    auto from = sum.begin();
    for (const size_t p : buckets_[b].parameters) {
      const auto to = from + static_cast<std::ptrdiff_t>(trainer_.values()[p].size());
      reduced[p].assign(from, to);
      from = to;
    }
  }
  trainer_.update(reduced);
  return loss;
}

auto Emulation::reduce(EmulatedBucket& bucket, size_t number, std::vector<Vector> gradients) -> Vector {
  std::vector<Vector> m;
  for (size_t r = 0; r < gradients.size(); ++r) m.push_back(sum_of(gradients[r], bucket.errors[r]));
  switch (config_.layout.compression.kind) {
    case CompressionKind::kBf16:
    case CompressionKind::kInt8: return reduce_quantised(bucket, m);
    case CompressionKind::kPowerSgd: return reduce_low_rank(bucket, m);
    default: return reduce_selected(bucket, number, m);
  }
}

namespace {

/// An orthonormal basis of the columns of p[rows, columns], from the left, each column twice; what its predecessors span is
/// replaced by the first unit vector of which enough is left.
void orthonormalise(std::vector<float>& p, int64_t rows, int64_t columns) {
  std::vector<std::vector<double>> basis;
  const auto dot = [&](const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) sum += a[static_cast<size_t>(i)] * b[static_cast<size_t>(i)];
    return sum;
  };
  const auto rest = [&](std::vector<double>& x) {
    for (int pass = 0; pass < 2; ++pass)
      for (const auto& b : basis) {
        const double share = dot(b, x);
        for (size_t i = 0; i < x.size(); ++i) x[i] -= share * b[i];
      }
    return std::sqrt(dot(x, x));
  };
  for (int64_t c = 0; c < columns; ++c) {
    std::vector<double> x;
    for (int64_t i = 0; i < rows; ++i) x.push_back(double{p[static_cast<size_t>(i * columns + c)]});
    const double before = std::sqrt(dot(x, x));
    double left = rest(x);
    for (size_t unit = 0; left <= 1e-6 * before && unit < x.size(); ++unit) {
      std::fill(x.begin(), x.end(), 0.0);
      x[unit] = 1;
      const double here = rest(x);
      if (here * here * static_cast<double>(rows) >= 0.5 * static_cast<double>(rows - c)) left = here + before;  // found
    }
    left = std::sqrt(dot(x, x));
    for (double& v : x) v /= left;
    basis.push_back(std::move(x));
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < columns; ++c)
      p[static_cast<size_t>(i * columns + c)] = static_cast<float>(basis[static_cast<size_t>(c)][static_cast<size_t>(i)]);
}

}  // namespace

auto Emulation::reduce_low_rank(EmulatedBucket& bucket, const std::vector<Vector>& m) -> Vector {
  const std::vector<int64_t>& shape = trainer_.parameters()[bucket.parameters.front()].shape;
  const auto summed = [&](const std::vector<Vector>& parts) {
    Vector sum(parts.front().size());
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] = over_ranks(ranks_, [&](int64_t r) { return parts[static_cast<size_t>(r)][i]; });
    return sum;
  };
  if (shape.size() != 2) return summed(m);  // a vector: plain, and no error
  const int64_t rows = shape[0], columns = shape[1], r = std::min({int64_t{config_.layout.compression.rank}, rows, columns});
  if (bucket.basis.empty()) {
    bucket.basis.resize(static_cast<size_t>(r * columns));
    for (int64_t i = 0; i < r; ++i) bucket.basis[static_cast<size_t>(i * columns + i)] = 1;
  }
  std::vector<Vector> left, right;
  for (const Vector& x : m) left.push_back(reference::linear<float>(x, bucket.basis, nullptr, rows, columns, r));
  Vector p = summed(left);
  orthonormalise(p, rows, r);
  for (const Vector& x : m) right.push_back(reference::linear_weight(x, p, rows, columns, r));
  bucket.basis = summed(right);
  const Vector sum = reference::linear_input(p, bucket.basis, rows, columns, r);
  const float share = 1.0f / static_cast<float>(ranks_);
  for (size_t rank = 0; rank < m.size(); ++rank)
    for (size_t i = 0; i < sum.size(); ++i) bucket.errors[rank][i] = m[rank][i] - share * sum[i];
  double most = 0, lost = 0;
  for (size_t i = 0; i < sum.size(); ++i) {
    double owed = double{sum[i]};
    for (size_t rank = 0; rank < m.size(); ++rank) {
      owed += double{bucket.errors[rank][i]} - double{m[rank][i]};
      most = std::max(most, std::abs(double{m[rank][i]}));
    }
    lost = std::max(lost, std::abs(owed));
  }
  largest_loss_ = std::max(largest_loss_, lost / most);
  return sum;
}

void Emulation::check_conserved(const Vector& m, const Vector& sent, const Vector& error) {
  for (size_t i = 0; i < m.size(); ++i) conserved_ = conserved_ && double{sent[i]} + double{error[i]} == double{m[i]};
}

auto Emulation::code(Vector& x, int64_t blocks) -> Vector {
  const Vector before = x;
  Vector error(x.size());
  const Compression& c = config_.layout.compression;
  const size_t block = c.kind == CompressionKind::kInt8 ? x.size() / static_cast<size_t>(blocks) : x.size();
  for (size_t first = 0; first < x.size(); first += block) {
    float most = 0;
    for (size_t i = first; i < first + block; ++i) most = std::max(most, std::abs(x[i]));
    const float levels = c.bits == 8 ? 127.0f : 7.0f, scale = most / levels;
    for (size_t i = first; i < first + block; ++i) {
      if (c.kind == CompressionKind::kBf16)
        x[i] = to_bf16(x[i]);
      else
        x[i] = scale == 0 ? 0 : std::clamp(std::nearbyint(x[i] / scale), -levels, levels) * scale;
      error[i] = before[i] - x[i];
    }
  }
  check_conserved(before, x, error);
  return error;
}

auto Emulation::reduce_quantised(EmulatedBucket& bucket, const std::vector<Vector>& m) -> Vector {
  const int64_t slice = bucket.elements / ranks_, blocks = (slice + kBlock - 1) / kBlock;
  std::vector<Vector> sent = m;
  for (size_t r = 0; r < m.size(); ++r) bucket.errors[r] = code(sent[r], ranks_ * blocks);
  Vector sum;
  for (int64_t owner = 0; owner < ranks_; ++owner) {
    const auto o = static_cast<size_t>(owner);
    Vector part(static_cast<size_t>(slice));
    for (int64_t i = 0; i < slice; ++i)
      part[static_cast<size_t>(i)] =
          over_ranks(ranks_, [&](int64_t r) { return sent[static_cast<size_t>(r)][static_cast<size_t>(owner * slice + i)]; });
    if (!bucket.of_slices.empty()) {  // a second leg, to ranks that want all of it
      part = sum_of(part, bucket.of_slices[o]);
      bucket.of_slices[o] = code(part, blocks);
    }
    sum.insert(sum.end(), part.begin(), part.end());
  }
  return sum;
}

auto Emulation::reduce_selected(EmulatedBucket& bucket, size_t number, const std::vector<Vector>& m) -> Vector {
  const Compression& c = config_.layout.compression;
  const auto n = static_cast<size_t>(bucket.elements);
  const auto k = static_cast<size_t>(std::max(1.0, std::ceil(c.k * static_cast<double>(n))));
  // docs: a kernel's draws are keyed by seed, step and its label, in which the bucket's number stands.
  const uint64_t hash = mix(mix(hash_text("select.bucket" + std::to_string(number))) + 0);
  const RandomKey key{config_.train.seed, RandomUse::kShuffle, static_cast<uint32_t>(hash & 0xffffff),
                      static_cast<uint32_t>(trainer_.steps())};
  std::vector<Vector> sent;
  for (size_t r = 0; r < m.size(); ++r) {
    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, [&](size_t a, size_t b) {
      if (c.kind == CompressionKind::kTopK) return std::abs(m[r][a]) > std::abs(m[r][b]);
      return random_bits(key, a) < random_bits(key, b);
    });
    Vector values(n);
    bucket.errors[r] = m[r];
    for (size_t i = 0; i < k; ++i) {
      values[order[i]] = m[r][order[i]];
      bucket.errors[r][order[i]] = 0;
    }
    check_conserved(m[r], values, bucket.errors[r]);
    sent.push_back(std::move(values));
  }
  Vector sum(n);
  for (size_t i = 0; i < n; ++i) sum[i] = over_ranks(ranks_, [&](int64_t r) { return sent[static_cast<size_t>(r)][i]; });
  return sum;
}

}  // namespace shardlab::testing
