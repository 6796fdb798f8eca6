// The constants of DeviceModel by name, with the default of each: what a machine file may state under `device.constants`.
#pragma once

#include <span>
#include <string_view>

namespace shardlab::simulator {

/// The share of a data sheet's rates that a program reaches, and the costs of a kernel beside its flops and bytes.
///
/// Units: as stated. Defaults are the constants of an A100 (fitted there, transferred anywhere else); shipped machines state their
/// own, each tagged. Fitted constants come from simulator/published alone, never from an end-to-end run. `matmul_spread` is
/// transferred everywhere: Sinha et al., "Not All GPUs Are Created Equal" (SC 2022, arXiv 2208.11035) measured over 90 % of the
/// devices of five clusters and found 8 % on average between slow and fast ones, outliers apart, caused by power management. These
/// 8 % are read as the whiskers of a box plot, which are 5.4 deviations of a normal apart.
struct DeviceConstants {
  double sms = 108;  ///< multiprocessors (compute units): how many tiles are computed at once

  double matmul_bf16_rate = 0.85;    ///< of the dense peak, by large matmuls at the clock of short runs; fp16 too
  double matmul_fp8_rate = 0.72;     ///< the same for fp8
  double matmul_fp4_rate = 0.65;     ///< the same for fp4
  double matmul_fp32_rate = 0.85;    ///< the same for fp32 without tensor cores
  double matmul_sustained = 0.95;    ///< of that rate, by long runs of large matmuls: what power and heat leave
  double matmul_spread = 0.015;      ///< standard deviation of that clock among devices of one model, relative
  double matmul_beside = 1.76;       ///< time beside a collective that holds 24 multiprocessors, relative to alone
  double matmul_resident = 0;        ///< part of the multiprocessors that keep a block for the whole product; 0: a block a tile
  double matmul_input_rate = 1.0;    ///< Product::kInput relative to kForward
  double matmul_weight_rate = 1.0;   ///< Product::kWeight relative to kForward
  double matmul_ramp_k = 192;        ///< k0: elements of k whose time a tile needs to start and to write its result
  double matmul_small_tile = 0.60;   ///< rate of a 64-wide tile relative to the library's largest; tiles between interpolate
  double matmul_doublings = 3;       ///< of the area, from 64 x 64 to the library's largest tile: 3 is 128 x 256, 4 is 256 x 256
  double matmul_quantisation = 0.7;  ///< 1: a last wave that is partly filled costs a full one; 0: only its part
  double matmul_write = 1;           ///< rate of writing a result, relative to reading operands
  double matmul_memory = 0.75;       ///< of the memory bandwidth, by the operands of a matmul

  /// Rate of the library's 128 x 64 tile where rows of a matrix begin at any 16-bit element, relative to multiples of 16 bytes;
  /// larger tiles do not exist there (cutlass_75_tensorop_..._128x64_..._align1 on A100: pegainfer-project/pegainfer#1046).
  /// Transferred: an odd row of 2047 in a product of 2048 takes over twice as long (H. He, "What Shapes Do Matrix Multiplications
  /// Like?", answers, thonking.ai 2024), which this makes 2.2.
  double matmul_unaligned = 0.47;

  double matmul_start_s = 5e-6;  ///< least duration of a matmul: start, first loads, last stores

  double attention_flash_2 = 1;           ///< rate of FlashAttention-2 relative to the device's best fused kernel
  double attention_forward_rate = 0.62;   ///< of the bf16 peak, fused attention with head_dim 128, long sequences
  double attention_backward_rate = 0.50;  ///< the same of its backward
  double attention_head_64 = 0.85;        ///< rate with head_dim 64 relative to 128
  double attention_head_256 = 0.80;       ///< the same with 256
  double attention_causal = 0.90;         ///< rate over the flops left when causal, relative to not causal
  double attention_half = 256;            ///< keys seen by a row (half of them when causal) with which half of the rate is reached
  double attention_quantisation = 0.5;    ///< as of matmuls, of tiles of 128 rows of one head
  double attention_start_s = 10e-6;       ///< beside its flops: set-up and the kernels around it

  double memory_elementwise = 0.85;  ///< of the memory bandwidth, by kind of kernel
  double memory_norm = 0.75;
  double memory_norm_backward = 0.45;
  double memory_softmax = 0.75;
  double memory_cross_entropy = 0.75;
  double memory_embedding = 0.60;
  double memory_optimizer = 0.80;
  double memory_eager = 0.80;
  double memory_activation = 0.70;
  double memory_permute = 0.54;  ///< of a B200: MooreThreads/SimuMax configs/system/b200_bf16_ceperm.json
  /// Of an H100 with 2.4 TB/s and of an A100: bf16 to fp32 at 278 G elements/s (pytorch/pytorch#120678, 0.70), 1.5 GB in 1.98 ms
  /// and 2.2 GB in 2.85 ms (pytorch/pytorch#117203, 0.72 and 0.77). The devices' memories are not stated.
  double memory_buffer = 0.72;
  double memory_copy = 0.85;
  double cache_bytes = 40e6;    ///< second-level cache
  double cache_speed_up = 1.8;  ///< rate of a kernel whose bytes all fit in half of it, relative to memory

  double kernel_start_s = 2e-6;  ///< least duration of one kernel on the device
  double host_launch_s = 6e-6;   ///< host cost of one launch from a framework's compiled or C++ path
  /// Speed of the host's thread that starts kernels, relative to the host of the profiles' seconds (FrameworkProfile::Host).
  double host_speed = 1;

  double host_to_device_bytes_per_s = 25e9;  ///< pinned memory, one copy engine
  double device_to_host_bytes_per_s = 25e9;
  double host_copy_start_s = 10e-6;
  double nvme_read_bytes_per_s = 20e9;  ///< of a node: all its drives
  double nvme_write_bytes_per_s = 10e9;
  double nvme_start_s = 100e-6;

  double host_memory_bytes = 0;    ///< of a node, that programs can use; 0: not known
  double nvme_capacity_bytes = 0;  ///< of a node's drives; 0: not known
};

/// One name of Device::constants.
struct DeviceConstant {
  std::string_view name;
  double DeviceConstants::*value;
  /// The kind of prediction that uses the constant: "matmul", "unaligned", "many" (devices that wait for one another), "attention",
  /// "memory", "host", "capacity".
  std::string_view group;
};

/// All of them, in the order of the struct.
std::span<const DeviceConstant> device_constants();

}  // namespace shardlab::simulator
