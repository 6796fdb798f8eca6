// Kernels of products whose factors have 8 bits: what finds their largest sizes and scales, what rounds them, and what multiplies.
//
// Formula, of a factor of n elements: its largest size n flops, of a current scale over the ranks that have the other slices, and a
//   kernel of its own that makes the scale of it; under delayed scaling noted beside what was noted before. Rounding n flops (2 n
//   with a scale for each block of 128, which is found on the way).
// Source: strategies/fp8.h names the papers; the counts are those of docs/canonical-order.md.
#include <cmath>

#include "simulator/step_kernels.h"

namespace shardlab::simulator::forms {
namespace {

constexpr double kScale = 4;         // bytes
constexpr double kScaleWidth = 128;  // of blocks

double blocks(double n) { return std::ceil(n / kScaleWidth); }

}  // namespace

double StepKernels::scale_bytes(const Factor& f) const {
  return c_.train.fp8_scaling == "block" ? kScale * blocks(f.columns) * (f.weight ? blocks(f.rows) : f.rows) : kScale;
}

/// Of the rounded values and their scales.
double StepKernels::narrow_bytes(const Factor& f) const { return f.elements() + scale_bytes(f); }

void StepKernels::measure(Block& b, const Factor& f, Spent spent) const {
  if (c_.train.fp8_scaling == "block") return;
  const bool delayed = c_.train.fp8_scaling == "delayed";
  add(b, f.elements(), f.elements() * e_ + (delayed ? 2 : 1) * kScale, spent);
  if (delayed) return;
  if (f.cut) all_reduce(b, 1, kScale);
  add(b, 1, 2 * kScale, spent);
}

void StepKernels::quantise(Block& b, const Factor& f, Spent spent, size_t scale) const {
  if (scale < kMostKept) b.need(scale);
  const double flops = c_.train.fp8_scaling == "block" ? 2 : 1;
  add(b, flops * f.elements(), f.elements() * e_ + narrow_bytes(f), spent);
}

void StepKernels::quantise_input(Block& b, const Linear& l) const {
  if (l.narrow) quantise(b, input_of(l), Spent::kRecompute, input_scale(l.product));
}

void StepKernels::round(Block& b, const Factor& f, Spent spent) const {
  measure(b, f, spent);
  quantise(b, f, spent);
}

void StepKernels::multiply(Block& b, const Factor& x, const Factor& y, double other_bytes, double flops, Spent spent) const {
  b.add(kernel({flops, narrow_bytes(x) + narrow_bytes(y) + other_bytes, true, true}, spent));
}

namespace {

constexpr double kForward = 8, kBackward = 4;  // x and w, and dy, of four products

}  // namespace

void StepKernels::add_scales(int64_t layers, Block& b) const {
  if (!remembers_amax(c_)) return;
  const double window = kFp8Window;
  add(b, 0, (kForward + kBackward) * static_cast<double>(layers) * kScale, Spent::kUpdate);
  for (int64_t l = 0; l < layers; ++l)
    for (const double rows : {kForward, kBackward}) add(b, rows * window, (window + 1) * rows * kScale, Spent::kUpdate);
}

void StepKernels::add_remembering(int64_t layers, Block& b) const {
  if (!remembers_amax(c_)) return;
  const double window = kFp8Window;
  const int64_t sizes = layers * static_cast<int64_t>(kForward + kBackward);
  b.add(exchange({CollectiveKind::kAllReduce, c_.layout.dp * c_.layout.tp, sizes, 4}, ways_.stage, Spent::kData));
  for (int64_t l = 0; l < layers; ++l)
    for (const double rows : {kForward, kBackward}) add(b, 0, (2 * window + 1) * rows * kScale, Spent::kUpdate);
}

}  // namespace shardlab::simulator::forms
