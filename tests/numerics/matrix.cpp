#include "tests/numerics/matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "plan/base/hash.h"
#include "plan/base/philox.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

Model gpt() {
  Model m;
  m.name = "gpt";
  m.family = Family::kGpt;
  m.layers = 2;
  m.hidden = 32;
  m.heads = m.kv_heads = 4;
  m.head_dim = 8;
  m.ffn = 64;
  m.vocab = 64;
  m.max_positions = 24;
  m.tied_embeddings = true;
  m.init_deviation = 0.15f;
  return m;
}

Model llama() {
  Model m = gpt();
  m.name = "llama";
  m.family = Family::kLlama;
  m.layers = 3;  // two stages of unequal depth
  m.hidden = 48;
  m.heads = 8;
  m.kv_heads = 4;
  m.head_dim = 6;
  m.ffn = 80;
  m.vocab = 112;
  m.tied_embeddings = false;
  return m;
}

/// The same subject under both optimizers. SGD at lr 1 shows every uniform scale error, which Adam would hide.
void add(std::vector<Subject>& list, std::string name, Model model, int64_t seq_len, float dropout, int64_t sequences,
         float clip_norm = 0, Precision precision = Precision::kFp32, Fp8Scaling fp8_scaling = Fp8Scaling::kCurrent) {
  Train t;
  t.precision = precision;
  t.fp8_scaling = fp8_scaling;
  t.clip_norm = clip_norm;
  t.seq_len = seq_len;
  t.dropout = dropout;
  t.seed = 7 + list.size();
  t.optimizer = Optimizer::kSgd;
  t.learning_rate.peak = 1.0f;
  list.push_back({name + " sgd", model, t, sequences});
  t.optimizer = Optimizer::kAdamW;
  t.learning_rate.peak = 0.01f;
  t.weight_decay = 0.1f;
  list.push_back({name + " adamw", model, t, sequences});
}

/// Each schedule of the learning rate on some subjects; a guard that finds nothing on others; a scale that nothing overflows.
void schedule_and_guard(std::vector<Subject>& list) {
  using Kind = LearningRate::Kind;
  constexpr Kind kKinds[] = {Kind::kConstant, Kind::kCosine, Kind::kLinear, Kind::kWsd};
  for (size_t i = 0; i < list.size(); ++i) {
    Train& t = list[i].train;
    const Kind kind = kKinds[i / 2 % std::size(kKinds)];
    const float peak = t.learning_rate.peak;
    if (kind != Kind::kConstant)
      t.learning_rate = {.kind = kind, .peak = peak, .warmup_steps = 2, .total_steps = 5, .decay_steps = 2, .floor = peak / 8};
    if (i / 2 == 5) t.ema_decay = 0.9f;
    if (i / 2 % 3 == 2)
      t.guard = {
          .nonfinite = GuardAction::kSkip, .spike = GuardAction::kSkip, .loss_factor = 100, .norm_factor = 1000, .window = 2};
    if (t.precision != Precision::kFp16) continue;
    t.guard.nonfinite = GuardAction::kNone;
    t.loss_scale_start = 1024;
    t.loss_scale_interval = 2;
  }
}

/// Replaces every case of `list` by one for each value.
template <class T>
void times(std::vector<Case>& list, std::initializer_list<T> values, void (*set)(Case&, T)) {
  std::vector<Case> product;
  for (const Case& c : list)
    for (const T& value : values) set(product.emplace_back(c), value);
  list = std::move(product);
}

}  // namespace

