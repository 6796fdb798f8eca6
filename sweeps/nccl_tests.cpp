#include "sweeps/nccl_tests.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

namespace shardlab::sweeps {
namespace {

using nlohmann::json;

constexpr int64_t kMostBytes = int64_t{1} << 50;
constexpr int kMostRanks = 1 << 24;
constexpr double kMicro = 1e-6, kGiga = 1e9;

Error wrong(const std::string& file, std::string message, std::string hint) {
  return {ExitCode::kUsage, std::move(message), std::move(hint), file};
}

/// "all_reduce" of "./build/all_reduce_perf", "all_reduce_perf_mpi.txt"; empty where the text has none.
std::string collective_in(std::string_view text) {
  for (const std::string_view name : {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv",
                                      "scatter", "gather", "hypercube"})
    if (text.find(fmt::format("{}_perf", name)) != std::string_view::npos) return std::string(name);
  return {};
}

template <class T>
std::optional<T> number_in(std::string_view text) {
  T value{};
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  if constexpr (std::is_floating_point_v<T>)
    if (!std::isfinite(value)) return std::nullopt;
  return value;
}

std::vector<std::string_view> words_in(std::string_view line) {
  std::vector<std::string_view> words;
  while (true) {
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string_view::npos) return words;
    line.remove_prefix(begin);
    const size_t end = std::min(line.find_first_of(" \t\r"), line.size());
    words.push_back(line.substr(0, end));
    line.remove_prefix(end);
  }
}

bool plausible(const NcclTestRow& row) {
  return row.bytes > 0 && row.bytes <= kMostBytes && row.seconds > 0 && row.bus_bytes_per_s > 0 && row.bus_bytes_per_s < 1e18;
}

/// Reads the lines of one run after the other.
class TextReader {
 public:
  std::vector<NcclTest> read(std::string_view text) {
    while (!text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size());
      line(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    finish();
    return std::move(tests_);
  }

 private:
  void line(std::string_view text) {
    const std::vector<std::string_view> words = words_in(text);
    if (words.empty()) return;
    if (words[0].starts_with('#')) return comment(text, words);
    if (const auto bytes = number_in<int64_t>(words[0]); bytes && words.size() >= 8) result(*bytes, words);
  }

  void comment(std::string_view text, const std::vector<std::string_view>& words) {
    if (const std::string name = collective_in(text); !name.empty()) {
      if (text.find("starting") != std::string_view::npos) finish();
      test_.collective = name;
    }
    if (words.size() > 1 && words[1] == "nThread" && !test_.rows.empty()) finish();
    if (words.size() > 2 && words[1] == "size") has_root_ = std::ranges::find(words, "root") != words.end();
    if (words.size() > 2 && words[1] == "Rank" &&
        number_in<int>(words[2])) {  // "#  Rank  0 Group  0 Pid  7 on  host device  0 [..] .."
      if (!test_.rows.empty()) finish();
      ++test_.ranks;
      const auto on = std::ranges::find(words, "on");
      if (on != words.end() && on + 1 != words.end()) hosts_.emplace(*(on + 1));
    }
  }

  /// size count type redop [root] | time algbw busbw wrong | time algbw busbw wrong
  void result(int64_t bytes, const std::vector<std::string_view>& words) {
    const size_t first = has_root_ ? 5 : 4;
    for (const size_t begin : {first, first + 4}) {
      if (begin + 3 > words.size()) return;
      const auto time = number_in<double>(words[begin]), bus = number_in<double>(words[begin + 2]);
      if (!time || !bus) continue;
      const NcclTestRow row{bytes, *time * kMicro, *bus * kGiga};
      if (!plausible(row)) continue;
      test_.rows.push_back(row);
      return;
    }
  }

  void finish() {
    test_.nodes = static_cast<int>(hosts_.size());
    if (!test_.rows.empty()) tests_.push_back(std::move(test_));
    test_ = {};
    hosts_.clear();
  }

  NcclTest test_;
  std::set<std::string, std::less<>> hosts_;
  bool has_root_ = true;
  std::vector<NcclTest> tests_;
};

std::optional<double> number_at(const json& object, const char* key) {
  if (!object.is_object()) return std::nullopt;
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return std::nullopt;
  const auto value = found->get<double>();
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}

NcclTest test_of(const json& root) {
  NcclTest test;
  if (const auto args = root.find("args"); args != root.end() && args->is_array())
    for (const json& word : *args)
      if (word.is_string() && test.collective.empty()) test.collective = collective_in(word.get<std::string>());
  std::set<std::string> hosts;
  if (const auto config = root.find("config"); config != root.end() && config->is_object())
    if (const auto devices = config->find("devices"); devices != config->end() && devices->is_array())
      for (const json& device : *devices) {
        ++test.ranks;
        if (device.is_object() && device.contains("hostname") && device["hostname"].is_string())
          hosts.insert(device["hostname"].get<std::string>());
      }
  test.nodes = static_cast<int>(hosts.size());
  const auto results = root.find("results");
  if (results == root.end() || !results->is_array()) return test;
  for (const json& result : *results) {
    const auto bytes = number_at(result, "size");
    if (!bytes || *bytes < 1 || *bytes > static_cast<double>(kMostBytes)) continue;
    if (const auto name = result.find("experiment_name"); test.collective.empty() && name != result.end() && name->is_string())
      test.collective = collective_in(name->get<std::string>());
    for (const char* way : {"out_of_place", "in_place"}) {
      const auto found = result.find(way);
      if (found == result.end()) continue;
      const auto time = number_at(*found, "time"), bus = number_at(*found, "bus_bw");
      if (!time || !bus) continue;
      const NcclTestRow row{static_cast<int64_t>(*bytes), *time * kMicro, *bus * kGiga};
      if (!plausible(row)) continue;
      test.rows.push_back(row);
      break;
    }
  }
  return test;
}

}  // namespace

Result<std::vector<NcclTest>> parse_nccl_tests(std::string_view text, const std::string& file) {
  std::vector<NcclTest> tests;
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin != std::string_view::npos && (text[begin] == '{' || text[begin] == '[')) {
    const json root = json::parse(text, nullptr, false);
    if (root.is_discarded()) return wrong(file, "is no whole JSON", "give the file that `-J` wrote, after the test has ended");
    for (const json& test : root.is_array() ? root : json::array({root}))
      if (test.is_object()) tests.push_back(test_of(test));
  } else {
    tests = TextReader().read(text);
  }
  if (tests.empty() || tests.front().rows.empty())
    return wrong(file, "has no results of nccl-tests", "give what all_reduce_perf and its like print, or write with -J");
  for (NcclTest& test : tests) {
    if (test.collective.empty()) test.collective = collective_in(file);
    if (test.collective.empty())
      return wrong(file, "does not say which collective it measured", "name it after the program: all_reduce_perf.txt");
    if (test.ranks < 1 || test.ranks > kMostRanks || test.nodes < 1)
      return wrong(file, "does not list its ranks and their hosts", "keep the lines `#  Rank  0 ... on HOST device ...`");
    std::ranges::stable_sort(test.rows, {}, &NcclTestRow::bytes);
  }
  return tests;
}

