// Parameter counts: against the plan's for what plans can say, against published totals for the rest.
#include <random>

#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::analytic {
namespace {

using testing::llama_8b;
using testing::mixtral_8x7b;

TEST_CASE("counts and flops equal the plan's for the families that are executed") {
  std::mt19937 random(7);
  const auto pick = [&](int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random); };
  for (int i = 0; i < 500; ++i) {
    Model m{.name = "m", .family = i % 2 == 0 ? Family::kGpt : Family::kLlama, .layers = pick(1, 9), .hidden = 4 * pick(1, 300)};
    m.kv_heads = pick(1, 8), m.heads = m.kv_heads * (m.is_llama() ? pick(1, 4) : 1);
    m.head_dim = 2 * pick(1, 64), m.ffn = pick(1, 999), m.vocab = pick(1, 5000), m.tied_embeddings = pick(0, 1) == 1;
    m.max_positions = m.is_llama() ? 0 : pick(1, 3000);
    REQUIRE(check(m).ok());
    REQUIRE(check(shape_of(m)).ok());
    REQUIRE(parameter_count(shape_of(m)) == shardlab::parameter_count(m));
    REQUIRE(active_parameter_count(shape_of(m)) == shardlab::parameter_count(m));
  }
}

TEST_CASE("published totals") {
  CHECK(parameter_count(llama_8b()) == 8'030'261'248);       // model card of Llama 3.1 8B: safetensors total
  CHECK(parameter_count(mixtral_8x7b()) == 46'702'792'704);  // of Mixtral 8x7B
  CHECK(active_parameter_count(mixtral_8x7b()) == 46'702'792'704 - int64_t{32} * 6 * 3 * 4096 * 14336);
  ModelShape gpt2{.layers = 12, .hidden = 768, .heads = 12, .kv_heads = 12, .head_dim = 64, .ffn = 3072, .vocab = 50257};
  gpt2.max_positions = 1024, gpt2.tied_embeddings = true, gpt2.biases = true;
  CHECK(parameter_count(gpt2) == 124'439'808);
}

TEST_CASE("latent attention counts its low-rank factors") {
  // DeepSeek-V2, table of hyper-parameters: section 3.1.2. By hand: q 5120 x 1536 + 1536 x 128 x 192, kv 5120 x 576 + 512 x 128 x
  // 256, out 128 x 128 x 5120, norms of both ranks and of the layer.
  ModelShape s{.layers = 60, .hidden = 5120, .heads = 128, .kv_heads = 128, .head_dim = 128, .ffn = 12288, .vocab = 102400};
  s.swiglu = s.rms_norm = true;
  s.experts = 160, s.top_k = 6, s.moe_ffn = 1536, s.shared_experts = 2, s.dense_layers = 1;
  s.q_rank = 1536, s.kv_rank = 512, s.rope_dim = 64, s.v_dim = 128;
  REQUIRE(check(s).ok());
  const int64_t attention = 5120LL * 1536 + 1536LL * 128 * 192 + 5120LL * 576 + 512LL * 128 * 256 + 128LL * 128 * 5120 + 1536 + 512;
  const LayerParameters dense = dense_layer_parameters(s), moe = moe_layer_parameters(s);
  CHECK(dense.total() == attention + 2 * 5120 + 3LL * 5120 * 12288);
  CHECK(moe.expert == 160LL * 3 * 5120 * 1536);
  CHECK(moe.total() == attention + 2 * 5120 + 5120 * 160 + 162LL * 3 * 5120 * 1536);
  CHECK(parameter_count(s) == 235'741'434'880);  // "236B": model card
}

TEST_CASE("shapes that no transformer has are refused with the value") {
  const auto refused = [](auto change, const char* word) {
    ModelShape s = mixtral_8x7b();
    change(s);
    const Result<void> result = check(s);
    REQUIRE(!result.ok());
    CHECK(to_string(result.error()).find(word) != std::string::npos);
  };
  refused([](ModelShape& s) { s.layers = 0; }, "layers is 0");
  refused([](ModelShape& s) { s.hidden = -3; }, "hidden is -3");
  refused([](ModelShape& s) { s.vocab = int64_t{1} << 40; }, "vocab is");
  refused([](ModelShape& s) { s.kv_heads = 7; }, "7 kv heads");
  refused([](ModelShape& s) { s.top_k = 9; }, "top_k 9");
  refused([](ModelShape& s) { s.kv_rank = 512; }, "v_dim");
  refused([](ModelShape& s) { s.experts = 0, s.ffn = 0; }, "ffn");
  refused([](ModelShape& s) { s.layers = 1 << 30, s.hidden = 1 << 30; }, "parameters");
}

}  // namespace
}  // namespace shardlab::simulator::analytic
