// The sweep file: expansion in its fixed order, derived values, refusals, and errors with their places.
#include "sweeps/sweep.h"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "plan/base/hash.h"
#include "sweeps/resolution.h"
#include "sweeps/search.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

LoadOptions with_local(std::vector<std::string> overrides = {}) {
  LoadOptions options;
  options.overrides = std::move(overrides);
  options.local_machine = []() -> Result<Machine> {
    Machine m;
    m.id = "here";
    m.local = true;
    m.cores = 2;
    m.devices_per_node = 2;
    m.device.id = "core";
    m.device.memory_bytes = int64_t{4} << 30;
    m.device.memory_bytes_per_s = 1e10;
    m.device.peak_flops["fp32"] = 1e11;
    m.calibration = std::make_shared<const Calibration>(Calibration{.id = "c1"});
    return m;
  };
  return options;
}

/// A local machine and a tiny model, then `text`.
std::string small(const std::string& text) { return "model: tiny-gpt\nmachine: local\n" + text; }

Expansion points_of(const std::string& text, const LoadOptions& options = with_local()) {
  const auto sweep = load_sweep_text(text, "s.yaml", options);
  INFO((sweep.ok() ? "" : to_string(sweep.error())));
  REQUIRE(sweep.ok());
  auto expansion = expand(*sweep);
  INFO((expansion.ok() ? "" : to_string(expansion.error())));
  REQUIRE(expansion.ok());
  return *std::move(expansion);
}

std::vector<std::string> names_of(const Expansion& e) {
  std::vector<std::string> names;
  for (const Point& p : e.points) names.push_back(p.name);
  return names;
}

/// All that is wrong, as one text; empty when nothing is.
std::string errors_of(const std::string& text, const LoadOptions& options = with_local()) {
  const auto sweep = load_sweep_text(text, "s.yaml", options);
  if (!sweep.ok()) return to_string(sweep.error());
  const auto expansion = expand(*sweep);
  return expansion.ok() ? "" : to_string(expansion.error());
}

