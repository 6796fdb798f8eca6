// weights export and weights import: parameters between shardlab's checkpoints and safetensors under Hugging Face names.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <ranges>
#include <set>

#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/verbs.h"
#include "interop/frameworks.h"
#include "interop/hugging_face.h"
#include "interop/safetensors.h"
#include "plan/base/files.h"
#include "plan/base/json_depth.h"
#include "plan/base/limits.h"
#include "plan/base/pending_file.h"
#include "plan/base/values.h"
#include "plan/base/world_error.h"
#include "plan/run_state.h"
#include "runtime/checkpoint.h"
#include "sweeps/models.h"

namespace shardlab::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kShown = 10;  ///< tensors that a refusal names

struct WeightsFlags {
  std::string from, model, out, dtype = "fp32", shard_bytes = "5Gi";
  bool average = false;
};

// ---- out --------------------------------------------------------------------------------------------------------------------

std::optional<interop::WeightType> weight_type(const std::string& name) {
  if (name == "fp32") return interop::WeightType::kF32;
  if (name == "bf16") return interop::WeightType::kBf16;
  if (name == "fp16") return interop::WeightType::kF16;
  return std::nullopt;
}

/// Tensors of one file, in order.
struct ShardFile {
  std::string name;
  std::vector<const interop::ForeignTensor*> tensors;
  std::vector<std::pair<std::string, interop::StoredTensor>> entries;
  int64_t bytes = 0;
};

int64_t elements_of(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t extent : shape) elements *= extent;
  return elements;
}

/// As many files as it takes to keep each within `most` bytes, but for a tensor that is larger by itself.
std::vector<ShardFile> shards_of(const std::vector<interop::ForeignTensor>& tensors, interop::WeightType type, int64_t most) {
  std::vector<ShardFile> shards(1);
  for (const interop::ForeignTensor& tensor : tensors) {
    // Biases of routers are state: a step of theirs is less than 16 bits tell apart.
    const interop::WeightType own = names_run_state(tensor.parts[0].parameter) ? interop::WeightType::kF32 : type;
    const int64_t bytes = elements_of(tensor.shape) * width_of(own);
    if (!shards.back().tensors.empty() && shards.back().bytes + bytes > most) shards.emplace_back();
    ShardFile& shard = shards.back();
    shard.entries.emplace_back(tensor.name, interop::StoredTensor{own, tensor.shape, shard.bytes, shard.bytes + bytes});
    shard.tensors.push_back(&tensor);
    shard.bytes += bytes;
  }
  for (size_t i = 0; i < shards.size(); ++i)
    shards[i].name =
        shards.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  return shards;
}

/// The values of one of our parameters; the one read last is kept, since q, k and v come from one.
class Parameters {
 public:
  Parameters(const Checkpoint& checkpoint, const Model& model, bool average) : checkpoint_(checkpoint), average_(average) {
    for (ModelParameter& p : interop::carried_by_files(model)) shapes_[p.name] = std::move(p.shape);
  }
  Result<const std::vector<float>*> values(const std::string& name) {
    if (name != last_) {
      auto tensor = values_of(name);
      if (!tensor.ok()) return tensor.error();
      if (tensor->shape.elements() != elements_of(shapes_.at(name)))
        return Error{ExitCode::kUsage,
                     fmt::format("`{}` has {} elements in the checkpoint, and {} in the model", name, tensor->shape.elements(),
                                 elements_of(shapes_.at(name))),
                     "name the model that was saved",
                     {}};
      values_ = std::move(tensor->values);
      last_ = name;
    }
    return &values_;
  }
  int64_t columns(const std::string& name) const { return shapes_.at(name).size() >= 2 ? shapes_.at(name).back() : 1; }

