#include "simulator/estimator/validate/rows.h"
#include "tests/test.h"
#include "tests/validate/support.h"

namespace shardlab::simulator::validation {
namespace {

using testing::resolver;
using testing::table_of;

Run run_of(const std::string& header, const std::string& row) {
  const RowTable table = table_of(header, {row});
  const Result<Run>& run = table.rows[0].run;
  INFO((run.ok() ? std::string() : to_string(run.error())));
  REQUIRE(run.ok());
  return *run;
}

std::string refusal(const std::string& header, const std::string& row) {
  const RowTable table = table_of(header, {row});
  return table.rows[0].run.ok() ? "accepted" : table.rows[0].run.error().message;
}

TEST_CASE("a row's sizes come from the preset, and its columns override them") {
  const Run preset = run_of("devices,micro_batch", "8,1");
  CHECK(preset.shape.layers == 8);
  CHECK(preset.shape.kv_heads == 2);
  CHECK(preset.shape.swiglu);
  CHECK(preset.shape.rms_norm);
  const Run changed = run_of("devices,micro_batch,layers,norm,mlp,tied_embeddings,kv_heads", "8,1,24,layer,gelu,yes,8");
  CHECK(changed.shape.layers == 24);
  CHECK(changed.shape.hidden == 256);
  CHECK(changed.shape.kv_heads == 8);
  CHECK_FALSE(changed.shape.swiglu);
  CHECK_FALSE(changed.shape.rms_norm);
  CHECK(changed.shape.tied_embeddings);
}

TEST_CASE("a row may state its whole shape; the model is then a label") {
  const std::string header = "machine,seq_len,devices,micro_batch,model,layers,hidden,heads,ffn,vocab\n";
  const auto table = read_rows(header + "box,128,1,1,my-model,4,64,4,256,1000\n", "t.csv", resolver());
  REQUIRE(table.ok());
  REQUIRE(table->rows[0].run.ok());
  CHECK(table->rows[0].run->shape.head_dim == 16);
  CHECK(table->rows[0].run->shape.kv_heads == 4);
  const auto partial = read_rows(header + "box,128,1,1,my-model,4,64,,256,1000\n", "t.csv", resolver());
  REQUIRE(partial.ok());
  REQUIRE_FALSE(partial->rows[0].run.ok());
  CHECK(partial->rows[0].run.error().message == "`model`: no model is named `my-model`");
  CHECK(partial->rows[0].run.error().where == "t.csv:2:13");
}

TEST_CASE("what a row leaves out follows from the rest") {
  const Run run = run_of("devices,tp,pp,micro_batch,global_batch_tokens", "16,2,4,2,8192");
  CHECK(run.layout.dp == 2);
  CHECK(run.layout.grad_accumulation == 16);
  CHECK(run.layout.schedule == "1f1b");
  CHECK(run.machine.nodes == 2);
  CHECK_FALSE(run.layout.zero.has_value());
  CHECK(run.layout.recompute == std::vector<std::string>{"none"});
  const Run interleaved = run_of("dp,pp,vpp,micro_batch", "2,4,2,1");
  CHECK(interleaved.layout.schedule == "interleaved");
  CHECK(interleaved.devices == 8);
  CHECK(run_of("devices,schedule,micro_batch", "8,1f1b,1").layout.schedule == "none");
  CHECK(run_of("devices,pp,vpp,schedule,micro_batch", "8,2,2,1F1B,1").layout.schedule == "interleaved");
  CHECK(run_of("devices,grad_accumulation,global_batch_tokens", "8,4,16384").layout.micro_batch == 4);
}

TEST_CASE("the preset of one device stands for a host of them") {
  const auto machine = [](const std::string& devices) {
    const auto table =
        read_rows("model,machine,seq_len,micro_batch,devices\ntiny-llama,box,128,1," + devices + "\n", "t.csv", resolver());
    REQUIRE(table.ok());
    REQUIRE(table->rows[0].run.ok());
    return table->rows[0].run->machine;
  };
  CHECK(machine("1").devices() == 1);
  CHECK(machine("4").devices_per_node == 4);
  CHECK(machine("4").nodes == 1);
  CHECK(machine("16").devices_per_node == 8);
  CHECK(machine("16").nodes == 2);
}

TEST_CASE("words of a row are read as users write them") {
  const Run run = run_of(
      "devices,micro_batch,profile,recompute,offload,sequence_parallel,precision,measured_tokens_per_s,measured_bytes,"
      "measured_memory_kind,all_reduce_busbw_gbps,seq",
      "8.0,1,Megatron-2022,\"[attention, mlp]\",\"{optimizer: cpu, activations: nvme}\",True,BF16,2048,7e10,reserved,90.5,x");
  CHECK(run.profile == "megatron-2022");
  CHECK(run.layout.recompute == std::vector<std::string>{"attention", "mlp"});
  CHECK(run.layout.offload == std::vector<std::pair<std::string, std::string>>{{"optimizer", "cpu"}, {"activations", "nvme"}});
  CHECK(run.layout.sequence_parallel == true);
  CHECK(run.layout.precision == "bf16");
  CHECK(run.measured.step_s == 0.5);
  CHECK(run.measured.bytes == 70'000'000'000);
  CHECK(run.measured.kind == MemoryKind::kReserved);
  CHECK(run.measured.fits == true);
  CHECK(run.fabric.all_reduce == 90.5);
}

TEST_CASE("a run that went out of memory has no step time") {
  const Run run =
      run_of("devices,micro_batch,measured_step_s,measured_bytes,measured_memory_kind,measured_status", "8,1,2.5,8e10,device,oom");
  CHECK(run.measured.fits == false);
  CHECK_FALSE(run.measured.step_s.has_value());
  CHECK_FALSE(run.measured.bytes.has_value());
  CHECK_FALSE(run_of("devices,micro_batch", "8,1").measured.fits.has_value());
}

TEST_CASE("rows that can be no training run are refused with the reason") {
  CHECK(refusal("devices,micro_batch", "0,1") == "`devices`: 0 is outside 1 to 4194304");
  CHECK(refusal("devices,micro_batch", "-8,1") == "`devices`: -8 is outside 1 to 4194304");
  CHECK(refusal("devices,micro_batch", "nan,1") == "`devices`: `nan` is not a whole number");
  CHECK(refusal("devices,micro_batch", "inf,1") == "`devices`: `inf` is not a whole number");
  CHECK(refusal("devices,micro_batch", "99999999999999999999999,1") ==
        "`devices`: 99999999999999999999999 is outside 1 to 4194304");
  CHECK(refusal("devices,micro_batch", "8 GPUs,1") == "`devices`: `8 GPUs` is not a whole number");
  CHECK(refusal("devices,micro_batch", "7.5,1") == "`devices`: `7.5` is not a whole number");
  CHECK(refusal("devices,dp,tp,micro_batch", "8,2,2,1") == "`devices`: 8, but dp * tp * pp * cp = 2 * 2 * 1 * 1 = 4 ranks");
  CHECK(refusal("devices,tp,micro_batch", "8,3,1") == "`devices`: 8 is not a multiple of tp * pp * cp = 3");
  CHECK(refusal("dp,tp,pp,cp,micro_batch", "4000000,4000000,4000000,4000000,1") ==
        "`tp`: tp * pp * cp = 64000000000000000000 ranks");
  CHECK(refusal("dp,tp,micro_batch", "4000000,4000000,1") == "`dp`: dp * tp * pp * cp = 16000000000000 ranks");
  CHECK(refusal("devices,ep,micro_batch", "8,3,1") == "`ep`: 3 times expert_tp 1 does not divide dp * cp * tp = 8");
  CHECK(refusal("devices,zero,micro_batch", "8,4,1") == "`zero`: 4 is outside 0 to 3");
  CHECK(refusal("devices,pp,schedule,micro_batch", "8,2,gpipe,1") == "`schedule`: `gpipe` is unknown");
  CHECK(refusal("devices,pp,schedule,micro_batch", "8,2,none,1") == "`schedule`: none with pp = 2");
  CHECK(refusal("devices,vpp,micro_batch", "8,2,1") == "`vpp`: 2 virtual stages without a pipeline");
  CHECK(refusal("devices,precision,micro_batch", "8,int8,1") == "`precision`: `int8` is unknown");
  CHECK(refusal("devices,profile,micro_batch", "8,megatronic,1") == "`profile`: `megatronic` is unknown");
  CHECK(refusal("devices,recompute,micro_batch", "8,\"full,none\",1") == "`recompute`: `full,none` is not a kind of recompute");
  CHECK(refusal("devices,offload,micro_batch", "8,optimizer=disk,1") == "`offload`: `optimizer=disk` is unknown");
  CHECK(refusal("devices,sequence_parallel,micro_batch", "8,maybe,1") == "`sequence_parallel`: `maybe` is neither true nor false");
  CHECK(refusal("devices,global_batch_tokens", "8,1024") ==
        "`micro_batch`: is not stated, and does not follow from global_batch_tokens and grad_accumulation");
  CHECK(refusal("devices,micro_batch,global_batch_tokens", "8,3,4096") ==
        "`global_batch_tokens`: 4096 is not a multiple of 3072 tokens");
  CHECK(refusal("devices,micro_batch,grad_accumulation,global_batch_tokens", "8,1,2,4096") ==
        "`global_batch_tokens`: 4096 where seq_len * micro_batch * grad_accumulation * dp is 2048");
  CHECK(refusal("devices,micro_batch,grad_accumulation", "8,16777216,16777216") == "`micro_batch`: a step of 2.88e+17 tokens");
  CHECK(refusal("devices,micro_batch,heads,hidden", "8,1,7,256") == "`head_dim`: hidden 256 is not a multiple of 7 heads");
  CHECK(refusal("devices,micro_batch,kv_heads", "8,1,3") == "`kv_heads`: 8 heads do not divide into 3 groups");
  CHECK(refusal("devices,micro_batch,hidden,ffn,layers", "8,1,4194304,4194304,10000") ==
        "`hidden`: these sizes make 9.7e+17 parameters");
  CHECK(refusal("devices,micro_batch,experts", "8,1,8") == "`top_k`: 0 of 8 experts for a token");
  CHECK(refusal("devices,micro_batch,measured_step_s", "8,1,0") == "`measured_step_s`: 0 is outside 1e-06 to 1e+07 seconds");
  CHECK(refusal("devices,micro_batch,measured_bytes", "8,1,1e9") == "`measured_memory_kind`: is not stated beside measured_bytes");
  CHECK(refusal("devices,micro_batch,measured_status", "8,1,crashed") == "`measured_status`: `crashed` is unknown");
  CHECK(refusal("devices,micro_batch,all_reduce_busbw_gbps", "8,1,-3") ==
        "`all_reduce_busbw_gbps`: -3 is outside 0.001 to 100000 GB/s");
  CHECK(refusal("devices,micro_batch,busbw_bytes", "8,1,-1") == "`busbw_bytes`: -1 is outside 0 to 1e+13 bytes");
}

TEST_CASE("a bad row costs itself only, with line and column") {
  const RowTable table = table_of("devices,micro_batch,who", {"8,1,a", "8,0,b", "8,1,c"});
  REQUIRE(table.rows.size() == 3);
  CHECK(table.rows[0].run.ok());
  REQUIRE_FALSE(table.rows[1].run.ok());
  CHECK(table.rows[1].run.error().where == "hand.csv:3:23");
  CHECK(table.rows[2].run.ok());
  CHECK(table.rows[2].line == 4);
  CHECK(table.unread == std::vector<std::string>{"who"});
}

TEST_CASE("a table without the columns that every run needs is refused as a whole") {
  const auto refusal_of = [](const std::string& text) {
    const auto table = read_rows(text, "t.csv", resolver());
    return table.ok() ? "read" : table.error().message;
  };
  CHECK(refusal_of("model,seq_len,devices\na,1,1\n") == "the header has no column `machine`");
  CHECK(refusal_of("model,machine,devices\na,b,1\n") == "the header has no column `seq_len`");
  CHECK(refusal_of("seq_len,machine,devices\na,b,1\n") == "the header has neither a column `model` nor a column `layers`");
  CHECK(refusal_of("seq_len,machine,model\na,b,1\n") == "the header has neither a column `devices` nor a column `dp`");
}

TEST_CASE("columns of untuned runs") {
  const RowTable table = testing::table_of(
      "devices,pp,micro_batch,grad_accumulation,stage_split,master_dtype,moment_dtype,gradient_fusion,tf32,cuda_graphs,head_chunks,"
      "offload,"
      "offload_layers,memory_rank,measured_bytes,measured_memory_kind,biases,positions,micro_batch_group,expert_overlap",
      {"8,4,1,4,embedding+head,bf16,bf16,false,true,layers,4,\"master=cpu,m=cpu\",3,last,1000,live,true,rotary,5,true",
       "8,4,1,4,first=1 last=2,,,,,,,,,,,,,,,", "8,4,1,4,middle=3,,,,,,,,,,,,,,,", "8,4,1,4,,,,,,,,,,nth,1,live,,,,"});
  REQUIRE(table.rows[0].run.ok());
  const RunLayout& l = table.rows[0].run->layout;
  CHECK((l.embedding_as_layer && l.head_as_layer));
  CHECK((l.master_dtype == "bf16" && l.moment_dtype == "bf16" && l.cuda_graphs == "layers"));
  CHECK((l.gradient_fusion == false && l.tf32 == true && l.head_chunks == 4 && l.offload_layers == 3));
  CHECK(l.offload.size() == 2);
  CHECK((l.micro_batch_group == 5 && l.expert_overlap));
  CHECK_FALSE(table.rows[1].run->layout.expert_overlap);
  CHECK(table.rows[0].run->measured.stage == 3);
  CHECK((table.rows[0].run->shape.biases == true && table.rows[0].run->shape.learned_positions == false));
  CHECK((table.rows[1].run->layout.first_stage_layers == 1 && table.rows[1].run->layout.last_stage_layers == 2));
  CHECK(table.rows[1].run->measured.stage == -1);
  CHECK_FALSE(table.rows[2].run.ok());
  CHECK_FALSE(table.rows[3].run.ok());
}

}  // namespace
}  // namespace shardlab::simulator::validation
