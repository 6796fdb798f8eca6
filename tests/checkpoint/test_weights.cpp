// Weights alone: from a session to Hugging Face's tensors and back, exactly; and that those tensors mean there what they mean here.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <numbers>
#include <numeric>
#include <set>

#include "interop/frameworks.h"
#include "interop/hugging_face.h"
#include "interop/safetensors.h"
#include "plan/base/hash.h"
#include "plan/run_state.h"
#include "runtime/checkpoint.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "sweeps/models.h"
#include "tests/namespaces.h"
#include "tests/numerics/reference/trainer.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_weights {
namespace {

namespace fs = std::filesystem;
using interop::ForeignTensor;

/// A folder of its own, removed at the end.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "shardlab-weights-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

int32_t token_at(int64_t sequence, size_t i) { return static_cast<int32_t>(mix(static_cast<uint64_t>(sequence) * 1000 + i) % 64); }

class Sequences final : public BatchSource {
 public:
  void sequence(int64_t number, std::span<int32_t> out) const override {
    for (size_t i = 0; i < out.size(); ++i) out[i] = token_at(number, i);
  }
};

Case weights_case(Family family, int dp, int tp, int pp, int zero, bool tied) {
  Case c = tiny_case(family);
  c.canonical = true;
  c.model.tied_embeddings = tied;
  c.layout.dp = dp;
  c.layout.tp = tp;
  c.layout.pp = pp;
  c.layout.schedule = pp > 1 ? Schedule::k1F1B : Schedule::kNone;
  c.layout.zero = zero;
  c.train.learning_rate.peak = 0.01f;
  c.train.grad_accumulation = 8 / dp;
  return c;
}

/// A case in training, with the weights of its seed.
struct Run {
  explicit Run(const Case& c) : config(c), placed(place(lower(c).value())) {
    const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
    transport = std::make_unique<ThreadTransport>(kernels);
    RunOptions options;
    options.learning_rate = config.train.learning_rate;
    options.timeout_s = 60;
    auto made = Session::create(placed, options, *transport, cpu_backend(kernels, {config.canonical, 1}), &source);
    INFO((made.ok() ? std::string() : to_string(made.error())));
    REQUIRE(made.ok());
    session = std::move(*made);
    session->initialise_parameters();
  }
  std::vector<float> weights(const std::string& name) const { return session->parameter(name).value().values; }

  Sequences source;
  Case config;
  PlacedPlan placed;
  std::unique_ptr<ThreadTransport> transport;
  std::unique_ptr<Session> session;
};

using interop::columns_of;

/// Small models of the `model_type`s with experts.
Model mixture_of(const std::string& type) {
  Model m = tiny_case(Family::kLlama).model;
  m.name = type;
  m.layers = 3;
  m.experts = {.count = 4, .top_k = 2, .ffn = 8};
  if (type == "mixtral") m.ffn = 8;
  if (type == "qwen3_moe") m.qk_norm = true, m.experts.dense_layers = 1, m.experts.every = 2;
  if (type == "qwen2_moe") m.qkv_biases = m.experts.shared_gate = true, m.experts.shared = 2, m.experts.normalise = false;
  if (type != "glm4_moe") return m;
  m.qkv_biases = m.qk_norm = true;
  m.experts = {.count = 8,
               .top_k = 3,
               .ffn = 8,
               .sigmoid = true,
               .factor = 1.5f,
               .shared = 1,
               .dense_layers = 1,
               .groups = 4,
               .groups_chosen = 2,
               .bias_update_rate = 0.001f};
  return m;
}
constexpr const char* kMixtures[] = {"mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe"};

/// Small models of DeepSeek's: of `deepseek_v3` with a compressed q and all that its router has, of `deepseek_v2` with neither. No two
/// widths are equal, and the norms' epsilon is not that of the compressed vectors.
Model latent_of(const std::string& type) {
  Model m = tiny_case(Family::kLlama).model;
  const bool v3 = type == "deepseek_v3";
  m.name = type;
  m.layers = 3;
  m.kv_heads = m.heads;
  m.norm_epsilon = 0.01f;
  m.latent = {.q_rank = v3 ? 10 : 0, .kv_rank = 12, .nope = 6, .rope = 8, .v = 5};
  m.head_dim = 14;
  m.experts = {.count = 8, .top_k = 3, .ffn = 8, .shared = v3 ? 1 : 2, .dense_layers = 1, .groups = 4, .groups_chosen = 2};
  if (v3)
    m.experts.sigmoid = true, m.experts.factor = 2.5f, m.experts.bias_update_rate = 0.001f;
  else
    m.experts.normalise = false, m.experts.factor = 1.5f;
  return m;
}
constexpr const char* kLatents[] = {"deepseek_v2", "deepseek_v3"};

TEST_CASE("each row of each parameter is in exactly one tensor, and tensors go there and back exactly") {
  std::vector<Model> models;
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const bool tied : {false, true}) {
      models.push_back(tiny_case(family).model);
      models.back().tied_embeddings = tied;
      if (family == Family::kLlama) REQUIRE(models.back().kv_heads < models.back().heads);  // groups of queries
      models.back().qk_norm = family == Family::kLlama && tied;
    }
  models.push_back(tiny_case(Family::kLlama).model);
  models.back().qkv_biases = true;
  for (const char* type : kMixtures) models.push_back(mixture_of(type));
  for (const char* type : kLatents) models.push_back(latent_of(type));
  for (const Model& m : models) {
    std::map<std::string, std::vector<std::pair<const ForeignTensor*, size_t>>> of;  // tensors, and their parts
    std::set<std::string> names;
    const std::vector<ForeignTensor> tensors = interop::foreign_tensors(m);
    for (const ForeignTensor& t : tensors) {
      REQUIRE(names.insert(t.name).second);
      int64_t rows = 0;
      for (size_t part = 0; part < t.parts.size(); ++part) {
        of[t.parts[part].parameter].emplace_back(&t, part);
        rows += std::ssize(t.parts[part].rows);
      }
      REQUIRE(t.shape[t.transposed ? 1 : 0] == rows);
    }
    for (const ModelParameter& p : interop::carried_by_files(m)) {
      INFO(m.name << " " << p.name);
      const int64_t columns = columns_of(p);
      int64_t rows = 1;
      for (size_t d = 0; d + 1 < std::max<size_t>(2, p.shape.size()); ++d) rows *= p.shape[d];
      std::vector<float> ours(static_cast<size_t>(rows * columns)), again(ours.size(), -1.0f);
      for (size_t i = 0; i < ours.size(); ++i) ours[i] = static_cast<float>(i);
      std::vector<int> covered(static_cast<size_t>(rows));
      for (const auto& [t, part] : of.at(p.name)) {
        for (const int64_t row : t->parts[part].rows) ++covered.at(static_cast<size_t>(row));
        // The other parts have values that are not ours.
        std::vector<float> whole;
        for (size_t other = 0; other < t->parts.size(); ++other) {
          const std::vector<float> foreign(t->parts[other].rows.size() * static_cast<size_t>(columns), -2.0f);
          const std::vector<float> values = other == part ? interop::to_foreign(*t, part, ours, columns) : foreign;
          whole.insert(whole.end(), values.begin(), values.end());
        }
        interop::from_foreign(*t, part, whole, columns, again);
      }
      REQUIRE(std::ranges::all_of(covered, [](int n) { return n == 1; }));
      REQUIRE(again == ours);
    }
  }
}

