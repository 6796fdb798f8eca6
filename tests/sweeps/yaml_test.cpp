// The YAML tree: marks, problems, scalars, spelling.
#include "sweeps/yaml.h"

#include "plan/base/values.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

std::vector<std::string> problems_of(std::string_view text) {
  Problems problems("f.yaml");
  parse_yaml(text, problems);
  std::vector<std::string> lines;
  for (const Error& e : problems.errors()) lines.push_back(e.where + ": " + e.message);
  return lines;
}

}  // namespace

TEST_CASE("every node knows where it stands") {
  Problems problems("f.yaml");
  const YamlNode root = parse_yaml("a: 1\nb:\n  - x\n  - {c: \"2\"}\nd:\n", problems);
  REQUIRE(problems.empty());
  REQUIRE(root.entries.size() == 3);
  CHECK(root.entries[1].mark.line == 2);
  CHECK(root.entries[1].mark.column == 1);
  const YamlNode& c = root.find("b")->items[1].entries[0].value;
  CHECK(c.text == "2");
  CHECK(c.mark.line == 4);
  CHECK(c.mark.column == 9);
  CHECK(root.find("d")->is_null());
  CHECK(root.find("e") == nullptr);
  CHECK(to_flow(root) == "{a: 1, b: [x, {c: 2}], d: null}");
}

TEST_CASE("duplicates, merge keys and broken YAML are problems") {
  CHECK(problems_of("a: 1\nb: 2\na: 3\n") == std::vector<std::string>{"f.yaml:3:1: duplicate key `a`, first given on line 1"});
  CHECK(problems_of("x: {a: 1, a: 2}\n") == std::vector<std::string>{"f.yaml:1:11: duplicate key `a`, first given on line 1"});
  CHECK(problems_of("base: &b {x: 1}\nc:\n  <<: *b\n") ==
        std::vector<std::string>{"f.yaml:3:3: merge keys (<<) are not supported"});
  CHECK(problems_of("a: [1, 2\nb: 3\n").size() == 1);
  CHECK(problems_of("[a, b]: 1\n") == std::vector<std::string>{"f.yaml:1:1: a key must be a single word"});
  CHECK(problems_of("a: 1\n---\nb: 2\n").size() == 1);
  CHECK(problems_of("a: &x 1\nb: *x\n").empty());
  CHECK(problems_of(std::string(200, '[') + std::string(200, ']')).size() == 1);
  CHECK(problems_of("").empty());
}

TEST_CASE("anchors cannot unfold without end") {
  std::string bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n";
  for (char c = 'b'; c <= 'i'; ++c) {
    bomb += std::string(1, c) + ": &" + c + " [";
    for (int i = 0; i < 10; ++i) bomb += std::string(i ? ", *" : "*") + static_cast<char>(c - 1);
    bomb += "]\n";
  }
  CHECK(problems_of(bomb).size() == 1);
}

