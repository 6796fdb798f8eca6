// Model shapes: counts against those published with the checkpoints, names and order of parameters, config.json reading.
#include "sweeps/machines.h"
#include "sweeps/models.h"
#include "sweeps/sweep.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

TEST_CASE("parameter counts equal the published ones") {
  // Sums of the tensors of the published checkpoints (model.safetensors headers); of GPT-3, which never was one, by its sizes,
  // which make the 174,600 and 6,660 million of Brown et al. 2020 (arXiv 2005.14165), appendix D; of Qwen1.5-MoE-A2.7B by its sizes, which
  // make the 14.3 billion of its model card.
  const std::pair<const char*, int64_t> published[] = {{"gpt2", 124'439'808},
                                                       {"gpt2-medium", 354'823'168},
                                                       {"gpt2-large", 774'030'080},
                                                       {"gpt2-xl", 1'557'611'200},
                                                       {"gpt3-6.7b", 6'658'404'352},
                                                       {"gpt3-175b", 174'604'259'328},
                                                       {"llama-2-7b", 6'738'415'616},
                                                       {"llama-2-13b", 13'015'864'320},
                                                       {"llama-2-70b", 68'976'648'192},
                                                       {"llama-3-8b", 8'030'261'248},
                                                       {"llama-3-70b", 70'553'706'496},
                                                       {"llama-3.1-8b", 8'030'261'248},
                                                       {"llama-3.1-70b", 70'553'706'496},
                                                       {"llama-3.1-405b", 405'853'388'800},
                                                       {"llama-3.2-1b", 1'235'814'400},
                                                       {"llama-3.2-3b", 3'212'749'824},
                                                       {"mistral-7b-v0.1", 7'241'732'096},
                                                       {"mistral-7b-v0.3", 7'248'023'552},
                                                       {"tinyllama-1.1b", 1'100'048'384},
                                                       {"smollm-135m", 134'515'008},
                                                       {"smollm-360m", 361'821'120},
                                                       {"smollm-1.7b", 1'711'376'384},
                                                       {"llama-7b", 6'738'415'616},
                                                       {"llama-13b", 13'015'864'320},
                                                       {"llama-30b", 32'528'943'616},
                                                       {"llama-65b", 65'285'660'672},
                                                       {"yi-34b", 34'388'917'248},
                                                       {"codellama-34b", 33'743'970'304},
                                                       {"mistral-nemo-12b", 12'247'782'400},
                                                       {"mistral-small-24b", 23'572'403'200},
                                                       {"mistral-large-123b", 122'610'069'504},
                                                       {"phi-3-medium-128k", 13'960'238'080},
                                                       {"mixtral-8x7b", 46'702'792'704},
                                                       {"mixtral-8x22b", 140'630'071'296},
                                                       {"qwen2.5-0.5b", 494'032'768},
                                                       {"qwen2.5-1.5b", 1'543'714'304},
                                                       {"qwen2.5-3b", 3'085'938'688},
                                                       {"qwen2.5-7b", 7'615'616'512},
                                                       {"qwen2.5-14b", 14'770'033'664},
                                                       {"qwen2.5-32b", 32'763'876'352},
                                                       {"qwen2.5-72b", 72'706'203'648},
                                                       {"qwen1.5-moe-a2.7b", 14'315'784'192},
                                                       {"qwen3-0.6b", 596'049'920},
                                                       {"qwen3-1.7b", 1'720'574'976},
                                                       {"qwen3-4b", 4'022'468'096},
                                                       {"qwen3-8b", 8'190'735'360},
                                                       {"qwen3-14b", 14'768'307'200},
                                                       {"qwen3-32b", 32'762'123'264},
                                                       {"qwen3-30b-a3b", 30'532'122'624},
                                                       {"qwen3-235b-a22b", 235'093'634'560},
                                                       {"phi-4", 14'659'507'200},
                                                       {"phi-3-mini-4k", 3'821'079'552},
                                                       // Files have the biases of routers besides, which are state of the run here.
                                                       {"deepseek-v3", 671'026'419'200 - 58 * 256},
                                                       {"deepseek-v2", 235'741'434'880},
                                                       {"deepseek-v2-lite", 15'706'484'224},
                                                       {"moonlight-16b-a3b", 15'960'111'936 - 27 * 64 - 26 * 64},
                                                       {"kimi-k2", 1'026'408'232'448 - 60 * 384}};
  std::set<std::string> listed;
  for (const std::string& name : list_models())
    if (load_model_config(name)->unexecuted.empty()) listed.insert(name);
  for (const auto& [name, count] : published) {
    INFO(name);
    CHECK(listed.erase(name) == 1);
    const auto model = load_model(name);
    REQUIRE(model.ok());
    CHECK(parameter_count(*model) == count);
    int64_t sum = 0;
    for (const ModelParameter& p : parameters_of(*model)) {
      int64_t elements = 1;
      for (const int64_t extent : p.shape) elements *= extent;
      sum += elements;
    }
    CHECK(sum == count);
  }
  CHECK(listed == std::set<std::string>{"tiny-gpt", "tiny-llama"});  // every other shipped model has a published count above
}

TEST_CASE("parameters have fixed names, shapes and order") {
  Model gpt = *load_model("tiny-gpt");
  gpt.layers = 1;
  std::string text;
  for (const ModelParameter& p : parameters_of(gpt)) {
    text += p.name + " [";
    for (const int64_t& extent : p.shape) text += std::to_string(extent) + (&extent == &p.shape.back() ? "]" : ",");
    text += p.residual_projection ? " residual\n" : "\n";
  }
  CHECK(text ==
        "embed.tokens [256,128]\nembed.positions [256,128]\n"
        "layers.0.attn.norm.gamma [128]\nlayers.0.attn.norm.beta [128]\n"
        "layers.0.attn.wqkv [384,128]\nlayers.0.attn.bqkv [384]\nlayers.0.attn.wo [128,128] residual\nlayers.0.attn.bo [128]\n"
        "layers.0.mlp.norm.gamma [128]\nlayers.0.mlp.norm.beta [128]\n"
        "layers.0.mlp.wup [512,128]\nlayers.0.mlp.bup [512]\nlayers.0.mlp.wdown [128,512] residual\nlayers.0.mlp.bdown [128]\n"
        "final.norm.gamma [128]\nfinal.norm.beta [128]\n");

  Model llama = *load_model("tiny-llama");
  llama.layers = 1;
  std::string names;
  for (const ModelParameter& p : parameters_of(llama)) names += p.name + " ";
  CHECK(names ==
        "embed.tokens layers.0.attn.norm.gamma layers.0.attn.wqkv layers.0.attn.wo layers.0.mlp.norm.gamma layers.0.mlp.wup "
        "layers.0.mlp.wdown final.norm.gamma head.weight ");
  CHECK(parameters_of(llama)[2].shape == std::vector<int64_t>{(4 + 2 * 2) * 32, 128});
  CHECK(parameters_of(llama)[5].shape == std::vector<int64_t>{2 * 352, 128});
  CHECK(parameters_of(llama)[2].layer == 0);
  CHECK(parameters_of(llama)[0].layer == -1);
  CHECK(parameters_of(llama)[0].kind == ModelParameter::Kind::kEmbedding);
  CHECK(parameters_of(llama)[1].kind == ModelParameter::Kind::kNormWeight);
  CHECK(parameters_of(gpt)[3].kind == ModelParameter::Kind::kBias);
  CHECK(parameters_of(gpt)[1].kind == ModelParameter::Kind::kPositions);
}

TEST_CASE("model flops follow from the weights that tokens are multiplied by") {
  const Model gpt2 = *load_model("gpt2");
  // 12 h^2 per layer (3 + 1 + 4 + 4) and the head V h, six flops each; attention 6 L h s.
  const double matmul = 12.0 * 12 * 768 * 768 + 50257.0 * 768;
  CHECK(model_flops_per_token(gpt2, 1024) == 6 * matmul + 6.0 * 12 * 768 * 1024);
  CHECK(model_flops_per_token(gpt2, 2048) - model_flops_per_token(gpt2, 1024) == 6.0 * 12 * 768 * 1024);
  const Model llama = *load_model("llama-3-8b");
  const double per_layer = 4096.0 * (32 + 16) * 128 + 4096.0 * 4096 + 3 * 4096.0 * 14336;
  CHECK(model_flops_per_token(llama, 0) == 6 * (32 * per_layer + 128256.0 * 4096));
}

TEST_CASE("impossible shapes are refused by name") {
  const Model good = *load_model("tiny-llama");
  CHECK(check(good).ok());
  const auto message = [&](auto change) {
    Model m = good;
    change(m);
    const auto result = check(m);
    return result.ok() ? std::string("accepted") : result.error().message;
  };
  CHECK(message([](Model& m) { m.layers = 0; }) == "model.layers=0 is not positive");
  CHECK(message([](Model& m) { m.vocab = -5; }) == "model.vocab=-5 is not positive");
  CHECK(message([](Model& m) { m.hidden = int64_t{1} << 40; }) == "model.hidden=1099511627776 is absurdly large");
  CHECK(message([](Model& m) { m.kv_heads = 3; }) ==
        "model.heads=4 is not divisible by model.kv_heads=3: every KV head must serve the same number of query heads");
  CHECK(message([](Model& m) { m.layers = 16385; }) == "model.layers=16385 is above the limit of 16384");
  CHECK(message([](Model& m) { m.head_dim = 33; }).find("model.head_dim=33 is odd") == 0);
  CHECK(message([](Model& m) { m.norm_epsilon = 0; }).find("model.norm_epsilon=0") == 0);
  CHECK(message([](Model& m) {
          m.layers = 16'384;
          m.hidden = m.ffn = int64_t{1} << 30;
        }).find("the model has about") == 0);
  Model gpt = *load_model("tiny-gpt");
  gpt.max_positions = 0;
  CHECK_FALSE(check(gpt).ok());
  gpt.max_positions = 16;
  gpt.head_dim = 33;  // no pairs are turned: fine
  CHECK(check(gpt).ok());
}

TEST_CASE("a config.json is read with the defaults of its family") {
  const auto gpt = parse_model(
      R"({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 100, "n_inner": null})",
      "g");
  REQUIRE(gpt.ok());
  CHECK(gpt->ffn == 256);
  CHECK(gpt->tied_embeddings);
  CHECK(gpt->kv_heads == 4);
  const auto llama = parse_model(
      R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100})",
      "l");
  REQUIRE(llama.ok());
  CHECK(llama->kv_heads == 4);
  CHECK(llama->head_dim == 16);
  CHECK_FALSE(llama->tied_embeddings);
  CHECK(llama->max_positions == 0);
  CHECK(load_model("mistral-7b-v0.1")->max_positions == 32768);
  CHECK(load_model("mistral-7b-v0.1")->window == SlidingWindow{.tokens = 4096});
  CHECK(load_model("mistral-7b-v0.3")->max_positions == 32768);
  CHECK(load_model("mistral-7b-v0.3")->window == SlidingWindow{});  // null in the file
}

TEST_CASE("keys of rotary embeddings are read where transformers 5 has them, and their scaling is noted") {
  const auto read = [](const std::string& extra, const std::string& type = "llama") {
    const auto config = parse_model_config(R"({"model_type": ")" + type +
                                               R"(", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 96, "vocab_size": 100, )" +
                                               extra + "}",
                                           "m");
    INFO((config.ok() ? "" : to_string(config.error())));
    REQUIRE(config.ok());
    return *config;
  };
  CHECK(read(R"("rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"})").model.rope_theta == 500000);
  CHECK(read(R"("rope_theta": 20000, "rope_parameters": {"rope_type": "default"})").model.rope_theta == 20000);
  CHECK(read(R"("rope_theta": 20000, "rope_parameters": null)").model.rope_theta == 20000);
  CHECK(read(R"("rope_parameters": {"rope_theta": 1e4, "rope_type": "default"})").rotary_scaling.empty());
  CHECK(read(R"("rope_scaling": null)").rotary_scaling.empty());
  CHECK(read(R"("rope_scaling": {"type": "linear", "factor": 2.0})").rotary_scaling == "\"linear\"");
  CHECK(read(R"("rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0})").rotary_scaling == "\"llama3\"");
  CHECK(read(R"("rope_parameters": {"full_attention": {"rope_type": "yarn"}})").rotary_scaling == "\"yarn\"");
  CHECK_FALSE(read(R"("rope_parameters": {"partial_rotary_factor": 0.75})", "phi3").unexecuted.empty());
}

TEST_CASE("what a config.json asks for and cannot have is refused") {
  const auto message = [](const std::string& extra) {
    const auto result = parse_model(
        R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96)" +
            extra + "}",
        "m");
    return result.ok() ? std::string("accepted") : result.error().message;
  };
  const std::string vocab = R"(, "vocab_size": 100)";
  CHECK(message(vocab) == "accepted");
  CHECK(message("") == "`vocab_size` is missing, which a config.json of model_type llama needs");
  CHECK(message(R"(, "vocab_size": null)") == "`vocab_size` is null");
  CHECK(message(vocab + R"(, "attention_bias": true)") == "`attention_bias` is true, which is not implemented");
  CHECK(message(vocab + R"(, "hidden_act": "relu")") == "`hidden_act` is \"relu\", which is not implemented for model_type llama");
  CHECK(message(vocab + R"(, "head_dim": "x")") == "`head_dim` is \"x\"");
  CHECK(message(vocab + R"(, "num_key_value_heads": 3)") ==
        "num_attention_heads=4 is not divisible by num_key_value_heads=3: every KV head must serve the same number of query heads");
  CHECK(message(vocab + R"(, "num_key_value_heads": 0)") == "num_key_value_heads=0 is not positive");
  CHECK(parse_model("[1]", "m").error().message == "the file is a list");
  CHECK(parse_model("", "m").error().message == "the file is empty");
  CHECK(to_string(parse_model("{", "m").error()).starts_with("m:1:2: not JSON: unexpected end of input"));
  CHECK(parse_model("{}", "m").error().message == "`model_type` is missing");
  CHECK(parse_model(R"({"model_type": "rwkv"})", "m").error().message == "`model_type` \"rwkv\" is not implemented");
}

TEST_CASE("Mixtral's config is a model that is executed, with its published count") {
  const auto model = load_model("mixtral-8x7b");
  REQUIRE(model.ok());
  CHECK(model->experts == Experts{.count = 8, .top_k = 2, .ffn = 14336});
  CHECK(parameter_count(*model) == 46'702'792'704);
  const auto message = [](const std::string& extra) {
    const auto result = parse_model(
        R"({"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96,
            "vocab_size": 100, "num_local_experts": 8, "num_experts_per_tok": )" +
            extra + "}",
        "m");
    return result.ok() ? std::string("accepted") : result.error().message;
  };
  CHECK(message("2") == "accepted");
  CHECK(message("9") == "num_experts_per_tok=9 of num_local_experts=8");
  CHECK(message("0") == "num_experts_per_tok=0 of num_local_experts=8");
}

TEST_CASE("families that are predicted are read whole, and refused as cases with the reason") {
  const ModelConfig v3 = *load_model_config("deepseek-v3");
  CHECK(v3.type == "deepseek_v3");
  CHECK(v3.experts == 256);
  CHECK(v3.top_k == 8);
  CHECK(v3.shared_experts == 1);
  CHECK(v3.dense_layers == 3);
  CHECK(v3.q_rank == 1536);
  CHECK(v3.kv_rank == 512);
  CHECK(v3.nope_dim + v3.rope_dim == 192);
  CHECK(v3.model.experts.has_bias());
  CHECK(load_model_config("moonlight-16b-a3b")->q_rank == 0);  // null in the file
  CHECK(load_model_config("qwen2.5-7b")->qkv_biases);
  CHECK(load_model_config("qwen3-8b")->qk_norm);
  CHECK(load_model_config("mixtral-8x7b")->moe_ffn == 14336);
  CHECK(load_model("glm-4.5-air").error().message == "glm-4.5-air is not executed: its layers are mixtures of experts");
  CHECK(load_model("olmo-2-7b").error().hint.find("--profile") != std::string::npos);
  const ModelConfig moe = *load_model_config("qwen1.5-moe-a2.7b");
  CHECK(moe.type == "qwen2_moe");
  CHECK(moe.model.qkv_biases);
  CHECK(moe.model.experts == Experts{.count = 60, .top_k = 4, .ffn = 1408, .normalise = false, .shared = 4, .shared_gate = true});

  const auto message = [](const std::string& extra) {
    const auto result = parse_model_config(
        R"({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96,
            "vocab_size": 100, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32)" +
            extra + "}",
        "m");
    if (!result.ok()) return result.error().message;
    std::string layers = "accepted, with experts:";
    for (int64_t l = 0; l < result->model.layers; ++l)
      if (result->model.is_mixture(l)) layers += " " + std::to_string(l);
    CHECK(result->model.layers - result->dense_layers == result->model.mixture_layers());
    return layers;
  };
  CHECK(message("") == "accepted, with experts: 0 1 2 3");
  CHECK(message(R"(, "mlp_only_layers": [0, 1])") == "accepted, with experts: 2 3");
  CHECK(message(R"(, "mlp_only_layers": [1])") == "`mlp_only_layers` is [1], which is not implemented");
  CHECK(message(R"(, "decoder_sparse_step": 2)") == "accepted, with experts: 1 3");
  CHECK(message(R"(, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1])") == "accepted, with experts: 3");
  CHECK(message(R"(, "decoder_sparse_step": 0)") == "`decoder_sparse_step` is 0");
  CHECK(message(R"(, "decoder_sparse_step": 5)") ==
        "model.dense_layers=0 decoder_sparse_step=5 of num_hidden_layers=4: no layer has experts");
  CHECK(message(R"(, "num_experts_per_tok": 9)") == "num_experts_per_tok=9 of num_experts=8");
  CHECK(message(R"(, "num_experts": 99999999999)") == "num_experts=99999999999");
  CHECK(message(R"(, "num_experts": -1)") == "num_experts=-1");
  CHECK(message(R"(, "moe_intermediate_size": "x")") == "`moe_intermediate_size` is \"x\"");
  // A window that is switched off limits nothing.
  const auto qwen2 = parse_model_config(
      R"({"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
          "vocab_size": 100, "max_position_embeddings": 64, "sliding_window": 8, "use_sliding_window": false})",
      "q");
  REQUIRE(qwen2.ok());
  CHECK(qwen2->model.max_positions == 64);
  // The text part of a multimodal file.
  const auto nested = parse_model_config(
      R"({"model_type": "vision", "text_config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}})",
      "n");
  REQUIRE(nested.ok());
  CHECK(nested->unexecuted.empty());
  CHECK(nested->model.hidden == 64);
}

TEST_CASE("routers of DeepSeek are read as the papers have them") {
  const Experts v2 = load_model("deepseek-v2")->experts, v3 = load_model("deepseek-v3")->experts;
  CHECK((!v2.sigmoid && !v2.normalise && v2.factor == 16 && v2.groups == 8 && v2.groups_chosen == 3 && v2.shared == 2));
  CHECK((v3.sigmoid && v3.normalise && v3.factor == 2.5f && v3.groups == 8 && v3.groups_chosen == 4 && v3.dense_layers == 3));
}

TEST_CASE("a config.json with any value anywhere is read or refused") {
  const std::string values[] = {"false",
                                "true",
                                "null",
                                "-1",
                                "0",
                                "9223372036854775807",
                                "18446744073709551615",
                                "-9223372036854775808",
                                "1e308",
                                "\"x\"",
                                "\"\\ud83d\\ude00\"",
                                "[]",
                                "{}",
                                "[[[0]]]",
                                "1.5"};
  int refused = 0;
  for (const std::string& name : list_models()) {
    std::ifstream file(testing::source_dir() + "/sweeps/models/" + name + ".json");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    REQUIRE_FALSE(text.empty());
    for (size_t colon = text.find("\": "); colon != std::string::npos; colon = text.find("\": ", colon + 1)) {
      const size_t end = text.find_first_of(",\n", colon);
      for (const std::string& value : values) {
        const std::string mutated = text.substr(0, colon + 3) + value + text.substr(end);
        const auto read = parse_model_config(mutated, name);
        if (!read.ok()) CHECK(read.error().message.size() < 1000);
        refused += read.ok() ? 0 : 1;
      }
    }
  }
  CHECK(refused > 1000);
  const auto message = [](const std::string& key, const std::string& value) {
    const auto result = parse_model_config(R"({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256,
                                               "n_positions": 64, ")" +
                                               key + "\": " + value + "}",
                                           "m");
    return result.ok() ? std::string("accepted") : result.error().message;
  };
  CHECK(message("n_embd", "false") == "`n_embd` is false");
  CHECK(message("n_embd", "9223372036854775807") == "`n_embd` is 9223372036854775807, beyond 2^48");
  CHECK(message("n_embd", "18446744073709551615") == "`n_embd` is 18446744073709551615, beyond 2^48");
  CHECK(message("layer_norm_epsilon", "1e308") == "`layer_norm_epsilon` is 1e+308, not a number of single precision");
  const auto nested = [](int depth) {
    return std::string(static_cast<size_t>(depth), '[') + std::string(static_cast<size_t>(depth), ']');
  };
  CHECK(message("n_embd", nested(10)) == "`n_embd` is " + nested(10));
  CHECK(message("n_embd", nested(200'000)) == "is nested more than 64 levels deep");
  CHECK(message("torch_dtype", nested(200'000)) == "is nested more than 64 levels deep");
  CHECK(message("n_embd", "\"" + std::string(5 << 20, 'x') + "\"") ==
        "has 5243042 bytes, more than the 4194304 that are read of a config.json");
  CHECK(message("n_embd", "\"" + std::string(1 << 20, 'x') + "\"").ends_with("... (1048578 bytes)"));
}

TEST_CASE("models are found by name or path") {
  CHECK(load_model("gptt2").error().message == "no model is named `gptt2`, did you mean `gpt2`?");
  CHECK(load_model("nowhere/config.json").error().where == "nowhere/config.json");
  const auto file = load_model(testing::source_dir() + "/sweeps/models/gpt2.json");
  REQUIRE(file.ok());
  CHECK(*file == *load_model("gpt2"));
}

TEST_CASE("models and machines are found as people name them") {
  const auto model = [](const char* said) {
    const auto found = load_model_config(said);
    return found.ok() ? found->model.name : found.error().message;
  };
  for (const char* said : {"Llama-3.1-8B", "llama3.1 8b", "meta-llama/Llama-3.1-8B", "Meta-Llama-3.1-8B-Instruct", "LLAMA_3.1_8B"})
    CHECK(model(said) == "llama-3.1-8b");
  CHECK(model("gpt-2") == "gpt2");
  CHECK(model("Qwen/Qwen2.5-7B-Instruct") == "qwen2.5-7b");
  CHECK(model("neox") == "gpt-neox-20b");
  CHECK(model("gpt-oss") == "no model is named `gpt-oss`, did you mean `gpt-oss-120b` or `gpt-oss-20b`?");
  CHECK(model("someone/else") == "`someone/else` is not a folder here, and no shipped model is called so");
  CHECK(load_model_config("someone/else").error().hint.find("someone/else/config.json") != std::string::npos);
  CHECK(load_model_config("./gpt2").error().where == "./gpt2");  // a path, and there is no such file
  const auto machine = [](const char* said) {
    const auto found = load_machine(said);
    return found.ok() ? found->id : found.error().message;
  };
  for (const char* said : {"h100", "H100", "dgx-h100", "DGX H100", "hgx-h100", "hgx-h100-ndr"})
    CHECK(machine(said) == "hgx-h100-ndr");
  CHECK(machine("4090") == "rtx-4090-24gb");
  CHECK(machine("RTX 4090") == "rtx-4090-24gb");
  CHECK(machine("l40") == "l40-48gb");
  CHECK(machine("h100 pcie") == "h100-pcie-80gb");
  CHECK(machine("a100-pcie") == "no machine is named `a100-pcie`, did you mean `a100-pcie-40gb` or `a100-pcie-80gb`?");
  for (const std::string& name : list_machines()) CHECK(machine_name(name).ok());
  for (const std::string& name : list_models()) CHECK(load_model_config(name)->model.name == name);
}

TEST_CASE("a folder with a config.json is a model, and an unknown type is read as one that is known") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "shardlab-model-test" / "My-Model";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"model_type": "mine", "hidden_act": "relu", "n_layer": 4, "n_embd": 64, "num_attention_heads": 4, "vocab_size": 128})";
  CHECK(load_model_config(folder.string()).error().message == "`model_type` \"mine\" is not implemented");
  CHECK(load_model_config(folder.string()).error().hint.find("--assume llama") != std::string::npos);
  CHECK(load_model_config(folder.string(), "none").error().message == "read as `none`, which is not a model_type that is known");
  const auto assumed = load_model_config(folder.string(), "llama");
  REQUIRE(assumed.ok());
  CHECK(assumed->model.name == "My-Model");
  CHECK(assumed->model.layers == 4);
  CHECK(assumed->model.hidden == 64);
  CHECK(assumed->model.ffn == 0);  // for --set model.ffn
  CHECK(assumed->unexecuted == "it is read as if it were a llama");
  const auto point =
      point_from_words({.overrides = {"model=" + folder.string(), "model.assume=llama", "model.ffn=96", "machine=h100", "dp=1"}});
  REQUIRE(point.ok());
  REQUIRE(point->model);
  CHECK(point->model->model.ffn == 96);
  CHECK(point->refusal->message == "My-Model is not executed: it is read as if it were a llama");
  std::filesystem::remove_all(folder.parent_path());
}

TEST_CASE("windows, biases and norms of the families that are estimated") {
  const ModelConfig gemma = *load_model_config("gemma-3-27b"), oss = *load_model_config("gpt-oss-20b");
  CHECK(gemma.model.window == SlidingWindow{.tokens = 1024, .global_every = 6, .rope_theta = 10000});
  CHECK(gemma.model.local_layers() == 52);  // of 62 every sixth sees all
  CHECK(gemma.post_norms);
  CHECK(gemma.qk_norm);
  CHECK(oss.model.window == SlidingWindow{.tokens = 128, .global_every = 2});
  CHECK(oss.model.local_layers() == 12);
  CHECK(load_model("gpt-oss-20b").error().message ==
        "gpt-oss-20b is not executed: its heads have sinks, and its experts and their router biases");
  CHECK(load_model("gemma-3-1b").error().message ==
        "gemma-3-1b is not executed: its feed-forward is gated by gelu, and norms follow attention and feed-forward");
  CHECK(load_model_config("olmo-2-7b")->qk_norm_whole);
  CHECK(load_model_config("pythia-12b")->rotary);
  CHECK(load_model("phi-3-mini-4k")->window == SlidingWindow{.tokens = 2047});
  CHECK(load_model_config("phi-4")->unexecuted.empty());
  const auto types = [](const std::string& list) {
    const auto read =
        parse_model_config(R"({"model_type": "gpt_oss", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "head_dim": 16, "intermediate_size": 96, "vocab_size": 100, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": )" +
                               list + "}",
                           "m");
    return read.ok() ? std::to_string(read->model.local_layers()) : read.error().message;
  };
  CHECK(types(R"(["sliding_attention", "sliding_attention"])") == "2");
  CHECK(types(R"(["sliding_attention", "linear"])") == "`layer_types` has \"linear\"");
  CHECK(types("[]").find("no list of 2 layers") != std::string::npos);
}

TEST_CASE("windows of config.json files: which layers are local") {
  const auto read = [](const std::string& type, const std::string& extra) -> std::string {
    const auto model =
        parse_model(R"({"model_type": ")" + type + R"(", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 256, "vocab_size": 100)" +
                        extra + "}",
                    "m");
    if (!model.ok()) return model.error().message;
    std::string layers;
    for (int64_t layer = 0; layer < 6; ++layer) layers += model->is_local(layer) ? 'l' : 'g';
    return fmt::format("{} of {}", layers, model->window.tokens);
  };
  const auto types = [&](const std::string& letters) {
    std::string list;
    for (const char letter : letters)
      list += fmt::format("{}\"{}_attention\"", list.empty() ? "" : ", ", letter == 'l' ? "sliding" : "full");
    return read("mistral", R"(, "sliding_window": 32, "layer_types": [)" + list + "]");
  };
  CHECK(read("mistral", "") == "gggggg of 0");
  CHECK(read("mistral", R"(, "sliding_window": null)") == "gggggg of 0");
  CHECK(read("mistral", R"(, "sliding_window": 32)") == "llllll of 32");
  CHECK(read("mistral", R"(, "sliding_window": 256)") == "gggggg of 0");  // hides nothing
  CHECK(read("mistral", R"(, "sliding_window": -1)") == "sliding_window=-1: a query sees from 1 to 2^31 - 1 keys in a local layer");
  CHECK(read("qwen2", R"(, "sliding_window": 32)") == "gggggg of 0");
  CHECK(read("qwen2", R"(, "sliding_window": 32, "use_sliding_window": true)") == "gggggg of 0");  // behind layer 28
  CHECK(read("qwen2", R"(, "sliding_window": 32, "use_sliding_window": true, "max_window_layers": 2)") == "ggllll of 32");
  CHECK(read("qwen3", R"(, "sliding_window": 32, "use_sliding_window": false, "max_window_layers": 2)") == "gggggg of 0");
  for (const char* letters : {"llllll", "lglglg", "llgllg", "glllgl", "ggllll", "lllllg", "gllgll"})
    CHECK(types(letters) == fmt::format("{} of 32", letters));
  CHECK(types("gggggg") == "gggggg of 0");
  CHECK(types("lgllgl").ends_with(
      "is not executed: `layer_types` has \"sliding_attention\" at layer 3, which breaks the pattern of the layers before"));
  // What is only estimated needs no pattern: layers are counted.
  for (const char* type : {"mistral", "gemma2"}) {
    const auto counted = parse_model_config(
        R"({"model_type": ")" + std::string(type) + R"(", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 256, "vocab_size": 100, "head_dim": 16, "sliding_window": 32, "layer_types": ["sliding_attention",
        "full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]})",
        "m");
    INFO(type << (counted.ok() ? "" : ": " + counted.error().message));
    REQUIRE(counted.ok());
    CHECK(counted->model.local_layers() == 4);
    CHECK_FALSE(counted->unexecuted.empty());
  }
  const auto bases = parse_model_config(
      R"({"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 96, "rope_parameters":
          {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}, "sliding_attention": {"rope_theta": 2e4}}})",
      "m");
  REQUIRE(bases.ok());
  CHECK((bases->model.rope_theta == 5e5f && bases->model.window.rope_theta == 2e4f));
}
