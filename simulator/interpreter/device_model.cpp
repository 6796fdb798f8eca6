#include "simulator/interpreter/device_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>

namespace shardlab::simulator {

namespace {

/// A tile of the result that one multiprocessor (or a pair, or a matrix core's worth of them) computes: its two edges, and the
/// doublings of its area over the smallest tile. Each doubling improves the reuse of what is read into shared memory.
struct Tile {
  double rows, columns, doublings;
  double row_part = 1 / rows, column_part = 1 / columns;  // exact: powers of two
};
constexpr Tile kTiles[] = {{256, 256, 4}, {256, 128, 3}, {128, 256, 3}, {128, 128, 2}, {64, 128, 1}, {128, 64, 1}, {64, 64, 0}};
constexpr int kUnalignedHalvings = 3;      // of 16 bytes, down to one 16-bit element
constexpr double kUnalignedDoublings = 1;  // of the largest tile for that: 128 x 64
constexpr double kCollectiveBlocks = 24;   // of the collectives beside which `matmul.beside` was measured
constexpr double kManyTimes = 1e6;         // as many products beside one collective are any number
constexpr double kGroupStreams = 4;        // of a grouped matmul in Transformer Engine
constexpr double kSplits[] = {1, 2, 4, 8};
constexpr double kFlopsBackward = 2.5;  // five products against two: the scores are computed again (Dao 2022, section 3.1)
constexpr double kHeadStep = 32;        // heads are padded to a multiple of it
constexpr double kAttentionRows = 128;  // rows of queries that one multiprocessor holds

/// The least whole number at or above `x`. The library's own is a call on processors without SSE 4.1.
double round_up(double x) {
  if (!(x < 0x1p53)) return x;  // whole already
  const auto whole = static_cast<double>(static_cast<int64_t>(x));
  return whole < x ? whole + 1 : whole;
}
double ceil_div(double a, double b) { return round_up(a / b); }

/// Waves of `tiles` on `sms`: between the tiles' share and whole waves.
double waves(double tiles, double sms, double quantisation) {
  const double exact = tiles / sms;
  return exact + quantisation * (round_up(exact) - exact);
}

}  // namespace

namespace {

/// The peak of `precision`, or of the nearest wider one that the device has; fp16 and bf16 stand in for each other.
double peak_of(const Device& device, Precision precision) {
  constexpr std::string_view wider[kPrecisions][5] = {{"fp32"},
                                                      {"bf16", "fp16", "fp32"},
                                                      {"fp16", "bf16", "fp32"},
                                                      {"fp8", "bf16", "fp16", "fp32"},
                                                      {"fp4", "fp8", "bf16", "fp16", "fp32"}};
  for (const std::string_view name : wider[static_cast<int>(precision)])
    if (const auto it = device.peak_flops.find(std::string(name)); it != device.peak_flops.end() && it->second > 0)
      return it->second;
  return 0;
}

Error unknown_constant(const std::string& name) {
  std::string names;
  for (const DeviceConstant& c : device_constants()) names += fmt::format("{}{}", names.empty() ? "" : " ", c.name);
  return Error{ExitCode::kUsage, fmt::format("device constant `{}` is not known", name), "one of: " + names, {}};
}

}  // namespace

Result<DeviceModel> DeviceModel::of(const Device& device) {
  DeviceModel model;
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    return Error{ExitCode::kUsage, fmt::format("device `{}` {}", device.id, what), hint, {}};
  };
  if (!(device.memory_bytes_per_s > 0) || !std::isfinite(device.memory_bytes_per_s))
    return refuse("has no memory bandwidth", "give device.memory_bandwidth in its machine file");
  for (const auto& entry : device.constants) {
    const std::string& name = entry.first;  // not a structured binding: a lambda captures it
    const double value = entry.second;
    const auto table = device_constants();
    const auto it = std::find_if(table.begin(), table.end(), [&](const DeviceConstant& c) { return c.name == name; });
    if (it == table.end()) return unknown_constant(name);
    if (!(value > 0) || !std::isfinite(value))
      return refuse(fmt::format("has constant `{}` = {}", name, value), "constants are positive numbers");
    model.constants_.*(it->value) = value;
  }
  const DeviceConstants& c = model.constants_;
  const double reached[kPrecisions] = {c.matmul_fp32_rate, c.matmul_bf16_rate, c.matmul_bf16_rate, c.matmul_fp8_rate,
                                       c.matmul_fp4_rate};
  for (int i = 0; i < kPrecisions; ++i) {
    model.peak_[i] = peak_of(device, static_cast<Precision>(i));
    model.rate_[i] = model.peak_[i] * reached[i];
  }
  if (model.peak_[static_cast<int>(Precision::kFp4)] <= 0)
    return refuse("has no peak for any precision", "give device.peak_flops, dense, in its machine file");
  model.memory_bytes_per_s_ = device.memory_bytes_per_s;
  model.provenance_ = device.provenance;
  return model;
}

