// The case by which timelines are timed, and held to one another in tests/segments.
#pragma once

#include "plan/case.h"

namespace shardlab {

/// GPT-3 175B, tp 8, on nodes of eight H100.
inline Case gpt3_175b(int pp, int64_t micro_batches) {
  Case c;
  c.name = "gpt3-175b";
  c.model = {.name = "gpt3-175b",
             .family = Family::kGpt,
             .layers = 96,
             .hidden = 12288,
             .heads = 96,
             .kv_heads = 96,
             .head_dim = 128,
             .ffn = 49152};
  c.model.vocab = 51200;
  c.model.max_positions = 2048;
  c.train.seq_len = 2048;
  c.train.micro_batch = 1;
  c.train.grad_accumulation = micro_batches;
  c.layout.tp = 8;
  c.layout.pp = pp;
  c.layout.schedule = pp > 1 ? Schedule::k1F1B : Schedule::kNone;
  c.machine.device.peak_flops = {{"fp32", 494.7e12}, {"bf16", 989.4e12}};
  c.machine.device.memory_bytes_per_s = 3.35e12;
  c.machine.device.link_bytes_per_s = 450e9;
  c.machine.inter_bytes_per_s = 50e9;
  c.machine.devices_per_node = 8;
  c.machine.nodes = pp;
  return c;
}

}  // namespace shardlab
