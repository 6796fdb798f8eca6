// Checkpoints: saved under one layout, resumed under another, and what becomes of them when something fails.
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "plan/base/hash.h"
#include "plan/base/world_error.h"
#include "plan/text.h"
#include "runtime/block_store.h"
#include "runtime/checkpoint.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSequences = 8;

/// A folder of its own for each test, removed at the end.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (fs::temp_directory_path() / "shardlab-checkpoint-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path_)) names.push_back(entry.path().filename().string());
    std::ranges::sort(names);
    return names;
  }

 private:
  std::string path_;
};

/// Distinct tokens for every sequence; one of them cannot be read when a test says so.
class Tokens final : public BatchSource {
 public:
  explicit Tokens(int64_t broken = -1) : broken_(broken) {}
  void sequence(int64_t number, std::span<int32_t> out) const override {
    if (number == broken_) throw WorldError(fmt::format("sequence {} cannot be read", number));
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<int32_t>(mix(static_cast<uint64_t>(number) * 1000 + i) % 64);
  }

 private:
  int64_t broken_;
};

struct Ranks {
  int dp = 1, tp = 1, pp = 1, zero = 0, hybrid = 0;
  int64_t bucket = 0;
  int secondary = 0;
  Offload offload = {};
};

Case case_of(const Ranks& r, Family family = Family::kGpt, Optimizer optimizer = Optimizer::kAdamW) {
  Case c = tiny_case(family);
  c.canonical = true;
  c.model.tied_embeddings = family == Family::kGpt;
  c.train.optimizer = optimizer;
  c.train.weight_decay = 0.1f;
  c.train.learning_rate.peak = 0.01f;
  c.layout.dp = r.dp;
  c.layout.tp = r.tp;
  c.layout.pp = r.pp;
  c.layout.schedule = r.pp > 1 ? Schedule::k1F1B : Schedule::kNone;
  c.layout.zero = r.zero;
  c.layout.hybrid_shard = r.hybrid;
  c.layout.bucket_bytes = r.bucket;
  c.layout.zero_plus_plus.secondary = r.secondary;
  c.layout.offload = r.offload;
  c.train.grad_accumulation = kSequences / r.dp;
  return c;
}

/// A case in training.
struct Training {
  explicit Training(const Case& c, const BatchSource& source = tokens(), const BlockStores& stores = {}) : config(c) {
    auto plan = lower(config);
    INFO((plan.ok() ? std::string() : to_string(plan.error())));
    REQUIRE(plan.ok());
    placed = place(std::move(*plan));
    const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
    transport = std::make_unique<ThreadTransport>(kernels);
    RunOptions options;
    options.learning_rate = config.train.learning_rate;
    options.timeout_s = 60;
    options.poison = true;
    options.block_stores = stores;
    auto made = Session::create(placed, options, *transport, cpu_backend(kernels, {config.canonical, 1}), &source);
    INFO((made.ok() ? std::string() : to_string(made.error())));
    REQUIRE(made.ok());
    session = std::move(*made);
    session->initialise_parameters();
  }
  static const BatchSource& tokens() {
    static const Tokens source;
    return source;
  }

  double step(int64_t number) { return session->step(number).loss.value(); }
  std::map<StateName, std::vector<float>> state() const {
    std::map<StateName, std::vector<float>> all;
    const auto names = session->states();
    REQUIRE(names.ok());
    for (const StateName& name : *names) {
      const auto tensor = session->state(name);
      INFO((tensor.ok() ? std::string() : to_string(tensor.error())));
      REQUIRE(tensor.ok());
      all[name] = tensor->values;
    }
    return all;
  }
  void save(int64_t steps, const Scratch& folder) const {
    REQUIRE(prepare_checkpoints(*session, folder.path()).ok());
    const auto saved = save_checkpoint(*session, config, steps, folder.path());
    INFO((saved.ok() ? std::string() : to_string(saved.error())));
    REQUIRE(saved.ok());
  }
  int64_t resume(const std::string& from) {
    const auto checkpoint = Checkpoint::open(from);
    INFO((checkpoint.ok() ? std::string() : to_string(checkpoint.error())));
    REQUIRE(checkpoint.ok());
    const auto restored = checkpoint->restore(config, *session);
    INFO((restored.ok() ? std::string() : to_string(restored.error())));
    REQUIRE(restored.ok());
    return checkpoint->steps();
  }

