#include "simulator/interpreter/device_constants.h"

namespace shardlab::simulator {

std::span<const DeviceConstant> device_constants() {
  using C = DeviceConstants;
  static constexpr DeviceConstant table[] = {
      {"sms", &C::sms, "matmul"},
      {"matmul.bf16.rate", &C::matmul_bf16_rate, "matmul"},
      {"matmul.fp8.rate", &C::matmul_fp8_rate, "matmul"},
      {"matmul.fp4.rate", &C::matmul_fp4_rate, "matmul"},
      {"matmul.fp32.rate", &C::matmul_fp32_rate, "matmul"},
      {"matmul.sustained", &C::matmul_sustained, "matmul"},
      {"matmul.spread", &C::matmul_spread, "many"},
      {"matmul.beside", &C::matmul_beside, "many"},
      {"matmul.resident", &C::matmul_resident, "many"},
      {"matmul.input.rate", &C::matmul_input_rate, "matmul"},
      {"matmul.weight.rate", &C::matmul_weight_rate, "matmul"},
      {"matmul.ramp_k", &C::matmul_ramp_k, "matmul"},
      {"matmul.small_tile", &C::matmul_small_tile, "matmul"},
      {"matmul.doublings", &C::matmul_doublings, "matmul"},
      {"matmul.quantisation", &C::matmul_quantisation, "matmul"},
      {"matmul.write", &C::matmul_write, "matmul"},
      {"matmul.memory", &C::matmul_memory, "matmul"},
      {"matmul.start_s", &C::matmul_start_s, "matmul"},
      {"matmul.unaligned", &C::matmul_unaligned, "unaligned"},
      {"attention.flash_2", &C::attention_flash_2, "attention"},
      {"attention.forward.rate", &C::attention_forward_rate, "attention"},
      {"attention.backward.rate", &C::attention_backward_rate, "attention"},
      {"attention.head_64", &C::attention_head_64, "attention"},
      {"attention.head_256", &C::attention_head_256, "attention"},
      {"attention.causal", &C::attention_causal, "attention"},
      {"attention.half", &C::attention_half, "attention"},
      {"attention.quantisation", &C::attention_quantisation, "attention"},
      {"attention.start_s", &C::attention_start_s, "attention"},
      {"memory.elementwise", &C::memory_elementwise, "memory"},
      {"memory.norm", &C::memory_norm, "memory"},
      {"memory.norm_backward", &C::memory_norm_backward, "memory"},
      {"memory.softmax", &C::memory_softmax, "memory"},
      {"memory.cross_entropy", &C::memory_cross_entropy, "memory"},
      {"memory.embedding", &C::memory_embedding, "memory"},
      {"memory.optimizer", &C::memory_optimizer, "memory"},
      {"memory.eager", &C::memory_eager, "memory"},
      {"memory.activation", &C::memory_activation, "memory"},
      {"memory.permute", &C::memory_permute, "memory"},
      {"memory.buffer", &C::memory_buffer, "memory"},
      {"memory.copy", &C::memory_copy, "memory"},
      {"cache.bytes", &C::cache_bytes, "memory"},
      {"cache.speed_up", &C::cache_speed_up, "memory"},
      {"kernel.start_s", &C::kernel_start_s, "host"},
      {"host.launch_s", &C::host_launch_s, "host"},
      {"host.to_device_bytes_per_s", &C::host_to_device_bytes_per_s, "host"},
      {"host.from_device_bytes_per_s", &C::device_to_host_bytes_per_s, "host"},
      {"host.copy_start_s", &C::host_copy_start_s, "host"},
      {"nvme.read_bytes_per_s", &C::nvme_read_bytes_per_s, "host"},
      {"nvme.write_bytes_per_s", &C::nvme_write_bytes_per_s, "host"},
      {"nvme.start_s", &C::nvme_start_s, "host"},
      {"host.memory_bytes", &C::host_memory_bytes, "capacity"},
      {"nvme.capacity_bytes", &C::nvme_capacity_bytes, "capacity"},
  };
  return table;
}

}  // namespace shardlab::simulator
