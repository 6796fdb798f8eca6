// How long one kernel takes on one device, from its shape: the device level of (device, node, cluster).
//
// Every function is pure, allocates nothing and takes tens of nanoseconds: the estimate calls them for each distinct shape of a
// layer. All return seconds of device time for one launch, start-up of the kernel included; what the host pays is apart
// (`host_bound_seconds`).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/machine.h"
#include "simulator/interpreter/device_constants.h"

namespace shardlab::simulator {

/// Seconds that `total` takes at `rate` a second; none where the rate is not known.
inline double time_at(double total, double rate) { return rate > 0 ? total / rate : 0; }

/// How the operands of the multiplications are stored. fp16 runs at the rate of bf16 on every device that has both.
constexpr double bytes_of(Precision precision) {  ///< of one operand element; scales of blocks not counted
  constexpr double bytes[] = {4, 2, 2, 1, 0.5};
  return bytes[static_cast<int>(precision)];
}

/// The operand that is read along its rows. The three matmuls of a linear layer differ in it, and libraries differ in speed by it.
enum class Product : uint8_t {
  kForward,  ///< y = x w^T: m = tokens, n = out, k = in
  kInput,    ///< dx = dy w: m = tokens, n = in, k = out
  kWeight,   ///< dw = dy^T x: m = out, n = in, k = tokens
};

/// One matrix product, or `batch` of one shape in one launch.
struct Matmul {
  double m = 0, n = 0, k = 0;
  double batch = 1;
  Precision precision = Precision::kBf16;
  Product product = Product::kForward;
  double out_bytes = 2;     ///< of one element of the result
  bool accumulate = false;  ///< the result is read and added to
  bool grouped = false;     ///< the `batch` products are launches of their own on four streams (experts), not one launch
  double slowest = 1;       ///< of devices that wait for one another: DeviceModel::slowest_of
  bool tf32 = false;        ///< fp32 operands are rounded to 19 bits for the tensor cores, which do half as many as of 16 bits
};

enum class Pass : uint8_t { kForward, kBackward };
enum class AttentionKernel : uint8_t {
  kFused,    ///< flash attention: no scores in memory; its backward recomputes them
  kUnfused,  ///< two batched products with scale, mask, softmax (and dropout) as kernels between them
  kFlash2,   ///< FlashAttention-2: fused, written for Ampere; kFused is the device's best (cuDNN, FlashAttention-3)
  kEager,    ///< as kUnfused, but scale, mask and casts around a softmax in fp32 are kernels of their own
};

/// Attention of `batch` sequences on one rank.
struct AttentionShape {
  double batch = 1;
  double heads = 1;     ///< of the queries
  double kv_heads = 1;  ///< heads that share keys and values: heads / kv_heads queries each
  double queries = 0;   ///< tokens that ask
  double keys = 0;      ///< tokens that are asked; equal to `queries` but in context parallelism
  double head_dim = 128;
  double value_dim = 0;  ///< of values and outputs; 0: as head_dim (they differ in latent attention)
  bool causal = true;    ///< half of the scores are masked; the fused kernel skips them, the unfused one does not
  bool dropout = false;  ///< on the probabilities; unfused: one more kernel and one byte a score
  AttentionKernel kernel = AttentionKernel::kFused;
  Pass pass = Pass::kForward;
  Precision precision = Precision::kBf16;
};

/// Kernels that move memory and compute next to nothing, by how well they use the bandwidth.
enum class MemoryKernel : uint8_t {
  kElementwise,   ///< add, activation, cast, fill: streams
  kNorm,          ///< LayerNorm or RMSNorm, forward, fused
  kNormBackward,  ///< both gradients, fused
  kSoftmax,       ///< rows of scores, forward or backward
  kCrossEntropy,  ///< rows of logits
  kEmbedding,     ///< gather of rows; its backward scatters with atomics
  kOptimizer,     ///< many tensors in one launch
  kEager,         ///< an op composed of unfused element-wise kernels; give the bytes and launches of all of them
  kActivation,    ///< GeLU, SwiGLU: element-wise with transcendentals
  kPermute,       ///< rows put in another order, as those of tokens by expert
  kBuffer,        ///< many tensors into the buffer of a collective, or out of it, cast where they differ
};
inline constexpr int kMemoryKernels = 11;

enum class HostCopy : uint8_t { kToDevice, kToHost };

/// Seconds of kernels on one device.
///
/// Formula: see each function; constants in simulator/interpreter/device_constants.h, each with its provenance.
/// Units: seconds, bytes, flop/s, bytes/s.
/// Source: Machine::device (data sheet) and Device::constants (fitted to the kernel tables in simulator/published).
/// Valid when: the kernel has the device for itself; shapes of at least 1.
class DeviceModel {
 public:
  /// Refuses a device without bandwidth or without any dense peak, and constants that are unknown, not finite or not positive.
  static Result<DeviceModel> of(const Device& device);