Provenance DeviceModel::provenance(std::string_view what, Precision precision) const {
  // "matmul.fp8.rate" concerns fp8 alone; fp16 has the constant of bf16.
  const auto other_precision = [&](std::string_view name) {
    const std::string_view own = precision == Precision::kFp16 ? "bf16" : name_of(precision);
    for (const std::string_view p : {"fp32", "bf16", "fp8", "fp4"})
      if (p != own && name == fmt::format("matmul.{}.rate", p)) return true;
    return false;
  };
  const auto rank = [](Provenance p) {
    constexpr int trust[] = {1, 0, 2, 3};  // measured before datasheet before fitted before transferred
    return trust[static_cast<int>(p)];
  };
  Provenance least = Provenance::kMeasured;
  for (const DeviceConstant& c : device_constants()) {
    if (c.group != what || other_precision(c.name)) continue;
    const auto it = provenance_.find(std::string(c.name));
    const Provenance p = it == provenance_.end() ? Provenance::kTransferred : it->second;
    if (rank(p) > rank(least)) least = p;
  }
  return least;
}

/// How much longer a matmul takes in a long run, at the clock that keeps the device within its power: at the clock f it draws what
/// multipliers that are busy `used` of the time do, used f^3, and matmul_sustained is f where they always are; that of a slower
/// device is lower by `slowest`. Where it is 1, power binds no device.
double DeviceModel::throttled(double used, double slowest) const {
  const double reached = constants_.matmul_sustained;
  const double sustained = reached < 1 ? reached / slowest : 1, kept = sustained * sustained * sustained;
  return used > kept ? std::cbrt(used / kept) : 1;
}

namespace {

/// The largest of n standard normals, by its median rank, for n = 2^0, 2^1, ...
const std::array<double, 64> kLargest = [] {
  std::array<double, 64> largest{};
  for (size_t i = 1; i < largest.size(); ++i) {
    const double above = 0.625 / (std::exp2(static_cast<double>(i)) + 0.25), t = std::sqrt(-2 * std::log(above));
    largest[i] = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
  }
  return largest;
}();

}  // namespace

double DeviceModel::slowest_of(int64_t devices) const {
  if (devices <= 1) return 1;
  const int power = std::bit_width(static_cast<uint64_t>(devices)) - 1;
  const double at = kLargest[static_cast<size_t>(power)], next = kLargest[static_cast<size_t>(power) + 1];
  const double beyond = static_cast<double>(devices) / static_cast<double>(int64_t{1} << power) - 1;
  return 1 + constants_.matmul_spread * (at + beyond * (next - at));
}

namespace {

/// Halvings of 16 bytes down to what the rows of all three matrices begin at a multiple of: 0 where they are aligned, or of a size
/// that is only an average.
int unaligned_halvings(const Matmul& x) {
  const double operand = bytes_of(x.precision);
  int halvings = 0;
  for (const double row : {x.n, x.product == Product::kWeight ? x.m : x.k}) {
    const double bytes = row * operand;
    if (!(bytes >= 1 && bytes < 0x1p53) || row != std::floor(row) || bytes != std::floor(bytes)) continue;
    halvings = std::max(halvings, 4 - std::min(4, std::countr_zero(static_cast<uint64_t>(bytes))));
  }
  return halvings;
}

}  // namespace

