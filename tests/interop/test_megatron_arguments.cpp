// Arguments of Megatron-LM that the exporter writes, held to the arguments that the version it is stamped with takes.
#include <fmt/format.h>

#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "interop/frameworks.h"
#include "plan/base/values.h"
#include "tests/interop/cases.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing::of_megatron {
namespace {

/// What an argument takes: nothing ("switch"), a whole number, two of them, a number, any text, or one of the words listed.
struct Argument {
  std::string_view name, form;
};

/// Source: megatron/training/arguments.py at core_v0.15.3 (309ffca6), `action`, `type` and `choices` of each.
constexpr Argument kArguments[] = {
    {"accumulate-allreduce-grads-in-fp32", "switch"},
    {"adam-beta1", "float"},
    {"adam-beta2", "float"},
    {"adam-eps", "float"},
    {"add-qkv-bias", "switch"},
    {"attention-dropout", "float"},
    {"bf16", "switch"},
    {"ckpt-format", "torch torch_dist zarr torch_dcp fsdp_dtensor"},
    {"clip-grad", "float"},
    {"context-parallel-size", "int"},
    {"cp-comm-type", "text"},
    {"data-parallel-sharding-strategy", "no_shard optim optim_grads optim_grads_params"},
    {"ddp-bucket-size", "int"},
    {"disable-bias-linear", "switch"},
    {"expert-model-parallel-size", "int"},
    {"expert-tensor-parallel-size", "int"},
    {"ffn-hidden-size", "int"},
    {"fp16", "switch"},
    {"fp8-format", "e4m3 hybrid"},
    {"fp8-recipe", "tensorwise delayed mxfp8 blockwise"},
    {"global-batch-size", "int"},
    {"grad-reduce-in-bf16", "switch"},
    {"group-query-attention", "switch"},
    {"hidden-dropout", "float"},
    {"hidden-size", "int"},
    {"hierarchical-context-parallel-sizes", "ints"},
    {"init-method-std", "float"},
    {"initial-loss-scale", "float"},
    {"kv-channels", "int"},
    {"kv-lora-rank", "int"},
    {"loss-scale", "float"},
    {"loss-scale-window", "float"},
    {"lr", "float"},
    {"lr-decay-iters", "int"},
    {"lr-decay-style", "constant linear cosine inverse-square-root WSD"},
    {"lr-warmup-iters", "int"},
    {"lr-wsd-decay-iters", "int"},
    {"lr-wsd-decay-style", "exponential linear cosine minus_sqrt"},
    {"make-vocab-size-divisible-by", "int"},
    {"max-position-embeddings", "int"},
    {"micro-batch-size", "int"},
    {"min-lr", "float"},
    {"mock-data", "switch"},
    {"moe-aux-loss-coeff", "float"},
    {"moe-expert-capacity-factor", "float"},
    {"moe-ffn-hidden-size", "int"},
    {"moe-grouped-gemm", "switch"},
    {"moe-layer-freq", "text"},
    {"moe-router-bias-update-rate", "float"},
    {"moe-router-dtype", "fp32 fp64"},
    {"moe-router-enable-expert-bias", "switch"},
    {"moe-router-group-topk", "int"},
    {"moe-router-load-balancing-type", "aux_loss seq_aux_loss global_aux_loss sinkhorn none"},
    {"moe-router-num-groups", "int"},
    {"moe-router-pre-softmax", "switch"},
    {"moe-router-score-function", "softmax sigmoid"},
    {"moe-router-topk", "int"},
    {"moe-router-topk-scaling-factor", "float"},
    {"moe-shared-expert-intermediate-size", "int"},
    {"moe-shared-expert-overlap", "switch"},
    {"moe-token-dispatcher-type", "allgather alltoall flex"},
    {"moe-token-drop-policy", "probs position"},
    {"moe-z-loss-coeff", "float"},
    {"multi-latent-attention", "switch"},
    {"no-check-for-nan-in-loss-and-grad", "switch"},
    {"no-gradient-accumulation-fusion", "switch"},
    {"norm-epsilon", "float"},
    {"normalization", "LayerNorm RMSNorm"},
    {"num-attention-heads", "int"},
    {"num-distributed-optimizer-instances", "int"},
    {"num-experts", "int"},
    {"num-layers", "int"},
    {"num-query-groups", "int"},
    {"num-virtual-stages-per-pipeline-rank", "int"},
    {"optimizer", "adam sgd"},
    {"optimizer-cpu-offload", "switch"},
    {"optimizer-offload-fraction", "float"},
    {"overlap-grad-reduce", "switch"},
    {"overlap-param-gather", "switch"},
    {"pipeline-model-parallel-layout", "text"},
    {"pipeline-model-parallel-size", "int"},
    {"position-embedding-type", "learned_absolute rope mrope relative none"},
    {"q-lora-rank", "int"},
    {"qk-head-dim", "int"},
    {"qk-layernorm", "switch"},
    {"qk-pos-emb-head-dim", "int"},
    {"recompute-granularity", "full selective"},
    {"recompute-method", "uniform block"},
    {"recompute-modules", "text"},
    {"recompute-num-layers", "int"},
    {"rope-type", "rope yarn"},
    {"rotary-base", "int"},
    {"seed", "int"},
    {"seq-length", "int"},
    {"sequence-parallel", "switch"},
    {"sgd-momentum", "float"},
    {"swiglu", "switch"},
    {"tensor-model-parallel-size", "int"},
    {"tokenizer-type",
     "BertWordPieceLowerCase BertWordPieceCase GPT2BPETokenizer SentencePieceTokenizer GPTSentencePieceTokenizer "
     "HuggingFaceTokenizer Llama2Tokenizer TikTokenizer MultimodalTokenizer NullTokenizer NullMultimodalTokenizer SFTTokenizer"},
    {"tp-comm-overlap", "switch"},
    {"train-iters", "int"},
    {"untie-embeddings-and-output-weights", "switch"},
    {"use-distributed-optimizer", "switch"},
    {"use-megatron-fsdp", "switch"},
    {"use-precision-aware-optimizer", "switch"},
    {"v-head-dim", "int"},
    {"vocab-size", "int"},
    {"weight-decay", "float"},
};

bool is_of(std::string_view form, const std::string& value) {
  if (form == "switch") return value.empty();
  if (form == "int") return parse_count(value).has_value() && value.find_first_not_of("0123456789") == std::string::npos;
  if (form == "float") return parse_number(value).has_value();
  if (form == "ints") return is_of("int", value.substr(0, value.find(' '))) && is_of("int", value.substr(value.find(' ') + 1));
  if (form == "text") return !value.empty();
  std::istringstream words{std::string(form)};
  for (std::string word; words >> word;)
    if (word == value) return true;
  return false;
}

/// Cases that together write every argument.
std::vector<Case> cases() {
  const std::string wsd =
      "learning_rate: 3e-4\ntrain: {learning_rate: {kind: wsd, warmup_steps: 100, total_steps: 2000, decay_steps: 200, floor: "
      "3e-5}}\n";
  std::vector<Case> all{llama("megatron",
                              "tp: 2\nsequence_parallel: true\ntensor_overlap: true\nzero: 1\nhybrid_shard: 4\nbucket_bytes: 64Mi\n"
                              "recompute: selective\nmicro_batch: 1\n" +
                                  wsd),
                        llama("megatron", "pp: 2\nvpp: 2\nschedule: interleaved\nrecompute: full\nmicro_batch: 1\n"),
                        llama("megatron",
                              "pp: 2\nschedule: 1f1b\nstage_layers: '15,17'\nreduce_dtype: bf16\naccumulate_dtype: bf16\n"
                              "micro_batch: 1\n"),
                        llama("megatron", "zero: 3\nmicro_batch: 1\n"),
                        llama("megatron", "zero: 2\nmicro_batch: 1\noptimizer: sgd\n"),
                        llama("megatron", "zero: 1\noffload: {optimizer: cpu}\nmicro_batch: 1\n"),
                        llama("megatron", "cp: 4\ncp_kind: usp\ncp_ulysses: 2\nmicro_batch: 1\ntrain: {loss_scale: 1024}\n"),
                        llama("megatron", "micro_batch: 1\n"),
                        llama("megatron", "micro_batch: 1\n"),
                        point_of("model: gpt2\nmachine: h100\nseq_len: 1Ki\nglobal_batch_tokens: 8Ki\nprofile: megatron\n")};
  all[1].train.precision = Precision::kFp8, all[5].train.precision = all[6].train.precision = Precision::kFp16;
  all[7].model.qkv_biases = true, all[8].model.qk_norm = true;
  all.push_back(llama("megatron", "tp: 2\nsequence_parallel: true\nzero: 1\nmicro_batch: 1\nep: 8\nexpert_tp: 1\n"));
  all.back().model.experts = {
      .count = 8, .top_k = 2, .ffn = 14336, .normalise = false, .balance = 0.01f, .z_loss = 0.001f, .capacity_factor = 1.25f};
  all.push_back(llama("megatron", "zero: 1\nmicro_batch: 1\nep: 8\n"));
  all.back().model.experts = {.count = 64,
                              .top_k = 4,
                              .ffn = 2048,
                              .sigmoid = true,
                              .factor = 2.5f,
                              .shared = 1,
                              .dense_layers = 3,
                              .groups = 8,
                              .groups_chosen = 2,
                              .bias_update_rate = 0.001f};
  all.back().model.latent = {.q_rank = 1536, .kv_rank = 512, .nope = 128, .rope = 64, .v = 128};
  all.back().layout.expert_overlap = ExpertOverlap::kLayer;
  return all;
}

}  // namespace

