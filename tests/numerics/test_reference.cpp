// The reference trainer, judged by itself: its gradients against central differences of its loss, its updates against their
// formulas.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/reference/functions.h"
#include "tests/numerics/reference/order.h"
#include "tests/numerics/reference/trainer.h"
#include "tests/test.h"

namespace shardlab::testing::of_reference {
namespace {

using reference::Trainer;

Model tiny(Family family, bool tied) {
  Model m;
  m.name = "tiny";
  m.family = family;
  m.layers = 2;
  m.hidden = 10;
  m.heads = 4;
  m.kv_heads = family == Family::kLlama ? 2 : 4;
  m.head_dim = 4;  // heads * head_dim is not hidden: shapes cannot be confused
  m.ffn = 6;
  m.vocab = 13;
  m.max_positions = 8;
  m.tied_embeddings = tied;
  m.init_deviation = 0.4f;
  return m;
}

Train recipe(float dropout) {
  Train t;
  t.seq_len = 5;
  t.dropout = dropout;
  t.seed = 3;
  return t;
}

std::vector<int32_t> tokens_for(const Model& model, int64_t sequences, int64_t seq_len) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < sequences * (seq_len + 1); ++i)
    tokens.push_back(static_cast<int32_t>(random_bits({9, RandomUse::kShuffle, 0, 0}, static_cast<uint64_t>(i)) %
                                          static_cast<uint32_t>(model.vocab)));
  return tokens;
}

/// Largest difference between a parameter's gradient and the differences of the loss, over every eleventh element (all when thorough),
/// relative to the gradient's largest element. Differences of fourth order: (8 (f(+h) - f(-h)) - (f(+2h) - f(-2h))) / 12h.
double gradient_error(Trainer<double>& trainer, std::span<const int32_t> tokens, size_t parameter,
                      const reference::Tensor<double>& gradient) {
  const double h = 5e-5;
  double worst = 0, largest = 0;
  for (const double g : gradient) largest = std::max(largest, std::abs(g));
  const size_t step = dealt(1, 11);
  for (size_t i = parameter % std::min(step, gradient.size()); i < gradient.size(); i += step) {
    double& w = trainer.values()[parameter][i];
    const double centre = w;
    const auto loss_at = [&](double offset) {
      w = centre + offset;
      const double loss = trainer.objective(tokens);
      w = centre;
      return loss;
    };
    const double slope = (8 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / (12 * h);
    worst = std::max(worst, std::abs(slope - gradient[i]));
  }
  return worst / largest;
}

void check_gradients(const Model& model, float dropout) {
  const int64_t sequences = 2;
  Trainer<double> trainer(model, recipe(dropout), sequences);
  // Off their initial 1 and 0, gammas and biases are told apart from constants.
  for (size_t i = 0; i < trainer.values().size(); ++i)
    for (size_t j = 0; j < trainer.values()[i].size(); ++j)
      trainer.values()[i][j] += 0.2 * reference::initial_normal({4, RandomUse::kRounding, static_cast<uint32_t>(i), 0}, j, 1.0);
  const auto tokens = tokens_for(model, sequences, 5);
  const auto sum = trainer.gradients(tokens);
  REQUIRE(sum.nll == trainer.loss(tokens));
  REQUIRE(std::isfinite(sum.nll));
  REQUIRE(sum.gradients.size() == trainer.parameters().size());
  for (size_t i = 0; i < sum.gradients.size(); ++i) {
    INFO(trainer.parameters()[i].name);
    REQUIRE(sum.gradients[i].size() == trainer.values()[i].size());
    REQUIRE(gradient_error(trainer, tokens, i, sum.gradients[i]) < 1e-8);
  }
}

}  // namespace

TEST_CASE("gradients of the gpt family equal central differences, elements of every parameter") {
  check_gradients(tiny(Family::kGpt, true), 0);
  check_gradients(tiny(Family::kGpt, false), 0);
}

TEST_CASE("gradients of the llama family equal central differences, elements of every parameter") {
  check_gradients(tiny(Family::kLlama, false), 0);
  check_gradients(tiny(Family::kLlama, true), 0);
}

TEST_CASE("gradients of mixtures of experts equal central differences of the objective, routers included") {
  Model model = tiny(Family::kLlama, false);
  model.experts = {.count = 4, .top_k = 2, .ffn = 3, .balance = 0.7f, .z_loss = 0.3f};
  check_gradients(model, 0);
  model.experts.normalise = false;
  check_gradients(model, 0.25f);
  model.experts = {.count = 5, .top_k = 3, .ffn = 3, .sigmoid = true, .factor = 2.5f, .balance = 0.7f, .z_loss = 0.3f};
  check_gradients(model, 0);
  // The second layer alone has experts, in groups, beside one that every token passes; heads of q and k are normed.
  model.experts = {
      .count = 6, .top_k = 2, .ffn = 3, .sigmoid = true, .shared = 2, .dense_layers = 1, .groups = 3, .groups_chosen = 2};
  model.qk_norm = true;
  check_gradients(model, 0);
}