std::vector<Subject> subjects() {
  std::vector<Subject> list;
  Model gpt_untied = gpt(), llama_tied = llama();
  gpt_untied.tied_embeddings = false;
  gpt_untied.layers = 3;
  llama_tied.tied_embeddings = true;
  llama_tied.layers = 2;
  llama_tied.kv_heads = 8;
  llama_tied.vocab = 64;
  add(list, "gpt tied", gpt(), 16, 0, 8);
  add(list, "llama", llama(), 24, 0, 8);
  add(list, "gpt untied dropout", gpt_untied, 20, 0.25f, 8);
  add(list, "llama tied dropout clipped", llama_tied, 16, 0.25f, 8, 0.5f);
  add(list, "gpt tied clipped, 16 sequences", gpt(), 16, 0, 16, 0.5f);
  add(list, "llama, 6 sequences", llama(), 16, 0, 6);
  add(list, "gpt tied bf16 clipped", gpt(), 16, 0, 8, 0.5f, Precision::kBf16);
  add(list, "llama bf16", llama(), 24, 0.25f, 8, 0, Precision::kBf16);
  add(list, "gpt tied fp16 clipped", gpt(), 16, 0, 8, 0.5f, Precision::kFp16);
  add(list, "gpt tied fp8", gpt(), 16, 0, 8, 0, Precision::kFp8);
  add(list, "llama fp8 delayed clipped", llama(), 24, 0, 8, 0.5f, Precision::kFp8, Fp8Scaling::kDelayed);
  add(list, "gpt untied fp8 block", gpt_untied, 20, 0, 8, 0, Precision::kFp8, Fp8Scaling::kBlock);
  schedule_and_guard(list);
  for (const char* name : {"llama adamw", "gpt tied clipped, 16 sequences adamw"}) {
    Subject lion = *std::ranges::find(list, name, &Subject::name);
    lion.name = lion.name.substr(0, lion.name.rfind(' ')) + " lion";
    lion.train.optimizer = Optimizer::kLion;
    lion.train.learning_rate.peak /= 4, lion.train.learning_rate.floor /= 4;
    list.push_back(std::move(lion));
  }
  return list;
}

std::vector<Case> layouts() {
  Case base;
  base.canonical = true;
  std::vector<Case> list{base};
  times<int>(list, {1, 2, 4}, [](Case& c, int v) { c.layout.dp = v; });
  times<int>(list, {1, 2, 4}, [](Case& c, int v) { c.layout.tp = v; });
  times<int>(list, {1, 2}, [](Case& c, int v) { c.layout.pp = v; });
  times<Schedule>(list, {Schedule::kNone, Schedule::kAfab, Schedule::k1F1B}, [](Case& c, Schedule v) { c.layout.schedule = v; });
  times<int>(list, {1, 2, 3, 4}, [](Case& c, int v) { c.train.grad_accumulation = v; });
  times<int>(list, {0, 1, 2, 3}, [](Case& c, int v) { c.layout.zero = v; });
  times<int>(list, {0, 2}, [](Case& c, int v) { c.layout.hybrid_shard = v; });
  times<int>(list, {0, 2}, [](Case& c, int v) { c.layout.zero_plus_plus.secondary = v; });
  times<Fsdp>(list, {{1, 1, true}, {1, 0, true}, {2, 2, true}, {1, 1, false}}, [](Case& c, Fsdp v) { c.layout.fsdp = v; });
  times<int64_t>(list, {0, 20000}, [](Case& c, int64_t v) { c.layout.bucket_bytes = v; });
  times<bool>(list, {false, true}, [](Case& c, bool v) { c.layout.overlap = v; });
  times<Recompute>(list, {Recompute::kNone, Recompute::kFull}, [](Case& c, Recompute v) { c.layout.recompute = v; });
  std::erase_if(list, [](const Case& c) {
    // Buckets and overlap are of the gradients' reduction: without one they say nothing.
    const bool idle = (c.layout.dp == 1 && (c.layout.bucket_bytes > 0 || c.layout.overlap)) ||
                      (c.layout.zero != 3 && !(c.layout.fsdp == Fsdp{})) || (c.layout.hybrid_shard > 0 && c.layout.dp < 4) ||
                      (c.layout.zero_plus_plus.secondary > 0 && (c.layout.zero != 3 || c.layout.dp < 4));
    return idle || c.layout.world_size() > 8;
  });
  return list;
}