TEST_CASE("what is beyond a bound is refused with the bound") {
  // The library reads a lone comma as one empty document after another.
  for (const char* sign : {",", "a: 1\n...\n,"}) {
    INFO(sign);
    const auto found = problems_of(sign);
    REQUIRE(found.size() == 1);
    CHECK(found[0].find("not YAML: nothing can begin with this sign") != std::string::npos);
  }
  CHECK(problems_of(std::string(65, '[') + std::string(65, ']')).empty());
  CHECK(problems_of(std::string(66, '[') + std::string(66, ']')) ==
        std::vector<std::string>{"f.yaml:1:66: nested more than 64 levels deep"});
  CHECK(problems_of(std::string(200'000, '[')) == std::vector<std::string>{"f.yaml:1:10001: more than 10000 brackets are open"});
  CHECK(problems_of(std::string((8 << 20) + 1, '#')) ==
        std::vector<std::string>{"f.yaml: has 8388609 bytes, more than the 8388608 that are read"});
  CHECK(problems_of("a: &a [*a]\n") == std::vector<std::string>{"f.yaml:1:8: an anchor that stands for what it is part of"});
  std::string list = "[";
  for (int i = 0; i < 1'000'000; ++i) list += "1,";
  CHECK(problems_of(list + "]") ==
        std::vector<std::string>{"f.yaml:1:2000000: more than 1000000 values, with what anchors unfold to"});
}

TEST_CASE("problems beyond a hundred are counted") {
  Problems problems("f.yaml");
  std::string text;
  for (int i = 0; i < 150'000; ++i) text += "key" + std::to_string(i) + ": 1\n";
  const YamlNode root = parse_yaml(text, problems);
  REQUIRE(problems.empty());
  REQUIRE(root.entries.size() == 150'000);
  for (const YamlEntry& e : root.entries) add_unknown_key(problems, e.mark, e.key, "", {"tp", "pp"});
  CHECK(problems.errors().size() == 100);
  const std::string message = problems.take().message;
  CHECK(message.ends_with("... and 149900 more\n150000 errors. Nothing was run."));
  // A value as long as a file is not told whole.
  Problems one("f.yaml");
  one.add({1, 1}, "`" + std::string(1 << 20, 'x') + "`");
  CHECK(one.take().message.size() < 2100);
}

TEST_CASE("a file without an end is refused") {
  CHECK(read_text_file("/dev/zero").error().message == "has more than 8388608 bytes, the most that is read of such a file");
  CHECK(read_text_file("/").error().message == "is a folder, not a file");
}

TEST_CASE("a NUL is refused where it stands, in every encoding; escapes of wide blanks are UTF-8") {
  const std::string said = ": a NUL character, as files have that are not text";
  using namespace std::string_literals;
  CHECK(problems_of("a: 1\nb: x\0_y\n"s) == std::vector{"f.yaml:2:5" + said});
  CHECK(problems_of("a: \"x\\0y\"\n") == std::vector{"f.yaml:1:4" + said});
  CHECK(problems_of("\xff\xfe\x61\0\x3a\0\x20\0\x62\0"s).empty());
  CHECK(problems_of("\xff\xfe\x61\0\x3a\0\x20\0\0\0"s) == std::vector{"f.yaml:1:5" + said});
  Problems problems("f.yaml");
  CHECK(parse_yaml("a: \"x\\_y\\Nz\"\n", problems).find("a")->text == "x\u00a0y\u0085z");
}

TEST_CASE("any text survives as a scalar") {
  for (const std::string text : {"plain", "a b", "null", "", "-", "x: y", "#c", "quote \" and \\", "tab\tnewline\n",
                                 "\xc3\xa9t\xc3\xa9", "{a}", "[", "'", "1f1b", "&a", "*", "?", "true"}) {
    Problems problems("f.yaml");
    const YamlNode root = parse_yaml("k: " + yaml_scalar(text) + "\n", problems);
    INFO(text);
    REQUIRE(problems.empty());
    REQUIRE(root.find("k")->is_scalar());
    CHECK(root.find("k")->text == text);
  }
}

TEST_CASE("texts stand for quantities") {
  CHECK(parse_count("8") == 8);
  CHECK(parse_count("-3") == -3);
  CHECK(parse_count("64k") == 64'000);
  CHECK(parse_count("1Mi") == 1'048'576);
  CHECK(parse_count("2.5M") == 2'500'000);
  CHECK(parse_count("1e6") == 1'000'000);
  CHECK(parse_count("9007199254740993") == 9'007'199'254'740'993);
  for (const char* bad : {"", "x", "1.5", "1.0001k", "k", "Mi", "1 k", "0x10", "1KiB", "1e30", "nan", "inf", "--1", "1e"}) {
    INFO(bad);
    CHECK_FALSE(parse_count(bad));
  }
  CHECK(parse_number("0.25") == 0.25);
  CHECK(parse_number("1e-3") == 1e-3);
  CHECK(parse_number("1.5k") == 1500.0);
  CHECK_FALSE(parse_number("inf"));
  CHECK_FALSE(parse_number("1e400"));
  CHECK(parse_duration("90") == 90.0);
  CHECK(parse_duration("5m") == 300.0);
  CHECK(parse_duration("2h") == 7200.0);
  CHECK(parse_duration("250ms") == 0.25);
  CHECK_FALSE(parse_duration("0s"));
  CHECK_FALSE(parse_duration("5d"));
  CHECK(parse_bool("true") == true);
  CHECK_FALSE(parse_bool("yes"));
  CHECK(to_text(12582912.0) == "12582912");
  CHECK(to_text(3e-3f) == "0.003");
  CHECK(to_text(0.9f) == "0.9");
}

TEST_CASE("slips of the finger find their key") {
  const std::vector<std::string> keys = {"micro_batch", "seq_len", "tp", "schedule"};
  CHECK(nearest("microbatch", keys) == "micro_batch");
  CHECK(nearest("seqlen", keys) == "seq_len");
  CHECK(nearest("shcedule", keys) == "schedule");
  CHECK(nearest("pt", keys) == "tp");
  CHECK(nearest("temperature", keys).empty());
}
