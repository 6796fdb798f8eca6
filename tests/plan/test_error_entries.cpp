// Refusals carry their kind, and every kind has an entry.
#include <set>

#include "plan/base/error_entries.h"
#include "plan/case.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

TEST_CASE("every kind of refusal has an entry with a code of its own, found by kind and by code") {
  REQUIRE(entry_of(ErrorKind::kPlain) == nullptr);
  std::set<std::string_view> codes;
  for (const ErrorEntry& e : error_entries()) {
    INFO(e.code);
    CHECK(codes.insert(e.code).second);
    CHECK(entry_of(e.kind) == &e);
    CHECK(entry_named(e.code)->kind == e.kind);
    for (const std::string_view text : {e.why, e.next}) CHECK(text.ends_with('.'));
    const std::string printed = to_string(e);
    CHECK(printed.starts_with(std::string(e.code) + ": " + std::string(e.title) + "\n\n"));
    for (size_t begin = printed.find('\n') + 1, end; (end = printed.find('\n', begin)) != std::string::npos; begin = end + 1)
      CHECK(end - begin <= 100);
  }
  const auto unknown = entry_named("E999");
  REQUIRE_FALSE(unknown.ok());
  CHECK(unknown.error().message == "no refusal has the code `E999`");
  CHECK(unknown.error().hint.starts_with("codes:\n  E101  "));
}

TEST_CASE("a refused case says of which kind its refusal is") {
  const auto kind_of = [](void (*change)(Case&)) {
    Case c = tiny_case(Family::kGpt);
    REQUIRE(check(c).ok());
    change(c);
    const auto checked = check(c);
    REQUIRE_FALSE(checked.ok());
    INFO(checked.error().message);
    return checked.error().kind;
  };
  CHECK(kind_of([](Case& c) { c.train.precision = Precision::kFp4; }) == ErrorKind::kMissing);
  CHECK(kind_of([](Case& c) { c.layout.cp = 2, c.layout.cp_kind = ContextKind::kZigzag, c.layout.diloco.steps = 2; }) ==
        ErrorKind::kMissing);
  CHECK(kind_of([](Case& c) { c.layout.zero = 1; }) == ErrorKind::kApart);
  CHECK(kind_of([](Case& c) { c.train.global_batch_tokens = 3; }) == ErrorKind::kBatch);
  CHECK(kind_of([](Case& c) { c.layout.pp = 2, c.layout.schedule = Schedule::k1F1B, c.layout.stage_layers = "measured"; }) ==
        ErrorKind::kNotMeasured);
  CHECK(kind_of([](Case& c) {
          c.model = tiny_case(Family::kLlama).model;
          c.model.experts = {.count = 4, .top_k = 2, .ffn = 8};
          c.layout.dp = c.layout.ep = 2, c.layout.expert_placement = "measured";
        }) == ErrorKind::kNotCounted);
  CHECK(kind_of([](Case& c) { c.train.dropout = 2; }) == ErrorKind::kPlain);
}

}  // namespace
}  // namespace shardlab::testing