std::vector<Case> deep_layouts() {
  Case base;
  base.canonical = true;
  base.layout.pp = 3;
  base.layout.overlap = false;
  std::vector<Case> list{base};
  times<int>(list, {1, 2}, [](Case& c, int v) { c.layout.dp = v; });
  times<Schedule>(list, {Schedule::kAfab, Schedule::k1F1B}, [](Case& c, Schedule v) { c.layout.schedule = v; });
  times<int>(list, {1, 2, 4}, [](Case& c, int v) { c.train.grad_accumulation = v; });
  times<Recompute>(list, {Recompute::kNone, Recompute::kSelective, Recompute::kFull},
                   [](Case& c, Recompute v) { c.layout.recompute = v; });
  return list;
}

std::vector<Case> selective_layouts() {
  Case base;
  base.canonical = true;
  base.layout.recompute = Recompute::kSelective;
  std::vector<Case> list{base};
  times<std::string>(list, {"", "mlp.act", "attn.norm attn.core mlp.norm mlp.act"},
                     [](Case& c, std::string v) { c.layout.recompute_options.modules = v; });
  times<std::array<int, 3>>(list, {{1, 1, 0}, {1, 2, 0}, {2, 1, 1}, {4, 2, 3}}, [](Case& c, std::array<int, 3> v) {
    c.layout.dp = v[0];
    c.layout.tp = v[1];
    c.layout.zero = v[2];
  });
  for (const int every : {2, 3}) {  // beside them, every second and every third layer made again
    Case c = base;
    c.layout.recompute = Recompute::kFull;
    c.layout.recompute_options.every = every;
    for (const std::array<int, 3> v : {std::array{1, 1, 0}, {1, 2, 0}, {2, 1, 1}, {4, 1, 3}}) {
      c.layout.dp = v[0];
      c.layout.tp = v[1];
      c.layout.zero = v[2];
      list.push_back(c);
    }
    c.layout.dp = 1;
    c.layout.zero = 0;
    c.layout.pp = 2;
    c.layout.schedule = Schedule::k1F1B;
    list.push_back(c);
  }
  // Layer by layer, in models of two layers and of three: of each subject those that its model refuses are left out.
  for (const char* layers : {"1*full@cpu 1*attn.core", "1*full@cpu 1*attn.norm+mlp.act 1*none"})
    for (const std::array<int, 4> v : {std::array{1, 1, 0, 1}, {1, 2, 0, 2}, {2, 1, 1, 1}, {4, 1, 3, 1}}) {
      Case c = base;
      c.layout.recompute = Recompute::kByLayer;
      c.layout.recompute_options.layers = layers;
      c.layout.dp = v[0];
      c.layout.tp = v[1];
      c.layout.zero = v[2];
      c.layout.pp = v[3];
      c.layout.schedule = v[3] > 1 ? Schedule::k1F1B : Schedule::kNone;
      list.push_back(c);
    }
  times<int>(list, {1, 2}, [](Case& c, int v) { c.train.grad_accumulation = v; });
  return list;
}

std::vector<Case> offload_layouts() {
  Case base;
  base.canonical = true;
  std::vector<Case> list{base};
  times<Offload>(list,
                 {{.activations = OffloadTo::kCpu},
                  {.optimizer = OffloadTo::kCpu},
                  {.optimizer = OffloadTo::kNvme},
                  {.activations = OffloadTo::kCpu, .optimizer = OffloadTo::kCpu},
                  {.activations = OffloadTo::kNvme},
                  {.optimizer = OffloadTo::kCpu, .parameters = OffloadTo::kCpu},
                  {.activations = OffloadTo::kCpu, .optimizer = OffloadTo::kCpu, .parameters = OffloadTo::kNvme},
                  {.activations = OffloadTo::kNvme, .optimizer = OffloadTo::kNvme, .parameters = OffloadTo::kNvme}},
                 [](Case& c, Offload v) { c.layout.offload = v; });
  times<std::array<int, 4>>(list,
                            {{1, 1, 1, 0},
                             {1, 2, 2, 0},
                             {2, 2, 2, 0},
                             {2, 1, 1, 1},
                             {2, 1, 1, 0},
                             {4, 2, 1, 2},
                             {4, 1, 1, 3},
                             {1, 2, 1, 3},
                             {2, 1, 2, 3}},
                            [](Case& c, std::array<int, 4> v) {
                              c.layout.dp = v[0];
                              c.layout.tp = v[1];
                              c.layout.pp = v[2];
                              c.layout.zero = v[3];
                              c.layout.schedule = v[2] > 1 ? Schedule::k1F1B : Schedule::kNone;
                            });
  times<int>(list, {1, 2}, [](Case& c, int v) { c.train.grad_accumulation = v; });
  times<bool>(list, {false, true}, [](Case& c, bool v) { c.layout.overlap = v; });
  times<Recompute>(list, {Recompute::kNone, Recompute::kFull}, [](Case& c, Recompute v) { c.layout.recompute = v; });
  return list;
}