 private:
  /// Biases of routers that were not trained are 0.
  Result<LogicalTensor> values_of(const std::string& name) const {
    if (names_run_state(name) && !std::ranges::binary_search(known_, name)) {
      LogicalTensor none;
      none.shape = {shapes_.at(name)[0]};
      none.values.resize(static_cast<size_t>(none.shape.elements()));
      return none;
    }
    return average_ ? checkpoint_.average(name) : checkpoint_.weights(name);
  }

  const Checkpoint& checkpoint_;
  std::vector<std::string> known_ = checkpoint_.parameters();
  bool average_;
  std::map<std::string, std::vector<int64_t>> shapes_;
  std::string last_;
  std::vector<float> values_;
};

Result<Model> model_of(const std::string& name) {
  if (name.empty())
    return refusal("no model is named",
                   "add --model NAME (`shardlab model list`) or --model CONFIG.JSON: the one that the weights are of");
  auto model = sweeps::load_model(name);
  if (model.ok())
    if (const auto type = interop::hugging_face_type(*model); !type.ok()) return type.error();
  return model;
}

bool is_beyond_fp16(float value) { return std::isfinite(value) && std::abs(value) >= 65520; }

/// Nothing that was trained stays behind.
Result<void> check_all_carried(const Checkpoint& checkpoint, const Model& model) {
  std::set<std::string> carried;
  for (const ModelParameter& p : interop::carried_by_files(model)) carried.insert(p.name);
  std::vector<std::string> left = checkpoint.parameters();
  std::erase_if(left, [&](const std::string& name) { return carried.contains(name); });
  if (left.empty()) return {};
  return refusal(fmt::format("{} has {} tensors that {} has no place for: {}{}", checkpoint.manifest(), left.size(), model.name,
                             fmt::join(left | std::views::take(kShown), ", "), left.size() > kShown ? ", ..." : ""),
                 "name the model that was trained (--model)");
}

Result<ExitCode> export_weights(const WeightsFlags& flags) {
  const auto model = model_of(flags.model);
  if (!model.ok()) return model.error();
  const auto type = weight_type(flags.dtype);
  if (!type) return refusal(fmt::format("--dtype {} is not a type of weights", flags.dtype), "one of: fp32 bf16 fp16");
  const auto most = parse_count(flags.shard_bytes);
  if (!most || *most < 1) return refusal(fmt::format("--shard-bytes {} is not a size", flags.shard_bytes), "as 5Gi");
  const auto checkpoint = Checkpoint::open(flags.from);
  if (!checkpoint.ok()) return checkpoint.error();
  SHARDLAB_TRY(check_all_carried(*checkpoint, *model));
  const std::string folder = flags.out.empty() ? "weights" : flags.out;
  fs::create_directories(folder);
  const std::vector<interop::ForeignTensor> tensors = interop::foreign_tensors(*model);
  const std::vector<ShardFile> shards = shards_of(tensors, *type, *most);
  Parameters parameters(*checkpoint, *model, flags.average);
  nlohmann::ordered_json index;
  int64_t total = 0;
  for (const ShardFile& shard : shards) {
    PendingFile file(folder + "/" + shard.name, "weights ");
    file.write(interop::safetensors_header(shard.entries));
    for (size_t i = 0; i < shard.tensors.size(); ++i) {
      const interop::ForeignTensor* tensor = shard.tensors[i];
      std::vector<float> theirs;
      for (size_t part = 0; part < tensor->parts.size(); ++part) {
        const std::string& parameter = tensor->parts[part].parameter;
        const auto values = parameters.values(parameter);
        if (!values.ok()) return values.error();
        const std::vector<float> rows = interop::to_foreign(*tensor, part, **values, parameters.columns(parameter));
        theirs.insert(theirs.end(), rows.begin(), rows.end());
      }
      const interop::WeightType own = shard.entries[i].second.type;
      if (own == interop::WeightType::kF16 && std::ranges::any_of(theirs, is_beyond_fp16))
        return refusal(fmt::format("`{}` has values beyond the range of fp16, which would be infinite", tensor->name),
                       "take --dtype bf16 or fp32");
      file.write(interop::narrowed(theirs, own));
      index["weight_map"][tensor->name] = shard.name;
    }
    file.sync();
    file.place();
    total += shard.bytes;
    fmt::print("{}\n", folder + "/" + shard.name);
  }
  if (shards.size() > 1) {
    nlohmann::ordered_json whole{{"metadata", {{"total_size", total}}}};
    whole.update(index);
    write_file_atomically(folder + "/model.safetensors.index.json", whole.dump(2) + "\n");
    fmt::print("{}\n", folder + "/model.safetensors.index.json");
  }
  std::string config = interop::hugging_face_config(*model);
  if (flags.dtype != "fp32") {
    const std::string was = "\"torch_dtype\": \"float32\"";
    config.replace(config.find(was), was.size(),
                   fmt::format("\"torch_dtype\": \"{}\"", flags.dtype == "bf16" ? "bfloat16" : "float16"));
  }
  write_file_atomically(folder + "/config.json", config);
  fmt::print("{}\n", folder + "/config.json");
  return ExitCode::kDone;
}