TEST_CASE("the config.json of a model is read back as that model, and what transformers does not have is refused") {
  std::vector<Model> models;
  for (const char* type : kMixtures) models.push_back(mixture_of(type));
  for (const char* type : kLatents) models.push_back(latent_of(type));
  for (const Model& m : models) {
    REQUIRE(interop::hugging_face_type(m).value() == m.name);
    const auto again = sweeps::parse_model(interop::hugging_face_config(m), m.name);
    INFO((again.ok() ? "" : to_string(again.error())));
    REQUIRE(again.ok());
    CHECK(again->experts == m.experts);
    CHECK(parameter_count(*again) == parameter_count(m));
    CHECK(again->qkv_biases == m.qkv_biases);
    CHECK(again->qk_norm == m.qk_norm);
    CHECK(again->latent == m.latent);
    CHECK(again->head_dim == m.head_dim);
  }
  constexpr SlidingWindow kAll{.tokens = 5}, kSome{.tokens = 5, .global_layers = 1, .global_every = 2};
  const auto with_window = [](Model model, const SlidingWindow& window) {
    model.layers = 4;
    model.window = window;
    return model;
  };
  Model llama = tiny_case(Family::kLlama).model, qwen2 = llama, qwen3 = llama;
  qwen2.qkv_biases = qwen3.qk_norm = true;
  for (const auto& [type, model] : {std::pair{"mistral", with_window(llama, kAll)},
                                    {"qwen2", with_window(qwen2, kAll)},
                                    {"qwen2", with_window(qwen2, kSome)},
                                    {"qwen3", with_window(qwen3, kSome)},
                                    {"mixtral", with_window(mixture_of("mixtral"), kAll)}}) {
    REQUIRE(interop::hugging_face_type(model).value() == type);
    const auto again = sweeps::parse_model(interop::hugging_face_config(model), model.name);
    INFO((again.ok() ? "" : to_string(again.error())));
    REQUIRE(again.ok());
    CHECK(again->window == model.window);
  }
  for (const Model& model :
       {with_window(llama, kSome), with_window(mixture_of("mixtral"), kSome), with_window(mixture_of("qwen3_moe"), kAll),
        with_window(tiny_case(Family::kGpt).model, kAll), with_window(qwen3, {.tokens = 5, .global_every = 2, .rope_theta = 100})})
    CHECK_FALSE(interop::hugging_face_type(model).ok());
  CHECK(interop::hugging_face_type(with_window(llama, kSome)).error().message ==
        "tiny is no model of transformers: some of its layers attend within a window, and its heads have no norms");
  Model m = mixture_of("qwen2_moe");
  m.experts.shared_gate = false;
  CHECK(interop::hugging_face_type(m).error().message ==
        "qwen2_moe is no model of transformers: its shared experts have no gate, or its heads have norms besides");
  m = mixture_of("mixtral");
  m.experts.bias_update_rate = 0.001f;
  CHECK_FALSE(interop::hugging_face_type(m).ok());
  m = latent_of("deepseek_v2");
  m.experts.normalise = true;
  CHECK(interop::hugging_face_type(m).error().message ==
        "deepseek_v2 is no model of transformers: its attention is latent, and its router a softmax with biases, or whose weights "
        "are "
        "divided by their sum");
  m.experts = {};
  CHECK(
      interop::hugging_face_type(m).error().message ==
      "deepseek_v2 is no model of transformers: its attention is latent, and its layers are not dense first ones and then mixtures "
      "with ungated shared experts");
  // Of layers behind the last a file may have more, which transformers leaves alone too.
  m = latent_of("deepseek_v3");
  CHECK(interop::is_derived_tensor("model.layers.3.eh_proj.weight", m));
  CHECK_FALSE(interop::is_derived_tensor("model.layers.2.self_attn.q_proj.weight", m));
  CHECK_FALSE(interop::is_derived_tensor("model.layers.3.eh_proj.weight", mixture_of("glm4_moe")));
}