TEST_CASE("every argument for Megatron-LM is one of its version, with a value of the form that it takes") {
  REQUIRE(interop::find_framework("megatron")->version == "core_v0.15.3");
  REQUIRE(interop::find_framework("megatron")->commit.starts_with("309ffca6"));
  std::map<std::string_view, std::string_view> forms;
  for (const Argument& a : kArguments) forms[a.name] = a.form;
  std::set<std::string> written;
  for (const Case& c : cases()) {
    const auto e = interop::export_case(
        c, "megatron", {.program = "shardlab", .case_id = "0123456789abcdef", .entry_point = {}, .slurm_account = {}});
    INFO((e.ok() ? std::string() : to_string(e.error())));
    REQUIRE(e.ok());
    std::istringstream lines(e->files.front().text);
    for (std::string line; std::getline(lines, line);) {
      if (line.empty() || line.starts_with('#')) continue;
      INFO(line);
      REQUIRE(line.starts_with("--"));
      const size_t blank = line.find(' ');
      const std::string name = line.substr(2, blank - 2), value = blank == std::string::npos ? "" : line.substr(blank + 1);
      const auto form = forms.find(name);
      REQUIRE(form != forms.end());
      CHECK(is_of(form->second, value));
      written.insert(name);
    }
  }
  for (const Argument& a : kArguments) {
    INFO(a.name);
    CHECK(written.contains(std::string(a.name)));
  }
}

}  // namespace shardlab::testing::of_megatron