// ---- in ---------------------------------------------------------------------------------------------------------------------

/// An open file of safetensors.
class WeightsFile {
 public:
  static Result<std::unique_ptr<WeightsFile>> open(const std::string& path) {
    std::unique_ptr<WeightsFile> file(new WeightsFile(path, ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)));
    struct stat status {};
    if (file->descriptor_ < 0 || ::fstat(file->descriptor_, &status) != 0)
      return refusal(fmt::format("{}: {}", path, std::strerror(errno)), "name a folder or file of safetensors");
    if (!S_ISREG(status.st_mode)) return refusal(fmt::format("{} is not a file", path), "name a folder or file of safetensors");
    std::string head(8, '\0');
    SHARDLAB_TRY(file->read(0, head));
    const auto bytes = interop::safetensors_header_bytes(head, status.st_size, path);
    if (!bytes.ok()) return bytes.error();
    head.resize(static_cast<size_t>(*bytes));
    SHARDLAB_TRY(file->read(0, head));
    auto header = interop::parse_safetensors(head, status.st_size, path);
    if (!header.ok()) return header.error();
    file->header_ = std::move(*header);
    return file;
  }
  WeightsFile(const WeightsFile&) = delete;
  WeightsFile& operator=(const WeightsFile&) = delete;
  ~WeightsFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  const interop::SafetensorsHeader& header() const { return header_; }
  const std::string& path() const { return path_; }
  Result<std::vector<float>> values(const interop::StoredTensor& tensor) const {
    std::string bytes(static_cast<size_t>(tensor.end - tensor.begin), '\0');
    SHARDLAB_TRY(read(header_.data_begin + tensor.begin, bytes));
    return interop::widened(bytes, tensor.type);
  }

 private:
  WeightsFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  Result<void> read(int64_t at, std::string& into) const {
    for (size_t done = 0; done < into.size();) {
      const ssize_t n = ::pread(descriptor_, into.data() + done, into.size() - done, at + static_cast<int64_t>(done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0)
        return refusal(fmt::format("{}: {}", path_, n < 0 ? std::strerror(errno) : "it is cut short"), "fetch the file again");
      done += static_cast<size_t>(n);
    }
    return {};
  }

  std::string path_;
  int descriptor_ = -1;
  interop::SafetensorsHeader header_;
};

