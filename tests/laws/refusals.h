// Cases that `check` refuses, one change at a time.
#pragma once

#include <string>
#include <string_view>

#include "plan/case.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

/// A legal case: change `c`, say what the refusal must contain, and it is the legal case again.
class Refusals {
 public:
  explicit Refusals(const Case& legal) : c(legal), legal_(legal) { REQUIRE(refusal().empty()); }

  void refused(std::string_view words) {
    INFO(words << " in\n" << refusal());
    CHECK(refusal().find(words) != std::string::npos);
    c = legal_;
  }

  Case c;

 private:
  std::string refusal() const {
    const Result<void> checked = check(c);
    return checked.ok() ? std::string() : to_string(checked.error());
  }

  const Case legal_;
};

}  // namespace shardlab::testing