TEST_CASE("weights alone begin a run under every layout, with the bits that they have and nothing else") {
  for (const Family family : {Family::kGpt, Family::kLlama}) {
    Case other = weights_case(family, 1, 1, 1, 0, family == Family::kGpt);
    other.train.seed = 77;  // other weights than those of the runs below
    const Run from(other);
    const Folder folder;
    const auto saved = save_weights(folder.path(), parameters_of(other.model),
                                    [&](const ModelParameter& p) { return from.session->parameter(p.name); });
    REQUIRE(saved.ok());
    const auto checkpoint = Checkpoint::open(folder.path());
    REQUIRE(checkpoint.ok());
    REQUIRE(checkpoint->holds_weights_alone());
    REQUIRE(checkpoint->steps() == 0);
    std::vector<double> losses;
    struct Size {
      int dp, tp, pp, zero;
    };
    for (const Size& s : {Size{1, 1, 1, 0}, {2, 1, 1, 0}, {2, 1, 1, 1}, {2, 1, 1, 3}, {1, 2, 1, 0}, {1, 1, 2, 0}, {2, 2, 2, 1}}) {
      INFO("dp " << s.dp << " tp " << s.tp << " pp " << s.pp << " zero " << s.zero);
      Run run(weights_case(family, s.dp, s.tp, s.pp, s.zero, family == Family::kGpt));
      const auto restored = checkpoint->restore(run.config, *run.session);
      INFO((restored.ok() ? std::string() : to_string(restored.error())));
      REQUIRE(restored.ok());
      for (const ModelParameter& p : parameters_of(run.config.model)) REQUIRE(run.weights(p.name) == from.weights(p.name));
      losses.push_back(run.session->step(0).loss.value());
      losses.push_back(run.session->step(1).loss.value());
      REQUIRE(losses[losses.size() - 2] == losses[0]);
      REQUIRE(losses.back() == losses[1]);  // moments began at zero
    }
    Run other_model(weights_case(family, 1, 1, 1, 0, family != Family::kGpt));
    const auto refused = checkpoint->restore(other_model.config, *other_model.session);
    REQUIRE_FALSE(refused.ok());
    REQUIRE(refused.error().message.find("parameters, and the model has") != std::string::npos);
  }
}

TEST_CASE("averages of the weights are read with what steps have filled of them, under every layout") {
  std::map<std::string, std::vector<float>> first;
  for (const int zero : {0, 1, 3}) {
    Case c = weights_case(Family::kLlama, zero == 0 ? 1 : 2, 1, 1, zero, false);
    c.train.ema_decay = 0.5f;  // products with it are exact
    Run run(c);
    std::map<std::string, std::vector<float>> expected;
    for (int64_t step = 0; step < 3; ++step) {
      run.session->step(step);
      for (const ModelParameter& p : parameters_of(c.model)) {
        const std::vector<float> now = run.weights(p.name);
        std::vector<float>& average = expected[p.name];
        average.resize(now.size());
        for (size_t i = 0; i < now.size(); ++i) average[i] -= 0.5f * (average[i] - now[i]);
      }
    }
    const Folder folder;
    REQUIRE(save_checkpoint(*run.session, c, 3, folder.path()).ok());
    const auto checkpoint = Checkpoint::open(folder.path());
    REQUIRE(checkpoint.ok());
    for (auto& [name, average] : expected) {
      INFO(name);
      for (float& x : average) x /= 0.875f;  // 1 - 0.5^3
      REQUIRE(checkpoint->average(name).value().values == average);
    }
    if (first.empty()) first = expected;
    REQUIRE(first == expected);
  }
  Run without(weights_case(Family::kLlama, 1, 1, 1, 0, false));
  without.session->step(0);
  const Folder folder;
  REQUIRE(save_checkpoint(*without.session, without.config, 1, folder.path()).ok());
  const auto refused = Checkpoint::open(folder.path())->average("embed.tokens");
  REQUIRE_FALSE(refused.ok());
  REQUIRE(refused.error().message.find("kept no averages of the weights") != std::string::npos);
}