std::vector<Case> sequence_layouts() {
  Case base;
  base.canonical = true;
  base.layout.sequence_parallel = true;
  std::vector<Case> list{base};
  times<int>(list, {2, 4}, [](Case& c, int v) { c.layout.tp = v; });
  times<bool>(list, {false, true}, [](Case& c, bool v) { c.layout.tensor_overlap = v; });
  times<std::array<int, 3>>(list, {{1, 1, 0}, {1, 2, 0}, {2, 1, 0}, {2, 1, 1}, {2, 1, 2}, {2, 1, 3}, {2, 2, 1}, {4, 1, 3}},
                            [](Case& c, std::array<int, 3> v) {
                              c.layout.dp = v[0];
                              c.layout.pp = v[1];
                              c.layout.zero = v[2];
                            });
  times<Schedule>(list, {Schedule::kNone, Schedule::k1F1B, Schedule::kZbH1}, [](Case& c, Schedule v) { c.layout.schedule = v; });
  times<int>(list, {1, 2, 4}, [](Case& c, int v) { c.train.grad_accumulation = v; });
  times<std::string>(
      list, {"none", "full", "attn.core", "attn.norm attn.core mlp.norm mlp.act", "1*full@cpu 1*attn.norm+mlp.act 1*none"},
      [](Case& c, std::string v) {
        Layout& l = c.layout;
        if (v == "none") return;
        l.recompute = v == "full" ? Recompute::kFull : v.front() == '1' ? Recompute::kByLayer : Recompute::kSelective;
        if (l.recompute == Recompute::kSelective) l.recompute_options.modules = v;
        if (l.recompute == Recompute::kByLayer) l.recompute_options.layers = v;
      });
  times<Offload>(list, {{}, {.activations = OffloadTo::kCpu, .optimizer = OffloadTo::kCpu}},
                 [](Case& c, Offload v) { c.layout.offload = v; });
  times<bool>(list, {false, true}, [](Case& c, bool v) { c.layout.overlap = v; });
  std::erase_if(list, [](const Case& c) { return c.layout.world_size() > 8; });
  return list;
}

std::vector<Case> chunked_layouts() {
  Case base;
  base.canonical = true;
  std::vector<Case> list{base};
  times<int>(list, {2, 4, 8}, [](Case& c, int v) { c.layout.loss_chunks = v; });
  // dp, tp, pp, zero, cp
  times<std::array<int, 5>>(list,
                            {{1, 1, 1, 0, 1},
                             {2, 2, 1, 0, 1},
                             {1, 2, 2, 0, 1},
                             {2, 1, 2, 1, 1},
                             {2, 1, 1, 2, 1},
                             {4, 2, 1, 3, 1},
                             {2, 1, 2, 3, 1},
                             {1, 1, 1, 0, 2},
                             {2, 2, 1, 2, 2}},
                            [](Case& c, std::array<int, 5> v) {
                              c.layout.dp = v[0];
                              c.layout.tp = v[1];
                              c.layout.pp = v[2];
                              c.layout.zero = v[3];
                              c.layout.cp = v[4];
                              c.layout.cp_kind = v[4] > 1 ? ContextKind::kRing : ContextKind::kNone;
                              c.layout.sequence_parallel = v[1] > 1 && v[0] * v[2] > 2;
                            });
  times<Schedule>(list, {Schedule::kNone, Schedule::k1F1B, Schedule::kZbH1}, [](Case& c, Schedule v) { c.layout.schedule = v; });
  times<int>(list, {1, 2, 4, 8}, [](Case& c, int v) { c.train.grad_accumulation = v; });
  times<bool>(list, {false, true}, [](Case& c, bool v) { c.layout.overlap = v; });
  return list;
}