/// The files of a model: the one that is named, the only one of the folder, or those of its index.
Result<std::vector<std::string>> weight_files(const std::string& from) {
  if (!fs::is_directory(from)) return std::vector<std::string>{from};
  const fs::path folder(from), index = folder / "model.safetensors.index.json";
  if (!fs::exists(index)) return std::vector<std::string>{(folder / "model.safetensors").string()};
  const auto text = read_file_within(index.string(), limits::kManifestBytes);
  if (!text.ok()) return text.error();
  const auto root = json_depth(*text) > limits::kJsonDepth ? nlohmann::json(nullptr)
                                                           : nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  const auto wrong = refusal(fmt::format("{} is not an index of safetensors", index.string()),
                             "it maps names of tensors to files of its folder, under weight_map");
  if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object()) return wrong;
  std::set<std::string> names;
  for (const auto& [tensor, file] : root["weight_map"].items()) {
    if (!file.is_string()) return wrong;
    const std::string name = file.get<std::string>();
    const auto controls = [](char c) { return static_cast<unsigned char>(c) < 0x20; };
    if (std::ranges::any_of(name, controls)) return wrong;
    if (name.empty() || name.find('/') != std::string::npos || !names.insert(name).second) {
      if (names.contains(name)) continue;
      return wrong;  // a file of another folder
    }
  }
  std::vector<std::string> files;
  for (const std::string& name : names) files.push_back((folder / name).string());
  return files;
}

Result<ExitCode> import_weights(const WeightsFlags& flags) {
  if (!fs::exists(flags.from))
    return refusal(fmt::format("{}: there is no such folder or file", flags.from),
                   "name a folder as transformers saves it, or a .safetensors file with --model");
  const std::string config = flags.model.empty() && fs::is_directory(flags.from) ? flags.from + "/config.json" : flags.model;
  const auto model = model_of(config);
  if (!model.ok()) return model.error();
  for (const std::string& path : {config, flags.from + "/config.json"}) {
    const auto read = sweeps::load_model_config(path);
    if (read.ok() && !read->rotary_pairs)
      return refusal(
          fmt::format("{}: `rope_interleave` is false, and rows that are rotated lie in pairs in every model that is read", path),
          "take a model whose `rope_interleave` is true, as DeepSeek's are");
    if (read.ok() && !read->rotary_scaling.empty())
      return refusal(fmt::format("{}: its rotary frequencies are scaled (`rope_type` is {}), and are not where a case trains", path,
                                 read->rotary_scaling),
                     "attention would be wrong by these weights: take a model whose `rope_scaling` is null");
  }
  const auto names = weight_files(flags.from);
  if (!names.ok()) return names.error();
  std::vector<std::unique_ptr<WeightsFile>> files;
  struct Place {
    const WeightsFile* file = nullptr;
    const interop::StoredTensor* tensor = nullptr;
  };
  std::map<std::string, Place> places;
  std::vector<std::string> unknown;
  std::map<std::string, std::string> of_other_types;  // tensors, and their files
  for (const std::string& name : *names) {
    auto file = WeightsFile::open(name);
    if (!file.ok()) return file.error();
    files.push_back(std::move(*file));
    for (const auto& [tensor, stored] : files.back()->header().tensors)
      if (!places.emplace(tensor, Place{files.back().get(), &stored}).second)
        return refusal(fmt::format("`{}` stands in two files", interop::shown_name(tensor)), "keep one");
    for (const std::string& other : files.back()->header().others) {
      of_other_types.emplace(other, name);
      if (!interop::is_derived_tensor(other, *model)) unknown.push_back(interop::shown_name(other) + " (of another element type)");
    }
  }
  const std::vector<interop::ForeignTensor> tensors = interop::foreign_tensors(*model);
  std::map<std::string, std::vector<std::pair<const interop::ForeignTensor*, size_t>>> by_parameter;  // tensors, and their parts
  std::map<std::string, Place> used;
  for (const interop::ForeignTensor& tensor : tensors) {
    auto found = places.find(tensor.name);
    for (const std::string& other : interop::other_names(tensor))
      if (found == places.end()) found = places.find(other);
    if (const auto other = of_other_types.find(tensor.name); found == places.end() && other != of_other_types.end())
      return refusal(fmt::format("`{}` in {} is of an element type that is not read", tensor.name, other->second),
                     "F32, BF16 and F16 are read: convert the file");
    if (found == places.end())
      return refusal(fmt::format("no file has `{}`", tensor.name),
                     "name the model that the weights are of (--model), or the files that are missing");
    if (found->second.tensor->shape != tensor.shape)
      return refusal(
          fmt::format("`{}` is {} in {}, and {} in the model", interop::shown_name(found->first),
                      fmt::join(found->second.tensor->shape, "x"), found->second.file->path(), fmt::join(tensor.shape, "x")),
          "name the model that the weights are of (--model)");
    used[tensor.name] = found->second;
    places.erase(found);
    for (size_t part = 0; part < tensor.parts.size(); ++part)
      by_parameter[tensor.parts[part].parameter].emplace_back(&tensor, part);
  }
  for (const auto& [name, place] : places)
    if (!interop::is_derived_tensor(name, *model)) unknown.push_back(interop::shown_name(name));
  if (!unknown.empty()) {
    const size_t count = unknown.size();
    unknown.resize(std::min(count, kShown));
    return refusal(
        fmt::format("{} tensors have no place in the model: {}{}", count, fmt::join(unknown, ", "), count > kShown ? ", ..." : ""),
        "name the model that the weights are of (--model); biases that a family does not have cannot be kept");
  }
  const std::string folder = flags.out.empty() ? "checkpoint" : flags.out;
  const auto parameters = interop::carried_by_files(*model);
  const auto saved = save_weights(folder, parameters, [&](const ModelParameter& p) -> Result<LogicalTensor> {
    LogicalTensor tensor;
    for (const int64_t extent : p.shape) tensor.shape.extent[static_cast<size_t>(tensor.shape.rank++)] = extent;
    tensor.values.resize(static_cast<size_t>(tensor.shape.elements()));
    for (const auto& [foreign, part] : by_parameter[p.name]) {
      const Place& place = used[foreign->name];
      const auto values = place.file->values(*place.tensor);
      if (!values.ok()) return values.error();
      interop::from_foreign(*foreign, part, *values, interop::columns_of(p), tensor.values);
    }
    return tensor;
  });
  if (!saved.ok()) return saved.error();
  fmt::print("{}\n", *saved);
  fmt::print(stderr, "a case begins from these weights with checkpoint.resume: {}\n", folder);
  return ExitCode::kDone;
}

}  // namespace