// ---- the forward pass of transformers, told again from its own tensors -------------------------------------------------------

using Matrix = std::vector<std::vector<double>>;  // rows

struct Foreign {
  std::map<std::string, ForeignTensor> tensors;
  std::map<std::string, std::vector<float>> values;

  double at(const std::string& name, size_t row, size_t column = 0) const {
    const auto& shape = tensors.at(name).shape;
    return values.at(name)[shape.size() == 2 ? row * static_cast<size_t>(shape[1]) + column : row];
  }
};

/// y = x W^T, W [out, in]: torch.nn.Linear.
Matrix linear(const Foreign& f, const Matrix& x, const std::string& weight) {
  const auto out = static_cast<size_t>(f.tensors.at(weight).shape[0]);
  Matrix y(x.size(), std::vector<double>(out));
  for (size_t t = 0; t < x.size(); ++t)
    for (size_t o = 0; o < out; ++o)
      for (size_t i = 0; i < x[t].size(); ++i) y[t][o] += x[t][i] * f.at(weight, o, i);
  return y;
}

/// y = x W + b, W [in, out]: GPT-2's Conv1D.
Matrix conv1d(const Foreign& f, const Matrix& x, const std::string& name) {
  const auto out = static_cast<size_t>(f.tensors.at(name + ".weight").shape[1]);
  Matrix y(x.size(), std::vector<double>(out));
  for (size_t t = 0; t < x.size(); ++t)
    for (size_t o = 0; o < out; ++o) {
      y[t][o] = f.at(name + ".bias", o);
      for (size_t i = 0; i < x[t].size(); ++i) y[t][o] += x[t][i] * f.at(name + ".weight", i, o);
    }
  return y;
}

Matrix norm(const Foreign& f, const Matrix& x, const std::string& name, double epsilon, bool rms) {
  Matrix y = x;
  for (auto& row : y) {
    double mean = 0, variance = 0;
    if (!rms)
      for (const double v : row) mean += v / static_cast<double>(row.size());
    for (const double v : row) variance += (v - mean) * (v - mean) / static_cast<double>(row.size());
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = (row[i] - mean) / std::sqrt(variance + epsilon) * f.at(name + ".weight", i);
      if (!rms) row[i] += f.at(name + ".bias", i);
    }
  }
  return y;
}

/// Qwen3's q_norm and k_norm: each head by itself.
void norm_heads(const Foreign& f, Matrix& x, const std::string& name, size_t d, double epsilon) {
  for (auto& row : x)
    for (size_t head = 0; head < row.size(); head += d) {
      const auto from = row.begin() + static_cast<std::ptrdiff_t>(head), to = from + static_cast<std::ptrdiff_t>(d);
      const Matrix y = norm(f, {std::vector<double>(from, to)}, name, epsilon, true);
      std::ranges::copy(y[0], from);
    }
}

/// Causal attention; q has heads * d columns, k kv_heads * d, v kv_heads * w of the width w of a value.
/// `sliding`: a mask hides the keys at positions up to the query's less the window.
Matrix attention(const Matrix& q, const Matrix& k, const Matrix& v, const Model& m, bool sliding = false) {
  const auto d = static_cast<size_t>(m.head_dim), w = static_cast<size_t>(m.value_dim()), heads = static_cast<size_t>(m.heads),
             share = heads / static_cast<size_t>(m.kv_heads);
  Matrix o(q.size(), std::vector<double>(heads * w));
  for (size_t h = 0; h < heads; ++h)
    for (size_t t = 0; t < q.size(); ++t) {
      std::vector<double> score(t + 1);
      double most = -1e300, sum = 0;
      for (size_t u = 0; u <= t; ++u) {
        for (size_t i = 0; i < d; ++i) score[u] += q[t][h * d + i] * k[u][h / share * d + i] / std::sqrt(static_cast<double>(d));
        if (sliding && static_cast<int64_t>(u) <= static_cast<int64_t>(t) - m.window.tokens) score[u] = -1e300;
        most = std::max(most, score[u]);
      }
      for (double& s : score) sum += s = std::exp(s - most);
      for (size_t u = 0; u <= t; ++u)
        for (size_t i = 0; i < w; ++i) o[t][h * w + i] += score[u] / sum * v[u][h / share * w + i];
    }
  return o;
}

/// rotate_half: x cos + (-x2, x1) sin, with x1 and x2 the halves of a head.
void rotate(Matrix& x, size_t d, double theta) {
  for (size_t t = 0; t < x.size(); ++t)
    for (size_t head = 0; head < x[t].size(); head += d)
      for (size_t i = 0; i < d / 2; ++i) {
        const double angle = static_cast<double>(t) * std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(d));
        const double a = x[t][head + i], b = x[t][head + i + d / 2];
        x[t][head + i] = a * std::cos(angle) - b * std::sin(angle);
        x[t][head + i + d / 2] = b * std::cos(angle) + a * std::sin(angle);
      }
}

void add(Matrix& x, const Matrix& y) {
  for (size_t t = 0; t < x.size(); ++t)
    for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
}