TEST_CASE("gradients of latent attention equal central differences, elements of every parameter") {
  Model model = tiny(Family::kLlama, false);
  model.heads = model.kv_heads = 3;
  model.latent = {.q_rank = 5, .kv_rank = 4, .nope = 3, .rope = 4, .v = 2};
  model.head_dim = 7;
  check_gradients(model, 0);
  model.latent.q_rank = 0, model.latent.v = 9;
  check_gradients(model, 0);
}

TEST_CASE("gradients of attention within windows equal central differences, elements of every parameter") {
  Model model = tiny(Family::kLlama, false);
  model.layers = 3;
  model.window = {.tokens = 2, .global_every = 2, .rope_theta = 100};
  check_gradients(model, 0);
  model.window = {.tokens = 3, .global_layers = 1};
  check_gradients(model, 0.25f);
  Model gpt = tiny(Family::kGpt, true);
  gpt.window = {.tokens = 1};  // a token sees itself alone
  check_gradients(gpt, 0);
}

TEST_CASE("gradients of mixtures that drop rows equal central differences of the objective") {
  // Experts take 1, or 2, of the rows of a sequence: most are dropped, of some tokens all.
  Model model = tiny(Family::kLlama, false);
  model.experts = {.count = 4, .top_k = 2, .ffn = 3, .balance = 0.7f, .z_loss = 0.3f, .capacity_factor = 0.5f};
  check_gradients(model, 0);
  model.experts.normalise = false;
  check_gradients(model, 0.25f);
  model.experts = {.count = 5, .top_k = 3, .ffn = 3, .sigmoid = true, .factor = 2.5f, .shared = 1, .capacity_factor = 0.75f};
  check_gradients(model, 0);
}

TEST_CASE("gradients under dropout equal central differences with the same mask") {
  check_gradients(tiny(Family::kGpt, true), 0.25f);
  check_gradients(tiny(Family::kLlama, false), 0.25f);
}

TEST_CASE("the dropout mask changes with the step and keeps the expected share") {
  reference::Tensor<float> a(100000, 1.0f), b(100000, 1.0f);
  reference::dropout(a, 0.25f, {1, RandomUse::kDropout, 5, 0}, 0);
  reference::dropout(b, 0.25f, {1, RandomUse::kDropout, 5, 1}, 0);
  REQUIRE(a != b);
  int64_t kept = 0;
  for (const float x : a) {
    REQUIRE((x == 0.0f || x == 1.0f / 0.75f));
    kept += x != 0;
  }
  REQUIRE(std::abs(kept - 75000) < 5 * 137);  // five deviations: sqrt(1e5 * 0.25 * 0.75) = 137
}

TEST_CASE("initial values: normal matrices, smaller residual projections, gammas 1, biases 0, the same in both types") {
  Model model = tiny(Family::kGpt, true);
  model.hidden = 64;
  model.ffn = 200;
  const Trainer<float> trainer(model, recipe(0), 1);
  const Trainer<double> wide(model, recipe(0), 1);
  const auto deviation = [&](const char* name) {
    double sum = 0, squares = 0;
    const auto& v = trainer.value(name);
    for (const float x : v) sum += x, squares += double{x} * x;
    const double n = static_cast<double>(v.size());
    REQUIRE(std::abs(sum / n) < 5 * 0.4 / std::sqrt(n));
    return std::sqrt(squares / n);
  };
  REQUIRE(deviation("layers.0.mlp.wup") == Approx(0.4).epsilon(0.03));
  REQUIRE(deviation("layers.1.mlp.wdown") == Approx(0.4 / 2).epsilon(0.03));  // sqrt(2 * 2 layers) = 2
  REQUIRE(trainer.value("layers.1.attn.norm.gamma") == reference::Tensor<float>(64, 1.0f));
  REQUIRE(trainer.value("layers.1.attn.norm.beta") == reference::Tensor<float>(64, 0.0f));
  REQUIRE(trainer.value("layers.0.mlp.bup") == reference::Tensor<float>(200, 0.0f));
  REQUIRE(trainer.value("layers.0.mlp.wup") != trainer.value("layers.1.mlp.wup"));
  for (size_t i = 0; i < trainer.values().size(); ++i)
    for (size_t j = 0; j < trainer.values()[i].size(); ++j) REQUIRE(double{trainer.values()[i][j]} == wide.values()[i][j]);
}

