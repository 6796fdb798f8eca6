// Machines, models and points that the tests share.
#pragma once

#include "simulator/estimator/analytic/analytic.h"

namespace shardlab::simulator::analytic::testing {

/// Nodes of 8 A100-like devices.
inline Machine machine(int nodes, int per_node = 8) {
  Machine m;
  m.id = "nodes-of-eight";
  m.devices_per_node = per_node, m.nodes = nodes;
  m.inter_bytes_per_s = 25e9;
  Device& d = m.device;
  d.id = "a100-like", d.architecture = "ampere";
  d.memory_bytes = 80'000'000'000;
  d.memory_bytes_per_s = 2.039e12, d.link_bytes_per_s = 300e9, d.power_w = 400;
  d.peak_flops = {{"fp32", 19.5e12}, {"bf16", 312e12}, {"fp16", 312e12}, {"fp8", 624e12}};
  return m;
}

inline ModelShape gpt_175b() {
  return {.layers = 96,
          .hidden = 12288,
          .heads = 96,
          .kv_heads = 96,
          .head_dim = 128,
          .ffn = 49152,
          .vocab = 51200,
          .max_positions = 2048,
          .tied_embeddings = true,
          .biases = true};
}

inline ModelShape llama_8b() {
  return {.layers = 32,
          .hidden = 4096,
          .heads = 32,
          .kv_heads = 8,
          .head_dim = 128,
          .ffn = 14336,
          .vocab = 128256,
          .swiglu = true,
          .rms_norm = true};
}

inline ModelShape mixtral_8x7b() {
  ModelShape s = llama_8b();
  s.vocab = 32000;
  s.experts = 8, s.top_k = 2, s.moe_ffn = 14336;
  return s;
}

/// Costs of a framework, with nothing that it cannot do: what a schedule costs is tested under every profile.
inline FrameworkProfile profile(std::string_view name) {
  auto found = profile_named(name);
  if (!found.ok()) return {};
  found->can = {};
  return *found;
}

inline Prepared study(const ModelShape& shape, std::string_view name, int nodes) {
  auto prepared = prepare(shape, machine(nodes), profile(name));
  if (!prepared.ok()) throw std::runtime_error(to_string(prepared.error()));
  return *prepared;
}

}  // namespace shardlab::simulator::analytic::testing