std::vector<Case> served_layouts() {
  Case base;
  base.canonical = true;
  std::vector<Case> list{base};
  times<std::array<int, 3>>(list, {{2, 1, 1}, {2, 2, 2}, {4, 1, 1}, {4, 2, 1}}, [](Case& c, std::array<int, 3> v) {
    c.layout.dp = c.layout.parameter_server.servers = v[0];
    c.layout.tp = v[1];
    c.layout.pp = v[2];
    c.layout.schedule = v[2] > 1 ? Schedule::k1F1B : Schedule::kNone;
  });
  times<int>(list, {1, 2, 4}, [](Case& c, int v) { c.train.grad_accumulation = v; });
  times<int64_t>(list, {0, 20000}, [](Case& c, int64_t v) { c.layout.bucket_bytes = v; });
  times<bool>(list, {false, true}, [](Case& c, bool v) { c.layout.overlap = v; });
  times<Recompute>(list, {Recompute::kNone, Recompute::kSelective, Recompute::kFull},
                   [](Case& c, Recompute v) { c.layout.recompute = v; });
  times<Offload>(list,
                 {{},
                  {.activations = OffloadTo::kCpu},
                  {.optimizer = OffloadTo::kCpu},
                  {.activations = OffloadTo::kCpu, .optimizer = OffloadTo::kNvme}},
                 [](Case& c, Offload v) { c.layout.offload = v; });
  return list;
}

std::vector<Case> validated_layouts() {
  Case base;
  base.canonical = true;
  base.layout.pp = 2;
  base.layout.overlap = false;
  base.train.post_validation = 5;
  std::vector<Case> list{base};
  times<Schedule>(list, {Schedule::k1F1B, Schedule::kZbH2, Schedule::kZbV}, [](Case& c, Schedule v) { c.layout.schedule = v; });
  times<std::array<int, 3>>(list, {{1, 1, 0}, {1, 2, 0}, {2, 1, 0}, {2, 1, 1}, {2, 1, 2}, {2, 1, 3}},
                            [](Case& c, std::array<int, 3> v) {
                              c.layout.dp = v[0];
                              c.layout.tp = v[1];
                              c.layout.zero = v[2];
                            });
  times<int>(list, {2, 4}, [](Case& c, int v) { c.train.grad_accumulation = v; });
  return list;
}

std::vector<Case> context_layouts(std::initializer_list<ContextKind> kinds) {
  Case base;
  base.canonical = true;
  std::vector<Case> list{base};
  times<ContextKind>(list, kinds, [](Case& c, ContextKind v) { c.layout.cp_kind = v; });
  // cp, dp, tp, pp, zero, grad_accumulation
  times<std::array<int, 6>>(list,
                            {{2, 1, 1, 1, 0, 8}, {4, 2, 1, 1, 0, 4}, {2, 2, 2, 1, 2, 4}, {2, 2, 1, 2, 3, 4}, {4, 1, 1, 2, 0, 8}},
                            [](Case& c, std::array<int, 6> v) {
                              c.layout.cp = v[0];
                              c.layout.dp = v[1];
                              c.layout.tp = v[2];
                              c.layout.pp = v[3];
                              c.layout.zero = v[4];
                              c.train.grad_accumulation = v[5];
                              c.layout.schedule = v[3] > 1 ? Schedule::k1F1B : Schedule::kNone;
                            });
  times<Recompute>(list, {Recompute::kNone, Recompute::kSelective, Recompute::kFull},
                   [](Case& c, Recompute v) { c.layout.recompute = v; });
  return list;
}

