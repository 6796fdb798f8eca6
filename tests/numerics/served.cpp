#include "tests/numerics/served.h"

#include <algorithm>
#include <functional>

#include "tests/namespaces.h"
#include "tests/numerics/reference/order.h"

namespace shardlab::testing {

ServedEmulation::ServedEmulation(const Case& config, std::function<std::vector<int32_t>(int64_t)> tokens)
    : config_(config),
      tokens_(std::move(tokens)),
      ranks_(static_cast<size_t>(config.layout.dp)),
      part_(config.model, config.train, config.sequences_per_step() / config.layout.dp),
      losses_(ranks_) {
  fill_buckets();
  workers_.resize(ranks_);
  for (Worker& w : workers_)
    for (const Bucket& bucket : buckets_) w.values.push_back(flat(bucket, part_.values()));
  for (size_t server = 0; server < ranks_; ++server)
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const size_t n = buckets_[b].elements / ranks_;
      const Vector& all = workers_.front().values[b];
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(server * n);
      services_.push_back(
          {Vector(begin, begin + static_cast<std::ptrdiff_t>(n)), Vector(n), Vector(n), 0, 0, std::vector<int64_t>(ranks_)});
    }
}

/// From the last parameter of the model to the first, matrices and vectors apart; in the order in which they are complete.
void ServedEmulation::fill_buckets() {
  Bucket open[2];
  const auto close = [&](Bucket& bucket) {
    if (bucket.parameters.empty()) return;
    bucket.elements = (bucket.elements + ranks_ - 1) / ranks_ * ranks_;
    buckets_.push_back(std::move(bucket));
    bucket = {};
  };
  for (size_t p = part_.values().size(); p-- > 0;) {
    const auto kind = part_.parameters()[p].kind;
    const bool vector = kind == ModelParameter::Kind::kNormWeight || kind == ModelParameter::Kind::kBias;
    Bucket& bucket = open[vector];
    bucket.parameters.push_back(p);
    bucket.elements += part_.values()[p].size();
    bucket.decays = !vector;
    if (static_cast<int64_t>(4 * bucket.elements) >= config_.layout.bucket_bytes) close(bucket);
  }
  for (Bucket& bucket : open) close(bucket);
  std::ranges::sort(buckets_, std::greater(), [](const Bucket& b) { return b.parameters.back(); });
}

auto ServedEmulation::flat(const Bucket& bucket, const reference::Tensors<float>& tensors) const -> Vector {
  Vector all;
  for (const size_t p : bucket.parameters) all.insert(all.end(), tensors[p].begin(), tensors[p].end());
  all.resize(bucket.elements);
  return all;
}

std::vector<float> ServedEmulation::value(size_t parameter) const {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    size_t at = 0;
    for (const size_t p : buckets_[b].parameters) {
      const size_t n = part_.values()[p].size();
      if (p != parameter) {
        at += n;
        continue;
      }
      Vector all;
      for (size_t server = 0; server < ranks_; ++server) {
        const Vector& slice = services_[server * buckets_.size() + b].value;
        all.insert(all.end(), slice.begin(), slice.end());
      }
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(at);
      return Vector(begin, begin + static_cast<std::ptrdiff_t>(n));
    }
  }
  return {};
}

/// Whether every server has applied what the worker pushed last.
bool ServedEmulation::has_pulled(size_t worker) {
  return std::ranges::all_of(services_, [&](const Service& s) { return s.applied[worker] == workers_[worker].pushed; });
}

void ServedEmulation::compute(size_t worker) {
  Worker& w = workers_[worker];
  for (size_t b = 0; b < buckets_.size(); ++b) {
    auto from = w.values[b].begin();
    for (const size_t p : buckets_[b].parameters) {
      auto& value = part_.values()[p];
      std::copy_n(from, value.size(), value.begin());
      from += static_cast<std::ptrdiff_t>(value.size());
    }
  }
  const std::vector<int32_t> all = tokens_(w.pushed);
  const size_t rows = all.size() / ranks_;
  const auto own = std::span(all).subspan(worker * rows, rows);
  const auto share = static_cast<float>(ranks_);  // a power of two: dividing by it rounds nothing
  losses_[worker].push_back(part_.loss(own) / share);
  auto gradients = part_.gradients(own).gradients;
  for (auto& gradient : gradients)
    for (float& g : gradient) g /= share;
  w.gradients.clear();
  for (const Bucket& bucket : buckets_) w.gradients.push_back(flat(bucket, gradients));
  ++w.pushed;
}

/// Makes the server's next update, where all of its gradients have been pushed; those whose gradients these were pull what it left.
bool ServedEmulation::apply_next(size_t server, size_t bucket, const BucketArrivals& log) {
  Service& s = service(server, bucket);
  if (s.updates == log.updates.size()) return false;
  const std::vector<Arrival>& arrivals = log.updates[s.updates];
  for (const Arrival& a : arrivals)
    if (a.step != s.applied[static_cast<size_t>(a.worker)] || workers_[static_cast<size_t>(a.worker)].pushed <= a.step)
      return false;
  const size_t n = s.value.size();
  Vector sum(n);
  for (size_t i = 0; i < n; ++i)
    sum[i] = reference::tree<float>(static_cast<int64_t>(arrivals.size()), [&](int64_t leaf) {
      return workers_[static_cast<size_t>(arrivals[static_cast<size_t>(leaf)].worker)].gradients[bucket][server * n + i];
    });
  update(s, buckets_[bucket], sum);
  s.gradients += static_cast<int64_t>(arrivals.size());
  for (const Arrival& a : arrivals) {
    Worker& w = workers_[static_cast<size_t>(a.worker)];
    ++s.applied[static_cast<size_t>(a.worker)];
    std::ranges::copy(s.value, w.values[bucket].begin() + static_cast<std::ptrdiff_t>(server * n));
  }
  return true;
}

/// The learning rate goes by rounds, which is what all workers' gradients of one step are; the bias correction by updates.
void ServedEmulation::update(Service& s, const Bucket& bucket, const Vector& gradient) {
  const Train& t = config_.train;
  const float lr = learning_rate_at(t.learning_rate, s.gradients / static_cast<int64_t>(ranks_));
  const float decay = bucket.decays ? t.weight_decay : 0;
  if (t.optimizer == Optimizer::kSgd)
    reference::sgd(s.value, gradient, lr, decay);
  else if (t.optimizer == Optimizer::kLion)
    reference::lion(s.value, s.m, gradient, {lr, t.beta1, t.beta2, decay});
  else
    reference::adamw(s.value, s.m, s.v, gradient, static_cast<int64_t>(s.updates), {lr, t.beta1, t.beta2, t.epsilon, decay});
  ++s.updates;
}

bool ServedEmulation::run(std::span<const ArrivalLog> logs, int64_t steps) {
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t w = 0; w < ranks_; ++w)
      if (workers_[w].pushed < steps && has_pulled(w)) compute(w), moved = true;
    for (size_t server = 0; server < ranks_; ++server)
      for (size_t b = 0; b < buckets_.size(); ++b)
        while (apply_next(server, b, logs[server].buckets[b])) moved = true;
  }
  for (size_t w = 0; w < ranks_; ++w)
    if (workers_[w].pushed != steps || !has_pulled(w)) return false;
  return true;
}

}  // namespace shardlab::testing
