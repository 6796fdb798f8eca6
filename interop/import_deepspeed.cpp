// A config.json of DeepSpeed v0.19.5 as settings of a case. Keys were read in the sources that interop/deepspeed.cpp names.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "interop/settings.h"
#include "plan/base/json_depth.h"
#include "plan/base/json_fault.h"
#include "plan/base/limits.h"
#include "plan/base/values.h"

namespace shardlab::interop {

namespace {

using Tree = nlohmann::json;

/// A value as text: numbers as they are written, strings without quotes.
std::string json_text(const Tree& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

class DeepSpeed {
 public:
  DeepSpeed(const Tree& root, int64_t devices) : root_(root), devices_(devices) {}

  Result<Imported> read(const std::string& name) {
    read_precision();
    read_zero();
    const int64_t tp = integer("tensor_parallel.autotp_size", 1);
    out_.set("layout.tp", tp);
    read_experts(tp);
    read_optimizer();
    copy("gradient_clipping", "train.clip_norm");
    if (devices_ % std::max<int64_t>(tp, 1) != 0)
      out_.problem("tensor_parallel.autotp_size", fmt::format("{} does not divide {} devices", tp, devices_));
    read_batch(devices_ / std::max<int64_t>(tp, 1));
    note_unread(root_, "");
    return out_.finish(name, "deepspeed");
  }

 private:
  /// The value at a path with dots, or null; "auto", which transformers fills in, counts as not there.
  const Tree* find(const std::string& path) {
    read_.insert(path);
    const Tree* at = &root_;
    for (size_t begin = 0; begin <= path.size();) {
      const size_t dot = std::min(path.find('.', begin), path.size());
      if (!at->is_object()) return nullptr;
      const auto found = at->find(path.substr(begin, dot - begin));
      if (found == at->end()) return nullptr;
      at = &*found;
      begin = dot + 1;
    }
    if (at->is_null()) return nullptr;
    if (at->is_string() && at->get_ref<const std::string&>() == "auto") {
      out_.unread(fmt::format("{}: auto, which the training script fills in", path));
      return nullptr;
    }
    return at;
  }
  int64_t integer(const std::string& path, int64_t otherwise) {
    const Tree* value = find(path);
    if (value == nullptr) return otherwise;
    if (value->is_number_float() && std::abs(value->get<double>()) < 1e15 &&
        value->get<double>() == std::floor(value->get<double>()))
      return whole(out_, path, fmt::to_string(static_cast<int64_t>(value->get<double>())));  // 5e8
    return whole(out_, path, json_text(*value));
  }
  bool flag(const std::string& path, bool otherwise) {
    const Tree* value = find(path);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) out_.problem(path, fmt::format("`{}` is neither true nor false", json_text(*value)));
    return value->is_boolean() && value->get<bool>();
  }
  void copy(const std::string& path, std::string_view to) {
    if (const Tree* value = find(path)) {
      if (value->is_number())
        out_.set(to, value->dump());
      else
        out_.problem(path, fmt::format("`{}` is not a number", json_text(*value)));
    }
  }

  /// AutoEP: the model, which another file says, has the router. Source: deepspeed/module_inject/auto_ep_config.py, parse_autoep_config.
  void read_experts(int64_t tp) {
    const std::string e = "expert_parallel.";
    if (!flag(e + "enabled", false)) return;
    const int64_t ep = integer(e + "autoep_size", 1), slices = integer(e + "expert_tensor_parallel_size", 1);
    if (ep > 1) out_.set("layout.ep", ep);
    if (slices != tp && ep > 1) out_.set("layout.expert_tp", slices);
    for (const char* router :
         {"route_norm", "route_scale", "score_func", "top_k", "num_expert_groups", "num_limited_groups", "routed_scaling_factor"})
      if (const Tree* value = find(e + router))
        out_.problem(e + router,
                     fmt::format("{} in place of what the model says: say it in the model's config.json", json_text(*value)));
    if (const Tree* score = find(e + "score_apply"); score != nullptr && json_text(*score) == "pre")
      out_.problem(e + "score_apply", "weights multiply the outputs of experts here: \"post\" or \"auto\"");
    for (const char* how : {"preset_model", "use_grouped_mm", "disable_triton_grouped_mm", "combine_impl", "moe_layer_pattern",
                            "expert_pattern", "router_pattern", "load_balance_coeff", "validate_folding_routing"})
      read_.insert(e + how);  // where AutoEP finds the experts, and its kernels
  }

  /// train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp, as DeepSpeed has it
  /// (`_set_batch_related_parameters` of runtime/config.py): what is not said follows from the others. `dp` 0: not known.
  void read_batch(int64_t dp) {
    const std::string all = "train_batch_size", each = "train_micro_batch_size_per_gpu", times = "gradient_accumulation_steps";
    const int64_t sequences = integer(all, 0), said_micro = integer(each, 0), said_times = integer(times, 0);
    const int64_t ranks = std::max<int64_t>(dp, 1);
    int64_t micro_batch = said_micro, accumulation = said_times;
    if (accumulation == 0 && (sequences == 0 || micro_batch == 0)) accumulation = 1;
    if (micro_batch == 0) micro_batch = sequences > 0 && dp > 0 ? sequences / product(ranks, accumulation) : 1;
    if (accumulation == 0 && dp > 0) accumulation = sequences / product(micro_batch, ranks);
    // Without the number of ranks, it is what the others leave.
    const int64_t together = product(product(micro_batch, accumulation), ranks);
    const bool fits = sequences == 0 || (dp > 0 ? together == sequences : together == 0 || sequences % together == 0);
    if (!fits) {
      std::string factors;
      int64_t least = 1;
      const auto add = [&](int64_t n, const std::string& what) {
        factors += fmt::format("{}{}", factors.empty() ? "" : " * ", what);
        least = product(least, n);
      };
      if (said_micro > 0) add(said_micro, fmt::format("{} {}", each, said_micro));
      if (said_times > 0) add(said_times, fmt::format("{} {}", times, said_times));
      if (dp > 0) add(dp, fmt::format("{} data-parallel {}", dp, dp == 1 ? "rank" : "ranks"));
      return out_.problem(all, fmt::format("{} is not {}{} = {}", sequences,
                                           said_micro > 0 && said_times > 0 && dp > 0 ? "" : "a multiple of ", factors, least));
    }
    out_.set("train.micro_batch", micro_batch);
    set_batch(out_, all, sequences, dp, accumulation);
  }

  void read_precision() {
    const bool bf16 = flag("bf16.enabled", false) || flag("bfloat16.enabled", false), fp16 = flag("fp16.enabled", false);
    out_.set("train.precision", bf16 ? "bf16" : fp16 ? "fp16" : "fp32");
    if (fp16) {
      copy("fp16.loss_scale", "train.loss_scale");
      if (const auto scale = out_.get("train.loss_scale"); scale && parse_number(*scale) == 0.0)
        out_.set("train.loss_scale", "dynamic");
      const int64_t power = integer("fp16.initial_scale_power", 16);
      if (power > 24) out_.problem("fp16.initial_scale_power", "a scale begins at 2^24 at most");
      out_.set("train.loss_scale_start", int64_t{1} << std::clamp<int64_t>(power, 0, 24));
      out_.set("train.loss_scale_interval", integer("fp16.loss_scale_window", 1000));
    } else {
      for (const char* unused : {"fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"}) read_.insert(unused);
    }
    for (const auto& [path, to] :
         {std::pair{"communication_data_type", "train.reduce_dtype"}, {"data_types.grad_accum_dtype", "train.accumulate_dtype"}})
      if (const Tree* type = find(path)) {
        const std::string word = json_text(*type);
        if (word != "fp32" && word != "bf16" && word != "fp16")
          out_.problem(path, fmt::format("`{}` is none of fp32, bf16, fp16", word));
        else
          out_.set(to, word);
      }
  }

  void read_zero() {
    const int64_t stage = integer("zero_optimization.stage", 0);
    if (stage > 3) out_.problem("zero_optimization.stage", fmt::format("{} is not a stage: 0, 1, 2 or 3", stage));
    out_.set("layout.zero", stage);
    const std::string z = "zero_optimization.";
    if (stage == 0) return;
    out_.set("layout.overlap", flag(z + "overlap_comm", stage == 3));
    if (const int64_t elements = integer(z + "reduce_bucket_size", 0); elements > 0)
      out_.set(
          "layout.bucket_bytes",
          elements * (out_.get("train.reduce_dtype").value_or("fp32") == "fp32" && out_.get("train.precision") == "fp32" ? 4 : 2));
    std::string offload;
    for (const auto& [section, part] : {std::pair{"offload_optimizer", "optimizer"}, {"offload_param", "parameters"}})
      if (const Tree* device = find(z + section + ".device"); device != nullptr && json_text(*device) != "none") {
        const std::string word = json_text(*device);
        if (word != "cpu" && word != "nvme") {
          out_.problem(z + section + ".device", fmt::format("`{}` is none of none, cpu, nvme", word));
          continue;
        }
        offload += fmt::format("{}{}: {}", offload.empty() ? "" : ", ", part, word);
      }
    if (const Tree* ratio = find(z + "offload_optimizer.ratio");
        ratio != nullptr && json_text(*ratio) != "1.0" && json_text(*ratio) != "1")
      out_.problem(z + "offload_optimizer.ratio", "an optimizer is on the host as a whole, or not at all");
    if (!offload.empty()) out_.set("layout.offload", "{" + offload + "}");
    if (flag(z + "zero_quantized_weights", false)) out_.set("layout.zero_plus_plus.weights", true);
    if (flag(z + "zero_quantized_gradients", false)) out_.set("layout.zero_plus_plus.gradients", true);
    if (const int64_t ranks = integer(z + "zero_hpz_partition_size", 1); ranks > 1)
      out_.set("layout.zero_plus_plus.secondary", ranks);
    if (const Tree* mics = find(z + "mics_shard_size"); mics != nullptr && mics->is_number_integer() && mics->get<int64_t>() > 0)
      out_.set("layout.hybrid_shard", whole(out_, z + "mics_shard_size", mics->dump()));
    for (const char* layout :
         {"contiguous_gradients", "reduce_scatter", "offload_optimizer.pin_memory", "offload_param.pin_memory",
          "offload_optimizer.nvme_path", "offload_param.nvme_path", "allgather_partitions", "allgather_bucket_size"})
      read_.insert(z + layout);  // how DeepSpeed lays its buffers out
    if (stage == 3) out_.unread(z + "stage3_*: how far ahead parameters are gathered is DeepSpeed's own choice");
  }

  void read_optimizer() {
    const Tree* type = find("optimizer.type");
    if (type == nullptr) return;
    std::string word = json_text(*type);
    std::ranges::transform(word, word.begin(), [](unsigned char c) { return std::tolower(c); });
    const std::string p = "optimizer.params.";
    if (word == "onebitadam") {
      out_.set("layout.compression.kind", "one-bit-adam");
      out_.set("layout.compression.warmup", integer(p + "freeze_step", 100000));
    } else if (word != "adam" && word != "adamw" && word != "sgd" && word != "lion") {
      return out_.problem("optimizer.type",
                          fmt::format("`{}` has no counterpart: AdamW, OneBitAdam, SGD or Lion", json_text(*type)));
    }
    if (word == "adam" && !flag(p + "adam_w_mode", true))
      out_.problem(p + "adam_w_mode", "Adam without decoupled weight decay has no counterpart");
    out_.set("train.optimizer", word == "sgd" || word == "lion" ? word : "adamw");
    copy(p + "lr", "train.learning_rate.peak");
    copy(p + "weight_decay", "train.weight_decay");
    if (word != "sgd" && word != "lion") copy(p + "eps", "train.epsilon");
    if (word == "sgd" && find(p + "momentum") != nullptr && json_text(*find(p + "momentum")) != "0")
      out_.problem(p + "momentum", "sgd has no momentum here");
    if (const Tree* betas = find(p + "betas"); betas != nullptr) {
      if (betas->is_array() && betas->size() == 2 && (*betas)[0].is_number() && (*betas)[1].is_number()) {
        out_.set("train.beta1", (*betas)[0].dump());
        out_.set("train.beta2", (*betas)[1].dump());
      } else {
        out_.problem(p + "betas", "two numbers are expected");
      }
    }
    read_scheduler();
  }

  void read_scheduler() {
    const Tree* type = find("scheduler.type");
    if (type == nullptr) return;
    const std::string word = json_text(*type), p = "scheduler.params.";
    if (word != "WarmupLR" && word != "WarmupDecayLR" && word != "WarmupCosineLR")
      return out_.problem("scheduler.type", fmt::format("`{}` has no counterpart", word));
    if (const Tree* kind = find(p + "warmup_type");
        (kind == nullptr || json_text(*kind) != "linear") && integer(p + "warmup_num_steps", 1000) > 1)
      out_.problem(p + "warmup_type", "the rate rises in a line here: set \"linear\"");
    out_.set("train.learning_rate.warmup_steps", integer(p + "warmup_num_steps", 1000));
    if (word != "WarmupCosineLR") copy(p + "warmup_max_lr", "train.learning_rate.peak");
    for (const char* low : {"warmup_min_lr", "warmup_min_ratio"})
      if (const Tree* least = find(p + low); least != nullptr && (!least->is_number() || least->get<double>() != 0))
        out_.problem(p + low, "the rate rises from 0 here");
    if (word == "WarmupLR") return;
    out_.set("train.learning_rate.kind", word == "WarmupCosineLR" ? "cosine" : "linear");
    out_.set("train.learning_rate.total_steps", integer(p + "total_num_steps", 0));
    if (word != "WarmupCosineLR") return;
    const Tree* ratio = find(p + "cos_min_ratio");
    const double share = ratio == nullptr ? 0.0001 : ratio->is_number() ? ratio->get<double>() : -1;
    if (!(share >= 0 && share <= 1)) return out_.problem(p + "cos_min_ratio", "a share of the rate is expected");
    if (const auto peak = parse_number(out_.get("train.learning_rate.peak").value_or("0.001")))
      out_.set("train.learning_rate.floor", to_text(static_cast<float>(*peak * share)));
  }

  /// Names every key that nothing above asked for.
  void note_unread(const Tree& at, const std::string& prefix) {
    for (const auto& [key, value] : at.items()) {
      const std::string path = prefix + key;
      if (value.is_object() && !value.empty())
        note_unread(value, path + ".");
      else if (!read_.contains(path))
        out_.unread(path);
    }
  }

  const Tree& root_;
  int64_t devices_ = 0;
  std::set<std::string> read_;
  Settings out_;
};

}  // namespace

Result<Imported> import_deepspeed(std::string_view text, const std::string& name, int64_t devices) {
  const bool deep = json_depth(text) > limits::kJsonDepth;
  const Tree root =
      deep ? Tree(Tree::value_t::discarded) : Tree::parse(text, nullptr, /*allow_exceptions=*/false, /*ignore_comments=*/true);
  if (root.is_object()) return DeepSpeed(root, devices).read(name);
  const JsonFault fault = deep ? JsonFault{"", fmt::format("nested more than {} levels deep", limits::kJsonDepth)}
                               : json_fault(text, /*ignore_comments=*/true);
  return Error{ExitCode::kUsage, fault.message, "a JSON object, {...}, is expected: a configuration of DeepSpeed (ds_config.json)",
               name + fault.place};
}

}  // namespace shardlab::interop
