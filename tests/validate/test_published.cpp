#include "simulator/estimator/validate/published.h"

#include <algorithm>
#include <map>
#include <set>

#include "tests/test.h"
#include "tests/validate/support.h"

namespace shardlab::simulator::validation {
namespace {

TEST_CASE("every published row is a run that was measured") {
  const std::map<std::string, size_t> expected{{"korthikanti_2022", 9},
                                               {"llm_foundry_mpt", 300},
                                               {"megatron_core_h100_weak_scaling", 9},
                                               {"narayanan_2021", 22},
                                               {"simumax_b200", 43},
                                               {"torchtitan", 41},
                                               {"vtrain_multi_node", 109},
                                               {"vtrain_single_node", 1440},
                                               {"llmq_single_box", 30},
                                               {"megatron_bridge_perf_summary", 73},
                                               {"megatron_golden_values", 298},
                                               {"mlperf_training_llm", 13},
                                               {"nanotron_playbook", 1375}};
  const std::set<std::string> untuned = testing::untuned_sets();
  CHECK(published_runs().size() == expected.size());
  for (const RowTable& table : testing::published_tables()) {
    INFO(table.name);
    CHECK(table.rows.size() == expected.at(table.name));
    for (const Row& row : table.rows) {
      INFO(row.line << (row.run.ok() ? std::string() : to_string(row.run.error())));
      REQUIRE(row.run.ok());
      const RunMeasured& m = row.run->measured;
      if (untuned.contains(table.name)) {
        CHECK(m.fits.has_value());
        CHECK((m.step_s || m.bytes || m.fits == false));
        continue;
      }
      CHECK(m.step_s.has_value());
      CHECK(m.fits == true);
      CHECK(row.run->machine.device.memory_bytes > 0);
      CHECK(table.csv.column("source") >= 0);
    }
  }
}

TEST_CASE("rows of the published sets that papers print") {
  const std::vector<RowTable> tables = testing::published_tables();
  const auto set = [&](const std::string& name) -> const RowTable& {
    return *std::find_if(tables.begin(), tables.end(), [&](const RowTable& table) { return table.name == name; });
  };
  const RowTable& korthikanti = set("korthikanti_2022");
  const Run& gpt3 = *korthikanti.rows[3].run;  // 175B, sequence parallel and selective: 13.75 s on 64 devices
  CHECK(gpt3.measured.step_s == 13.75);
  CHECK(gpt3.layout.vpp == 3);
  CHECK(gpt3.layout.grad_accumulation == 64);
  CHECK(gpt3.layout.sequence_parallel == true);
  CHECK(gpt3.machine.nodes == 8);
  const RowTable& titan = set("torchtitan");
  const Run& llama = *titan.rows[0].run;  // 8B on 8 devices, eager: 5762 tokens a second and device, 82.4 GiB
  CHECK(*llama.measured.step_s == Approx(16 * 8192 / (8 * 5762.0)));
  CHECK(llama.measured.bytes == 88'476'326'298);
  CHECK(llama.measured.kind == MemoryKind::kReserved);
  CHECK(llama.layout.zero == 3);
  CHECK(llama.machine.device.memory_bytes_per_s == 2.4e12);
  const RowTable& multi = set("vtrain_multi_node");
  CHECK(multi.rows[0].run->machine.inter_bytes_per_s == 12.5e9);
  const RowTable& deepseek = set("simumax_b200");
  CHECK(deepseek.rows[4].run->shape.kv_lora_rank == 512);
  CHECK(deepseek.rows[4].run->shape.shared_experts == 2);
  CHECK(deepseek.rows[4].run->layout.ep == 8);
}

}  // namespace
}  // namespace shardlab::simulator::validation
