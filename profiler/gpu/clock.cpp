#include "profiler/gpu/clock.h"

#include <algorithm>
#include <cmath>

#include "plan/base/check.h"

namespace shardlab::profiler {

namespace {

constexpr double kLargestDrift = 200e-6;

struct Anchor {
  int64_t tracer_ns = 0;
  double session_s = 0;  ///< at tracer_ns
  double error_s = 0;
};

Anchor anchor_of(std::span<const ClockPair> pairs) {
  std::vector<ClockPair> quickest(pairs.begin(), pairs.end());
  std::ranges::sort(quickest, {}, [](const ClockPair& p) { return p.after - p.before; });
  quickest.resize((quickest.size() + 1) / 2);
  Anchor anchor{.tracer_ns = pairs.front().tracer_ns};
  std::vector<double> offsets;  // of the session's clock at anchor.tracer_ns
  double half_width = 0;
  for (const ClockPair& p : quickest) {
    offsets.push_back(0.5 * (p.before + p.after) - 1e-9 * static_cast<double>(p.tracer_ns - anchor.tracer_ns));
    half_width = std::max(half_width, 0.5 * (p.after - p.before));
  }
  std::ranges::sort(offsets);
  anchor.session_s = offsets[offsets.size() / 2];
  anchor.error_s = half_width + std::max(offsets.back() - anchor.session_s, anchor.session_s - offsets.front());
  return anchor;
}

}  // namespace

std::vector<ClockPair> read_clock_pairs(const Clock& session, const std::function<int64_t()>& tracer_ns, int count) {
  tracer_ns();  // the first call sets things up and is slow
  std::vector<ClockPair> pairs(static_cast<size_t>(count));
  for (ClockPair& p : pairs) {
    p.before = session.now();
    p.tracer_ns = tracer_ns();
    p.after = session.now();
  }
  return pairs;
}

ClockAlignment::ClockAlignment(std::span<const ClockPair> first, std::span<const ClockPair> last) {
  SHARDLAB_CHECK(!first.empty(), "clocks are aligned by at least one pair of readings");
  const Anchor a = anchor_of(first);
  origin_ns_ = a.tracer_ns;
  origin_s_ = a.session_s;
  error_s_ = a.error_s;
  if (last.empty()) return;
  const Anchor b = anchor_of(last);
  error_s_ = std::max(error_s_, b.error_s);
  const double elapsed = 1e-9 * static_cast<double>(b.tracer_ns - a.tracer_ns);
  if (elapsed <= 0) return;
  const double drift = b.session_s - a.session_s - elapsed;
  rate_ = 1 + drift / elapsed;
  if (std::abs(drift) > kLargestDrift * elapsed + a.error_s + b.error_s) error_s_ += std::abs(drift);
}

double ClockAlignment::seconds(int64_t tracer_ns) const {
  return origin_s_ + rate_ * 1e-9 * static_cast<double>(tracer_ns - origin_ns_);
}

}  // namespace shardlab::profiler