DeviceModel::Waited DeviceModel::matmul_waited(const Matmul& x, bool short_run) const {
  if (x.grouped && x.batch > kGroupStreams) {
    Matmul together = x;
    together.batch = kGroupStreams;
    const Waited one = matmul_waited(together, short_run);
    return {x.batch / kGroupStreams * one.seconds, x.batch / kGroupStreams * one.late};
  }
  const DeviceConstants& c = constants_;
  const double product = x.product == Product::kForward ? 1.0
                         : x.product == Product::kInput ? c.matmul_input_rate
                                                        : c.matmul_weight_rate;
  const int halvings = unaligned_halvings(x);  // 16 bits are the third
  const double aligned = halvings == 0 ? 1 : std::pow(c.matmul_unaligned, halvings / 3.0);
  const bool tf32 = x.tf32 && x.precision == Precision::kFp32;
  const double peak = tf32 ? std::max(rate_[static_cast<int>(Precision::kBf16)] / 2, rate_[static_cast<int>(Precision::kFp32)])
                           : rate_[static_cast<int>(x.precision)];
  const double per_sm = peak * product * aligned / c.sms;
  const double memory = memory_bytes_per_s_ * c.matmul_memory;
  double best = HUGE_VAL;
  for (const Tile& tile : kTiles) {
    if (tile.doublings > (halvings == kUnalignedHalvings ? kUnalignedDoublings : c.matmul_doublings)) continue;
    const double tiles = x.batch * round_up(x.m * tile.row_part) * round_up(x.n * tile.column_part);
    const double rate = per_sm * (c.matmul_small_tile + tile.doublings / c.matmul_doublings * (1 - c.matmul_small_tile));
    const double flops_k = 2 * tile.rows * tile.columns / rate;
    for (const double split : kSplits) {
      if (split > 1 && (tiles * split > 2 * c.sms || x.k < 512 * split)) break;  // nothing is gained once the device is full
      const double reduction = split > 1 ? x.batch * x.m * x.n * 4 * (split + 1) / memory + c.kernel_start_s : 0;
      best = std::min(best,
                      waves(tiles * split, c.sms, c.matmul_quantisation) * flops_k * (x.k / split + c.matmul_ramp_k) + reduction);
    }
  }
  const double operand = bytes_of(x.precision);
  const double bytes =
      x.batch * (operand * (x.m * x.k + x.n * x.k) + x.out_bytes * x.m * x.n * ((x.accumulate ? 1 : 0) + 1 / c.matmul_write));
  if (short_run) return {c.matmul_start_s + std::max(best, bytes / memory), 0};
  const double used = aligned * 2 * x.batch * x.m * x.n * x.k / (per_sm * c.sms) / best;
  const double all = std::max(best * throttled(used, x.slowest), bytes / memory);
  return {c.matmul_start_s + all, x.slowest > 1 ? all - std::max(best * throttled(used, 1), bytes / memory) : 0};
}

double DeviceModel::lost_beside(double taken, double collective, double alone) const {
  if (constants_.matmul_resident <= 0) return held_beside(taken);
  if (!waits_beside(taken) || collective <= 0) return 0;
  if (collective <= alone) return 1;
  const double times = collective / alone, pairs = std::floor(times / 2);
  return times < kManyTimes ? (pairs + std::min(1.0, times - 2 * pairs)) / times : 0.5;
}

double DeviceModel::held_beside(double taken) const {
  if (constants_.matmul_resident > 0) return waits_beside(taken) ? 0.5 : 0;
  return 1 - 1 / (1 + (constants_.matmul_beside - 1) * std::min(1.0, taken / kCollectiveBlocks));
}

double DeviceModel::attention_seconds(const AttentionShape& x) const {
  const bool unfused = x.kernel == AttentionKernel::kUnfused || x.kernel == AttentionKernel::kEager;
  return unfused ? unfused_attention_seconds(x) : fused_attention_seconds(x);
}

double DeviceModel::fused_attention_seconds(const AttentionShape& x) const {
  const DeviceConstants& c = constants_;
  const bool backward = x.pass == Pass::kBackward;
  const double value_dim = x.value_dim > 0 ? x.value_dim : x.head_dim;
  const double wide = ceil_div(x.head_dim, kHeadStep) * kHeadStep + ceil_div(value_dim, kHeadStep) * kHeadStep;
  const double flops = 2 * x.batch * x.heads * x.queries * x.keys * wide * (x.causal ? 0.5 : 1) * (backward ? kFlopsBackward : 1);
  const double seen = x.causal ? x.keys / 2 : x.keys;  // by a row, on average
  const double rate = rate_[static_cast<int>(x.precision)] / c.matmul_bf16_rate *
                      (backward ? c.attention_backward_rate : c.attention_forward_rate) * head_rate(wide / 2) *
                      (x.kernel == AttentionKernel::kFlash2 ? c.attention_flash_2 : 1) * (x.causal ? c.attention_causal : 1) *
                      seen / (seen + c.attention_half);
  const double tiles = x.batch * x.heads * ceil_div(x.queries, kAttentionRows);
  const double spread = waves(tiles, c.sms, c.attention_quantisation) / (tiles / c.sms);
  const double tokens = x.batch * (x.queries * x.heads + x.keys * x.kv_heads) * (x.head_dim + value_dim);
  const double bytes = tokens * bytes_of(x.precision) * (backward ? 2 : 1);
  return c.attention_start_s + std::max(flops / rate * spread, bytes / (memory_bytes_per_s_ * c.memory_elementwise));
}

