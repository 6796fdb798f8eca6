// Catch2, version 2 or 3, under one include; and golden files.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <string>

#include "tests/paths.h"

namespace shardlab::testing {

/// Compares `text` with tests/golden/<name>. With SHARDLAB_UPDATE_GOLDEN=1 in the environment the file is rewritten instead, to be
/// reviewed as text. Returns an empty string when equal, else what differs and how to update.
std::string golden_difference(const std::string& name, const std::string& text);

}  // namespace shardlab::testing

#define REQUIRE_GOLDEN(name, text) REQUIRE(::shardlab::testing::golden_difference(name, text) == "")