Matrix columns(const Matrix& x, size_t from, size_t n) {
  Matrix y;
  for (const auto& row : x)
    y.emplace_back(row.begin() + static_cast<std::ptrdiff_t>(from), row.begin() + static_cast<std::ptrdiff_t>(from + n));
  return y;
}

/// LlamaMLP.
Matrix swiglu(const Foreign& f, const Matrix& x, const std::string& gates, const std::string& ups, const std::string& downs) {
  Matrix gate = linear(f, x, gates);
  const Matrix up = linear(f, x, ups);
  for (size_t t = 0; t < gate.size(); ++t)
    for (size_t i = 0; i < gate[t].size(); ++i) gate[t][i] = gate[t][i] / (1 + std::exp(-gate[t][i])) * up[t][i];
  return linear(f, gate, downs);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// The k largest of `by`, as torch.topk has them.
std::vector<size_t> topk(const std::vector<double>& by, size_t k) {
  std::vector<size_t> order(by.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return by[a] > by[b]; });
  order.resize(k);
  return order;
}

/// What DeepseekV3Attention (apply_rotary_pos_emb_interleave) and DeepseekV2Attention (apply_rotary_emb) make of n, before o_proj. Pair i of a
/// vector that is rotated are its elements 2i and 2i + 1, turned by position theta^(-2i/r). DeepseekV3 lays the turned pairs half a vector
/// apart, in q and k alike, which no product of q and k sees. Norms of compressed vectors add 1e-6, whatever rms_norm_eps says.
Matrix latent_attention(const Foreign& f, const Matrix& n, const std::string& p, const Model& m) {
  const auto heads = static_cast<size_t>(m.heads), nope = static_cast<size_t>(m.latent.nope),
             r = static_cast<size_t>(m.latent.rope), v = static_cast<size_t>(m.latent.v),
             rank = static_cast<size_t>(m.latent.kv_rank);
  const auto turn = [&](std::vector<double>& row, size_t first, size_t t) {
    for (size_t i = 0; i < r / 2; ++i) {
      const double angle = static_cast<double>(t) *
                           std::pow(static_cast<double>(m.rope_theta), -2.0 * static_cast<double>(i) / static_cast<double>(r));
      const double a = row[first + 2 * i], b = row[first + 2 * i + 1];
      row[first + 2 * i] = a * std::cos(angle) - b * std::sin(angle);
      row[first + 2 * i + 1] = b * std::cos(angle) + a * std::sin(angle);
    }
  };
  Matrix q = m.latent.q_rank > 0
                 ? linear(f, norm(f, linear(f, n, p + "q_a_proj.weight"), p + "q_a_layernorm", 1e-6, true), p + "q_b_proj.weight")
                 : linear(f, n, p + "q_proj.weight");
  const Matrix narrow = linear(f, n, p + "kv_a_proj_with_mqa.weight");
  const Matrix wide = linear(f, norm(f, columns(narrow, 0, rank), p + "kv_a_layernorm", 1e-6, true), p + "kv_b_proj.weight");
  Matrix k(n.size()), values(n.size());
  for (size_t t = 0; t < n.size(); ++t) {
    std::vector<double> shared(narrow[t].begin() + static_cast<std::ptrdiff_t>(rank), narrow[t].end());
    turn(shared, 0, t);
    for (size_t head = 0; head < heads; ++head) {
      turn(q[t], head * (nope + r) + nope, t);
      const auto key = wide[t].begin() + static_cast<std::ptrdiff_t>(head * (nope + v)),
                 value = key + static_cast<std::ptrdiff_t>(nope);
      k[t].insert(k[t].end(), key, value);
      k[t].insert(k[t].end(), shared.begin(), shared.end());
      values[t].insert(values[t].end(), value, value + static_cast<std::ptrdiff_t>(v));
    }
  }
  return attention(q, k, values, m);
}

