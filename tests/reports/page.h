// A page as tests read it: its data, packed or not, as text.
#pragma once

#include <zlib.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/test.h"

namespace shardlab::testing {

/// What stands between two marks of a page; they must both be there.
inline std::string between(const std::string& page, const std::string& open, const std::string& close) {
  const size_t from = page.find(open);
  REQUIRE(from != std::string::npos);
  const size_t to = page.find(close, from + open.size());
  REQUIRE(to != std::string::npos);
  return page.substr(from + open.size(), to - from - open.size());
}

/// What `packed` packed.
inline std::string unpacked(const std::string& text) {
  std::string bytes;
  unsigned bits = 0;
  int held = 0;
  for (const char c : text) {
    const size_t digit = std::string("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/").find(c);
    if (digit == std::string::npos) break;
    bits = bits << 6 | static_cast<unsigned>(digit), held += 6;
    if (held >= 8) bytes += static_cast<char>(bits >> (held -= 8) & 255);
  }
  std::vector<char> out(64 << 20);
  uLongf size = out.size();
  REQUIRE(uncompress(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()) ==
          Z_OK);
  return {out.data(), size};
}

/// The data of a page as text.
inline std::string data_of(const std::string& page) {
  const bool is_packed = page.find("data-packed=\"deflate\"") != std::string::npos;
  const std::string text = between(between(page, "id=\"data\"", "/script>"), ">", "<");
  return is_packed ? unpacked(text) : text;
}

/// The values of a column of a page, one a case; empty where the page has no such column.
inline nlohmann::json column_of(const nlohmann::json& data, const std::string& name) {
  for (const auto& column : data["columns"]) {
    if (column["name"] != name) continue;
    const auto& raw = column["values"];
    if (raw.is_array()) return raw;
    nlohmann::json all = nlohmann::json::array();
    for (size_t i = 0; i < data["count"].get<size_t>(); ++i)
      all.push_back(raw.contains("c") ? raw["c"] : raw["d"][raw["i"][i].get<size_t>()]);
    return all;
  }
  return nlohmann::json::array();
}

}  // namespace shardlab::testing
