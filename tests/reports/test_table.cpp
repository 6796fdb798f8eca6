#include <nlohmann/json.hpp>

#include <cmath>

#include "reports/table.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

Table sample() {
  Table t;
  t.columns = {{"name", Unit::kNone, "", true},
               {"step_s", Unit::kSeconds, "step"},
               {"peak_bytes", Unit::kBytes, "peak"},
               {"error_pct", Unit::kPercent, "error"},
               {"overlap"}};
  t.rows = {{std::string("plain"), 0.0412, int64_t{1536}, -2.5, true},
            {std::string("a,\"b\"\nand | c <d>"), 1.0 / 3, Value(), Value(), false},
            {std::string(""), std::nan(""), int64_t{0}, 0.0, Value()}};
  return t;
}

}  // namespace

TEST_CASE("the four forms of a table") {
  std::string all;
  for (const TableFormat f : {TableFormat::kTable, TableFormat::kMarkdown, TableFormat::kCsv, TableFormat::kJson})
    all += print_table(sample(), f) + "\n";
  REQUIRE_GOLDEN("reports/table.txt", all);
}

TEST_CASE("CSV fields survive the round trip") {
  const auto records = parse_csv(print_csv(sample()));
  REQUIRE(records.size() == 4);
  CHECK(records[0] == std::vector<std::string>{"name", "step_s", "peak_bytes", "error_pct", "overlap"});
  CHECK(records[1] == std::vector<std::string>{"plain", "0.0412", "1536", "-2.5", "true"});
  CHECK(records[2][0] == "a,\"b\"\nand | c <d>");
  CHECK(std::stod(records[2][1]) == 1.0 / 3);
  CHECK(records[2][2] == "");
  CHECK(records[3] == std::vector<std::string>{"", "nan", "0", "0", ""});
}

TEST_CASE("CSV with CRLF, empty fields and a last line without its end") {
  const auto records = parse_csv("a,b\r\n,\"x \"\"y\"\"\"\r\n1,");
  REQUIRE(records.size() == 3);
  CHECK(records[1] == std::vector<std::string>{"", "x \"y\""});
  CHECK(records[2] == std::vector<std::string>{"1", ""});
}

TEST_CASE("JSON holds exact numbers, and null for what it cannot hold") {
  const auto json = nlohmann::json::parse(print_json(sample()));
  REQUIRE(json.size() == 3);
  CHECK(json[1]["step_s"].get<double>() == 1.0 / 3);
  CHECK(json[1]["peak_bytes"].is_null());
  CHECK(json[2]["step_s"].is_null());
  CHECK(json[0]["overlap"] == true);
}

TEST_CASE("a narrow terminal shortens texts first and then leaves columns out, saying so") {
  Table t;
  t.columns = {{"name", Unit::kNone, "", true}, {"number"}, {"other"}};
  t.rows = {{std::string("a rather long name of a case"), int64_t{12345}, std::string("last")}};
  CHECK(print_aligned(t, 30) ==
        "name             number  other\n"
        "---------------  ------  -----\n"
        "a rather long …   12345  last\n");
  CHECK(print_aligned(t, 18) ==
        "name        number\n"
        "----------  ------\n"
        "a rather …   12345\n"
        "(1 more column\n does not fit into\n 18 characters:\n other; --wide or\n --format csv\n shows every\n column)\n");
}

TEST_CASE("a narrow terminal first takes from names what all have in common, and says it above") {
  Table t;
  t.columns = {{"name", Unit::kNone, "", true}, {"step"}};
  t.rows = {{std::string("tp=1 schedule=1f1b micro_batch=1 recompute=none"), std::string("1 s")},
            {std::string("tp=1 schedule=1f1b micro_batch=1 recompute=full"), std::string("2 s")},
            {std::string("tp=16 schedule=1f1b micro_batch=4 recompute=full"), std::string("3 s")}};
  CHECK(print_aligned(t, 60).starts_with("name                                              step\n"));  // there is room
  CHECK(print_aligned(t, 50) ==
        "name, in every row: schedule=1f1b\n"
        "name                                step\n"
        "----------------------------------  ----\n"
        "tp=1 micro_batch=1 recompute=none   1 s\n"
        "tp=1 micro_batch=1 recompute=full   2 s\n"
        "tp=16 micro_batch=4 recompute=full  3 s\n");
  CHECK(print_aligned(t, 36) ==
        "name, in every row: schedule=1f1b\n"
        "name: the values of tp, micro_batch,\n"
        "  recompute\n"
        "name       step\n"
        "---------  ----\n"
        "1 1 none   1 s\n"
        "1 1 full   2 s\n"
        "16 4 full  3 s\n");
  t.rows[2][0] = std::string("another");  // no keys in common: what is too wide is cut
  CHECK(print_aligned(t, 24) ==
        "name                step\n"
        "------------------  ----\n"
        "tp=1 schedule=1f1…  1 s\n"
        "tp=1 schedule=1f1…  2 s\n"
        "another             3 s\n");
}

TEST_CASE("a text that wraps keeps the columns after it") {
  Table t;
  t.columns = {{.name = "layout", .wraps = true}, {.name = "step", .right = true}};
  t.rows = {{std::string("dp2 tp2 pp4 cp4 zero1 1f1b"), std::string("55.1 s")}, {std::string("dp64"), std::string("9 s")}};
  CHECK(print_aligned(t, 26) ==
        "layout                step\n"
        "------------------  ------\n"
        "dp2 tp2 pp4 cp4     55.1 s\n"
        "zero1 1f1b\n"
        "dp64                   9 s\n");
}

TEST_CASE("a word that is wider than its column goes on after a mark of its own") {
  Table t;
  t.columns = {{.name = "keys", .wraps = true}, {.name = "tier"}};
  t.rows = {{std::string("parameter_server.staleness, dp"), std::string("E3")}};
  CHECK(print_aligned(t, 23) ==
        "keys               tier\n"
        "-----------------  ----\n"
        "parameter_server.  E3\n"
        "staleness, dp\n");
}

TEST_CASE("formats are named") {
  CHECK(table_format_named("markdown") == TableFormat::kMarkdown);
  CHECK(table_format_named("json") == TableFormat::kJson);
  CHECK_FALSE(table_format_named("xml"));
}