/// MixtralSparseMoeBlock, Qwen2MoeSparseMoeBlock, Qwen3MoeSparseMoeBlock, Glm4MoeMoE and DeepseekV3MoE (DeepseekV3TopkRouter), and
/// DeepseekV2Moe, as transformers has them.
Matrix experts(const Foreign& f, const Matrix& x, const Model& m, const std::string& layer) {
  const Experts& e = m.experts;
  const bool mixtral = f.tensors.contains(layer + "block_sparse_moe.gate.weight");
  const std::string p = layer + (mixtral ? "block_sparse_moe." : "mlp.");
  Matrix y(x.size(), std::vector<double>(static_cast<size_t>(m.hidden)));
  const Matrix logits = linear(f, x, p + "gate.weight");
  for (size_t t = 0; t < x.size(); ++t) {
    std::vector<double> scores = logits[t];
    double all = 0;
    for (double& s : scores) all += s = e.sigmoid ? sigmoid(s) : std::exp(s);
    for (double& s : scores) s = e.sigmoid ? s : s / all;
    std::vector<double> by = scores;
    if (f.tensors.contains(p + "gate.e_score_correction_bias"))
      for (size_t i = 0; i < by.size(); ++i) by[i] += f.at(p + "gate.e_score_correction_bias", i);
    if (e.groups > 1) {
      const size_t each = by.size() / static_cast<size_t>(e.groups);
      std::vector<double> of_groups;
      for (size_t g = 0; g < by.size(); g += each) {
        const std::vector<double> group(by.begin() + static_cast<std::ptrdiff_t>(g),
                                        by.begin() + static_cast<std::ptrdiff_t>(g + each));
        double sum = 0;
        for (const size_t i : topk(group, e.sigmoid ? 2 : 1)) sum += group[i];
        of_groups.push_back(sum);
      }
      const auto best = topk(of_groups, static_cast<size_t>(e.groups_chosen));
      for (size_t i = 0; i < by.size(); ++i)
        if (std::ranges::find(best, i / each) == best.end()) by[i] = 0;
    }
    const auto chosen = topk(by, static_cast<size_t>(e.top_k));
    double sum = e.normalise ? 0 : 1;
    for (const size_t i : chosen) sum += e.normalise ? scores[i] : 0;
    for (const size_t i : chosen) {
      const std::string name = fmt::format("{}experts.{}.", p, i);
      const Matrix one = mixtral ? swiglu(f, {x[t]}, name + "w1.weight", name + "w3.weight", name + "w2.weight")
                                 : swiglu(f, {x[t]}, name + "gate_proj.weight", name + "up_proj.weight", name + "down_proj.weight");
      for (size_t c = 0; c < y[t].size(); ++c) y[t][c] += scores[i] / sum * static_cast<double>(e.factor) * one[0][c];
    }
  }
  if (e.shared == 0) return y;
  const std::string shared = p + (e.shared_gate ? "shared_expert." : "shared_experts.");
  Matrix z = swiglu(f, x, shared + "gate_proj.weight", shared + "up_proj.weight", shared + "down_proj.weight");
  if (e.shared_gate) {
    const Matrix gates = linear(f, x, p + "shared_expert_gate.weight");
    for (size_t t = 0; t < z.size(); ++t)
      for (double& v : z[t]) v *= sigmoid(gates[t][0]);
  }
  add(y, z);
  return y;
}