namespace {

/// "busbw.intra_all_reduce" for tests on one node, "busbw.all_reduce" for those across nodes.
Result<std::string> constant_of(const NcclTest& test, int devices_per_node) {
  if (test.collective != "all_reduce" && test.collective != "all_gather" && test.collective != "reduce_scatter")
    return refusal(fmt::format("{} does not correct a fabric", test.collective), "give all_reduce, all_gather or reduce_scatter");
  if (test.ranks != test.nodes * devices_per_node || (test.nodes == 1 && devices_per_node == 1))
    return refusal(
        fmt::format("{} ranks on {} nodes, where a node of the machine has {} devices", test.ranks, test.nodes, devices_per_node),
        "measure over all devices of one node, or of whole nodes");
  return fmt::format("busbw.{}{}", test.nodes == 1 ? "intra_" : "", test.collective);
}

/// The largest size that all tests have.
std::optional<int64_t> common_size(const std::vector<NcclTest>& tests) {
  for (size_t i = tests.front().rows.size(); i-- > 0;) {
    const int64_t bytes = tests.front().rows[i].bytes;
    if (std::ranges::all_of(
            tests, [&](const NcclTest& t) { return std::ranges::find(t.rows, bytes, &NcclTestRow::bytes) != t.rows.end(); }))
      return bytes;
  }
  return std::nullopt;
}

}  // namespace

Result<std::string> with_measured_fabric(std::string_view machine, int devices_per_node, const std::vector<NcclTest>& tests) {
  if (tests.empty()) return refusal("nothing was measured", "give a file of nccl-tests");
  const auto bytes = common_size(tests);
  if (!bytes) return refusal("the tests have no size in common", "measure all with the same -b, -e and -f");
  std::map<std::string, std::string> constants;
  int nodes = 0;
  for (const NcclTest& test : tests) {
    const auto name = constant_of(test, devices_per_node);
    if (!name.ok()) return name.error();
    if (test.nodes > 1 && nodes > 1 && nodes != test.nodes)
      return refusal(fmt::format("tests over {} and over {} nodes", nodes, test.nodes), "give those over one number of nodes");
    nodes = std::max(nodes, test.nodes);
    const double rate = std::ranges::find(test.rows, *bytes, &NcclTestRow::bytes)->bus_bytes_per_s;
    constants[*name] =
        fmt::format("{{value: {:.9g}, provenance: measured, source: \"nccl-tests {}_perf, {} ranks on {} nodes, {} bytes\"}}", rate,
                    test.collective, test.ranks, test.nodes, *bytes);
  }
  constants["busbw.bytes"] = fmt::format("{{value: {}, provenance: measured}}", *bytes);
  if (nodes > 1) constants["busbw.nodes"] = fmt::format("{{value: {}, provenance: measured}}", nodes);

  std::string lines, out;
  for (const auto& [name, value] : constants) lines += fmt::format("  {}: {}\n", name, value);
  bool placed = false;
  for (std::string_view left = machine; !left.empty();) {
    const size_t end = std::min(left.find('\n'), left.size());
    const std::string_view line = left.substr(0, end);
    left.remove_prefix(std::min(end + 1, left.size()));
    if (line.starts_with("  busbw.")) continue;  // of an earlier import
    out += fmt::format("{}\n", line);
    if (line.starts_with("fabric:")) out += lines, placed = true;
  }
  if (!placed) out += "fabric:\n" + lines;
  return out;
}

}  // namespace shardlab::sweeps
