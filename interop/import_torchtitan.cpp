// A TOML file of torchtitan v0.2.2 as settings of a case. Keys were read in the sources that interop/torchtitan.cpp names.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "interop/settings.h"
#include "interop/toml.h"
#include "interop/torchtitan.h"
#include "plan/base/values.h"
#include "plan/keys.h"

namespace shardlab::interop {

namespace {

class Titan {
 public:
  Titan(std::vector<TomlEntry> entries, int64_t devices) : devices_(devices) {
    for (TomlEntry& entry : entries) entries_.insert_or_assign(entry.path, std::move(entry.value));
  }

  Result<Imported> read(const std::string& name) {
    read_model();
    read_layout();
    read_training();
    for (const auto& [path, value] : entries_)
      if (!read_.contains(path)) out_.unread(path);
    return out_.finish(name, "torchtitan");
  }

 private:
  const TomlValue* find(std::string_view path) {
    read_.emplace(path);
    const auto found = entries_.find(path);
    return found == entries_.end() ? nullptr : &found->second;
  }
  std::string text(std::string_view path, std::string_view otherwise) {
    const TomlValue* value = find(path);
    if (value == nullptr) return std::string(otherwise);
    if (const auto* word = std::get_if<std::string>(&value->value)) return *word;
    if (const auto* number = std::get_if<int64_t>(&value->value)) return fmt::to_string(*number);
    if (const auto* real = std::get_if<double>(&value->value)) return to_text(*real);
    if (const auto* truth = std::get_if<bool>(&value->value)) return *truth ? "true" : "false";
    out_.problem(path, "a single value is expected");
    return std::string(otherwise);
  }
  int64_t integer(std::string_view path, int64_t otherwise, int64_t least = 0) {
    const std::string value = text(path, "");
    return value.empty() ? otherwise : whole(out_, path, value, least);
  }
  void copy(std::string_view path, std::string_view to) {
    if (find(path) != nullptr) out_.set(to, text(path, ""));
  }

  void read_model() {
    const std::string model = text("model.name", "llama3"), flavour = text("model.flavor", "debugmodel");
    const auto all = titan_flavours();
    const auto found = std::ranges::find_if(all, [&](const Flavour& f) { return f.model == model && f.name == flavour; });
    if (found == all.end())
      return out_.problem("model.flavor", fmt::format("`{}` of `{}` is not known here: {}", flavour, model, flavour_list()));
    Case told;
    const Case plain;
    told.model = found->shape;
    for (const CaseKey& key : case_keys())
      if (key.get != nullptr && key.path.starts_with("model.") && key.path != "model.name" && key.get(told) != key.get(plain))
        out_.set(key.path, key.get(told));
    out_.set("model.tied_embeddings", told.model.tied_embeddings);
    is_mixture_ = told.model.is_mixture();
    if (told.model.is_latent()) {
      out_.differs("model.flavor", "the norms of compressed vectors add 1e-5 there, and 1e-6 here");
      if (integer("training.seq_len", 2048, 1) > kTitanPlainTokens)
        out_.differs("training.seq_len",
                     fmt::format("rotary frequencies are scaled beyond {} tokens there (YaRN), and not here", kTitanPlainTokens));
    }
    if (told.model.experts.groups > 1 && !told.model.experts.sigmoid)
      out_.differs("model.flavor", "the score of a group of experts is the sum of its two largest there, and its largest here");
    if (is_mixture_ && text("debug.moe_force_load_balance", "false") == "true")
      out_.differs("debug.moe_force_load_balance", "predictions take even routes; in a run routers choose");
    has_fp8_ = false;
    if (const TomlValue* converters = find("model.converters"))
      if (const auto* list = std::get_if<TomlValue::List>(&converters->value))
        for (const TomlValue& item : *list) {
          const auto* word = std::get_if<std::string>(&item.value);
          if (word != nullptr && (*word == "float8" || *word == "quantize.linear.float8"))
            has_fp8_ = true;
          else
            out_.problem("model.converters", fmt::format("`{}` has no counterpart", word != nullptr ? *word : "?"));
        }
  }