Matrix logits_llama(const Foreign& f, const Model& m, int64_t sequence, int64_t tokens) {
  Matrix x;
  for (int64_t t = 0; t < tokens; ++t) {
    x.emplace_back();
    for (int64_t i = 0; i < m.hidden; ++i)
      x.back().push_back(f.at("model.embed_tokens.weight", static_cast<size_t>(token_at(sequence, static_cast<size_t>(t))),
                              static_cast<size_t>(i)));
  }
  for (int64_t l = 0; l < m.layers; ++l) {
    const std::string p = fmt::format("model.layers.{}.", l);
    const Matrix n = norm(f, x, p + "input_layernorm", m.norm_epsilon, true);
    if (m.is_latent()) {
      add(x, linear(f, latent_attention(f, n, p + "self_attn.", m), p + "self_attn.o_proj.weight"));
    } else {
      Matrix q = linear(f, n, p + "self_attn.q_proj.weight"), k = linear(f, n, p + "self_attn.k_proj.weight"),
             v = linear(f, n, p + "self_attn.v_proj.weight");
      for (const auto& [heads, name] : {std::pair{&q, "q_proj"}, {&k, "k_proj"}, {&v, "v_proj"}})
        for (size_t t = 0; m.qkv_biases && t < heads->size(); ++t)
          for (size_t i = 0; i < (*heads)[t].size(); ++i) (*heads)[t][i] += f.at(p + "self_attn." + name + ".bias", i);
      for (const auto& [heads, name] : {std::pair{&q, "q_norm"}, {&k, "k_norm"}})
        if (m.qk_norm) norm_heads(f, *heads, p + "self_attn." + name, static_cast<size_t>(m.head_dim), m.norm_epsilon);
      rotate(q, static_cast<size_t>(m.head_dim), m.rope_theta);
      rotate(k, static_cast<size_t>(m.head_dim), m.rope_theta);
      add(x, linear(f, attention(q, k, v, m, m.is_local(l)), p + "self_attn.o_proj.weight"));
    }
    const Matrix g = norm(f, x, p + "post_attention_layernorm", m.norm_epsilon, true);
    add(x, m.is_mixture(l) ? experts(f, g, m, p)
                           : swiglu(f, g, p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight", p + "mlp.down_proj.weight"));
  }
  return linear(f, norm(f, x, "model.norm", m.norm_epsilon, true),
                m.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
}

Matrix logits_gpt(const Foreign& f, const Model& m, int64_t sequence, int64_t tokens) {
  Matrix x;
  for (int64_t t = 0; t < tokens; ++t) {
    x.emplace_back();
    for (int64_t i = 0; i < m.hidden; ++i)
      x.back().push_back(
          f.at("transformer.wte.weight", static_cast<size_t>(token_at(sequence, static_cast<size_t>(t))), static_cast<size_t>(i)) +
          f.at("transformer.wpe.weight", static_cast<size_t>(t), static_cast<size_t>(i)));
  }
  const auto h = static_cast<size_t>(m.hidden);
  for (int64_t l = 0; l < m.layers; ++l) {
    const std::string p = fmt::format("transformer.h.{}.", l);
    const Matrix qkv = conv1d(f, norm(f, x, p + "ln_1", m.norm_epsilon, false), p + "attn.c_attn");
    add(x, conv1d(f, attention(columns(qkv, 0, h), columns(qkv, h, h), columns(qkv, 2 * h, h), m), p + "attn.c_proj"));
    Matrix up = conv1d(f, norm(f, x, p + "ln_2", m.norm_epsilon, false), p + "mlp.c_fc");
    for (auto& row : up)
      for (double& u : row) u = 0.5 * u * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (u + 0.044715 * u * u * u)));
    add(x, conv1d(f, up, p + "mlp.c_proj"));
  }
  return linear(f, norm(f, x, "transformer.ln_f", m.norm_epsilon, false),
                m.tied_embeddings ? "transformer.wte.weight" : "lm_head.weight");
}

/// Weights so large that every part of the model shows in a loss: as they start they are small, and biases zero.
void enlarge(std::vector<float>& values, const std::string& name) {
  for (size_t i = 0; i < values.size(); ++i) values[i] += 0.25f * std::sin(static_cast<float>(i) + static_cast<float>(name.size()));
}

/// The tensors that are exported of these parameters.
Foreign exported(const Model& m, const std::function<std::vector<float>(const std::string&)>& values_of) {
  Foreign f;
  std::map<std::string, int64_t> columns_by_name;
  for (const ModelParameter& p : interop::carried_by_files(m)) columns_by_name[p.name] = columns_of(p);
  for (ForeignTensor& t : interop::foreign_tensors(m)) {
    std::vector<float>& whole = f.values[t.name];
    for (size_t part = 0; part < t.parts.size(); ++part) {
      const std::string& name = t.parts[part].parameter;
      const std::vector<float> rows = interop::to_foreign(t, part, values_of(name), columns_by_name[name]);
      whole.insert(whole.end(), rows.begin(), rows.end());
    }
    f.tensors[t.name] = std::move(t);
  }
  return f;
}

/// The loss of the session, and of the tensors that are exported then.
void compare_losses(Case c) {
  c.train.learning_rate.peak = 0;
  c.train.grad_accumulation = 2;
  c.train.micro_batch = 1;
  Run run(c);
  const Model& m = c.model;
  const auto state = [](const std::string& name) {
    return names_run_state(name) ? StateName{std::string(kRunState), name} : StateName{name, "value"};
  };
  for (const ModelParameter& p : interop::carried_by_files(m)) {
    LogicalTensor t = run.session->state(state(p.name)).value();
    enlarge(t.values, p.name);
    REQUIRE(run.session->set_state(state(p.name), t).ok());
  }
  const Foreign f = exported(m, [&](const std::string& name) { return run.session->state(state(name)).value().values; });
  double nll = 0;
  for (int64_t sequence = 0; sequence < 2; ++sequence) {
    const Matrix logits =
        m.is_llama() ? logits_llama(f, m, sequence, c.train.seq_len) : logits_gpt(f, m, sequence, c.train.seq_len);
    for (size_t t = 0; t < logits.size(); ++t) {
      double sum = 0;
      for (const double v : logits[t]) sum += std::exp(v - logits[t][0]);
      nll += std::log(sum) + logits[t][0] - logits[t][static_cast<size_t>(token_at(sequence, t + 1))];
    }
  }
  nll /= static_cast<double>(2 * c.train.seq_len);
  const double loss = run.session->step(0).loss.value();
  INFO(m.name << " " << nll << " " << loss);
  REQUIRE(std::abs(nll - loss) < 1e-5 * std::abs(loss));
}

TEST_CASE("the exported tensors, read as transformers reads them, give the loss of the session within rounding") {
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const bool tied : {false, true}) {
      Case c = weights_case(family, 1, 1, 1, 0, tied);
      c.model.qk_norm = family == Family::kLlama && tied;  // as the small models of Qwen3
      compare_losses(c);
    }
  Case c = weights_case(Family::kLlama, 1, 1, 1, 0, false);
  c.model.qkv_biases = true;  // as Qwen2
  compare_losses(c);
  c.model.window = {.tokens = 5, .global_layers = 1};  // which has windows behind the first layers
  compare_losses(c);
  c.model.qkv_biases = false, c.model.window = {.tokens = 3};  // as Mistral
  compare_losses(c);
  for (const char* type : kMixtures) {
    c.model = mixture_of(type);
    compare_losses(c);
  }
  for (const char* type : kLatents) {
    c.model = latent_of(type);
    compare_losses(c);
  }
}