std::vector<Case> composed_layouts() {
  Case base;
  base.canonical = true;
  std::vector<Case> list{base};
  // dp, tp, cp, pp, ep
  times<std::array<int, 5>>(list,
                            {{2, 2, 2, 2, 1},
                             {1, 2, 4, 2, 1},
                             {1, 4, 2, 2, 1},
                             {4, 1, 2, 2, 1},
                             {2, 2, 4, 1, 1},
                             {4, 2, 2, 1, 1},
                             {1, 2, 2, 2, 1},
                             {2, 2, 2, 2, 2},
                             {2, 2, 2, 2, 4},
                             {1, 2, 4, 2, 4},
                             {4, 1, 2, 2, 4},
                             {4, 2, 2, 1, 8}},
                            [](Case& c, std::array<int, 5> v) {
                              c.layout.dp = v[0];
                              c.layout.tp = v[1];
                              c.layout.cp = v[2];
                              c.layout.pp = v[3];
                              c.layout.ep = v[4];
                              c.train.grad_accumulation = 8 / v[0];
                            });
  times<ContextKind>(list, {ContextKind::kRing, ContextKind::kUlysses}, [](Case& c, ContextKind v) { c.layout.cp_kind = v; });
  times<int>(list, {0, 1, 2, 3}, [](Case& c, int v) { c.layout.zero = v; });
  times<Schedule>(list, {Schedule::kNone, Schedule::kAfab, Schedule::k1F1B, Schedule::kZbH1},
                  [](Case& c, Schedule v) { c.layout.schedule = v; });
  times<bool>(list, {false, true}, [](Case& c, bool v) { c.layout.sequence_parallel = v; });
  times<bool>(list, {false, true}, [](Case& c, bool v) { c.layout.tensor_overlap = v; });
  times<Recompute>(list, {Recompute::kNone, Recompute::kSelective, Recompute::kFull},
                   [](Case& c, Recompute v) { c.layout.recompute = v; });
  times<Offload>(list, {{}, {.activations = OffloadTo::kCpu, .optimizer = OffloadTo::kCpu}},
                 [](Case& c, Offload v) { c.layout.offload = v; });
  times<int>(list, {1, 2}, [](Case& c, int v) { c.layout.loss_chunks = v; });
  times<bool>(list, {false, true}, [](Case& c, bool v) { c.layout.overlap = v; });
  return list;
}

Subject subject_named(std::string_view name) {
  for (Subject& s : subjects())
    if (s.name == name) return s;
  SHARDLAB_CHECK(false, "no subject is called {}", name);
}

std::vector<Subject> mixture_subjects() {
  Model m = llama();
  m.name = "mixture";
  m.layers = 2;
  m.vocab = 64;
  m.experts = {.count = 8, .top_k = 2, .ffn = 20, .balance = 0.05f, .z_loss = 0.01f, .bias_update_rate = 0.02f};
  std::vector<Subject> list;
  add(list, "mixture clipped", m, 20, 0.25f, 8, 0.5f);
  return list;
}