/// Rate of a fused kernel by the width of a head, relative to 128: narrower heads leave part of each step to the softmax, wider
/// ones have fewer rows in a tile.
double DeviceModel::head_rate(double head_dim) const {
  const double doublings = std::log2(head_dim / 128);
  const double rate =
      doublings < 0 ? 1 + doublings * (1 - constants_.attention_head_64) : 1 - doublings * (1 - constants_.attention_head_256);
  return std::clamp(rate, 0.2, 1.5);
}

double DeviceModel::unfused_attention_seconds(const AttentionShape& x) const {
  const double value_dim = x.value_dim > 0 ? x.value_dim : x.head_dim;
  const double batch = x.batch * x.heads;
  const double scores = batch * x.queries * x.keys;
  const double operand = bytes_of(x.precision);
  Matmul qk{.m = x.queries, .n = x.keys, .k = x.head_dim, .batch = batch, .precision = x.precision, .out_bytes = operand};
  Matmul pv = qk;
  pv.n = value_dim;
  pv.k = x.keys;
  pv.product = Product::kInput;
  const auto softmax_of = [&](double tensors) {
    if (x.kernel != AttentionKernel::kEager) return memory_bound_seconds(tensors * scores * operand, 1, MemoryKernel::kSoftmax);
    // Cast to fp32, scale, mask and cast back, each of which reads and writes; and the same again in backward.
    const double steps = scores * (2 * (operand + 4) + 2 * 8);
    return memory_bound_seconds(steps, 4, MemoryKernel::kElementwise) +
           memory_bound_seconds(tensors * scores * 4, 1, MemoryKernel::kSoftmax);
  };
  // Dropout reads and writes the probabilities and keeps one byte of mask each.
  const double dropout = x.dropout ? memory_bound_seconds(scores * (2 * operand + 1), 1, MemoryKernel::kElementwise) : 0;
  if (x.pass == Pass::kForward) return matmul_seconds(qk) + softmax_of(2) + dropout + matmul_seconds(pv);
  Matmul weight = pv;  // dV = P^T dO and dK = dS^T Q: the long extent is contracted
  weight.product = Product::kWeight;
  return 2 * matmul_seconds(pv) + matmul_seconds(qk) + matmul_seconds(weight) + softmax_of(3) + dropout;
}

double DeviceModel::memory_bound_seconds(double bytes, double launches, MemoryKernel kind) const {
  const DeviceConstants& c = constants_;
  const double efficiency[kMemoryKernels] = {c.memory_elementwise,   c.memory_norm,      c.memory_norm_backward, c.memory_softmax,
                                             c.memory_cross_entropy, c.memory_embedding, c.memory_optimizer,     c.memory_eager,
                                             c.memory_activation,    c.memory_permute,   c.memory_buffer};
  const double rate = memory_bytes_per_s_ * efficiency[static_cast<int>(kind)];
  const double cached = bytes <= 0.5 * c.cache_bytes ? c.cache_speed_up : 1;
  return launches * c.kernel_start_s + bytes / (rate * cached);
}

double DeviceModel::host_copy_seconds(double bytes, HostCopy direction) const {
  return constants_.host_copy_start_s +
         bytes / (direction == HostCopy::kToDevice ? constants_.host_to_device_bytes_per_s : constants_.device_to_host_bytes_per_s);
}

double DeviceModel::nvme_seconds(double bytes, bool write, double sharing) const {
  return constants_.nvme_start_s + bytes * sharing / (write ? constants_.nvme_write_bytes_per_s : constants_.nvme_read_bytes_per_s);
}

}  // namespace shardlab::simulator
