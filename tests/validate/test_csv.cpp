#include "simulator/estimator/validate/csv.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

std::string refusal(const std::string& text) {
  const auto table = read_csv(text, "t.csv");
  return table.ok() ? "read" : to_string(table.error());
}

TEST_CASE("CSV keeps fields with their positions") {
  const auto table = read_csv(
      "\xEF\xBB\xBF"
      "a,b\r\n1,\"x, \"\"y\"\"\nz\"\r\n\n 2 ,\n",
      "t.csv");
  REQUIRE(table.ok());
  CHECK(table->columns == std::vector<std::string>{"a", "b"});
  REQUIRE(table->records.size() == 2);
  CHECK(table->records[0][1].text == "x, \"y\"\nz");
  CHECK(table->records[0][1].line == 2);
  CHECK(table->records[0][1].column == 3);
  CHECK(table->records[1][0].text == "2");
  CHECK(table->records[1][0].line == 5);
  CHECK(table->records[1][1].text.empty());
  CHECK(table->column("b") == 1);
  CHECK(table->column("c") == -1);
}

TEST_CASE("CSV without a last line end keeps its last field") {
  const auto table = read_csv("a,b\n1,", "t.csv");
  REQUIRE(table.ok());
  REQUIRE(table->records.size() == 1);
  CHECK(table->records[0][1].text.empty());
}

TEST_CASE("CSV that is no table is refused where it is wrong") {
  CHECK(refusal("") ==
        "t.csv: the file is empty\n  write a header line with the names of the columns, then one line for each measured run");
  CHECK(refusal("a,b\n") == "t.csv:2:1: the file has a header but no rows\n  write one measured run per line");
  CHECK(refusal("a,a\n1,2\n") == "t.csv:1:3: column `a` appears twice\n  remove one of them");
  CHECK(refusal("a,\n1,2\n") == "t.csv:1:3: column 2 has no name\n  name it, or remove it");
  CHECK(refusal("a,b\n1\n") ==
        "t.csv:2:1: the row has 1 field, the header has 2\n  give the row one field for each column; write a field with a comma in "
        "quotes");
  CHECK(refusal("a\n\"1\n").starts_with("t.csv:2:1: the quote that opens here is never closed\n  add the closing quote"));
  CHECK(refusal("a\n\"1\"2\n").starts_with("t.csv:2:4: text after the closing quote of a field"));
  CHECK(refusal("a\n1\"2\n").starts_with("t.csv:2:2: a quote inside a field that does not begin with one"));
}

TEST_CASE("CSV of too many columns is refused before they are compared") {
  CHECK(refusal(std::string(5'000'000, ',') + "\n") ==
        "t.csv:1:1: 5000001 columns, more than 1000\n  write one column for each property of a run");
}

TEST_CASE("CSV errors are reported together, and only so many") {
  std::string text = "a,b\n";
  for (int i = 0; i < 30; ++i) text += "1\n";
  const std::string message = refusal(text);
  CHECK(message.find("t.csv:2:1") != std::string::npos);
  CHECK(message.find("t.csv:21:1") != std::string::npos);
  CHECK(message.find("t.csv:22:1") == std::string::npos);
  CHECK(message.ends_with("... and 10 more"));
}

}  // namespace
}  // namespace shardlab::testing