std::vector<Case> expert_layouts() {
  Case base;
  base.canonical = true;
  std::vector<Case> list{base};
  // dp, ep, pp, zero, grad_accumulation, cp, tp, sequence_parallel, expert_tp
  times<std::array<int, 9>>(list,
                            {{1, 1, 1, 0, 4, 1, 1, 0, 0},
                             {2, 1, 1, 3, 2, 1, 1, 0, 0},
                             {2, 2, 1, 0, 2, 1, 1, 0, 0},
                             {4, 2, 1, 1, 1, 1, 1, 0, 0},
                             {4, 4, 1, 2, 2, 1, 1, 0, 0},
                             {2, 2, 2, 0, 4, 1, 1, 0, 0},
                             {2, 4, 1, 2, 4, 2, 1, 0, 0},
                             {1, 2, 1, 0, 8, 2, 2, 1, 0},
                             {2, 1, 1, 3, 2, 1, 2, 0, 0},
                             {2, 2, 1, 0, 4, 1, 2, 1, 0},
                             {2, 2, 1, 0, 4, 1, 2, 1, 1},
                             {1, 4, 1, 2, 8, 2, 2, 1, 1},
                             {2, 4, 1, 3, 4, 1, 2, 1, 1}},
                            [](Case& c, std::array<int, 9> v) {
                              c.layout.dp = v[0];
                              c.layout.ep = v[1];
                              c.layout.pp = v[2];
                              c.layout.zero = v[3];
                              c.train.grad_accumulation = v[4];
                              c.layout.cp = v[5];
                              c.layout.cp_kind = v[5] > 1 ? ContextKind::kRing : ContextKind::kNone;
                              c.layout.tp = v[6];
                              c.layout.sequence_parallel = v[7] > 0;
                              c.layout.expert_tp = v[8];
                              c.layout.schedule = v[2] > 1 ? Schedule::k1F1B : Schedule::kNone;
                            });
  times<Recompute>(list, {Recompute::kNone, Recompute::kFull}, [](Case& c, Recompute v) { c.layout.recompute = v; });
  times<ExpertOverlap>(list, {ExpertOverlap::kNone, ExpertOverlap::kLayer, ExpertOverlap::kMicroBatches},
                       [](Case& c, ExpertOverlap v) { c.layout.expert_overlap = v; });
  // A bound that the routes of some steps exceed.
  times<float>(list, {0, 1.1f}, [](Case& c, float v) { c.layout.expert_bound = v; });
  std::erase_if(list, [](const Case& c) {  // test_experts and test_expert_bound have the rest
    const bool braids = c.layout.expert_overlap != ExpertOverlap::kNone;
    return (braids && (c.layout.recompute != Recompute::kNone || c.layout.ep == 1 || c.layout.cp > 1 || c.layout.tp > 1)) ||
           (c.layout.expert_bound > 0 && (c.layout.ep == 1 || braids));
  });
  return list;
}

std::vector<Case> uneven_layouts() {
  Case base;
  base.layout.overlap = false;
  std::vector<Case> list{base};
  times<int>(list, {1, 2, 3, 6}, [](Case& c, int v) { c.layout.dp = v; });
  times<int>(list, {1, 3, 6}, [](Case& c, int v) { c.layout.tp = v; });
  times<int>(list, {1, 2}, [](Case& c, int v) { c.train.grad_accumulation = v; });
  times<int>(list, {0, 1}, [](Case& c, int v) { c.layout.zero = v; });
  times<int64_t>(list, {0, 20000}, [](Case& c, int64_t v) { c.layout.bucket_bytes = v; });
  std::erase_if(list, [](const Case& c) {
    const Layout& l = c.layout;
    const bool idle = l.dp == 1 && l.bucket_bytes > 0, even = (l.dp == 1 || l.dp == 2) && l.tp == 1;
    return idle || (even && l.world_size() > 1) || l.world_size() > 6;
  });
  return list;
}

std::vector<Subject> uneven_subjects() {
  std::vector<Subject> list;
  Model m = gpt();
  m.name = "six heads";
  m.hidden = 48;
  m.heads = m.kv_heads = 6;
  m.ffn = 96;
  m.vocab = 66;
  add(list, "gpt six heads, cosine", m, 16, 0, 12);
  for (Subject& subject : list) {
    LearningRate& lr = subject.train.learning_rate;
    lr = {.kind = LearningRate::Kind::kCosine, .peak = lr.peak, .warmup_steps = 2, .total_steps = 5, .floor = lr.peak / 10};
  }
  return list;
}

std::vector<Case> rows_of(const Subject& subject, std::span<const Case> layouts) {
  std::vector<Case> rows;
  for (Case c : layouts) {
    const int64_t validated = c.train.post_validation, accumulation = c.train.grad_accumulation, ways = accumulation * c.layout.dp;
    if (subject.sequences % ways != 0) continue;
    c.model = subject.model;
    c.train = subject.train;
    c.train.grad_accumulation = accumulation;
    c.train.micro_batch = subject.sequences / ways;
    c.train.global_batch_tokens = subject.sequences * subject.train.seq_len;
    c.train.post_validation = validated;
    c.name = layout_name(c);
    // Half of the rows have the gradient's norm computed too. A period reports that of its last step alone.
    c.train.grad_norm = validated == 0 && mix(hash_text(c.name)) >> 63;
    if (check(c).ok()) rows.push_back(std::move(c));
  }
  return rows;
}

