#include "runtime/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "plan/base/files.h"
#include "plan/base/hash.h"
#include "plan/base/limits.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "plan/optimizers.h"
#include "plan/run_state.h"

namespace shardlab::runtime {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");

constexpr std::string_view kManifestSuffix = ".manifest";

std::string step_name(int64_t steps) { return fmt::format("step-{:08}", steps); }

/// What two runs must have in common for the second to see the data that the first would have seen, and to read its state.
std::map<std::string, std::string> recipe_of(const Case& c) {
  std::map<std::string, std::string> recipe{
      {"seed", fmt::format("{}", c.train.seed)},
      {"seq_len", fmt::format("{}", c.train.seq_len)},
      {"sequences_per_step", fmt::format("{}", c.sequences_per_step())},
      {"optimizer", std::string(name_of(c.train.optimizer))},
      {"precision", c.train.precision == Precision::kFp8 ? fmt::format("fp8-{}", name_of(c.train.fp8_scaling))
                                                         : std::string(name_of(c.train.precision))}};
  const Layout& l = c.layout;
  const Compression& k = l.compression;
  // Blocks are cut from what a rank updates, and codes are of their blocks.
  if (has_blocks(row_of(c.train.optimizer)))
    recipe["blocks"] = fmt::format("dp{}:tp{}:pp{}:{}:vpp{}:cp{}:ep{}:zero{}:hybrid{}:bucket{}:fsdp{}:offload{}:servers{}", l.dp,
                                   l.tp, l.pp, name_of(l.schedule), l.vpp, l.cp, l.ep, l.zero, l.hybrid_shard, l.bucket_bytes,
                                   l.fsdp.unit, name_of(l.offload.optimizer), l.parameter_server.servers) +
                       (l.folds_experts() ? fmt::format(":expert_tp{}", l.expert_tp) : "");
  if (k.kind == CompressionKind::kNone) return recipe;
  // What a rank owes is of its own micro-batches, and lies as its buckets do.
  recipe["owed"] = fmt::format("{}:rank{}:k{}:bits{}:dp{}:tp{}:pp{}:zero{}:hybrid{}:bucket{}:micro{}", name_of(k.kind), k.rank, k.k,
                               k.bits, l.dp, l.tp, l.pp, l.zero, l.hybrid_shard, l.bucket_bytes, c.train.grad_accumulation);
  return recipe;
}

// ---- files

/// An open file, closed at the end of its life.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

/// A file of a checkpoint, under a temporary name until it is placed. No reader looks under that name.
class CheckpointFile : public PendingFile {
 public:
  CheckpointFile(const std::string& folder, const std::string& name)
      : PendingFile(folder + "/" + name, "checkpoint ",
                    "make room on the disk or make the folder writable; the checkpoints before this one are intact") {}
};

/// Makes the names in a folder as durable as the files.
void sync_folder(const std::string& folder) {
  const File file(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (file.get() < 0 || ::fsync(file.get()) != 0)
    throw WorldError(fmt::format("checkpoint folder {}: {} while syncing it", folder, std::strerror(errno)),
                     "see that the folder is on a disk that can be written");
}

// ---- the manifest's words

std::string shape_text(const Shape& shape) {
  std::string text;
  for (int d = 0; d < shape.rank; ++d) text += fmt::format("{}{}", d == 0 ? "" : "x", shape[d]);
  return text.empty() ? "scalar" : text;
}

/// The manifest of that path, or the newest in that folder.
Result<std::string> find_manifest(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return path;
  std::string newest;
  int64_t most = -1;
  for (auto it = fs::directory_iterator(path, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    const std::string file = it->path().filename().string();
    std::string_view name = file;
    if (!name.starts_with("step-") || !name.ends_with(kManifestSuffix)) continue;
    name = name.substr(5, name.size() - 5 - kManifestSuffix.size());
    const auto steps = manifest_number(name);
    if (!steps || *steps <= most) continue;
    most = *steps;
    newest = it->path().string();
  }
  if (error) return unreadable_checkpoint(path, error.message());
  if (newest.empty())
    return unreadable_checkpoint(path, "no manifest in this folder", "name the folder that checkpoint.folder said, or a manifest");
  return newest;
}

/// Tensors as they come, then the manifest that makes them a checkpoint.
class Writer {
 public:
  Writer(const std::string& folder, int64_t steps)
      : folder_(folder), steps_(steps), tensors_(folder, step_name(steps) + ".tensors") {}

  void add(const StateName& name, const LogicalTensor& tensor) {
    const int64_t bytes = static_cast<int64_t>(tensor.values.size() * sizeof(float));
    tensors_.write({reinterpret_cast<const char*>(tensor.values.data()), static_cast<size_t>(bytes)});
    const std::string entry = fmt::format("tensor {} {} {} {} {} {:016x}\n", name.parameter, name.part, shape_text(tensor.shape),
                                          offset_, bytes, checksum_of(tensor));
    content_ = hash_text(entry, content_);
    entries_ += entry;
    offset_ += bytes;
  }

  void place(const std::map<std::string, std::string>& recipe) {
    const std::string data = fmt::format("{}-{:016x}.tensors", step_name(steps_), content_);
    tensors_.sync();
    tensors_.place(folder_ + "/" + data);
    std::string text = fmt::format("{}\nsteps {}\n", kManifestFirstLine, steps_);
    for (const auto& [key, value] : recipe) text += fmt::format("{} {}\n", key, value);
    text += fmt::format("data {}\n{}", data, entries_);
    text += manifest_end(text);
    CheckpointFile manifest(folder_, step_name(steps_) + std::string(kManifestSuffix));
    manifest.write(text);
    manifest.sync();
    sync_folder(folder_);  // the tensors' name before the manifest's
    manifest.place();
    sync_folder(folder_);
  }

 private:
  const std::string& folder_;
  int64_t steps_ = 0, offset_ = 0;
  CheckpointFile tensors_;
  std::string entries_;
  uint64_t content_ = hash_text({});
};

/// The recipe's word of a checkpoint that holds weights alone, and its value.
constexpr const char* kHolds = "holds";
constexpr const char* kWeights = "weights";

}  // namespace

Result<void> prepare_checkpoints(const Session& session, const std::string& folder) {
  const auto names = session.states();
  if (!names.ok()) return names.error();
  if (!session.leads()) return {};
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    throw WorldError(fmt::format("checkpoint folder {}: {}", folder, error.message()), "name a folder that can be written");
  remove_pending_files(folder);
  return {};
}

Result<std::string> save_checkpoint(const Session& session, const Case& config, int64_t steps, const std::string& folder) {
  const auto names = session.states();
  if (!names.ok()) return names.error();
  const std::string path = fmt::format("{}/{}{}", folder, step_name(steps), kManifestSuffix);
  if (!session.leads()) {  // has its part in the reading, and none in the writing
    for (const StateName& name : *names)
      if (const auto tensor = session.state(name); !tensor.ok()) return tensor.error();
    return path;
  }
  Writer writer(folder, steps);
  for (const StateName& name : *names) {
    const auto tensor = session.state(name);
    if (!tensor.ok()) return tensor.error();
    writer.add(name, *tensor);
  }
  writer.place(recipe_of(config));
  return path;
}

Result<std::string> save_weights(const std::string& folder, std::span<const ModelParameter> parameters,
                                 const std::function<Result<LogicalTensor>(const ModelParameter&)>& read) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    throw WorldError(fmt::format("checkpoint folder {}: {}", folder, error.message()), "name a folder that can be written");
  remove_pending_files(folder);
  Writer writer(folder, 0);
  for (const ModelParameter& parameter : parameters) {
    const auto tensor = read(parameter);
    if (!tensor.ok()) return tensor.error();
    const bool of_run = names_run_state(parameter.name);
    writer.add(of_run ? StateName{std::string(kRunState), parameter.name} : StateName{parameter.name, "value"}, *tensor);
  }
  writer.place({{kHolds, kWeights}});
  return fmt::format("{}/{}{}", folder, step_name(0), kManifestSuffix);
}

Result<Checkpoint> Checkpoint::open(const std::string& path) {
  auto found = find_manifest(path);
  if (!found.ok()) return found.error();
  const auto text = read_file_within(*found, limits::kManifestBytes);
  if (!text.ok()) return unreadable_checkpoint(*found, text.error().message, text.error().hint);
  auto manifest = parse_manifest(*text, *found);
  if (!manifest.ok()) return manifest.error();
  Checkpoint checkpoint;
  checkpoint.path_ = std::move(*found);
  checkpoint.manifest_ = std::move(*manifest);
  return checkpoint;
}

bool Checkpoint::holds_weights_alone() const {
  const auto holds = manifest_.recipe.find(kHolds);
  return holds != manifest_.recipe.end() && holds->second == kWeights;
}

std::vector<std::string> Checkpoint::parameters() const {
  std::set<std::string> names;
  for (const auto& [name, entry] : manifest_.entries) {
    if (name.parameter == kRunState && name.part.starts_with("router_bias.")) names.insert(name.part);
    if (name.part == "value" || name.part == "master") names.insert(name.parameter);
  }
  return {names.begin(), names.end()};
}

Result<LogicalTensor> Checkpoint::weights(std::string_view parameter) const {
  if (names_run_state(parameter)) return read({std::string(kRunState), std::string(parameter)});
  const StateName master{std::string(parameter), "master"};
  return read(manifest_.entries.contains(master) ? master : StateName{std::string(parameter), "value"});
}

Result<LogicalTensor> Checkpoint::average(std::string_view parameter) const {
  if (names_run_state(parameter)) return weights(parameter);  // nothing averages that
  const StateName filled{std::string(kRunState), std::string(kAveragedSteps)};
  if (!manifest_.entries.contains(filled))
    return unreadable_checkpoint(path_, "its run kept no averages of the weights",
                                 "train with ema_decay: 0.999, or take the weights themselves");
  auto average = read({std::string(parameter), "ema"});
  const auto share = read(filled);
  if (!average.ok() || !share.ok()) return average.ok() ? share.error() : average.error();
  if (!(share->values.front() > 0))
    return unreadable_checkpoint(path_, "no step has entered the averages of the weights", "take a checkpoint of a later step");
  for (float& x : average->values) x /= share->values.front();
  return average;
}

Result<LogicalTensor> Checkpoint::read(const StateName& name) const {
  const auto entry = manifest_.entries.find(name);
  if (entry == manifest_.entries.end())
    return unreadable_checkpoint(path_, fmt::format("it has no `{}`", name.parameter), "name the model that was saved");
  const std::string tensors = (fs::path(path_).parent_path() / manifest_.data).string();
  const File file(::open(tensors.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return unreadable_checkpoint(tensors, std::strerror(errno));
  return read_tensor(file.get(), tensors, entry->first, entry->second);
}

/// What weights have beside parameters: biases of routers. A case that has biases begins with 0 where weights have none.
Result<void> Checkpoint::restore_biases(std::span<const StateName> names, Session& session) const {
  if (names.empty()) return {};
  const auto known = session.states();
  if (!known.ok()) return known.error();
  for (const StateName& name : names) {
    if (std::ranges::find(*known, name) == known->end())
      return unreadable_checkpoint(path_, fmt::format("it has biases of routers (`{}`), and this case has none", name.part),
                                   "set model.bias_update_rate, as 0.001: what was chosen by biases is not chosen without");
    const auto tensor = weights(name.part);
    if (!tensor.ok()) return tensor.error();
    SHARDLAB_TRY(session.set_state(name, *tensor));
  }
  return {};
}

Result<void> Checkpoint::restore(const Case& config, Session& session) const {
  if (holds_weights_alone()) {
    const std::vector<ModelParameter> parameters = parameters_of(config.model);
    std::vector<StateName> of_run;
    for (const auto& [name, entry] : manifest_.entries)
      if (name.parameter == kRunState) of_run.push_back(name);
    if (const size_t saved = manifest_.entries.size() - of_run.size(); parameters.size() != saved)
      return unreadable_checkpoint(path_, fmt::format("it has {} parameters, and the model has {}", saved, parameters.size()),
                                   "begin with the model that the weights are of");
    SHARDLAB_TRY(restore_biases(of_run, session));
    for (const ModelParameter& parameter : parameters) {
      const auto tensor = weights(parameter.name);
      if (!tensor.ok()) return tensor.error();
      SHARDLAB_TRY(session.set_parameter(parameter.name, *tensor));
    }
    return {};
  }
  for (const auto& [key, value] : recipe_of(config)) {
    const auto saved = manifest_.recipe.find(key);
    if (saved == manifest_.recipe.end() || saved->second != value)
      return unreadable_checkpoint(
          path_,
          fmt::format("saved with {}={}, and this case has {}", key, saved == manifest_.recipe.end() ? "?" : saved->second, value),
          key == "blocks"
              ? std::string("moments in 8 bits are coded in blocks of what a rank updates: resume under the layout that was "
                            "saved, or begin a run from the weights alone")
          : key == "owed"
              ? std::string("compression keeps errors, which belong to the ranks and buckets of one layout: resume with "
                            "the compression, dp, tp, pp, zero and bucket_bytes that were saved")
              : fmt::format("set {} to what the checkpoint has, or start a run of its own", key));
  }
  const auto names = session.states();
  if (!names.ok()) return names.error();
  const auto as_saved = [](const StateName& name) {
    return name.part == "ema" || name.part == kAveragedSteps
               ? "resume with train.ema_decay on or off as it was saved; averages do not begin within a run"
               : "resume with the model and optimizer that were saved";
  };
  for (const StateName& name : *names)
    if (!manifest_.entries.contains(name))
      return unreadable_checkpoint(path_, fmt::format("it has no `{}` of `{}`, which this case keeps", name.part, name.parameter),
                                   as_saved(name));
  if (names->size() != manifest_.entries.size())
    for (const auto& [name, entry] : manifest_.entries)
      if (std::ranges::find(*names, name) == names->end())
        return unreadable_checkpoint(
            path_, fmt::format("it has `{}` of `{}`, for which this case has no place", name.part, name.parameter), as_saved(name));
  const std::string tensors = (fs::path(path_).parent_path() / manifest_.data).string();
  const File file(::open(tensors.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return unreadable_checkpoint(tensors, std::strerror(errno));
  for (const auto& [name, entry] : manifest_.entries) {
    const auto tensor = read_tensor(file.get(), tensors, name, entry);
    if (!tensor.ok()) return tensor.error();
    SHARDLAB_TRY(session.set_state(name, *tensor));
  }
  return {};
}

}  // namespace shardlab::runtime