  /// Formula: the least over the library's tiles (tm x tn) and splits of k (s) of
  ///     waves * (2 tm tn (k / s + k0) / (rate / sms * tile efficiency)) + reduction of the split,
  ///   waves between tiles / sms and its ceiling (`matmul.quantisation`), tiles = batch * ceil(m/tm) * ceil(n/tn) * s;
  ///   at least the time of its bytes at the memory bandwidth; plus the start of a kernel.
  ///   Rows that do not begin at multiples of 16 bytes are loaded in smaller pieces: the rate falls by the same factor with each
  ///   halving of the alignment, to `matmul.unaligned` at 2 bytes, where tiles are 128 x 64 at most.
  ///   A long run of matmuls goes at the clock at which the device stays within its power (`matmul.sustained`): switching draws the
  ///   clock times the voltage squared, which rises with the clock, so that used f^3 = sustained^3 where the multipliers are busy
  ///   `used` of the time. What partly filled waves leave idle is partly given back as clock. `short_run` leaves that out, as in a
  ///   benchmark of a few milliseconds. Devices of one model do not reach the same clock within the same power: one that `slowest`
  ///   says is slower is so where power binds, and there alone.
  double matmul_seconds(const Matmul& matmul, bool short_run = false) const { return matmul_waited(matmul, short_run).seconds; }
  /// The same, and how much less the typical device takes.
  struct Waited {
    double seconds = 0, late = 0;
  };
  Waited matmul_waited(const Matmul& matmul, bool short_run = false) const;

  /// How much longer the slowest of `devices` takes than the typical one, where power sets the clock. A step in which all wait for
  /// one another goes at its pace.
  /// Formula: 1 + matmul.spread * E[largest of n standard normals], by its median rank (n - 3/8) / (n + 1/4) where n is a power
  ///   of two, linear in between.
  /// Source: Blom, Statistical Estimates and Transformed Beta-Variables (1958); the normal quantile of Abramowitz and
  /// Stegun, 26.2.23.
  double slowest_of(int64_t devices) const;

  /// Seconds that a matmul loses for each second of a collective beside it. The collective holds `taken` multiprocessors and takes
  /// `collective` seconds, the matmul `alone`.
  /// Formula: where a product's blocks stay on their multiprocessors (`matmul.resident` of them), those that find none wait for
  ///   the collective to end or for the first wave, and then take as long again. A collective shorter than the matmul costs all
  ///   its time; one x times as long, beside products one after the other, (floor(x / 2) + min(1, x mod 2)) / x. One that fits
  ///   beside the blocks costs nothing. Where a block is one tile, 1 - 1 / (1 + (matmul.beside - 1) * min(1, taken / 24)).
  /// Source: pytorch/pytorch#143988 and #144974 (H100 under FSDP: twice as long, in two waves), NVIDIA developer forum 337991
  ///   (H100, 132 blocks: 80 to 47 % of the peak beside an all-gather of 24), NVIDIA/nccl#1428 (A100: 1.18 to 2.08 ms beside
  ///   an all-gather).
  double lost_beside(double taken, double collective, double alone) const;
  /// The part of their multiprocessors that matmuls go without, over time, while a collective holds `taken`.
  double held_beside(double taken) const;
  /// The part of all multiprocessors that `taken` are.
  double share_of(double taken) const { return std::min(1.0, taken / std::max(1.0, constants_.sms)); }

  /// Formula, fused: flops / (rate * seen / (seen + half)), `seen` the keys a row sees on average, flops = 2 queries keys heads
  /// batch (head_dim + value_dim), halved when
  ///   causal, times 2.5 backward; work is spread in tiles of 128 rows over the multiprocessors; at least its bytes. Unfused: the
  ///   two (backward: four) batched products and the kernels between them.
  double attention_seconds(const AttentionShape& attention) const;

  /// Formula: launches * start + bytes / (bandwidth * efficiency of the kind), less what the second-level cache serves when all of
  ///   `bytes` fit in it.
  double memory_bound_seconds(double bytes, double launches = 1, MemoryKernel kind = MemoryKernel::kElementwise) const;

  /// Formula: max(device seconds, launches * host cost of a launch): a stretch of kernels runs no faster than it is launched.
  double host_bound_seconds(double device_seconds, double launches) const {
    const double host = launches * constants_.host_launch_s;
    return device_seconds > host ? device_seconds : host;
  }

  /// One copy between pinned host memory and the device on a copy engine; the two directions are independent.
  double host_copy_seconds(double bytes, HostCopy direction) const;

  /// Reads or writes of one node's NVMe by one of its devices, when `sharing` of them do so at once.
  double nvme_seconds(double bytes, bool write, double sharing = 1) const;

  /// Dense peak by the data sheet, flop/s; of the nearest wider precision where the device lacks one, 0 where it lacks those too:
  /// its matmuls then take for ever.
  double peak_flops(Precision precision) const { return peak_[static_cast<int>(precision)]; }
  double memory_bytes_per_s() const { return memory_bytes_per_s_; }
  const DeviceConstants& constants() const { return constants_; }
  /// The least trusted provenance among the constants that predict `what` ("matmul", "attention", "memory", "host"); for rates of
  /// matmuls, the provenance of the rate of `precision`.
  Provenance provenance(std::string_view what, Precision precision = Precision::kBf16) const;

 private:
  DeviceModel() = default;
  double fused_attention_seconds(const AttentionShape& attention) const;
  double head_rate(double head_dim) const;
  double throttled(double used, double slowest) const;
  bool waits_beside(double taken) const { return taken > constants_.sms * (1 - constants_.matmul_resident); }
  double unfused_attention_seconds(const AttentionShape& attention) const;

  DeviceConstants constants_;
  double peak_[kPrecisions] = {};
  double rate_[kPrecisions] = {};  ///< of a large matmul, flop/s
  double memory_bytes_per_s_ = 0;
  ByName<Provenance> provenance_;
};

}  // namespace shardlab::simulator