  void read_layout() {
    const std::string p = "parallelism.";
    const int64_t tp = integer(p + "tensor_parallel_degree", 1, 1), pp = integer(p + "pipeline_parallel_degree", 1, 1),
                  cp = integer(p + "context_parallel_degree", 1, 1);
    out_.set("layout.tp", tp);
    out_.set("layout.pp", pp);
    out_.set("layout.cp", cp);
    if (tp > 1) out_.set("layout.sequence_parallel", true);
    if (text(p + "enable_async_tensor_parallel", "false") == "true" && tp > 1) out_.set("layout.tensor_overlap", true);
    const int64_t ep = integer(p + "expert_parallel_degree", 1, 1), slices = integer(p + "expert_tensor_parallel_degree", 1, 1);
    find(p + "expert_parallel_comm_backend");
    if (is_mixture_ && ep > 1) {  // without ep, tp cuts experts, and a model without experts has no use for it
      out_.set("layout.ep", ep);
      if (slices != tp) out_.set("layout.expert_tp", slices);
    }
    const int64_t copies = integer(p + "data_parallel_replicate_degree", 1, 1);
    const std::string shards_text = text(p + "data_parallel_shard_degree", "-1");
    int64_t shards = 0;
    if (shards_text == "-1") {
      const int64_t others =
          tp < kMost / pp && tp * pp < kMost / cp && tp * pp * cp < kMost / copies ? tp * pp * cp * copies : kMost;
      if (devices_ == 0 || devices_ % others != 0)
        out_.problem(p + "data_parallel_shard_degree", devices_ == 0
                                                           ? "-1 is what the devices leave: name --devices"
                                                           : fmt::format("{} devices are not a multiple of {}", devices_, others));
      else
        shards = devices_ / others;
    } else {
      shards = whole(out_, p + "data_parallel_shard_degree", shards_text, 1);
    }
    dp_ = shards < kMost / copies ? copies * shards : 0;
    out_.set("layout.zero", int64_t{shards > 1 ? 3 : 0});
    if (shards > 1 && copies > 1) out_.set("layout.hybrid_shard", shards);
    const std::string reshard = text(p + "fsdp_reshard_after_forward", "default");
    if (shards > 1)
      out_.set("layout.fsdp.reshard", reshard == "always" || (reshard == "default" && pp == 1));  // default: not with a pipeline
    if (pp > 1) read_pipeline(pp);

    const std::string mode = text("activation_checkpoint.mode", "selective"),
                      option = text("activation_checkpoint.selective_ac_option", "2");
    if (mode == "full")
      out_.set("layout.recompute", "full");
    else if (mode == "selective" && option == "op")
      out_.set("layout.recompute", "selective");
    else if (mode == "selective")
      out_.set("layout.recompute", "full"),
          out_.set("layout.recompute_options.every", whole(out_, "activation_checkpoint.selective_ac_option", option, 1));
    else if (mode != "none")
      out_.problem("activation_checkpoint.mode", fmt::format("`{}` has no counterpart: none, selective or full", mode));
  }

  void read_pipeline(int64_t pp) {
    const std::string p = "parallelism.", name = text(p + "pipeline_parallel_schedule", "1F1B");
    const auto schedule = std::ranges::find_if(torch_schedules(), [&](const ScheduleName& s) {
      return std::ranges::equal(s.torch, name, [](char a, char b) {
        return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
      });
    });
    const std::string csv = text(p + "pipeline_parallel_schedule_csv", "");
    if (!csv.empty())
      out_.set("layout.schedule", csv);
    else if (schedule == torch_schedules().end())
      out_.problem(p + "pipeline_parallel_schedule", fmt::format("`{}` has no counterpart", name));
    else
      out_.set("layout.schedule", std::string(name_of(schedule->schedule)));
    micro_batch_ = integer(p + "pipeline_parallel_microbatch_size", 1, 1);
    const TomlValue* parts = find(p + "module_fqns_per_model_part");
    if (parts == nullptr) {
      const int64_t first = integer(p + "pipeline_parallel_first_stage_less_layers", 1),
                    last = integer(p + "pipeline_parallel_last_stage_less_layers", 1);
      if (first != 0 || last != 0)
        out_.unread(
            fmt::format("{}pipeline_parallel_first_stage_less_layers, _last_: {} and {} layers less on the ends; layers are dealt "
                        "out as evenly as can be",
                        p, first, last));
      find(p + "pipeline_parallel_layers_per_stage");
      return;
    }
    const auto* list = std::get_if<TomlValue::List>(&parts->value);
    std::vector<int64_t> layers;
    for (const TomlValue& part : list != nullptr ? *list : TomlValue::List{}) {
      const auto* modules = std::get_if<TomlValue::List>(&part.value);
      layers.push_back(0);
      for (const TomlValue& module : modules != nullptr ? *modules : TomlValue::List{})
        if (const auto* word = std::get_if<std::string>(&module.value); word != nullptr && word->starts_with("layers."))
          ++layers.back();
    }
    if (layers.empty() || layers.size() % static_cast<size_t>(pp) != 0)
      return out_.problem(p + "module_fqns_per_model_part", fmt::format("{} parts on {} stages", layers.size(), pp));
    const int64_t vpp = static_cast<int64_t>(layers.size()) / pp;
    if (schedule != torch_schedules().end() &&
        (schedule->schedule == Schedule::kInterleaved || schedule->schedule == Schedule::kBreadthFirst))
      out_.set("layout.vpp", vpp);
    // As even as can be, the first ones with what is left over: what a case has where nothing is said.
    int64_t total = 0;
    for (const int64_t n : layers) total += n;
    std::vector<int64_t> even;
    for (size_t i = 0; i < layers.size(); ++i)
      even.push_back(total / static_cast<int64_t>(layers.size()) +
                     (static_cast<int64_t>(i) < total % static_cast<int64_t>(layers.size()) ? 1 : 0));
    if (layers != even) out_.set("layout.stage_layers", fmt::format("{}", fmt::join(layers, ",")));
  }

