// Weights alone: from a session to Hugging Face's tensors and back, exactly; and that those tensors mean there what they mean here.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <numbers>

#include "interop/hugging_face.h"
#include "interop/safetensors.h"
#include "plan/base/hash.h"
#include "runtime/checkpoint.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
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

int64_t columns_of(const ModelParameter& p) { return p.shape.size() == 2 ? p.shape[1] : 1; }

TEST_CASE("each row of each parameter is in exactly one tensor, and tensors go there and back exactly") {
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const bool tied : {false, true}) {
      Model m = tiny_case(family).model;
      m.tied_embeddings = tied;
      if (family == Family::kLlama) REQUIRE(m.kv_heads < m.heads);  // groups of queries
      m.qk_norm = family == Family::kLlama && tied;
      std::map<std::string, std::vector<ForeignTensor>> of;
      for (ForeignTensor& t : interop::foreign_tensors(m)) of[t.parameter].push_back(std::move(t));
      for (const ModelParameter& p : parameters_of(m)) {
        INFO(p.name);
        const int64_t columns = columns_of(p);
        std::vector<float> ours(static_cast<size_t>(p.shape[0] * columns)), again(ours.size(), -1.0f);
        for (size_t i = 0; i < ours.size(); ++i) ours[i] = static_cast<float>(i);
        std::vector<int> covered(static_cast<size_t>(p.shape[0]));
        for (const ForeignTensor& t : of.at(p.name)) {
          for (const int64_t row : t.rows) ++covered.at(static_cast<size_t>(row));
          interop::from_foreign(t, interop::to_foreign(t, ours, columns), columns, again);
        }
        REQUIRE(std::ranges::all_of(covered, [](int n) { return n == 1; }));
        REQUIRE(again == ours);
      }
    }
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

/// Causal attention; q has heads * d columns, k and v kv_heads * d.
Matrix attention(const Matrix& q, const Matrix& k, const Matrix& v, const Model& m) {
  const auto d = static_cast<size_t>(m.head_dim), heads = static_cast<size_t>(m.heads),
             share = heads / static_cast<size_t>(m.kv_heads);
  Matrix o(q.size(), std::vector<double>(heads * d));
  for (size_t h = 0; h < heads; ++h)
    for (size_t t = 0; t < q.size(); ++t) {
      std::vector<double> score(t + 1);
      double most = -1e300, sum = 0;
      for (size_t u = 0; u <= t; ++u) {
        for (size_t i = 0; i < d; ++i) score[u] += q[t][h * d + i] * k[u][h / share * d + i] / std::sqrt(static_cast<double>(d));
        most = std::max(most, score[u]);
      }
      for (double& s : score) sum += s = std::exp(s - most);
      for (size_t u = 0; u <= t; ++u)
        for (size_t i = 0; i < d; ++i) o[t][h * d + i] += score[u] / sum * v[u][h / share * d + i];
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
    Matrix q = linear(f, n, p + "self_attn.q_proj.weight"), k = linear(f, n, p + "self_attn.k_proj.weight");
    for (const auto& [heads, name] : {std::pair{&q, "q_norm"}, {&k, "k_norm"}})
      if (m.qk_norm) norm_heads(f, *heads, p + "self_attn." + name, static_cast<size_t>(m.head_dim), m.norm_epsilon);
    rotate(q, static_cast<size_t>(m.head_dim), m.rope_theta);
    rotate(k, static_cast<size_t>(m.head_dim), m.rope_theta);
    add(x, linear(f, attention(q, k, linear(f, n, p + "self_attn.v_proj.weight"), m), p + "self_attn.o_proj.weight"));
    const Matrix g = norm(f, x, p + "post_attention_layernorm", m.norm_epsilon, true);
    Matrix gate = linear(f, g, p + "mlp.gate_proj.weight");
    const Matrix up = linear(f, g, p + "mlp.up_proj.weight");
    for (size_t t = 0; t < gate.size(); ++t)
      for (size_t i = 0; i < gate[t].size(); ++i) gate[t][i] = gate[t][i] / (1 + std::exp(-gate[t][i])) * up[t][i];
    add(x, linear(f, gate, p + "mlp.down_proj.weight"));
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

TEST_CASE("the exported tensors, read as transformers reads them, give the loss of the session within rounding") {
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const bool tied : {false, true}) {
      Case c = weights_case(family, 1, 1, 1, 0, tied);
      c.model.qk_norm = family == Family::kLlama && tied;  // as the small models of Qwen3
      c.train.learning_rate.peak = 0;
      c.train.grad_accumulation = 2;
      c.train.micro_batch = 1;
      Run run(c);
      const Model& m = c.model;
      Foreign f;
      std::map<std::string, int64_t> columns_by_name;
      for (const ModelParameter& p : parameters_of(m)) {
        columns_by_name[p.name] = columns_of(p);
        // Weights as they start are small and biases zero: larger ones, so that every part of the model shows in the loss.
        LogicalTensor t = run.session->parameter(p.name).value();
        for (size_t i = 0; i < t.values.size(); ++i)
          t.values[i] += 0.25f * std::sin(static_cast<float>(i) + static_cast<float>(p.name.size()));
        REQUIRE(run.session->set_parameter(p.name, t).ok());
      }
      for (ForeignTensor& t : interop::foreign_tensors(m)) {
        f.values[t.name] = interop::to_foreign(t, run.weights(t.parameter), columns_by_name[t.parameter]);
        f.tensors[t.name] = std::move(t);
      }
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
      INFO(nll << " " << loss);
      REQUIRE(std::abs(nll - loss) < 1e-5 * std::abs(loss));
    }
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