bool says(const std::string& text, const std::string& part) {
  UNSCOPED_INFO(text);
  return text.find(part) != std::string::npos;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("a refused point says where the file, or the command line, asks for what cannot be") {
  const std::string text = small("layout: {dp: 1}\ninclude:\n  - {name: a, dp: 1}\n  - {name: b, tp: 3}\n");
  const Expansion e = points_of(text);
  REQUIRE(e.points.size() == 2);
  REQUIRE(e.points[1].refusal);
  CHECK(e.points[1].refusal->where == "s.yaml:6:19");
  const Expansion typed = points_of(small("layout: {dp: 1}\n"), with_local({"tp=3"}));
  REQUIRE(typed.points[0].refusal);
  CHECK(typed.points[0].refusal->where == "command line");
}

TEST_CASE("two points of one name are refused: results and claims tell them by it") {
  const std::string errors = errors_of(small("include:\n  - {name: a, dp: 1}\n  - {name: a, dp: 2}\n"));
  CHECK(says(errors, "s.yaml:5"));
  CHECK(says(errors, "a second point has the name `a`"));
}

TEST_CASE("axes multiply in order, the last fastest") {
  const Expansion e = points_of(small("axes: {tp: [1, 2], micro_batch: {pow2: [1, 4]}}\n"));
  CHECK(e.combinations == 6);
  CHECK(names_of(e) == Names{"tp=1 micro_batch=1", "tp=1 micro_batch=2", "tp=1 micro_batch=4", "tp=2 micro_batch=1",
                             "tp=2 micro_batch=2", "tp=2 micro_batch=4"});
  CHECK(e.points[4].config.layout.tp == 2);
  CHECK(e.points[4].config.train.micro_batch == 2);
  CHECK(e.points[4].config.name == "tp=2 micro_batch=2");
  CHECK(e.refused() == 0);
  CHECK(names_of(points_of(small("axes: {seed: {range: [3, 8, 2]}}\n"))) == Names{"seed=3", "seed=5", "seed=7"});
  CHECK(names_of(points_of(small("axes: {seed: {range: [1, 3]}}\n"))) == Names{"seed=1", "seed=2", "seed=3"});
  CHECK(names_of(points_of(small("axes: {seed: 4}\n"))) == Names{"seed=4"});
  CHECK(names_of(points_of(small("name: alone\n"))) == Names{"alone"});
}

TEST_CASE("a zip block is one axis") {
  const Expansion e =
      points_of(small("axes: {seed: [1, 2]}\nzip:\n  - {schedule: [none, afab, 1f1b], pp: [1, 2, 2], dp: [1, 1, 1]}\n"));
  CHECK(names_of(e) == Names{"seed=1 schedule=none pp=1 dp=1", "seed=1 schedule=afab pp=2 dp=1", "seed=1 schedule=1f1b pp=2 dp=1",
                             "seed=2 schedule=none pp=1 dp=1", "seed=2 schedule=afab pp=2 dp=1", "seed=2 schedule=1f1b pp=2 dp=1"});
  CHECK(e.points[1].config.layout.schedule == Schedule::kAfab);
}

TEST_CASE("no name that a file gives is lost: two for one point are a problem") {
  const std::string twins = errors_of(small("include:\n  - {name: a, tp: 1}\n  - {name: b, tp: 1}\n"));
  CHECK(twins.find("`a` and `b` are the same case under two names") != std::string::npos);
  // A name that is given replaces one made of values.
  const Expansion e = points_of(small("axes: {tp: [1, 2]}\ninclude:\n  - {name: b, tp: 2}\n  - {tp: 1}\n"));
  CHECK(names_of(e) == Names{"tp=1", "b"});
  CHECK(e.points[1].config.name == "b");
  CHECK(e.duplicates == 2);
}

TEST_CASE("when sets values, and what becomes equal is one point") {
  const Expansion e =
      points_of(small("axes: {pp: [1, 2], schedule: [afab, 1f1b]}\nwhen:\n  - {if: pp == 1, set: {schedule: none}}\n"));
  CHECK(e.combinations == 4);
  CHECK(e.duplicates == 1);
  CHECK(names_of(e) == Names{"pp=1 schedule=afab", "pp=2 schedule=afab", "pp=2 schedule=1f1b"});
  CHECK(e.points[0].config.layout.schedule == Schedule::kNone);
  CHECK(e.refused() == 0);
  // Rules apply one after the other, and see what earlier ones set.
  const Expansion chained = points_of(
      small("axes: {tp: [1, 2]}\nwhen:\n  - {if: tp == 2, set: {seed: 9}}\n  - {if: seed == 9, set: {model: {layers: 2}}}\n"));
  CHECK(chained.points[0].config.model.layers == 4);
  CHECK(chained.points[1].config.model.layers == 2);
  CHECK(points_of(small("when: [{if: model.layers == 4 and machine.devices_per_node == 2, set: {seed: 7}}]\n"))
            .points[0]
            .config.train.seed == 7);
}

TEST_CASE("each point of many is the point of its own words, and its id the hash of its case file without the name") {
  // Values leave keys out, come back, and set what others derive; one line (routes) is not written at all, others open sections.
  const std::string axes =
      "axes: {tp: [1, 2], dp: [auto, 1, 2], schedule: [auto, afab], pp: [1, 2], fsdp.unit: [1, 2], data.packed: [false, true], "
      "model.layers: [4, 2]}\n";
  for (const std::string rules : {"", "when: [{if: tp == 2, set: {seed: 9, dp: 1}}]\n"})
    for (const std::vector<std::string>& words : {std::vector<std::string>{}, {"train.beta1=0.8", "schedule=1f1b"}}) {
      const Expansion e = points_of(small("train: {seq_len: 64}\nlayout: {dp: 2}\n" + axes + rules), with_local(words));
      CHECK(e.combinations == (words.empty() ? 192 : 96));
      for (const Point& point : e.points) {
        INFO(point.name);
        std::string text = to_yaml(point.config);
        const size_t name = text.find("name: ");
        text.erase(name, text.find('\n', name) + 1 - name);
        CHECK(point.id == fmt::format("{:016x}", hash_text(text)));
        // The same words without axes.
        std::string alone = small("train: {seq_len: 64}\nlayout: {dp: 2}\n" + rules);
        std::vector<std::string> said;
        for (size_t at = 0; at < point.name.size();) {
          const size_t end = std::min(point.name.find(' ', at), point.name.size());
          said.push_back(point.name.substr(at, end - at));
          at = end + 1;
        }
        std::string values;
        for (const std::string& word : said)
          values += fmt::format("{}{}: [{}]", values.empty() ? "" : ", ", word.substr(0, word.find('=')),
                                word.substr(word.find('=') + 1));
        const Expansion one = points_of(alone + "axes: {" + values + "}\n", with_local(words));
        REQUIRE(one.points.size() == 1);
        CHECK(one.points[0].id == point.id);
        CHECK(one.points[0].name == point.name);
        CHECK(to_yaml(one.points[0].config) == to_yaml(point.config));
      }
    }
}

TEST_CASE("exclude removes partial matches, include adds points") {
  const Expansion e =
      points_of(small("axes: {tp: [1, 2, 4], seed: [1, 2]}\nexclude:\n  - {tp: 4, seed: 2}\n  - {tp: [1, 2], seed: 1}\ninclude:\n  "
                      "- {name: extra, tp: 4, seed: 2, dp: 1}\n  - {seed: 5}\n"));
  CHECK(e.excluded == 3);
  CHECK(e.included == 2);
  CHECK(names_of(e) == Names{"tp=1 seed=2", "tp=2 seed=2", "tp=4 seed=1", "extra", "seed=5"});
  // A value is compared as what it means, and a default counts.
  CHECK(points_of(small("axes: {bucket_bytes: [1Ki, 2Ki]}\nexclude: [{bucket_bytes: 1024, zero: 0}]\n")).points.size() == 1);
  CHECK(points_of(small("axes: {model: [tiny-gpt, tiny-llama]}\nexclude: [{model: tiny-gpt}]\n")).points.size() == 1);
  // A file that only includes has no point of its own.
  CHECK(names_of(points_of(small("include: [{name: a}, {name: b, seed: 3}]\n"))) == Names{"a", "b"});
}

TEST_CASE("dp, grad_accumulation, the global batch, seq_len and schedule are derived") {
  const std::string hgx = "model: llama-3.1-8b\nmachine: {preset: hgx-h100-ndr, nodes: 2}\n";
  const Case c = points_of(hgx + "train: {global_batch_tokens: 1Mi}\naxes: {tp: 4, pp: 2, micro_batch: 2}\n").points[0].config;
  CHECK(c.layout.dp == 2);
  CHECK(c.train.seq_len == 4096);
  CHECK(c.train.grad_accumulation == 1048576 / (4096 * 2 * 2));
  CHECK(c.layout.schedule == Schedule::k1F1B);
  const Case d = points_of(small("axes: {dp: 3, grad_accumulation: 5, micro_batch: 2, seq_len: 16}\n")).points[0].config;
  CHECK(d.train.global_batch_tokens == 3 * 5 * 2 * 16);
  CHECK(points_of(small("")).points[0].config.train.seq_len == 256);
  CHECK(points_of(small("")).points[0].config.layout.dp == 2);
  // `auto` is the absence of a value.
  CHECK(points_of(small("layout: {dp: 1}\naxes: {dp: [auto]}\n")).points[0].config.layout.dp == 2);
  CHECK(points_of(small("layout: {dp: 1}\n"), with_local({"dp=auto"})).points[0].config.layout.dp == 2);
}

TEST_CASE("bucket_bytes is 25 MiB where buckets of gradients travel and nobody says otherwise") {
  const Expansion e = points_of(
      small("layout: {dp: 2}\ninclude:\n  - {name: plain}\n  - {name: none, bucket_bytes: 0}\n  - {name: said, bucket_bytes: 1Mi}\n"
            "  - {name: auto, zero: 1, bucket_bytes: auto}\n  - {name: units, zero: 3}\n  - {name: apart, diloco.steps: 4, "
            "measure.warmup: 4, measure.steps: 4}\n"
            "  - {name: one, dp: 1}\n"));
  std::vector<int64_t> bytes;
  for (const Point& p : e.points) {
    INFO((p.refusal ? p.refusal->message : ""));
    CHECK_FALSE(p.refusal);
    bytes.push_back(p.config.layout.bucket_bytes);
  }
  CHECK(bytes == std::vector<int64_t>{26214400, 0, 1 << 20, 26214400, 0, 0, 0});
  CHECK(to_yaml(e.points[0].config).find("bucket_bytes: 26214400") != std::string::npos);  // the resolved value is seen
  // Another framework's buckets are its own.
  const Expansion other =
      points_of("model: gpt2\nmachine: hgx-h100-ndr\nresolution: analytic\nprofile: megatron\nlayout: {dp: 8}\n");
  CHECK(other.points.at(0).config.layout.bucket_bytes == 0);
}

TEST_CASE("time_to_loss is a loss above 0, or a map of a loss and the steps whose mean counts") {
  const auto target = [](const std::string& value) {
    const auto sweep = load_sweep_text(small("time_to_loss: " + value + "\n"), "s.yaml", with_local());
    REQUIRE(sweep.ok());
    return sweep->loss_target();
  };
  CHECK(target("2.5") == LossTarget{2.5, 10});
  CHECK(target("{loss: 2.5, mean_of: 4}") == LossTarget{2.5, 4});
  CHECK(load_sweep_text(small(""), "s.yaml", with_local())->loss_target() == LossTarget{});
  for (const char* bad : {"-1", "0", "low", "[2]", "{mean_of: 3}", "{loss: 2, mean_of: 0}", "{loss: 2, mean_of: 2000000}"})
    CHECK(says(errors_of(small(std::string("time_to_loss: ") + bad + "\n")), "a loss above 0 with 1 to 1000000 steps is expected"));
  CHECK(says(errors_of(small("time_to_loss: {loss: 2, window: 3}\n")), "window"));
}

TEST_CASE("what cannot be derived, run or held is refused and stays in the table") {
  const auto reason = [](const std::string& text) {
    const Expansion e = points_of(text);
    REQUIRE(e.points.size() == 1);
    REQUIRE(e.points[0].refusal);
    return e.points[0].refusal->message;
  };
  CHECK(reason(small("axes: {tp: 4}\n")) == "tp*pp*cp = 4*1*1 = 4 ranks, but here has 2 devices");
  CHECK(reason(small("train: {global_batch_tokens: 100, seq_len: 64}\n")) ==
        "global_batch_tokens=100 is not a positive multiple of seq_len 64 * micro_batch 1 * dp 2 = 128");
  CHECK(reason(small("dp: 1\ntp: 3\n")) == "heads 4 is not divisible by tp=3");
  CHECK(reason(small("dp: 1\npp: 8\n")).find("pp=8 stages for 4 layers") == 0);
  CHECK(reason(small("dp: 1\ntp: 2\nzero: 3\n")) == "zero=3 with dp=1: there is nothing to shard over");
  CHECK(reason(small("dp: 1\ngrad_accumulation: 1000000\n")) ==
        "layers 4 * grad_accumulation 1000000 = 4000000 runs of a layer in one step");
  CHECK(reason(small("dp: 1\nmicro_batch: 1G\nseq_len: 1G\n")).find("a tensor or bucket of 5.12e+20 elements") !=
        std::string::npos);
  CHECK(reason("model: tiny-gpt\nmachine: {local: true, cores: 0}\n") ==
        "machine.cores=0 on a local machine: its ranks run on cores");
  CHECK(reason(small("layout: {compression: {k: 0.5}}\n")) ==
        "settings of compression without compression.kind: they would change nothing");
  CHECK(reason(small("guard: {window: 5}\n")) ==
        "settings of guard without guard.nonfinite and guard.spike: they would change nothing");
  CHECK(reason(small("precision: fp4\n")) == "precision=fp4 is not implemented in this version");
  CHECK(reason(small("schedule: interleaved\npp: 2\n")) ==
        "schedule=interleaved with vpp=1: it needs several virtual stages on each rank");
  CHECK(reason(small("recompute: [attn, mlp]\n")) == "recompute of `attn`, which is no sub-layer that can be made again by itself");
  CHECK(reason(small("layout: {offload: {parameters: cpu}}\n")) ==
        "offload.parameters=cpu with zero=0: only zero 3 brings parameters unit by unit to where they compute");

  CHECK(reason("machine: local\nmodel: {preset: tiny-gpt, experts: 8}\n") ==
        "tiny-gpt is not executed: its layers are mixtures of experts");
  CHECK(reason("model: tiny-gpt\nmachine: {local: true, inter_bandwidth: 5}\n") ==
        "machine.inter_bandwidth=5 is not implemented in this version");
  CHECK(reason("model: tiny-gpt\nmachine: hgx-h100-ndr\ndp: 16\n") ==
        "dp*tp*pp*cp = 16*1*1*1 = 16 ranks, but hgx-h100-ndr has 8 devices (1 node of 8)");
  CHECK(reason("model: tiny-gpt\nmachine: hgx-h100-ndr\nmode: both\ndata: {text: .}\n") ==
        "mode both measures this machine, not hgx-h100-ndr");
  CHECK(reason(small("train: {learning_rate: {kind: cosine}}\n")) == "learning_rate.kind=cosine needs total_steps");
  // The values at which a key means nothing are accepted.
  CHECK(points_of(small("layout: {offload: none, fsdp: none, compression: none}\ntrain: {clip_norm: 0, reduce_dtype: fp32}\n"))
            .refused() == 0);
}

TEST_CASE("the analytic resolution refuses nothing for want of a plan") {
  const std::string text = small("dp: 1\naxes: {tp: [1, 3]}\nprofile: megatron\n");
  const auto sweep = load_sweep_text(text, "s.yaml", with_local());
  REQUIRE(sweep.ok());
  CHECK(resolution_of(*sweep) == Resolution::kTimeline);
  CHECK(expand(*sweep)->refused() == 2);
  CHECK(expand(*sweep, Resolution::kAnalytic)->refused() == 0);
  const auto said = load_sweep_text(text + "resolution: analytic\n", "s.yaml", with_local());
  REQUIRE(said.ok());
  CHECK(resolution_of(*said) == Resolution::kAnalytic);
  CHECK(expand(*said)->refused() == 0);
  CHECK(says(errors_of(small("resolution: exact\n")), "one of: timeline segments analytic"));
  // Nor schedules and models that no case can hold, under a framework's profile; under shardlab's own what it runs is asked.
  const std::string others = small("axes: {schedule: [1f1b, interleaved]}\nmodel.experts: 8\nmodel.top_k: 2\nmodel.moe_ffn: 64\n");
  const auto estimated = load_sweep_text(others + "profile: megatron\nresolution: analytic\n", "s.yaml", with_local());
  REQUIRE(estimated.ok());
  const auto points = expand(*estimated);
  CHECK(points->refused() == 0);
  REQUIRE(points->points.size() == 2);
  CHECK(points->points[1].model->experts == 8);
  CHECK(points->points[1].config.layout.schedule == Schedule::kInterleaved);
  CHECK(expand(*estimated, Resolution::kTimeline)->refused() == 2);
  CHECK(expand(*load_sweep_text(others + "resolution: analytic\n", "s.yaml", with_local()))->refused() == 2);
}

TEST_CASE("points that differ in a value no case can hold are different points") {
  const Expansion e = points_of(small("axes: {schedule: [none, interleaved, zb-v], model.mlp: [gelu, swiglu]}\n"));
  CHECK(e.points.size() == 6);
  CHECK(e.duplicates == 0);
  CHECK(e.refused() == 5);
  std::set<std::string> ids;
  for (const Point& p : e.points) ids.insert(p.id);
  CHECK(ids.size() == 6);
  CHECK(e.points[0].id == case_id(e.points[0].config));
  CHECK(e.points[3].config.layout.schedule == Schedule::kInterleaved);
  CHECK(e.points[3].unheld == std::vector<std::pair<std::string, std::string>>{{"model.mlp", "swiglu"}});
  const auto reasons = refusals(e).list();
  REQUIRE(reasons.size() == 2);
  CHECK(reasons[0].text == "model.mlp=swiglu is not implemented in this version");
  CHECK(reasons[0].cases == 3);
  CHECK(reasons[0].example == "schedule=none model.mlp=swiglu");
}

TEST_CASE("the precision is that of the device where nobody says one") {
  const auto precision = [](const std::string& text) { return points_of(text).points.front().config.train.precision; };
  CHECK(precision("model: tiny-gpt\nmachine: h100\n") == Precision::kBf16);
  CHECK(precision("model: tiny-gpt\nmachine: v100\n") == Precision::kFp32);  // fp16 alone needs a scaled loss
  CHECK(precision("model: tiny-gpt\nmachine: local\n") == Precision::kFp32);
  CHECK(precision("model: tiny-gpt\nmachine: h100\nprecision: fp32\n") == Precision::kFp32);
  CHECK(precision("model: tiny-gpt\nmachine: h100\nprecision: auto\n") == Precision::kBf16);
}

TEST_CASE("constraints refuse with their why") {
  const Expansion e = points_of(small(
      "axes: {tp: [1, 2]}\nconstraints:\n  - {expr: \"tp <= machine.nodes\", why: \"keep TP small\"}\n  - {expr: dp * tp == 2}\n"));
  CHECK_FALSE(e.points[0].refusal);
  REQUIRE(e.points[1].refusal);
  CHECK(e.points[1].refusal->message == "keep TP small");
  CHECK(points_of(small("constraints: [{expr: dp == 1}]\n")).points[0].refusal->message == "constraint `dp == 1`");
}

TEST_CASE("models and machines can be inline, overridden and axes") {
  const Case c = points_of(
                     "model:\n  inline: {family: llama, layers: 2, hidden: 64, heads: 4, kv_heads: 2, ffn: 96, vocab: 256, "
                     "max_positions: 64}\n  layers: 3\nmachine: local\n")
                     .points[0]
                     .config;
  CHECK(c.model.layers == 3);
  CHECK(c.model.name == "llama-3L-64d-4h");  // by its sizes, where nobody names it
  CHECK(c.model.head_dim == 16);
  CHECK(c.model.family == Family::kLlama);
  CHECK_FALSE(c.model.tied_embeddings);
  const Case g = points_of("model: {family: gpt, layers: 2, hidden: 64, heads: 4, vocab: 256, max_positions: 64}\nmachine: local\n")
                     .points[0]
                     .config;
  CHECK(g.model.ffn == 256);
  CHECK(g.model.tied_embeddings);
  const Expansion e = points_of(
      "axes:\n  model: [gpt2, llama-3-8b]\n  model.layers: [2, 4]\n  machine.nodes: [1, 2]\nmachine: {preset: hgx-h100-ndr, "
      "device: {memory: 40Gi, peak_flops: {fp32: 6e13}}}\n");
  REQUIRE(e.points.size() == 8);
  CHECK(e.points[5].name == "model=llama-3-8b model.layers=2 machine.nodes=2");
  CHECK(e.points[5].config.model.name == "llama-3-8b");
  CHECK(e.points[5].config.model.layers == 2);
  CHECK(e.points[5].config.machine.devices() == 16);
  CHECK(e.points[5].config.machine.device.memory_bytes == int64_t{40} << 30);
  CHECK(e.points[5].config.machine.device.peak_flops.at("fp32") == 6e13);
  CHECK(!e.points[5].config.machine.device.provenance.contains("memory"));
  CHECK(e.points[5].config.machine.device.provenance.contains("memory_bandwidth"));
}

TEST_CASE("a schedule from a file is called by the file's name") {
  std::string pattern = (std::filesystem::temp_directory_path() / "shardlab-slots-XXXXXX").string();
  REQUIRE(mkdtemp(pattern.data()) != nullptr);
  std::filesystem::create_directory(pattern + "/other");
  for (const char* name : {"/slots.csv", "/other/slots.csv", "/mine.csv"})
    std::ofstream(pattern + name) << "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
  const std::string head =
      "model: tiny-gpt\nmachine: hgx-h100-ndr\npp: 2\ndp: 1\ngrad_accumulation: 2\nmicro_batch: 1\nseq_len: 32\n";
  const auto first_line = [](const Case& c) { return c.layout.schedule_table.substr(0, c.layout.schedule_table.find('\n')); };
  const auto names = [&](const std::string& values) {
    const auto sweep = load_sweep_text(head + "axes: {schedule: [" + values + "]}\n", pattern + "/s.yaml", with_local());
    INFO((sweep.ok() ? std::string() : to_string(sweep.error())));
    REQUIRE(sweep.ok());
    std::vector<std::string> list;
    const auto expansion = expand(*sweep);
    REQUIRE(expansion.ok());
    for (const Point& point : expansion->points) list.push_back(point.name + ": " + first_line(point.config));
    return list;
  };
  CHECK(names("1f1b, mine.csv, other/slots.csv") ==
        std::vector<std::string>{"schedule=1f1b: ", "schedule=mine.csv: mine.csv", "schedule=slots.csv: slots.csv"});
  // A case file keeps it, and means the same case.
  const auto one = load_sweep_text(head + "schedule: mine.csv\n", pattern + "/s.yaml", with_local());
  REQUIRE(one.ok());
  const Case c = expand(*one)->points.at(0).config;
  const auto again = load_case_text(to_yaml(c), "case.yaml", with_local());
  INFO(to_yaml(c));
  REQUIRE(again.ok());
  CHECK(first_line(*again) == "mine.csv");
  CHECK(case_id(*again) == case_id(c));
  std::filesystem::remove_all(pattern);
}

TEST_CASE("claims are read with the file, and checked for form") {
  const std::string good = small(
      "include: [{name: a, tp: 1}, {name: b, tp: 2}]\nclaims:\n  - {says: b is smaller, source: us, check: "
      "\"b.predicted_peak_bytes < 0.9 * a.predicted_peak_bytes\"}\n");
  const auto sweep = load_sweep_text(good, "s.yaml", with_local());
  REQUIRE(sweep.ok());
  REQUIRE(sweep->claims().size() == 1);
  CHECK(sweep->claims()[0] == Claim{"b is smaller", "us", "b.predicted_peak_bytes < 0.9 * a.predicted_peak_bytes", ""});
  CHECK(says(errors_of(small("claims: [{says: x, check: \"a.loss_last < 1\"}]\n"), with_local()), "the claim has no `source`"));
  CHECK(says(errors_of(small("claims: [{says: x, source: y}]\n"), with_local()), "the claim has no `check`"));
  CHECK(says(errors_of(small("claims: [{says: x, source: y, check: \"a.b <\"}]\n"), with_local()), "in the expression `a.b <`"));
  CHECK(says(errors_of(small("claims: [{says: x, source: y, check: \"tp < 2\"}]\n"), with_local()), "unknown word `tp`"));
  CHECK(says(errors_of(small("claims: [{says: x, source: y, check: \"a.b < 2\", because: z}]\n"), with_local()), "`because`"));
  const auto reasoned =
      load_sweep_text(small("claims: [{says: x, source: y, check: \"a.b < 2\", why: z}]\n"), "s.yaml", with_local());
  REQUIRE(reasoned.ok());
  CHECK(reasoned->claims().at(0).why == "z");
}

TEST_CASE("the command line speaks the words of the file") {
  const std::string text = small("name: n\naxes: {tp: [1, 2], seed: [1, 2]}\ninclude: [{name: i, tp: 2, seed: 3}]\n");
  const Expansion e = points_of(text, with_local({"tp=2", "model.layers=8", "global-batch-tokens=4Ki"}));
  CHECK(names_of(e) == Names{"seed=1", "seed=2", "i"});
  for (const Point& p : e.points) {
    CHECK(p.config.layout.tp == 2);
    CHECK(p.config.model.layers == 8);
    CHECK(p.config.train.global_batch_tokens == 4096);
  }
  CHECK(points_of(text, with_local({"model=tiny-llama"})).points[0].config.model.name == "tiny-llama");
  const Expansion offloaded = points_of(small(""), with_local({"offload=optimizer=cpu,activations=nvme"}));
  CHECK(offloaded.points[0].config.layout.offload.optimizer == OffloadTo::kCpu);
  CHECK(offloaded.points[0].config.layout.offload.activations == OffloadTo::kNvme);
  CHECK(says(errors_of(text, with_local({"tpp=2", "tp=x", "seed"})), "command line: unknown key `tpp`, did you mean `tp`?"));
  CHECK(says(errors_of(text, with_local({"tpp=2", "tp=x", "seed"})), "command line: `tp` is `x`"));
  CHECK(says(errors_of(text, with_local({"tpp=2", "tp=x", "seed"})), "command line: `seed` is not of the form key=value"));
  CHECK(says(errors_of(small("zip: [{tp: [1, 2], seed: [1, 2]}]\n"), with_local({"tp=1"})), "`tp` is part of a zip block"));
  LoadOptions mode = with_local();
  mode.mode = Mode::kSimulate;
  CHECK(load_sweep_text(small("mode: both\n"), "s.yaml", mode)->mode() == Mode::kSimulate);
  const auto words = case_from_words(with_local({"model=llama-3-8b", "machine=hgx-h100-ndr", "tp=4", "micro-batch=2"}));
  REQUIRE(words.ok());
  CHECK(words->layout.dp == 2);
  CHECK(words->train.micro_batch == 2);
  CHECK(case_from_words(with_local({"model=gpt2"})).error().message == "no machine is given");
}

TEST_CASE("an unknown key under a short form is answered with what the short form takes") {
  struct Slip {
    const char *section, *key, *meant, *allowed;
  };
  for (const Slip& slip : {Slip{"fsdp", "unti", "unit", "unit prefetch reshard"},
                           {"diloco", "stepz", "steps", "steps learning_rate momentum"},
                           {"compression", "knd", "kind", "kind rank k bits warmup"},
                           {"guard", "windo", "window", "nonfinite spike loss_factor norm_factor window"},
                           {"zero_plus_plus", "weight", "weights", "weights secondary gradients"},
                           {"recompute_options", "evry", "every", "every budget_bytes"},
                           {"parameter_server", "server", "servers", "servers staleness"},
                           {"layout.fsdp", "unti", "unit", "unit prefetch reshard"}}) {
    const std::string section = slip.section;
    const bool nested = section.starts_with("layout.");
    const std::string entry = fmt::format("{}: {{{}: 1}}", nested ? section.substr(7) : section, slip.key);
    const std::string text = errors_of(small(nested ? fmt::format("layout: {{{}}}\n", entry) : entry + "\n"));
    INFO(text);
    CHECK(says(text, fmt::format("unknown key `{}`, did you mean `{}`?", slip.key, slip.meant)));
    CHECK(says(text, fmt::format("allowed under `{}`: {}", section, slip.allowed)));
  }
}

TEST_CASE("a map of named parts takes its own parts and words, and nothing else") {
  const auto says_of = [](const std::string& offload, const std::string& message, const std::string& hint) {
    const std::string text = errors_of("offload: " + offload + "\n" + small(""));
    INFO(text);
    CHECK(says(text, message));
    CHECK(says(text, hint));
  };
  const std::string parts = "allowed under `offload`: activations optimizer parameters", words = "expected one of: none cpu nvme";
  says_of("{activation: cpu}", "s.yaml:1:11: unknown key `activation`, did you mean `activations`?", parts);
  says_of("{activations: disk}", "s.yaml:1:24: `offload.activations` is `disk`, did you mean `nvme`?", words);
  says_of("{optimizer: nvm}", "s.yaml:1:22: `offload.optimizer` is `nvm`, did you mean `nvme`?", words);
  says_of("{optimizer: [cpu]}", "s.yaml:1:22: `offload.optimizer` is `[cpu]`", words);
  says_of("nonne", "s.yaml:1:10: `offload` is `nonne`, did you mean `none`?", "expected none, or a map such as {optimizer: cpu}");
  says_of("[cpu]", "s.yaml:1:10: `offload` is `[cpu]`", "expected none, or a map such as {optimizer: cpu}");
  CHECK(
      says(errors_of(small("axes: {offload: [none, {optimiser: cpu}]}\n")), "unknown key `optimiser`, did you mean `optimizer`?"));
  CHECK(says(errors_of(small(""), with_local({"offload=activation=cpu"})),
             "command line: unknown key `activation`, did you mean `activations`?"));
  CHECK(says(errors_of(small(""), with_local({"offload=optimizer=cpu,optimizer=nvme"})), "`offload.optimizer` is said twice"));
  // A list or map where a key takes none is a slip too, not something that this version lacks.
  CHECK(says(errors_of(small("recompute: {attn: full}\n")), "`recompute` is `{attn: full}`"));
  CHECK(says(errors_of(small("recompute: selectiv\n")), "did you mean `selective`?"));
  CHECK(says(errors_of(small("loss_scale: [1, 2]\n")), "expected dynamic, or a number"));
}

TEST_CASE("all errors of a file are reported at once, each with its place") {
  const std::string text = errors_of(
      "version: 2\n"                                              // 1
      "model: {preset: gpt9, layer: 4}\n"                         // 2
      "machine: hgx-h100-ndr\n"                                   // 3
      "trian: {seq_len: 4}\n"                                     // 4
      "train: {seq_len: long, global_batch_token: 1Mi}\n"         // 5
      "axes: {tp: [1, x], pp: {pow2: [3, 8]}, tpp: 1, dp: []}\n"  // 6
      "zip: [{vpp: [1, 2], ep: [1]}]\n"                           // 7
      "when: [{if: \"ppp == 1\", set: {schedule: nine}}]\n"       // 8
      "constraints: [{expr: tp <}, {why: x}]\n"                   // 9
      "exclude: [{}, 4]\n"                                        // 10
      "include: {tp: 4}\n"                                        // 11
      "tp: 2\nlayout: {tp: 2}\n");                                // 12, 13
  CHECK(says(text, "s.yaml:1:10: `version` is `2`, which this program does not read"));
  CHECK(says(text, "s.yaml:2:17: no model is named `gpt9`, did you mean `gpt2`?"));
  CHECK(says(text, "s.yaml:2:23: unknown key `layer`, did you mean `layers`?"));
  CHECK(says(text, "s.yaml:4:1: unknown key `trian`, did you mean `train`?"));
  CHECK(says(text, "s.yaml:5:18: `seq_len` is `long`"));
  CHECK(says(text, "s.yaml:5:24: unknown key `global_batch_token`, did you mean `global_batch_tokens`?"));
  CHECK(says(text, "`shardlab keys` and `shardlab schema sweep` list what is allowed"));
  CHECK(says(text, "s.yaml:6:16: `tp` is `x`"));
  CHECK(says(text, "s.yaml:6:31: pow2 begins at 3, which is not a power of two"));
  CHECK(says(text, "s.yaml:6:40: unknown key `tpp`, did you mean `tp`?"));
  CHECK(says(text, "s.yaml:6:52: axis `dp` has no values"));
  CHECK(says(text, "s.yaml:7:25: `ep` has 1 value, but `vpp` of the same zip block has 2"));
  CHECK(says(text, "s.yaml:8:14: unknown word `ppp`, did you mean `pp`?"));
  CHECK(says(text, "s.yaml:8:41: `schedule` is `nine`, did you mean `none`?"));
  CHECK(says(text, "s.yaml:9:26: the expression ends where a value is expected"));
  CHECK(says(text, "s.yaml:9:29: the constraint has no `expr`"));
  CHECK(says(text, "s.yaml:10:11: an empty exclusion would exclude every point"));
  CHECK(says(text, "s.yaml:10:15: an entry of `exclude` is `4`"));
  CHECK(says(text, "s.yaml:11:10: `include` is a map"));
  CHECK(says(text, "s.yaml:13:14: `tp` is set a second time: line 12 sets it as `layout.tp`"));
  CHECK(says(text, "19 errors. Nothing was run."));
}

TEST_CASE("what is misspelt, or a framework's word, is answered with the key or value that is meant") {
  CHECK(says(errors_of(small("profile: megatorn\n")), "`profile` is `megatorn`, did you mean `megatron`?"));
  CHECK(says(errors_of(small("mode: simulated\n")), "`mode` is `simulated`, did you mean `simulate`?"));
  CHECK(says(errors_of(small("backend: gpu\n")), "`backend` is `gpu`, did you mean `cuda`?"));
  CHECK(says(errors_of(small("overlap: yes\n")), "`overlap` is `yes`, did you mean `true`?"));
  CHECK(says(errors_of(small("tensor_model_parallel_size: 2\n")), "unknown key `tensor_model_parallel_size`, did you mean `tp`?"));
  CHECK(says(errors_of(small("num_nodes: 2\n")), "unknown key `num_nodes`, did you mean `machine.nodes`?"));
  CHECK(says(errors_of(small("train: {zero_stage: 2}\n")),
             "`zero_stage` under `train`, did you mean `layout.zero`?\n  write it under `layout`"));
  CHECK(says(errors_of(small("axes: {gradient-accumulation-steps: [2]}\n")), "did you mean `grad_accumulation`?"));
  CHECK(says(errors_of(small(""), with_local({"zero-stage=2"})), "did you mean `zero`?"));
  CHECK(says(errors_of(small("seq_len: 4kb\n")), "from 1 to 1Gi, for example 8, 64k or 1Mi; write it without a unit"));
}

TEST_CASE("of two faults the one that remains is told") {
  const std::string more = "model: tiny-gpt\nmachine: hgx-h100-ndr\ndp: 16\ntp: 8\nseq_len: 64\nglobal_batch_tokens: 512\n";
  CHECK(points_of(more).points[0].refusal->message ==
        "dp*tp*pp*cp = 16*8*1*1 = 128 ranks, but hgx-h100-ndr has 8 devices (1 node of 8)");
  CHECK(says(errors_of("model: tiny-gpt\nmachine: hgx-h100-ndr\nmode: measure\n"),
             "s.yaml:3:7: `mode` is `measure`, but the machine hgx-h100-ndr is not this machine"));
}

TEST_CASE("numbers outside their range are refused with the file, and wherever a sweep can say them") {
  CHECK(says(errors_of(small("dp: 0\n")), "s.yaml:3:5: `dp` is `0`"));
  CHECK(says(errors_of(small("dp: 0\n")), "expected a whole number from 1 to 1048576"));
  CHECK(says(errors_of(small("measure: {steps: 1e9}\n")), "s.yaml:3:18: `steps` is `1e9`"));
  CHECK(says(errors_of(small("seed: -1\n")), "s.yaml:3:7: `seed` is `-1`"));
  CHECK(says(errors_of(small("measure: {validate_sequences: -4}\n")), "s.yaml:3:31: `validate_sequences` is `-4`"));
  CHECK(says(errors_of(small("beta1: 1\n")), "expected a number from 0 to below 1"));
  CHECK(says(errors_of(small("ema_decay: 0.99999999\n")), "expected a number from 0 to below 1"));  // 1 in single precision
  CHECK(!says(errors_of(small("ema_decay: 0.9999999\n")), "expected a number from 0 to below 1"));
  CHECK(says(errors_of(small("epsilon: 0\n")), "expected a number above 0 to 1"));
  CHECK(says(errors_of(small("axes: {tp: {range: [0, 2]}}\n")), "`tp` is `0`"));
  CHECK(says(errors_of(small("when: [{if: pp == 1, set: {micro_batch: -1}}]\n")), "`micro_batch` is `-1`"));
  CHECK(says(errors_of(small("include: [{name: a, threads_per_rank: 5000}]\n")), "`threads_per_rank` is `5000`"));
  CHECK(says(errors_of("model: {inline: {layers: -2}}\nmachine: local\n"), "s.yaml:1:26: `layers` is `-2`"));
  CHECK(says(errors_of(small(""), with_local({"measure.timeout=0"})), "command line: `measure.timeout` is `0`"));
  CHECK(points_of(small("measure: {steps: 1M, repeat: 1, warmup: 0}\nseed: 9223372036854775807\n")).runnable() == 1);
}

TEST_CASE("the cases of a sweep share one calibration") {
  const Expansion e = points_of(small("axes: {seed: [1, 2, 3]}\n"));
  REQUIRE(e.points.size() == 3);
  REQUIRE(e.points[0].config.machine.calibration);
  for (const Point& p : e.points) CHECK(p.config.machine.calibration == e.points[0].config.machine.calibration);
}

TEST_CASE("files that miss something say what to add") {
  CHECK(says(errors_of(""), "no model is given"));
  CHECK(says(errors_of(""), "no machine is given"));
  CHECK(says(errors_of("- a\n"), "the file is a list"));
  CHECK(says(errors_of("model: gpt2\nmachine: local\n", {}), "s.yaml:2:10: this machine is not known here"));
  CHECK(says(errors_of(small("mode: measure\n")),
             "s.yaml:3:7: `mode` is `measure`, which trains on real text, but no `data` is given"));
  CHECK(says(errors_of(small("mode: both\ndata: {text: no/such/file.txt}\n")), "no/such/file.txt does not exist"));
  CHECK(says(errors_of(small("mode: fast\n")), "s.yaml:3:7: `mode` is `fast`"));
  CHECK(says(errors_of("model: {preset: gpt2, hf: x.json}\nmachine: local\n"), "keep one of the two"));
  CHECK(says(errors_of("model: sweeps/none/config.json\nmachine: local\n"), "none/config.json does not exist"));
  CHECK(says(errors_of(small("train: 5\n")), "s.yaml:3:8: `train` is `5`"));
  CHECK(says(errors_of(small("train: {micro_batch: [1, 2]}\n")), "s.yaml:3:22: `micro_batch` is a list"));
  CHECK(says(errors_of(small("tp: [1, 2]\n")), "a sweep varies it as `axes: {tp: [1, 2]}`"));
  CHECK(says(errors_of(small("steps: 2\n")), "unknown key `steps`, did you mean `diloco.steps` or `measure.steps`?"));
  CHECK(says(errors_of(small("axes: {layers: [2]}\n")), "unknown key `layers`, did you mean `model.layers`?"));
  CHECK(says(errors_of(small("tp:\n")), "`tp` has no value"));
  CHECK(says(errors_of(small("axes: {tp: [1], layout.tp: [2]}\n")), "`tp` is in two axes"));
  CHECK(says(errors_of(small("axes: {name: [a]}\n")), "unknown key `name`"));
  CHECK(says(errors_of(small("axes: {seed: {range: [1, 4000000000000]}}\n")),
             "range from 1 to 4000000000000 by 1 takes 3999999999999 steps, and the axes of a sweep have at most 1000000 values"));
  CHECK(says(errors_of(small("axes: {seed: {range: [-9223372036854775808, 9223372036854775807]}}\n")),
             "takes 18446744073709551615 steps"));
  CHECK(says(errors_of(small("axes: {seed: {range: [1, 600000]}, dp: {range: [1, 600000]}}\n")),
             "range from 1 to 600000 by 1 takes 599999 steps, and the axes"));
  CHECK(says(errors_of(small("axes: {seed: {range: [1, 2000]}, dp: {range: [1, 2000]}}\n")),
             "the axes make 4000000 points, more than 1000000"));
  CHECK(says(errors_of(small("when: [{if: dp == 1, set: {tp: 2}}]\n")), "s.yaml:3:13: `dp` has no value here"));
  CHECK(says(errors_of(small("constraints: [{expr: \"tp + schedule > 1\"}]\n")),
             "s.yaml:3:28: `schedule` is text, and `+` takes numbers"));
  CHECK(load_sweep("no/such.yaml").error().where == "no/such.yaml");
  CHECK(load_sweep("no/such.yaml").error().code == ExitCode::kUsage);
  CHECK(load_sweep(testing::source_dir()).error().message == "is a folder, not a file");
}

TEST_CASE("paths in a file are relative to the file") {
  const std::string file = testing::source_dir() + "/sweeps/some.yaml";
  const auto sweep =
      load_sweep_text("model: {hf: models/gpt2.json}\nmachine: {file: machines/hgx-h100-ndr.yaml}\ndata: {text: ..}\n", file, {});
  INFO((sweep.ok() ? "" : to_string(sweep.error())));
  REQUIRE(sweep.ok());
  const Case c = expand(*sweep)->points[0].config;
  CHECK(c.model.name == "gpt2");
  CHECK(c.machine.devices() == 8);
  CHECK(std::filesystem::equivalent(c.data.text, testing::source_dir()));
  CHECK(std::filesystem::path(c.data.text).is_absolute());
}

TEST_CASE("a random search takes as many points as it says, the same ones for the same seed") {
  const std::string grid = small("axes: {seed: {range: [1, 40]}, micro_batch: [1, 2]}\n");
  const auto names = [&](const std::string& search) {
    std::vector<std::string> of;
    for (const Point& point : points_of(grid + search).points) of.push_back(point.name);
    return of;
  };
  const auto first = names("search: {kind: random, count: 10, seed: 3}\n");
  CHECK(first.size() == 10);
  CHECK(std::set(first.begin(), first.end()).size() == 10);
  CHECK(names("search: {kind: random, count: 10, seed: 3}\n") == first);
  CHECK(names("search: {kind: random, count: 10, seed: 4}\n") != first);
  const auto longer = names("search: {kind: random, count: 20, seed: 3}\n");
  CHECK(std::vector(longer.begin(), longer.begin() + 10) == first);  // a larger sample goes on from a smaller one
  const auto all = names("search: {kind: random, count: 1000}\n"), whole = names("");
  CHECK(std::set(all.begin(), all.end()) == std::set(whole.begin(), whole.end()));
}

TEST_CASE("a goal is reached when no estimate that is left can be below the best, by its margin") {
  std::vector<Ranked> points{{3, 1.2}, {0, 1.0}, {2, 1.2}, {1, 1.3}};
  rank(points);
  std::vector<size_t> places;
  for (const Ranked& r : points) places.push_back(r.place);
  CHECK(places == std::vector<size_t>{0, 2, 3, 1});
  Goal goal(points, 0.1);
  CHECK(!goal.ran(1.3));           // 1.2 less 10 % is below it
  CHECK(!goal.ran(std::nullopt));  // a point that failed says nothing
  CHECK(!goal.ran(1.25));
  CHECK(goal.ran(1.9) == true);  // none is left
  CHECK(goal.reason() == "every one of the 4 points was run: their intervals do not part before");
  Goal parts(points, 0.1);
  CHECK(parts.ran(1.05) == true);
  CHECK(parts.reason() == "the best of 1 points takes 1050 ms, each of the 3 others at least 1080 ms: its estimate less 10 %");
  CHECK(survivors(16, 0.25) == 4);
  CHECK(survivors(17, 0.25) == 5);
  CHECK(survivors(1, 0.01) == 1);
  CHECK(survivors(0, 0.5) == 0);
}