void add_weights(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("weights", "carries weights to and from Hugging Face's safetensors");
  verb->require_subcommand(1);
  auto flags = std::make_shared<WeightsFlags>();
  auto* out = verb->add_subcommand("export", "a checkpoint as safetensors and config.json, which transformers loads");
  out->add_option("checkpoint", flags->from, "a manifest, or the folder of checkpoints whose newest is taken")->required();
  out->add_option("--model", flags->model, "the model that was trained: a preset, or a config.json")->required();
  out->add_option("--out", flags->out, "folder of the files; weights by default");
  out->add_option("--dtype", flags->dtype, "fp32 (exact), bf16 or fp16")->default_val("fp32");
  out->add_flag("--average", flags->average, "the running average of the weights (train.ema_decay) in place of the weights");
  out->add_option("--shard-bytes", flags->shard_bytes, "bytes of a file beyond which there are several, with an index")
      ->default_val("5Gi");
  out->callback([&action, flags] { action = [flags] { return export_weights(*flags); }; });
  auto* in = verb->add_subcommand("import", "safetensors as a checkpoint that a case begins from");
  in->add_option("from", flags->from, "a folder as transformers saves it, or one .safetensors file")->required();
  in->add_option("--model", flags->model, "a preset or config.json; that of the folder by default");
  in->add_option("--out", flags->out, "folder of the checkpoint; checkpoint by default");
  in->callback([&action, flags] { action = [flags] { return import_weights(*flags); }; });
}

}  // namespace shardlab::cli
