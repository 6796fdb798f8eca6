#include "plan/named_kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "plan/base/check.h"
#include "plan/op_fields.h"

namespace shardlab {
namespace {

using Rule = Kernel::Rule;
using Meaning = KernelMeaning;
using Scratch = KernelScratch;
using DeviceScratch = KernelDeviceScratch;

const Shape& shape(const Segment& segment, SlotId slot) { return segment.slots[slot.index()].type.shape; }
double elements(const Segment& segment, SlotId slot) { return static_cast<double>(shape(segment, slot).elements()); }
double rows(const Shape& s) { return s.rank < 2 ? 1 : static_cast<double>(s[0]); }
double columns(const Shape& s) { return s.rank < 1 ? 1 : static_cast<double>(s.last()); }

// --- flops: N for each element ------------------------------------------------------------------------------------------------

template <int N>
double per_result(const Segment& s, const Op& op) {
  return N * elements(s, op.writes[0]);
}
template <int N, size_t Read = 0>
double per_read(const Segment& s, const Op& op) {
  return N * elements(s, op.reads[Read]);
}
/// Of the rows of the first read that are expected: all of them, where they are not counted.
template <int N>
double per_row(const Segment& s, const Op& op) {
  const auto& kernel = std::get<Kernel>(op.work);
  const double n = kernel.counted ? static_cast<double>(kernel.rows) * columns(shape(s, op.reads[0])) : elements(s, op.reads[0]);
  return N * n;
}
/// Of all reads but one that the result goes on from.
double per_searched(const Segment& s, const Op& op) {
  double n = 0;
  for (const SlotId read : op.reads)
    if (std::ranges::find(op.writes, read) == op.writes.end()) n += elements(s, read);
  return n;
}
/// Of every part that is added to the result.
template <int N>
double per_part(const Segment& s, const Op& op) {
  return N * rows(shape(s, op.reads[0])) * elements(s, op.writes[0]);
}
double of_projection(const Segment& s, const Op& op) { return 2 * elements(s, op.reads[0]) * rows(shape(s, op.reads[1])); }
/// Each column, of those before it: a product and a subtraction.
double of_basis(const Segment& s, const Op& op) { return 4 * elements(s, op.reads[0]) * columns(shape(s, op.reads[0])); }
/// Two factors of a x b and b x c elements, and a result of a x c.
double of_product(const Segment& s, const Op& op) {
  const bool back = std::get<Kernel>(op.work).phase == Phase::kW;
  const double tokens = elements(s, op.reads[0]) / std::max(1.0, columns(shape(s, op.reads[0])));
  return 2 * (back ? tokens * elements(s, op.writes[0]) : tokens * elements(s, op.reads[2]));
}
/// With momentum three more operands of an addition and a multiplication each.
double of_outer_step(const Segment& s, const Op& op) { return (op.reads.size() > 4 ? 7 : 3) * elements(s, op.writes[0]); }

constexpr std::array kTable{
    NamedKernel{.name = "copy",
                .operands = "(a) -> b",
                .what = "The same elements in another storage type, rounded to nearest even",
                .reads = 1,
                .writes = 1,
                .summands = 1,
                .scratch = Scratch::kNarrowCopy,
                .on_gpu = true},
    NamedKernel{.name = "add",
                .operands = "(a, b) -> c",
                .what = "In fp32, rounded to the type of c",
                .reads = 2,
                .writes = 1,
                .rule = Rule::kLinear,
                .flops = per_result<1>,
                .on_gpu = true},
    NamedKernel{.name = "multiply",
                .operands = "(x, factor f32[1]) -> y",
                .what = "x times a number, rounded to the type of y; y may be x",
                .reads = 2,
                .writes = 1,
                .flops = per_result<1>,
                .on_gpu = true},
    NamedKernel{
        .name = "cast_stochastic",
        .operands = "(x) -> y",
        .what =
            "Rounded up or down by chance (kernels/storage.h), keyed by seed, step, op label, layer, parameter and logical element",
        .reads = 1,
        .writes = 1,
        .flops = per_result<1>},
    NamedKernel{.name = "amax",
                .operands = "(x, ...) -> amax f32[1]",
                .what = "The largest size of all elements; NaN if any is",
                .reads = 1,
                .writes = 1,
                .summands = ~1u,
                .meaning = Meaning::kLargest,
                .flops = per_searched,
                .scratch = Scratch::kOneBlock,
                .device_scratch = DeviceScratch::kSearch,
                .on_gpu = true},
    NamedKernel{.name = "found_inf",
                .operands = "(x, ...) -> bad i32[1][, where i32[1]]",
                .what = "1 where an element is infinite or NaN, else 0; and the first x that has one, counted from 1, or 0. To be "
                        "reduced by max over whoever updates together",
                .reads = 1,
                .writes = 1,
                .meaning = Meaning::kOverflow,
                .scratch = Scratch::kOneBlock,
                .device_scratch = DeviceScratch::kSearch,
                .on_gpu = true},
    NamedKernel{.name = "unscale",
                .operands = "(g, scale f32[1]) -> g32, bad i32[1]",
                .what = "g / scale, rounded to the type of g32, and found_inf of the result",
                .reads = 2,
                .writes = 2,
                .flops = per_result<1>},
    NamedKernel{.name = "any",
                .operands = "(a i32[1], ...) -> b i32[1]",
                .what = "1 where some read is not 0, else 0",
                .reads = 1,
                .writes = 1,
                .on_gpu = true},
    NamedKernel{
        .name = "not", .operands = "(a i32[1]) -> b i32[1]", .what = "1 for 0, else 0", .reads = 1, .writes = 1, .on_gpu = true},
    NamedKernel{.name = "start_scale",
                .operands = "(scale f32[1], first f32[1]) -> scale",
                .what = "A scale of 0, as persistent state begins, becomes `first`",
                .reads = 2,
                .writes = 1,
                .on_gpu = true},
    NamedKernel{
        .name = "adjust_scale",
        .operands = "(bad i32[1], scale f32[1][, good i32[1][, interval f32[1]]]) -> scale[, good]",
        .what =
            "In place. Halved after bad; doubled after `interval` (2000) good steps; 1 to 2^24. Without `good` it is only halved",
        .reads = 2,
        .writes = 1,
        .on_gpu = true},
    NamedKernel{.name = "unscale_factor",
                .operands = "(scale f32[1]) -> factor f32[1]",
                .what = "1 / scale",
                .reads = 1,
                .writes = 1,
                .on_gpu = true},
    NamedKernel{.name = "unscale_norm",
                .operands = "(squared_norm f64[1], factor f32[1]) -> squared_norm f64[1]",
                .what = "squared_norm factor^2: that of the unscaled gradients",
                .reads = 2,
                .writes = 1,
                .on_gpu = true},
    NamedKernel{.name = "judge_spike",
                .operands = "(x, mean f32[1], seen i32[1], factor f32[1], window f32[1]) -> bad i32[1]",
                .what = "1 where `window` have been seen and x is above factor mean, or is NaN; else 0. x: a loss, f32[1], or a "
                        "norm by its square, f64[1]",
                .reads = 5,
                .writes = 1,
                .on_gpu = true},
    NamedKernel{.name = "running_mean",
                .operands = "(x, window f32[1], mean f32[1], seen i32[1]) -> mean, seen",
                .what = "In place: seen + 1, at most `window`; mean + (x - mean) / seen",
                .reads = 4,
                .writes = 2,
                .on_gpu = true},
    NamedKernel{.name = "count", .operands = "(n i32[1]) -> n", .what = "n + 1, in place", .reads = 1, .writes = 1, .on_gpu = true},
    NamedKernel{.name = "clip_factor",
                .operands = "(squared_norm f64[1], max_norm f32[1]) -> factor f32[1]",
                .what = "min(1, max_norm / (sqrt(squared_norm) + 1e-6))",
                .reads = 2,
                .writes = 1,
                .meaning = Meaning::kClipFactor,
                .on_gpu = true},
    NamedKernel{.name = "not_one",
                .operands = "(factor f32[1]) -> differs i32[1]",
                .what = "0 for exactly 1, else 1: also for no number",
                .reads = 1,
                .writes = 1,
                .on_gpu = true},
    NamedKernel{
        .name = "outer_step",
        .operands =
            "(delta f32, start f32, share f32[1], learning_rate f32[1][, momentum f32[1], velocity f32]) -> value f32[, velocity]",
        .what = "SGD from start, of which share delta is the gradient; Nesterov's momentum, where velocity, in place, has one. "
                "value may be delta",
        .reads = 4,
        .writes = 1,
        .flops = of_outer_step,
        .on_gpu = true},
    NamedKernel{.name = "fp8_scale_e4m3",
                .operands = "(amax f32[1]) -> scale f32[1]",
                .what = "The least power of two that brings amax into range",
                .reads = 1,
                .writes = 1,
                .meaning = Meaning::kScale,
                .flops = per_result<1>},
    NamedKernel{.name = "fp8_scale_e5m2",
                .operands = "(amax f32[1]) -> scale f32[1]",
                .what = "The same for e5m2",
                .reads = 1,
                .writes = 1,
                .meaning = Meaning::kScale,
                .flops = per_result<1>},
    NamedKernel{.name = "fp8_delayed_e4m3",
                .operands = "(amax f32[1], history f32[n]) -> history, scale f32[1]",
                .what = "history in place: amax enters in front; scale is for its largest, and so for the next step",
                .reads = 2,
                .writes = 2,
                .flops = per_read<1, 1>},
    NamedKernel{.name = "fp8_delayed_e5m2",
                .operands = "(amax f32[1], history f32[n]) -> history, scale f32[1]",
                .what = "The same for e5m2",
                .reads = 2,
                .writes = 2,
                .flops = per_read<1, 1>},
    NamedKernel{.name = "fp8_scales_e4m3",
                .operands = "(history f32[t,n]) -> scales f32[t]",
                .what = "The scale of each row's largest",
                .reads = 1,
                .writes = 1,
                .meaning = Meaning::kScale,
                .flops = per_read<1>},
    NamedKernel{.name = "fp8_scales_e5m2",
                .operands = "(history f32[t,n]) -> scales f32[t]",
                .what = "The same for e5m2",
                .reads = 1,
                .writes = 1,
                .meaning = Meaning::kScale,
                .flops = per_read<1>},
    NamedKernel{.name = "fp8_remember",
                .operands = "(amax f32[t], history f32[t,n]) -> history",
                .what = "In place: each row moves on by one, its amax enters in front (0 where it is not finite)",
                .reads = 2,
                .writes = 1},
    NamedKernel{.name = "update_router_bias",
                .operands = "(load f32[e], bias f32[e], rate f32[1]) -> bias",
                .what = "In place: a bias goes up by rate where the load is below the mean, down where it is above",
                .reads = 3,
                .writes = 1,
                .meaning = Meaning::kFollowLoad,
                .flops = per_result<2>,
                .on_gpu = true},
    NamedKernel{.name = "fit_rows",
                .operands = "(rows[1,r,h], counts i32[1,l,e], overflow i32[1]) -> fitted i32[1,l,e], overflow",
                .what = "The counts in order, cut off where r rows end; overflow, in place, becomes 1 where some are cut off. No "
                        "row is looked at",
                .reads = 3,
                .writes = 2,
                .summands = 0b100,
                .meaning = Meaning::kFit,
                .flops = per_result<2>,
                .on_gpu = true},
    NamedKernel{.name = "fp8_quantise",
                .operands = "(x, scale f32[1]) -> q",
                .what = "x / scale; per-tensor scaling, current or delayed. The format is that of q",
                .reads = 2,
                .writes = 1,
                .meaning = Meaning::kRounding,
                .flops = per_result<1>},
    NamedKernel{.name = "fp8_quantise_1x128",
                .operands = "(x[..,c][, counts]) -> q, scales f32[..,ceil(c/128)]",
                .what = "A scale each 128 neighbours of a row. counted: of the rows of experts that are there",
                .reads = 1,
                .writes = 2,
                .meaning = Meaning::kRounding,
                .flops = per_row<2>,
                .scratch = Scratch::kTwoPasses,
                .rows = true},
    NamedKernel{
        .name = "fp8_quantise_128x128",
        .operands = "(x[(e,)r,c]) -> q, scales f32[(e,)ceil(r/128),ceil(c/128)]",
        .what = "A scale each square, of e matrices each by itself. A shard begins at a multiple of 128, so that its blocks are "
                "those of the whole",
        .reads = 1,
        .writes = 2,
        .meaning = Meaning::kRounding,
        .flops = per_read<2>,
        .scratch = Scratch::kTwoPasses},
    NamedKernel{.name = "fp8_dequantise",
                .operands = "(q, scales) -> y",
                .what = "q times its scales, of any of the three kinds",
                .reads = 2,
                .writes = 1,
                .flops = per_result<1>},
    NamedKernel{.name = "fp8_linear",
                .operands = "F: (x, sx, w, sw[, bias]) -> y. I: (dy, sdy, w, sw) -> dx. W: (x, sx, dy, sdy) -> dw",
                .what = "Linear on quantised operands, scales of any kind each: the fp32 (canonical or fast) product of the "
                        "dequantised values, rounded once",
                .reads = 4,
                .writes = 1,
                .flops = of_product},
    NamedKernel{.name = "subtract",
                .operands = "(m, approximation) -> error",
                .what = "m - approximation: the error of what this rank sent",
                .reads = 2,
                .writes = 1,
                .summands = 0b11,
                .flops = per_result<1>,
                .on_gpu = true},
    NamedKernel{.name = "subtract_share",
                .operands = "(m, approximation) -> error",
                .what = "m - approximation / n, n the ranks over which m is partial and the approximation is not: the errors add "
                        "up to what the sum lost",
                .reads = 2,
                .writes = 1,
                .summands = 1,
                .flops = per_result<2>,
                .on_gpu = true},
    NamedKernel{.name = "project",
                .operands = "(m[r,c], basis[k,c]) -> p[r,k]",
                .what = "m basis^T, in canonical order",
                .reads = 2,
                .writes = 1,
                .summands = 1,
                .flops = of_projection,
                .scratch = Scratch::kProjection,
                .on_gpu = true},
    NamedKernel{.name = "orthogonalise",
                .operands = "(p f32[r,k]) -> q f32[r,k]",
                .what = "An orthonormal basis of the columns (kernels/compress.h)",
                .reads = 1,
                .writes = 1,
                .flops = of_basis,
                .scratch = Scratch::kBasis,
                .device_scratch = DeviceScratch::kBasis,
                .on_gpu = true},
    NamedKernel{.name = "start_basis",
                .operands = "(q f32[k,c]) -> q",
                .what = "In place. A basis of zeros, as persistent state begins, becomes the first k unit vectors",
                .reads = 1,
                .writes = 1,
                .on_gpu = true},
    NamedKernel{.name = "quantise_int8",
                .operands = "(x[..,c]) -> q i8[..,c], scales f32[..,blocks]",
                .what = "Each row of x cut in as many blocks as its scales have columns; scale = amax / 127",
                .reads = 1,
                .writes = 2,
                .summands = 1,
                .flops = per_read<3>,
                .on_gpu = true},
    NamedKernel{.name = "quantise_int4",
                .operands = "(x[..,c]) -> q u8[..,ceil(c/2)], scales f32[..,blocks]",
                .what = "The same with amax / 7, two elements a byte, the even one low",
                .reads = 1,
                .writes = 2,
                .summands = 1,
                .flops = per_read<3>,
                .on_gpu = true},
    NamedKernel{.name = "dequantise_int8",
                .operands = "(q, scales) -> y[..,c]",
                .what = "q times its scales, rounded to the type of y",
                .reads = 2,
                .writes = 1,
                .flops = per_result<1>,
                .on_gpu = true},
    NamedKernel{.name = "dequantise_int4",
                .operands = "(q, scales) -> y[..,c]",
                .what = "The same from 4 bits",
                .reads = 2,
                .writes = 1,
                .flops = per_result<1>,
                .on_gpu = true},
    NamedKernel{.name = "dequantise_sum_int8",
                .operands = "(q[n,c], scales[n,blocks]) -> y[c]",
                .what = "The canonical tree, in fp32, over n quantised parts: what follows an all-to-all of quantised gradients",
                .reads = 2,
                .writes = 1,
                .flops = per_part<2>,
                .scratch = Scratch::kTree,
                .on_gpu = true},
    NamedKernel{.name = "dequantise_sum_int4",
                .operands = "(q[n,ceil(c/2)], scales[n,blocks]) -> y[c]",
                .what = "The same from 4 bits",
                .reads = 2,
                .writes = 1,
                .flops = per_part<2>,
                .scratch = Scratch::kTree,
                .on_gpu = true},
    NamedKernel{.name = "swap_leading",
                .operands = "(x) -> y[b,a,..]",
                .what = "x, in the order [a,b,..], with two dims in the other order, of any type: pieces for ranks of nodes become "
                        "pieces for nodes of ranks",
                .reads = 1,
                .writes = 1,
                .on_gpu = true},
    NamedKernel{
        .name = "sum_rows",
        .operands = "(x[n,..]) -> y[..]",
        .what = "The canonical tree, in fp32, over n parts of any storage: reduce-scatter in bf16 by all-to-all and fp32 sum",
        .reads = 1,
        .writes = 1,
        .flops = per_part<1>,
        .scratch = Scratch::kTree,
        .on_gpu = true},
    NamedKernel{.name = "top_k",
                .operands = "(x) -> values f32[k], indices i32[k]",
                .what = "The k largest by size, ties to the smaller index; indices ascending",
                .reads = 1,
                .writes = 2,
                .summands = 1,
                .flops = per_read<4>,
                .device_scratch = DeviceScratch::kSelection,
                .on_gpu = true},
    NamedKernel{.name = "random_k",
                .operands = "(x) -> values f32[k], indices i32[k]",
                .what = "k elements by chance, the same on all ranks; keyed by seed, step, op label, layer and parameter",
                .reads = 1,
                .writes = 2,
                .summands = 1,
                .flops = per_read<4>,
                .scratch = Scratch::kDraws,
                .device_scratch = DeviceScratch::kSelection,
                .on_gpu = true},
    NamedKernel{.name = "scatter",
                .operands = "(values f32[n,k], indices i32[n,k]) -> y",
                .what = "The canonical tree over n parts, each with its values at its indices and 0 elsewhere",
                .reads = 2,
                .writes = 1,
                .flops = per_part<1>,
                .scratch = Scratch::kScattered,
                .on_gpu = true},
    NamedKernel{.name = "zero_selected",
                .operands = "(x f32, indices i32[k]) -> error f32",
                .what = "x with 0 at the indices: the error of a selection; may be in place",
                .reads = 2,
                .writes = 1,
                .summands = 1,
                .on_gpu = true},
    NamedKernel{.name = "sign_compress",
                .operands = "(x[..,c]) -> signs u8[..,ceil(c/8)], scales f32[..,blocks]",
                .what = "1 where negative; scale = mean size of the block",
                .reads = 1,
                .writes = 2,
                .summands = 1,
                .flops = per_read<3>,
                .on_gpu = true},
    NamedKernel{.name = "sign_expand",
                .operands = "(signs, scales) -> y[..,c]",
                .what = "+-scale",
                .reads = 2,
                .writes = 1,
                .flops = per_result<1>,
                .on_gpu = true},
    NamedKernel{.name = "sign_expand_sum",
                .operands = "(signs[n,ceil(c/8)], scales[n,blocks]) -> y[c]",
                .what = "The canonical tree, in fp32, over n parts of signs",
                .reads = 2,
                .writes = 1,
                .flops = per_part<2>,
                .scratch = Scratch::kTree,
                .on_gpu = true},
    NamedKernel{.name = "fold_momentum",
                .operands = "(gradient f32[n], beta1 f32[1], m f32...) -> momentum f32[n]",
                .what = "A rank's summand of the momentum: beta1 m / N + (1 - beta1) gradient, N as in `subtract_share`; the m of "
                        "parameters that lie one after another",
                .reads = 2,
                .writes = 1,
                .summands = 1,
                .flops = per_result<4>,
                .on_gpu = true},
    NamedKernel{
        .name = "frozen_adam",
        .operands = "(momentum f32[n], beta1 f32[1], correction f32[1], epsilon f32[1], v f32...) -> direction f32[n], m...",
        .what = "In place. Adam's step, without decay, by a variance that changes no more; 0 where that is not above epsilon^2 "
                "(kernels/one_bit_adam.h)",
        .reads = 4,
        .writes = 1,
        .flops = per_result<5>,
        .device_scratch = DeviceScratch::kCounter,
        .on_gpu = true},
};

/// Rows by name, for a binary search.
constexpr auto kByName = [] {
  std::array<uint8_t, kTable.size()> order{};
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint8_t>(i);
  std::ranges::sort(order, {}, [](uint8_t i) { return kTable[i].name; });
  return order;
}();

}  // namespace

std::span<const NamedKernel> named_kernels() { return kTable; }

const NamedKernel* find_kernel(std::string_view name) {
  const auto at = std::ranges::lower_bound(kByName, name, {}, [](uint8_t i) { return kTable[i].name; });
  return at != kByName.end() && kTable[*at].name == name ? &kTable[*at] : nullptr;
}

Rule rule_of(const Kernel& kernel) {
  const NamedKernel* row = find_kernel(kernel.name);
  return row != nullptr ? row->rule : kernel.rule;
}

uint32_t summands_of(const Kernel& kernel) {
  if (const NamedKernel* row = find_kernel(kernel.name)) return row->summands;
  return kernel.rule == Rule::kTrusted ? ~0u : 0;
}

Meaning meaning_of(const Kernel& kernel) {
  const NamedKernel* row = find_kernel(kernel.name);
  return row != nullptr ? row->meaning : Meaning::kNone;
}

bool is_believed(const Kernel& kernel) {
  const Rule rule = rule_of(kernel);
  return rule == Rule::kOpaque || rule == Rule::kTrusted;
}

bool takes_maximum(const Kernel& kernel) {
  const Meaning meaning = meaning_of(kernel);
  return meaning == Meaning::kLargest || meaning == Meaning::kOverflow || meaning == Meaning::kFit;
}

double kernel_flops(const Segment& segment, const Op& op, const Kernel& kernel) {
  const NamedKernel* row = find_kernel(kernel.name);
  if (row == nullptr) return static_cast<double>(kernel.flops);
  return row->flops == nullptr ? 0 : row->flops(segment, op);
}

std::string kernel_fault(const Op& op, const Kernel& kernel) {
  const NamedKernel* row = find_kernel(kernel.name);
  if (kernel.counted && (row == nullptr || !row->rows))
    return fmt::format("is counted, and `{}` is no kernel that goes by counts of rows: only fp8_quantise_1x128 is", kernel.name);
  if (kernel.rows != 0 && !kernel.counted) return fmt::format("rows={}: expected of rows that are counted", kernel.rows);
  if (row == nullptr) return "";
  if (row->rows && static_cast<int>(op.reads.size()) != row->reads + (kernel.counted ? 1 : 0))
    return fmt::format("`{}` takes {}, found {} reads: counts go with `counted`, and nothing else does", row->name, row->operands,
                       op.reads.size());
  if (kernel.rule != Rule::kElementwise && kernel.rule != row->rule)
    return fmt::format("says rule={}, and the kernel `{}` is known: leave out `rule` (plan/named_kernels.cpp says {})",
                       kKernelRules[static_cast<size_t>(kernel.rule)], row->name, kKernelRules[static_cast<size_t>(row->rule)]);
  if (kernel.flops != 0) return fmt::format("says flops, and the kernel `{}` is known: leave out `flops`", row->name);
  if (static_cast<int>(op.reads.size()) < row->reads || static_cast<int>(op.writes.size()) < row->writes)
    return fmt::format("`{}` takes {}, found {} reads and {} writes", row->name, row->operands, op.reads.size(), op.writes.size());
  return "";
}

Kernel named(std::string_view name, Phase phase) {
  SHARDLAB_CHECK(find_kernel(name) != nullptr, "no row of plan/named_kernels.cpp is called `{}`", name);
  Kernel kernel;
  kernel.name = name;
  kernel.phase = phase;
  return kernel;
}

}  // namespace shardlab