  Case config;
  PlacedPlan placed;
  std::unique_ptr<ThreadTransport> transport;
  std::unique_ptr<Session> session;
};

std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void spill(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

/// What opening a checkpoint and resuming `config` from it is refused with; empty when it works.
std::string refusal(const std::string& path, const Case& config = case_of({})) {
  const auto checkpoint = Checkpoint::open(path);
  if (!checkpoint.ok()) return checkpoint.error().message;
  Training training(config);
  const auto restored = checkpoint->restore(config, *training.session);
  return restored.ok() ? "" : restored.error().message;
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

}  // namespace

TEST_CASE("one run through fifteen layouts, saved and resumed after every step, is one rank's run bit for bit", "[checkpoint]") {
  const Family family = GENERATE(Family::kGpt, Family::kLlama);
  const Optimizer optimizer = GENERATE(Optimizer::kAdamW, Optimizer::kSgd, Optimizer::kLion);
  const std::vector<Ranks> layouts = {
      {},
      {.dp = 2, .zero = 1},
      {.tp = 2},
      {.dp = 4, .zero = 3},
      {.pp = 2},
      {.dp = 2, .tp = 2, .pp = 2, .zero = 1, .bucket = 20000},
      {.dp = 4, .zero = 2, .hybrid = 2},
      {.dp = 2, .pp = 2, .zero = 2},
      {.dp = 2, .tp = 2, .zero = 3},
      {.dp = 4, .bucket = 20000},
      {.dp = 4, .zero = 3, .secondary = 2},
      {.dp = 2, .zero = 3, .offload = {.optimizer = OffloadTo::kCpu, .parameters = OffloadTo::kNvme}},
      {.tp = 2, .zero = 3, .offload = {.optimizer = OffloadTo::kNvme, .parameters = OffloadTo::kCpu}},
      {.zero = 3, .offload = {.activations = OffloadTo::kNvme, .optimizer = OffloadTo::kNvme, .parameters = OffloadTo::kNvme}},
      {},
  };
  CAPTURE(name_of(family), name_of(optimizer));
  Training alone(case_of({}, family, optimizer));
  Scratch folder;
  for (size_t i = 0; i < layouts.size(); ++i) {
    CAPTURE(i);
    Training next(case_of(layouts[i], family, optimizer));
    if (i > 0) REQUIRE(next.resume(folder.path()) == static_cast<int64_t>(i));
    REQUIRE(next.step(static_cast<int64_t>(i)) == alone.step(static_cast<int64_t>(i)));
    REQUIRE(next.state() == alone.state());
    next.save(static_cast<int64_t>(i) + 1, folder);
  }
}

TEST_CASE("the sizes that delayed fp8 scales are for are saved with the run, and other ranks take them up", "[checkpoint]") {
  const auto fp8_case = [](const Ranks& ranks) {
    Case c = case_of(ranks);
    c.train.precision = Precision::kFp8;
    c.train.fp8_scaling = Fp8Scaling::kDelayed;
    return c;
  };
  const std::vector<Ranks> layouts = {{}, {.dp = 2, .zero = 1}, {.pp = 2}, {.dp = 4, .zero = 3}, {.dp = 2, .pp = 2, .zero = 2}};
  Training alone(fp8_case({}));
  Scratch folder;
  for (size_t i = 0; i < layouts.size(); ++i) {
    CAPTURE(i);
    Training next(fp8_case(layouts[i]));
    if (i > 0) REQUIRE(next.resume(folder.path()) == static_cast<int64_t>(i));
    REQUIRE(next.step(static_cast<int64_t>(i)) == alone.step(static_cast<int64_t>(i)));
    REQUIRE(next.state() == alone.state());
    next.save(static_cast<int64_t>(i) + 1, folder);
  }
  Case other = fp8_case({});
  other.train.fp8_scaling = Fp8Scaling::kCurrent;
  CHECK(contains(refusal(folder.path(), other), "precision"));
}

TEST_CASE("biases of routers are saved with the run, and other ranks take them up", "[checkpoint]") {
  const auto expert_case = [](const Ranks& ranks, int ep) {
    Case c = case_of(ranks, Family::kLlama);
    c.model.experts = {.count = 4, .top_k = 2, .ffn = 8, .bias_update_rate = 0.05f};
    c.layout.ep = ep;
    return c;
  };
  const std::vector<std::pair<Ranks, int>> layouts = {
      {{}, 1}, {{.dp = 2, .zero = 2}, 2}, {{.pp = 2}, 1}, {{.dp = 4}, 2}, {{.tp = 2}, 1}};
  Training alone(expert_case({}, 1));
  Scratch folder;
  for (size_t i = 0; i < layouts.size(); ++i) {
    CAPTURE(i);
    Training next(expert_case(layouts[i].first, layouts[i].second));
    if (i > 0) REQUIRE(next.resume(folder.path()) == static_cast<int64_t>(i));
    REQUIRE(next.step(static_cast<int64_t>(i)) == alone.step(static_cast<int64_t>(i)));
    const auto state = next.state();
    REQUIRE(state == alone.state());
    for (int layer = 0; layer < 2; ++layer) {
      const auto bias = state.find({std::string(kRunState), "router_bias.layers." + std::to_string(layer)});
      REQUIRE(bias != state.end());
      // After an odd number of steps up or down it is not where it began.
      if (i % 2 == 0) CHECK(std::ranges::any_of(bias->second, [](float b) { return b != 0; }));
    }
    next.save(static_cast<int64_t>(i) + 1, folder);
  }
}

TEST_CASE("experts are saved by number, and a run goes on under any placement of them, slices and whole experts", "[checkpoint]") {
  const auto placed_case = [](const Ranks& ranks, int ep, std::string placement, bool whole = false) {
    Case c = case_of(ranks, Family::kLlama);
    c.model.experts = {.count = 4, .top_k = 2, .ffn = 8, .bias_update_rate = 0.05f};
    c.layout.ep = ep;
    if (whole) c.layout.expert_tp = 1, c.layout.sequence_parallel = true;
    c.layout.expert_placement = std::move(placement);
    return c;
  };
  struct Layout {
    Ranks ranks;
    int ep;
    const char* placement;
    bool whole = false;  ///< experts, on ranks of tp
  };
  constexpr Layout kLayouts[] = {{{.dp = 2}, 2, ""},
                                 {{.dp = 2}, 2, "0:2,1,0,3 1:3,2,1,0"},
                                 {{.dp = 4, .zero = 2}, 4, "0:1,2,3,0"},
                                 {{.dp = 4, .zero = 3}, 2, "1:0,2,1,3"},
                                 {{.dp = 8, .zero = 1, .bucket = 20000}, 2, "0:3,1,2,0 1:3,1,0,2"},
                                 {{.tp = 2}, 1, ""},
                                 {{.dp = 2, .tp = 2, .zero = 2}, 4, "0:3,1,2,0", true},
                                 {{.dp = 2, .tp = 2}, 2, "", true},
                                 {{.dp = 2, .tp = 2}, 2, ""}};
  Training alone(placed_case({}, 1, ""));
  Scratch folder;
  for (size_t i = 0; i < std::size(kLayouts); ++i) {
    CAPTURE(i);
    const Layout& l = kLayouts[i];
    Training next(placed_case(l.ranks, l.ep, l.placement, l.whole));
    if (i > 0) REQUIRE(next.resume(folder.path()) == static_cast<int64_t>(i));
    REQUIRE(next.step(static_cast<int64_t>(i)) == alone.step(static_cast<int64_t>(i)));
    REQUIRE(next.state() == alone.state());
    next.save(static_cast<int64_t>(i) + 1, folder);
  }
}

TEST_CASE("what ranks owe is saved and resumed with the layout that it belongs to, and with no other", "[checkpoint]") {
  const auto compressed = [](CompressionKind kind, int dp, int zero) {
    Case c = case_of({.dp = dp, .zero = zero, .bucket = zero > 0 ? 20000 : 0}, Family::kLlama);
    c.layout.compression.kind = kind;
    c.layout.compression.k = kind == CompressionKind::kTopK ? 0.1 : Compression{}.k;
    return c;
  };
  for (const auto& [kind, zero] : {std::pair{CompressionKind::kInt8, 0},
                                   {CompressionKind::kInt8, 2},
                                   {CompressionKind::kTopK, 0},
                                   {CompressionKind::kPowerSgd, 0}}) {
    CAPTURE(name_of(kind), zero);
    const Case config = compressed(kind, 2, zero);
    Scratch folder;
    Training alone(config), before(config), after(config);
    for (int64_t step = 0; step < 2; ++step) REQUIRE(before.step(step) == alone.step(step));
    before.save(2, folder);
    const auto owed = before.state();
    REQUIRE(std::ranges::any_of(owed, [](const auto& s) {
      return s.first.parameter == kRankState && std::ranges::any_of(s.second, [](float x) { return x != 0; });
    }));
    REQUIRE(after.resume(folder.path()) == 2);
    REQUIRE(after.state() == owed);
    for (int64_t step = 2; step < 4; ++step) REQUIRE(after.step(step) == alone.step(step));
    REQUIRE(after.state() == alone.state());

    CHECK(contains(refusal(folder.path(), compressed(kind, 4, zero)), "saved with owed="));
    Case plain = config;
    plain.layout.compression = {};
    CHECK(contains(refusal(folder.path(), plain), "for which this case has no place"));
    Scratch of_plain;
    Training(plain).save(0, of_plain);
    CHECK(contains(refusal(of_plain.path(), config), "saved with owed=?"));
  }
}

TEST_CASE("moments in 8 bits are saved with their scales and resumed under the layout whose blocks they have, and under no other",
          "[checkpoint]") {
  for (const Ranks& ranks : {Ranks{},
                             {.dp = 2, .zero = 1, .bucket = 20000},
                             {.dp = 2, .tp = 2, .zero = 3},
                             {.dp = 2, .zero = 1, .offload = {.optimizer = OffloadTo::kNvme}}}) {
    const Case config = case_of(ranks, Family::kLlama, Optimizer::kAdamW8bit);
    CAPTURE(ranks.dp, ranks.tp, ranks.zero);
    Scratch folder;
    Training alone(config), before(config), after(config);
    for (int64_t step = 0; step < 2; ++step) REQUIRE(before.step(step) == alone.step(step));
    before.save(2, folder);
    const auto saved = before.state();
    for (const char* part : {".m_scale", ".v_scale"})
      REQUIRE(std::ranges::any_of(saved, [&](const auto& s) {
        return s.first.parameter == kRankState && s.first.part.ends_with(part) &&
               std::ranges::any_of(s.second, [](float x) { return x > 0; });
      }));
    REQUIRE(after.resume(folder.path()) == 2);
    REQUIRE(after.state() == saved);
    for (int64_t step = 2; step < 4; ++step) REQUIRE(after.step(step) == alone.step(step));
    REQUIRE(after.state() == alone.state());
    CHECK(contains(refusal(folder.path(), case_of({.dp = 4, .zero = 2}, Family::kLlama, Optimizer::kAdamW8bit)),
                   "saved with blocks="));
    CHECK(contains(refusal(folder.path(), case_of(ranks, Family::kLlama)),
                   "saved with optimizer=adamw8bit, and this case has adamw"));
  }
}

TEST_CASE("a checkpoint holds each part of each parameter once, by its stable name", "[checkpoint]") {
  const auto parts_of = [](Optimizer optimizer) {
    const Training training(case_of({.dp = 2, .tp = 2, .zero = 3}, Family::kGpt, optimizer));
    std::map<std::string, int> counts;
    const auto states = training.session->states();
    for (const StateName& name : *states) ++counts[name.part];
    return counts;
  };
  const int parameters = static_cast<int>(parameters_of(case_of({}).model).size());
  CHECK(parts_of(Optimizer::kAdamW) == std::map<std::string, int>{{"m", parameters}, {"v", parameters}, {"value", parameters}});
  CHECK(parts_of(Optimizer::kSgd) == std::map<std::string, int>{{"value", parameters}});
  CHECK(parts_of(Optimizer::kLion) == std::map<std::string, int>{{"m", parameters}, {"value", parameters}});

  // The bytes of a layout's checkpoint are those of any other: their file has one name.
  Scratch one, many;
  Training(case_of({})).save(0, one);
  Training(case_of({.dp = 4, .zero = 3})).save(0, many);
  CHECK(one.files() == many.files());
  CHECK(one.files().size() == 2);
}

TEST_CASE("a rank that fails in a step is named with its op, and the last checkpoint goes on", "[checkpoint][failure]") {
  Scratch folder;
  Training alone(case_of({}));
  const Tokens breaks_in_step_2(2 * kSequences + 5);
  Training training(case_of({.dp = 2, .zero = 1}), breaks_in_step_2);
  for (int64_t step = 0; step < 2; ++step) {
    alone.step(step);
    training.step(step);
    training.save(step + 1, folder);
  }
  std::string message;
  try {
    training.step(2);
  } catch (const WorldError& e) { message = e.what(); }
  INFO(message);
  CHECK(contains(message, "rank 1"));
  CHECK(contains(message, "op #"));
  CHECK(contains(message, "sequence 21 cannot be read"));

  Training again(case_of({.tp = 2}));
  REQUIRE(again.resume(folder.path()) == 2);
  CHECK(again.step(2) == alone.step(2));
  CHECK(again.state() == alone.state());
}

/// A drive that fills up when a test says so.
class Drive final : public BlockStore {
 public:
  Drive(const std::string& folder, int64_t bytes, const std::atomic<bool>& full)
      : file_(open_file_store(folder, bytes)), full_(full) {}
  void read(int64_t offset, std::span<std::byte> to) override { file_->read(offset, to); }
  void write(int64_t offset, std::span<const std::byte> from) override {
    if (full_) throw WorldError("No space left on device", "make room");
    file_->write(offset, from);
  }
  bool direct() const override { return file_->direct(); }

 private:
  std::unique_ptr<BlockStore> file_;
  const std::atomic<bool>& full_;
};

TEST_CASE("a drive that fills up amid a step ends the run with rank and op, and the last checkpoint goes on",
          "[checkpoint][failure]") {
  const Case config = case_of({.dp = 2, .zero = 3, .offload = {.optimizer = OffloadTo::kNvme, .parameters = OffloadTo::kNvme}});
  Training alone(case_of({}));
  Scratch folder, drive;
  {
    std::atomic<bool> full = false;
    Training doomed(config, Training::tokens(),
                    [&](int, int64_t bytes) { return std::make_unique<Drive>(drive.path(), bytes, full); });
    REQUIRE(doomed.step(0) == alone.step(0));
    doomed.save(1, folder);
    full = true;
    std::string what;
    try {
      doomed.step(1);
    } catch (const WorldError& e) { what = e.what(); }
    INFO(what);
    CHECK(contains(what, "failed at stream nvme.write op #"));
    CHECK(contains(what, "No space left on device"));
  }
  Training next(config);
  REQUIRE(next.resume(folder.path()) == 1);
  CHECK(next.step(1) == alone.step(1));
  CHECK(next.state() == alone.state());
}

TEST_CASE("a save that the disk refuses leaves the checkpoints before it", "[checkpoint][failure]") {
  Scratch folder;
  Training training(case_of({}));
  training.save(0, folder);
  const auto before = folder.files();
  training.step(0);

  // A real refusal of the kernel, in the middle of the file of tensors.
  rlimit limit{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{20000, limit.rlim_max};
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  std::string message;
  try {
    (void)save_checkpoint(*training.session, training.config, 1, folder.path());
  } catch (const WorldError& e) { message = e.what() + ("; " + e.hint()); }
  REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  std::signal(SIGXFSZ, handler);
  INFO(message);
  CHECK(contains(message, folder.path()));
  CHECK(contains(message, "while writing it"));
  CHECK(contains(message, "the checkpoints before this one are intact"));
  CHECK(folder.files() == before);
  CHECK(refusal(folder.path()) == "");
}

TEST_CASE("a folder that cannot be made or written is the world's failure, before any step", "[checkpoint][failure]") {
  Scratch folder;
  spill(folder.path() + "/file", "not a folder");
  const Training training(case_of({}));
  CHECK_THROWS_AS(prepare_checkpoints(*training.session, folder.path() + "/file/below"), WorldError);
}

TEST_CASE("of several checkpoints the newest complete one is taken, or the one that is named", "[checkpoint]") {
  Scratch folder;
  Training training(case_of({}));
  training.save(3, folder);
  training.save(12, folder);
  spill(folder.path() + "/step-00000099.manifest.new-1", "a save that was killed");
  spill(folder.path() + "/step-notes.manifest", "no step");
  CHECK(Checkpoint::open(folder.path()).value().steps() == 12);
  CHECK(Checkpoint::open(folder.path() + "/step-00000003.manifest").value().steps() == 3);

  training.save(12, folder);  // the same state again takes the same names
  CHECK(folder.files().size() == 6);
}

TEST_CASE("a checkpoint that is damaged, incomplete or missing is refused by name, never replaced by an older one",
          "[checkpoint][refusal]") {
  Scratch folder;
  Training(case_of({})).save(1, folder);
  Training(case_of({})).save(2, folder);
  const std::string manifest = folder.path() + "/step-00000002.manifest";
  const std::string text = slurp(manifest);
  const size_t at = text.find("data ") + 5;
  const std::string tensors = folder.path() + "/" + text.substr(at, text.find('\n', at) - at);
  const std::string values = slurp(tensors);
  REQUIRE(refusal(folder.path()) == "");

  spill(manifest, text.substr(0, text.size() / 2));
  CHECK(contains(refusal(folder.path()), "step-00000002.manifest: the manifest is cut short or was changed"));
  std::string changed = text;
  changed[text.find("steps 2") + 6] = '7';
  spill(manifest, changed);
  CHECK(contains(refusal(folder.path()), "its checksum is not that of its text"));
  spill(manifest, "something else");
  CHECK(contains(refusal(folder.path()), "it does not begin with `shardlab checkpoint 1`"));
  spill(manifest, text);

  spill(tensors, values.substr(0, values.size() - 1));
  CHECK(contains(refusal(folder.path()), "the file ends within `"));
  std::string flipped = values;
  flipped[flipped.size() / 2] ^= 1;
  spill(tensors, flipped);
  CHECK(contains(refusal(folder.path()), "is damaged: its checksum is not the manifest's"));
  fs::remove(tensors);
  CHECK(contains(refusal(folder.path()), "No such file"));
  CHECK(contains(refusal(folder.path() + "/absent"), "there is no such file"));
  fs::create_directory(folder.path() + "/empty");
  CHECK(contains(refusal(folder.path() + "/empty"), "no manifest in this folder"));
}

TEST_CASE("a case that would not go on as the saved one is refused with what differs", "[checkpoint][refusal]") {
  Scratch folder;
  Training(case_of({})).save(1, folder);
  const auto with = [&](auto&& change) {
    Case c = case_of({});
    change(c);
    return refusal(folder.path(), c);
  };
  CHECK(contains(with([](Case& c) { c.train.seed = 2; }), "saved with seed=1, and this case has 2"));
  CHECK(contains(with([](Case& c) { c.train.seq_len = 8; }), "saved with seq_len=16, and this case has 8"));
  CHECK(contains(with([](Case& c) { c.train.grad_accumulation = 4; }), "saved with sequences_per_step=8, and this case has 4"));
  CHECK(contains(with([](Case& c) { c.train.optimizer = Optimizer::kSgd; }), "saved with optimizer=adamw, and this case has sgd"));
  CHECK(contains(with([](Case& c) { c.model.layers = 3; }), "which this case keeps"));
  CHECK(contains(with([](Case& c) { c.model.layers = 1; }), "for which this case has no place"));
  CHECK(contains(with([](Case& c) { c.model.ffn = 32; }), "elements in this plan, not"));
  Case averaged = case_of({});
  averaged.train.ema_decay = 0.5f;
  const auto hint_of = [](const Case& saved, const Case& resumed) {
    Scratch other;
    Training(saved).save(1, other);
    const auto restored = Checkpoint::open(other.path()).value().restore(resumed, *Training(resumed).session);
    REQUIRE_FALSE(restored.ok());
    return restored.error().hint;
  };
  CHECK(contains(hint_of(case_of({}), averaged), "resume with train.ema_decay on or off as it was saved"));
  CHECK(contains(hint_of(averaged, case_of({})), "resume with train.ema_decay on or off as it was saved"));
}

TEST_CASE("state that belongs to no parameter is refused before a run that saves", "[checkpoint][refusal]") {
  auto plan = parse_plan(R"(shardlab plan 1
name test
mesh pp=1 dp=1 cp=1 tp=1
micro_batches 1
sequences_per_micro_batch 1
period 1
streams compute
strategies test

segment one
  bound %x moment f32[5]
  fill one () -> (%x) value=1

role 0
  %residual moment f32[5] persistent

  call one (x=%residual)
)");
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  const PlacedPlan placed = place(std::move(*plan));
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  ThreadTransport transport(kernels);
  const auto session = Session::create(placed, {}, transport, cpu_backend(kernels, {true, 1}), nullptr);
  REQUIRE(session.ok());
  const auto prepared = prepare_checkpoints(**session, "unused");
  REQUIRE_FALSE(prepared.ok());
  CHECK(contains(prepared.error().message, "`residual` (moment) lives from step to step but belongs to no parameter"));
}

}  // namespace shardlab::testing::of_checkpoint