TEST_CASE("latent attention: the exported tensors give the logits of the reference trainer, in fp64, element by element") {
  for (const char* type : kLatents) {
    const Model m = latent_of(type);
    Train train = weights_case(Family::kLlama, 1, 1, 1, 0, false).train;
    reference::Trainer<double> trainer(m, train, 1);
    for (size_t i = 0; i < trainer.parameters().size(); ++i) {
      std::vector<float> values(trainer.values()[i].begin(), trainer.values()[i].end());
      enlarge(values, trainer.parameters()[i].name);
      trainer.values()[i].assign(values.begin(), values.end());
    }
    for (auto& bias : trainer.router_biases()) {
      std::vector<float> values(bias.begin(), bias.end());
      enlarge(values, "router_bias");
      bias.assign(values.begin(), values.end());
    }
    const Foreign f = exported(m, [&](const std::string& name) {
      if (!names_run_state(name)) {
        const auto& values = trainer.value(name);
        return std::vector<float>(values.begin(), values.end());
      }
      const auto& bias = trainer.router_biases()[static_cast<size_t>(std::stoi(name.substr(name.rfind('.') + 1)))];
      return std::vector<float>(bias.begin(), bias.end());
    });
    std::vector<int32_t> row;
    for (size_t i = 0; i <= static_cast<size_t>(train.seq_len); ++i) row.push_back(token_at(0, i));
    const auto ours = trainer.logits(row, 0);
    const Matrix theirs = logits_llama(f, m, 0, train.seq_len);
    const auto words = static_cast<size_t>(m.vocab_rows());
    double largest = 0, apart = 0;
    for (size_t t = 0; t < theirs.size(); ++t)
      for (size_t w = 0; w < theirs[t].size(); ++w) {
        largest = std::max(largest, std::abs(theirs[t][w]));
        apart = std::max(apart, std::abs(theirs[t][w] - ours[t * words + w]));
      }
    INFO(type << " " << largest << " " << apart);
    REQUIRE(largest > 0.1);
    REQUIRE(apart < 1e-12 * largest * static_cast<double>(m.hidden));
  }
}

TEST_CASE("weights of mixtures alone begin a run under every layout, biases of routers among them") {
  Case other = weights_case(Family::kLlama, 1, 1, 1, 0, false);
  other.model = mixture_of("glm4_moe");
  other.train.seed = 77;
  Run from(other);
  LogicalTensor bias{{8}, {0.5f, -0.25f, 0.125f, 0, 0, 0.75f, -1, 2}};
  const StateName name{std::string(kRunState), "router_bias.layers.1"};
  REQUIRE(from.session->set_state(name, bias).ok());
  const Folder folder;
  const auto saved = save_weights(folder.path(), interop::carried_by_files(other.model), [&](const ModelParameter& p) {
    return names_run_state(p.name) ? from.session->gather_buffer(p.name) : from.session->parameter(p.name);
  });
  REQUIRE(saved.ok());
  const auto checkpoint = Checkpoint::open(folder.path());
  REQUIRE(checkpoint.ok());
  REQUIRE(checkpoint->weights("router_bias.layers.1").value().values == bias.values);
  std::vector<double> losses;
  for (const int ep : {1, 2}) {
    Case c = weights_case(Family::kLlama, 2, 1, 1, 0, false);
    c.model = other.model;
    c.layout.ep = ep;
    Run run(c);
    REQUIRE(checkpoint->restore(run.config, *run.session).ok());
    REQUIRE(run.session->gather_buffer("router_bias.layers.1").value().values == bias.values);
    losses.push_back(run.session->step(0).loss.value());
  }
  REQUIRE(losses[0] == losses[1]);
  Case without = weights_case(Family::kLlama, 1, 1, 1, 0, false);
  without.model = other.model;
  without.model.experts.bias_update_rate = 0;
  Run run(without);
  const auto refused = checkpoint->restore(run.config, *run.session);
  REQUIRE_FALSE(refused.ok());
  REQUIRE(refused.error().message.find("it has biases of routers (`router_bias.layers.1`), and this case has none") !=
          std::string::npos);
}

TEST_CASE("element types widen exactly and narrow to the nearest even") {
  using interop::WeightType;
  for (const WeightType type : {WeightType::kBf16, WeightType::kF16}) {
    std::string all(2 * 65536, '\0');
    for (size_t i = 0; i < 65536; ++i) all[2 * i] = static_cast<char>(i & 255), all[2 * i + 1] = static_cast<char>(i >> 8);
    const std::vector<float> values = interop::widened(all, type);
    const std::string again = interop::narrowed(values, type);
    for (size_t i = 0; i < 65536; ++i)
      if (!std::isnan(values[i])) REQUIRE(again.substr(2 * i, 2) == all.substr(2 * i, 2));
    // Between two neighbours the nearer one is taken; half way the even one.
    for (size_t i = 1; i + 1 < 31744; i += 7) {
      const float low = values[i], high = values[i + 1];
      if (!std::isfinite(high)) break;
      const float middle = low + (high - low) / 2;
      const size_t even = i % 2 == 0 ? i : i + 1;
      const auto narrow = [&](float v) { return interop::narrowed({v}, type); };
      REQUIRE(narrow(middle) == all.substr(2 * even, 2));
      REQUIRE(narrow(std::nextafter(middle, low)) == all.substr(2 * i, 2));
      REQUIRE(narrow(std::nextafter(middle, high)) == all.substr(2 * i + 2, 2));
    }
  }
  REQUIRE(std::isinf(interop::widened(interop::narrowed({1e6f}, interop::WeightType::kF16), interop::WeightType::kF16)[0]));
  REQUIRE(
      std::isnan(interop::widened(interop::narrowed({std::nanf("")}, interop::WeightType::kBf16), interop::WeightType::kBf16)[0]));
}

}  // namespace
}  // namespace shardlab::testing::of_weights
