// Every numeric key of the sweep language, with values that are zero, negative, huge or no numbers: each is refused where it
// stands, with what is allowed, or means something: then a plan is made of it, or refused in words.
#include <fmt/format.h>

#include <limits>

#include "cases/pipeline.h"
#include "plan/base/values.h"
#include "plan/keys.h"
#include "sweeps/sweep.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

LoadOptions with_local() {
  LoadOptions options;
  options.local_machine = []() -> Result<Machine> {
    Machine m;
    m.id = "here";
    m.local = true;
    m.cores = m.devices_per_node = 2;
    m.device.id = "core";
    m.device.memory_bytes = int64_t{4} << 30;
    return m;
  };
  return options;
}

bool is_numeric(const CaseKey& key) {
  return key.form == Form::kInteger || key.form == Form::kCount || key.form == Form::kNumber || key.form == Form::kDuration;
}

/// A case file in which `key` is the one thing on line 4.
std::string file_with(std::string_view key, const std::string& value, const char* machine) {
  return fmt::format("model: {{preset: tiny-gpt}}\nmachine: {{{}}}\n# the next line holds the value\n{}: {}\n{}", machine, key,
                     value, key == "train.seq_len" ? "" : "seq_len: 32\n");
}

const std::vector<std::string> kNoNumbers = {"nan",  "inf",    "-inf",   "1e999", "-1e999", "0x10", "1_000", "1,5",  "two", "true",
                                             "\"\"", "[1, 2]", "{a: 1}", "1 2",   "--1",    "1e",   "12Q",   "-0x1", "~"};
const std::vector<std::string> kNegative = {"-1", "-4", "-0.5", "-1e9", "-9223372036854775808", "-1k"};
const std::vector<std::string> kNumbers = {"0",
                                           "1",
                                           "2",
                                           "3",
                                           "7",
                                           "64",
                                           "1000",
                                           "65536",
                                           "1e6",
                                           "1e9",
                                           "2147483647",
                                           "0.5",
                                           "1e-9",
                                           "1e12",
                                           "2147483648",
                                           "4294967296",
                                           "9223372036854775807",
                                           "9223372036854775808",
                                           "1e19",
                                           "1e30",
                                           "1e38",
                                           "1e39",
                                           "1e300",
                                           "1Ti",
                                           "7e6Ti"};

}  // namespace

TEST_CASE("what is no number, or lies outside a key's range, is refused where it stands, with the range") {
  int refused = 0;
  for (const CaseKey& key : case_keys()) {
    if (!is_numeric(key)) continue;
    std::vector<std::string> values = kNoNumbers;
    for (const std::string& value : kNegative)
      if (parse_number(value).value_or(-std::numeric_limits<double>::infinity()) < range_of(key).least) values.push_back(value);
    for (const std::string& value : values) {
      INFO(key.path << ": " << value);
      const auto loaded = load_case_text(file_with(key.path, value, "preset: hgx-h100-ndr"), "c.yaml", with_local());
      REQUIRE_FALSE(loaded.ok());
      INFO(to_string(loaded.error()));
      CHECK(loaded.error().code == ExitCode::kUsage);
      CHECK(loaded.error().where == fmt::format("c.yaml:4:{}", key.path.size() + 3));
      // A list is what a sweep's axes take: the hint goes on to say so, under the key's name there.
      const std::string as_axis = fmt::format("; a sweep varies it as `axes: {{{}: [1, 2]}}`", key.word());
      const std::string hint = fmt::format("expected {}{}", expected(key), value[0] == '[' ? as_axis : "");
      const std::string unit = "; write it without a unit";  // where words follow a number
      CHECK(loaded.error().hint == hint + (loaded.error().hint.ends_with(unit) ? unit : ""));
      ++refused;
    }
  }
  CHECK(refused > 1000);
}

TEST_CASE("a number is refused where it stands, or a plan is made of it or refused in words") {
  int accepted = 0, refused = 0, out_of_range = 0;
  uint64_t number = 0;
  for (const char* machine : {"preset: hgx-h100-ndr", "local: true"})
    for (const CaseKey& key : case_keys()) {
      if (!is_numeric(key)) continue;
      for (const std::string& value : kNumbers) {
        if (number++ % dealt(1, 4) != 0) continue;  // a quarter of the values of each key on each machine
        INFO(machine << ", " << key.path << ": " << value);
        const auto loaded = load_case_text(file_with(key.path, value, machine), "c.yaml", with_local());
        if (!has_form(key, value)) {
          REQUIRE_FALSE(loaded.ok());
          CHECK(loaded.error().where == fmt::format("c.yaml:4:{}", key.path.size() + 3));
          ++out_of_range;
          continue;
        }
        // A step of 256 micro-batches or more does not verify yet: the slots of its sum of losses run out of letters.
        const Error error = [&] {
          if (!loaded.ok()) return loaded.error();
          const auto placed = prepare(*loaded);
          if (!placed.ok()) return placed.error();
          CHECK(largest_arena(*placed) > 0);
          const auto fit = fits(*loaded, *placed);
          return fit.ok() ? Error{} : fit.error();
        }();
        INFO(to_string(error));
        ++(error.message.empty() ? accepted : refused);
        if (error.message.empty()) continue;
        CHECK((error.code == ExitCode::kUsage || error.code == ExitCode::kNo));
        CHECK_FALSE(error.hint.empty());
      }
    }
  CHECK(accepted > (thorough() ? 500 : 125));
  CHECK(refused > (thorough() ? 100 : 25));
  CHECK(out_of_range > (thorough() ? 500 : 125));
}