TEST_CASE("sgd moves against the gradient; weight decay spares norms and biases") {
  const Model model = tiny(Family::kGpt, false);
  Train train = recipe(0);
  train.optimizer = Optimizer::kSgd;
  train.learning_rate.peak = 0.5f;
  train.weight_decay = 0.1f;
  Trainer<double> trainer(model, train, 2);
  const auto tokens = tokens_for(model, 2, 5);
  const auto before = trainer.values();
  const auto sum = trainer.gradients(tokens);
  trainer.step(tokens);
  for (size_t i = 0; i < before.size(); ++i) {
    const auto& p = trainer.parameters()[i];
    INFO(p.name);
    const bool decays = p.name.find("norm") == std::string::npos && p.shape.size() == 2;
    for (size_t j = 0; j < before[i].size(); ++j) {
      const double want = before[i][j] - 0.5 * (sum.gradients[i][j] + (decays ? double{0.1f} : 0.0) * before[i][j]);
      REQUIRE(trainer.values()[i][j] == Approx(want).epsilon(1e-12).margin(1e-15));
    }
  }
}

TEST_CASE("adamw: the first step is lr against the gradient's sign; later steps keep the bias-corrected moments") {
  const Model model = tiny(Family::kLlama, false);
  Train train = recipe(0);
  train.learning_rate.peak = 0.01f;
  train.weight_decay = 0.1f;
  Trainer<double> trainer(model, train, 2);
  const auto tokens = tokens_for(model, 2, 5);
  std::vector<reference::Tensors<double>> gradients;
  reference::Tensors<double> w = trainer.values();
  for (int step = 0; step < 3; ++step) {
    gradients.push_back(trainer.gradients(tokens).gradients);
    trainer.step(tokens);
    for (size_t i = 0; i < w.size(); ++i)
      for (size_t j = 0; j < w[i].size(); ++j) {
        // The moments as weighted sums over the history, not as the recurrence.
        double m = 0, v = 0, m_weight = 0, v_weight = 0;
        for (int k = 0; k <= step; ++k) {
          const double g = gradients[static_cast<size_t>(k)][i][j];
          const double a = std::pow(double{0.9f}, step - k), b = std::pow(double{0.95f}, step - k);
          m += a * g, m_weight += a, v += b * g * g, v_weight += b;
        }
        const double decay = trainer.parameters()[i].shape.size() == 2 ? double{0.1f} : 0.0;
        w[i][j] -= double{0.01f} * ((m / m_weight) / (std::sqrt(v / v_weight) + double{1e-8f}) + decay * w[i][j]);
        REQUIRE(trainer.values()[i][j] == Approx(w[i][j]).epsilon(1e-9).margin(1e-11));
      }
  }
}

TEST_CASE("fp32 training stays close to fp64 training, and its loss falls on a text that repeats") {
  for (const Family family : {Family::kGpt, Family::kLlama}) {
    const Model model = tiny(family, family == Family::kGpt);
    Train train = recipe(0);
    train.learning_rate.peak = 0.01f;
    Trainer<float> narrow(model, train, 4);
    Trainer<double> wide(model, train, 4);
    const auto tokens = tokens_for(model, 4, 5);
    const float first = narrow.step(tokens);
    REQUIRE(first == Approx(wide.step(tokens)).epsilon(1e-5));
    float last = 0;
    for (int i = 0; i < 40; ++i) {
      last = narrow.step(tokens);
      REQUIRE(last == Approx(wide.step(tokens)).epsilon(1e-3));
    }
    REQUIRE(last < 0.3f * first);
  }
}

TEST_CASE("the sums of the reference are those of the page") {
  // 17 values whose lanes and tree differ from the plain sum: lane 0 holds 1e8 + 1, which swallows the 1.
  std::vector<float> x(17, 0.0f);
  x[0] = 1e8f, x[1] = -1e8f, x[16] = 1.0f;
  REQUIRE(reference::lanes<float>(17, [&](int64_t i) { return x[static_cast<size_t>(i)]; }) == 0.0f);
  // token_tree of 32: leaves of two; (1e8 + 1) swallows the 1 within leaf 0, (-1e8) is leaf 1.
  std::vector<float> y(32, 0.0f);
  y[0] = 1e8f, y[1] = 1.0f, y[2] = -1e8f;
  REQUIRE(reference::token_tree<float>(32, [&](int64_t i) { return y[static_cast<size_t>(i)]; }) == 0.0f);
  y[1] = 0.0f, y[4] = 1.0f;  // leaf 2 is added after leaves 0 and 1 cancel
  REQUIRE(reference::token_tree<float>(32, [&](int64_t i) { return y[static_cast<size_t>(i)]; }) == 1.0f);
  // A chain is fused: (1 + e)^2 - 1 keeps e^2.
  const float e = 0x1p-13f;
  const std::vector<float> a{-1.0f, 1.0f + e}, b{1.0f, 1.0f + e};
  const float chained = reference::chain<float>(
      0, 2, [&](int64_t i) { return a[static_cast<size_t>(i)]; }, [&](int64_t i) { return b[static_cast<size_t>(i)]; });
  REQUIRE(chained == 2 * e + e * e);
  REQUIRE(reference::tree<float>(0, [](int64_t) { return 1.0f; }) == 0.0f);
}

}  // namespace shardlab::testing::of_reference