  void read_training() {
    const std::string t = "training.";
    out_.set("train.seq_len", integer(t + "seq_len", 2048, 1));
    const int64_t local = integer(t + "local_batch_size", 8, 1), pp = out_.count("layout.pp", 1);
    const std::string global = text(t + "global_batch_size", "-1");
    out_.set("train.micro_batch", pp > 1 ? micro_batch_ : local);
    const int64_t sequences =
        global == "-1" ? (dp_ > 0 && local < kMost / dp_ ? local * dp_ : 0) : whole(out_, t + "global_batch_size", global, 1);
    set_batch(out_, t + "global_batch_size", sequences, dp_, 0);
    const std::string clip = text(t + "max_norm", "1.0");
    out_.set("train.clip_norm", clip == "inf" ? "0" : clip);
    if (text(t + "enable_cpu_offload", "false") == "true") out_.set("layout.offload", "{optimizer: cpu, parameters: cpu}");
    if (text(t + "dtype", "float32") != "float32")
      out_.problem(t + "dtype", "weights and moments in bf16 alone are not imported: float32");
    out_.set("train.precision", has_fp8_ ? "fp8" : text(t + "mixed_precision_param", "bfloat16") == "bfloat16" ? "bf16" : "fp32");
    find(t + "mixed_precision_reduce");
    const std::string optimizer = text("optimizer.name", "AdamW");
    if (optimizer != "AdamW") out_.problem("optimizer.name", fmt::format("`{}` has no counterpart: AdamW", optimizer));
    out_.set("train.learning_rate.peak", text("optimizer.lr", "8e-4"));
    out_.set("train.beta1", text("optimizer.beta1", "0.9"));
    out_.set("train.beta2", text("optimizer.beta2", "0.95"));
    out_.set("train.epsilon", text("optimizer.eps", "1e-8"));
    out_.set("train.weight_decay", text("optimizer.weight_decay", "0.1"));
    copy("debug.seed", "train.seed");
    read_rate();
  }

  void read_rate() {
    const int64_t steps = integer("training.steps", 10000), total = integer("lr_scheduler.total_steps", steps);
    out_.set("train.learning_rate.warmup_steps", integer("lr_scheduler.warmup_steps", 200));
    const std::string type = text("lr_scheduler.decay_type", "linear"), ratio = text("lr_scheduler.decay_ratio", ""),
                      floor = text("lr_scheduler.min_lr_factor", "0.0");
    const auto share = parse_number(ratio), low = parse_number(floor),
               peak = parse_number(out_.get("train.learning_rate.peak").value_or("0"));
    if (!ratio.empty() && share == 0.0) return;  // constant behind the warm-up
    if (type == "sqrt") return out_.problem("lr_scheduler.decay_type", "sqrt has no counterpart: linear or cosine");
    out_.set("train.learning_rate.total_steps", total);
    if (ratio.empty()) {
      out_.set("train.learning_rate.kind", type);
    } else if (share && *share > 0 && *share <= 1 && type == "linear") {
      out_.set("train.learning_rate.kind", "wsd");
      out_.set("train.learning_rate.decay_steps", static_cast<int64_t>(std::llround(static_cast<double>(total) * *share)));
    } else {
      return out_.problem("lr_scheduler.decay_ratio", "a share of the steps with a linear decay is expected");
    }
    if (low && peak && *low > 0)
      out_.set("train.learning_rate.floor", to_text(static_cast<float>(static_cast<float>(*low) * static_cast<float>(*peak))));
  }

  std::map<std::string, TomlValue, std::less<>> entries_;
  std::set<std::string, std::less<>> read_;
  int64_t devices_ = 0, dp_ = 0, micro_batch_ = 1;
  bool has_fp8_ = false, is_mixture_ = false;
  Settings out_;
};

}  // namespace

Result<Imported> import_torchtitan(std::string_view text, const std::string& name, int64_t devices) {
  auto entries = parse_toml(text, name);
  if (!entries.ok()) return entries.error();
  return Titan(std::move(*entries), devices).read(name);
}

}  // namespace shardlab::interop
