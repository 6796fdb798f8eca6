// The header of safetensors: what is written is read, and what is damaged is refused.
#include "interop/safetensors.h"

#include <fmt/format.h>

#include <cstring>

#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using interop::parse_safetensors;

std::string file_of(const std::string& header, size_t data) {
  const auto length = static_cast<uint64_t>(header.size());
  std::string head(8, '\0');
  std::memcpy(head.data(), &length, 8);
  return head + header + std::string(data, '\0');
}

std::string refused_file(const std::string& bytes) {
  const auto parsed = parse_safetensors(bytes, static_cast<int64_t>(bytes.size()), "f");
  REQUIRE_FALSE(parsed.ok());
  return parsed.error().message;
}

TEST_CASE("a header that was written is read") {
  const std::string head = interop::safetensors_header(
      {{"a", {interop::WeightType::kF32, {2, 3}, 0, 24}}, {"b", {interop::WeightType::kBf16, {5}, 24, 34}}});
  REQUIRE(head.size() % 8 == 0);
  const auto parsed = parse_safetensors(head, static_cast<int64_t>(head.size()) + 34, "f");
  INFO((parsed.ok() ? std::string() : parsed.error().message));
  REQUIRE(parsed.ok());
  REQUIRE(parsed->data_begin == static_cast<int64_t>(head.size()));
  REQUIRE(parsed->tensors.at("a").shape == std::vector<int64_t>{2, 3});
  REQUIRE(parsed->tensors.at("b").type == interop::WeightType::kBf16);
  REQUIRE(parsed->tensors.at("b").begin == 24);
}

TEST_CASE("tensors of other types are named, and their bytes are accounted for") {
  const std::string bytes =
      file_of(R"({"m":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]},"w":{"dtype":"F16","shape":[],"data_offsets":[3,5]}})", 5);
  const auto whole = parse_safetensors(bytes, static_cast<int64_t>(bytes.size()), "f");
  REQUIRE(whole.ok());
  REQUIRE(whole->others == std::vector<std::string>{"m"});
  REQUIRE(whole->tensors.size() == 1);
}

TEST_CASE("a name of a foreign file is shown on one line, without what a terminal takes for a command") {
  REQUIRE(interop::shown_name("layers.0.weight") == "layers.0.weight");
  REQUIRE(interop::shown_name("a\nb\tc") == "a\\u000ab\\u0009c");
  REQUIRE(interop::shown_name("\x1b[2J\xff") == "\\u001b[2J\\u00ff");
  REQUIRE(interop::shown_name(std::string(1000, 'x')) == std::string(400, 'x') + "...");
  const std::string damaged = refused_file(file_of(R"({"a\nb\u001b":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}})", 9));
  REQUIRE(damaged.find("`a\\u000ab\\u001b` has 9 bytes") != std::string::npos);
}

TEST_CASE("damage is refused in words") {
  REQUIRE(refused_file("abc").find("ends within the length") != std::string::npos);
  REQUIRE(refused_file(std::string(8, '\xff')).find("is the most") != std::string::npos);
  REQUIRE(refused_file(file_of("{}", 0).substr(0, 9)).find("ends within its header") != std::string::npos);
  REQUIRE(refused_file(file_of("[]", 0)).find("not a JSON object") != std::string::npos);
  REQUIRE(refused_file(file_of(std::string(1000, '['), 0)).find("nested too deep") != std::string::npos);
  const auto entry = [](const std::string& fields, size_t data) { return file_of("{\"t\":{" + fields + "}}", data); };
  REQUIRE(
      refused_file(entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,9])", 9)).find("has 9 bytes where its extents ask for 8") !=
      std::string::npos);
  REQUIRE(refused_file(entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])", 4)).find("says no tensor") != std::string::npos);
  REQUIRE(refused_file(entry(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])", 8)).find("says no tensor") != std::string::npos);
  REQUIRE(refused_file(entry(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])", 8)).find("says no tensor") != std::string::npos);
  REQUIRE(refused_file(entry(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8])", 8)).find("overflow") !=
          std::string::npos);
  REQUIRE(refused_file(entry(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])", 8)).find("says no tensor") !=
          std::string::npos);
  REQUIRE(refused_file(entry(R"("dtype":3,"shape":[2],"data_offsets":[0,8])", 8)).find("says no tensor") != std::string::npos);
  REQUIRE(refused_file(entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])", 12)).find("belong to no tensor") !=
          std::string::npos);
  REQUIRE(
      refused_file(
          file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                  12))
          .find("overlap") != std::string::npos);
  REQUIRE(refused_file(file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12)).find("a hole") !=
          std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