std::string layout_name(const Case& config) {
  const Layout& l = config.layout;
  std::string name = fmt::format("dp{} tp{} pp{}", l.dp, l.tp, l.pp);
  if (l.sequence_parallel) name += " sequence-parallel";
  if (l.pp > 1) name += fmt::format(" {}", name_of(l.schedule));
  if (l.cp > 1) name += fmt::format(" cp{} {}", l.cp, name_of(l.cp_kind));
  if (l.ep > 1) name += fmt::format(" ep{}", l.ep);
  if (l.folds_experts()) name += l.expert_tp == 1 ? " whole-experts" : fmt::format(" expert-tp{}", l.expert_tp);
  name += fmt::format(" ga{} b{}", config.train.grad_accumulation, config.train.micro_batch);
  if (l.zero > 0) name += fmt::format(" zero{}", l.zero);
  if (l.hybrid_shard > 0) name += fmt::format(" hybrid{}", l.hybrid_shard);
  if (l.parameter_server.servers > 0) name += fmt::format(" servers{}", l.parameter_server.servers);
  if (l.zero_plus_plus.secondary > 0) name += fmt::format(" secondary{}", l.zero_plus_plus.secondary);
  if (l.zero == 3) name += fmt::format(" unit{} prefetch{}{}", l.fsdp.unit, l.fsdp.prefetch, l.fsdp.reshard ? "" : " kept");
  if (l.bucket_bytes > 0) name += fmt::format(" bucket{}", l.bucket_bytes);
  if (l.overlap) name += " overlap";
  if (l.tensor_overlap) name += " tensor-overlap";
  if (l.expert_overlap != ExpertOverlap::kNone) name += fmt::format(" expert-overlap-{}", name_of(l.expert_overlap));
  if (l.expert_bound > 0) name += fmt::format(" expert-bound-{}", l.expert_bound);
  if (config.train.post_validation > 0) name += fmt::format(" validated-every-{}", config.train.post_validation);
  if (l.loss_chunks > 1) name += fmt::format(" chunks{}", l.loss_chunks);
  if (l.recompute != Recompute::kNone) name += fmt::format(" recompute-{}", name_of(l.recompute));
  if (l.offload.any()) name += fmt::format(" offload {}", offload_text(l.offload));
  if (l.recompute_options.every > 1) name += fmt::format(" every {}", l.recompute_options.every);
  if (!l.recompute_options.layers.empty()) name += fmt::format(" ({})", l.recompute_options.layers);
  if (!l.recompute_options.modules.empty()) name += fmt::format(" ({})", l.recompute_options.modules);
  return name;
}

void RandomText::sequence(int64_t number, std::span<int32_t> out) const {
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t element = static_cast<uint64_t>(number) * 4096 + i;
    out[i] = static_cast<int32_t>(random_bits({99, RandomUse::kShuffle, 0, 0}, element) % static_cast<uint64_t>(vocab_));
  }
}

void RandomText::packed(int64_t number, const PackedSequence& out) const {
  sequence(number, out.tokens);
  for (size_t i = 0; i < out.tokens.size(); ++i) {
    const uint64_t element = static_cast<uint64_t>(number) * 4096 + i;
    const auto draw = [&](uint32_t use) { return random_bits({99, RandomUse::kShuffle, use, 0}, element); };
    const bool begins = i == 0 || draw(1) % 5 == 0;
    out.positions[i] = begins ? 0 : out.positions[i - 1] + 1;
    if (i > 0) out.targets[i - 1] = begins ? static_cast<int32_t>(draw(2) % static_cast<uint64_t>(vocab_)) : out.tokens[i];
    if (i + 1 == out.tokens.size()) out.targets[i] = static_cast<int32_t>(draw(2) % static_cast<uint64_t>(vocab_));
  }
}

}  // namespace shardlab::testing
