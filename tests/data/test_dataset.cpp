// Real input: what is read, what is refused and with which words, how it is split, cut and shuffled.
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "runtime/dataset.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

/// A folder of its own for one test, removed at the end.
class Scratch {
 public:
  explicit Scratch(const std::string& name)
      : path_(fs::temp_directory_path() / fmt::format("shardlab-data-{}-{}", name, getpid())) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Scratch() { fs::remove_all(path_); }

  std::string write(const std::string& name, const std::string& bytes) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return (path_ / name).string();
  }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

std::string u16(const std::vector<int>& tokens) {
  std::string bytes;
  for (const int t : tokens) bytes += {static_cast<char>(t & 255), static_cast<char>(t >> 8)};
  return bytes;
}

std::string i32(uint32_t v) {
  return {static_cast<char>(v & 255), static_cast<char>(v >> 8 & 255), static_cast<char>(v >> 16 & 255),
          static_cast<char>(v >> 24)};
}

std::string llmc(uint32_t magic, uint32_t version, uint32_t count, const std::string& tokens) {
  std::string header = i32(magic) + i32(version) + i32(count);
  header.resize(256 * 4, '\0');
  return header + tokens;
}

std::vector<int> counted(int n) {
  std::vector<int> v(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) v[static_cast<size_t>(i)] = i;
  return v;
}

std::vector<int32_t> sequence(const BatchSource& source, int64_t number, int64_t seq_len) {
  std::vector<int32_t> out(static_cast<size_t>(seq_len + 1), -1);
  source.sequence(number, out);
  return out;
}

std::string refusal(const DataSource& source, const DatasetOptions& options) {
  const auto opened = open_dataset(source, options);
  REQUIRE_FALSE(opened.ok());
  REQUIRE(opened.error().code == ExitCode::kUsage);
  REQUIRE_FALSE(opened.error().hint.empty());
  return opened.error().message;
}

void require_contains(const std::string& text, const std::string& part) {
  INFO(text);
  REQUIRE(text.find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("a permutation of every size hits each index once and depends on seed and epoch") {
  for (const int64_t count : {1, 2, 3, 5, 16, 17, 64, 1000, 4097}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < count; ++i) seen.insert(permuted_index(i, count, 7, 0));
    INFO("count " << count);
    REQUIRE(static_cast<int64_t>(seen.size()) == count);
    REQUIRE(*seen.begin() == 0);
    REQUIRE(*seen.rbegin() == count - 1);
  }
  const auto order = [](uint64_t seed, uint32_t epoch) {
    std::vector<int64_t> v;
    for (int64_t i = 0; i < 100; ++i) v.push_back(permuted_index(i, 100, seed, epoch));
    return v;
  };
  REQUIRE(order(1, 0) == order(1, 0));
  REQUIRE(order(1, 0) != order(2, 0));
  REQUIRE(order(1, 0) != order(1, 1));
}

TEST_CASE("a permutation mixes: positions move far, and each target is as likely as another") {
  constexpr int64_t kCount = 10, kSeeds = 4000;
  std::vector<int64_t> hits(static_cast<size_t>(kCount));
  for (uint64_t seed = 0; seed < kSeeds; ++seed) ++hits[static_cast<size_t>(permuted_index(0, kCount, seed, 0))];
  // 400 hits expected of each target, deviation sqrt(4000 * 0.1 * 0.9) = 19: five deviations are 95.
  for (const int64_t h : hits) REQUIRE(std::abs(h - kSeeds / kCount) < 95);
  double moved = 0;
  for (int64_t i = 0; i < 1000; ++i) moved += static_cast<double>(std::abs(permuted_index(i, 1000, 3, 0) - i));
  REQUIRE(moved / 1000 > 300);  // 333 for a uniform permutation
  REQUIRE(moved / 1000 < 366);
}

TEST_CASE("a file with zero bytes is no text, alone as in a folder") {
  const Scratch scratch("binary");
  const auto data = open_dataset({scratch.write("a.bin", std::string(1000, '\0')), ""}, {8, 256, 0.1, 1});
  REQUIRE_FALSE(data.ok());
  REQUIRE(data.error().message.find("a.bin` is no text") != std::string::npos);
  REQUIRE(data.error().hint.find("data.tokens") != std::string::npos);
}

TEST_CASE("a text file is cut at a stride of seq_len into sequences of seq_len + 1 bytes") {
  const Scratch scratch("cut");
  std::string text;
  for (int i = 8; i < 108; ++i) text += static_cast<char>(i);
  const auto data = open_dataset({scratch.write("a.txt", text), ""}, {8, 256, 0.1, 1});
  REQUIRE(data.ok());
  REQUIRE(data->files() == 1);
  REQUIRE(data->train_tokens() == 90);
  REQUIRE(data->train_sequences() == 11);  // 89 / 8: the last token of a sequence is only a target
  REQUIRE(data->validation_sequences() == 1);

  std::set<int32_t> starts;
  for (int64_t i = 0; i < 11; ++i) {
    const auto s = sequence(data->train(), i, 8);
    for (size_t j = 0; j < s.size(); ++j) REQUIRE(s[j] == s[0] + static_cast<int32_t>(j));
    REQUIRE(s[0] % 8 == 0);
    starts.insert(s[0]);
  }
  REQUIRE(starts.size() == 11);  // an epoch shows each sequence once
  REQUIRE(*starts.rbegin() == 88);

  const auto validation = data->validation();
  REQUIRE(validation.ok());
  REQUIRE(sequence(**validation, 0, 8) == std::vector<int32_t>{98, 99, 100, 101, 102, 103, 104, 105, 106});
  REQUIRE(sequence(**validation, 1, 8) == sequence(**validation, 0, 8));  // from the first again
}

TEST_CASE("each epoch shows every sequence once, in an order of its own; the seed names the order") {
  const Scratch scratch("epochs");
  const std::string path = scratch.write("a.bin", u16(counted(401)));
  const DatasetOptions options{4, 65536, 0, 5};
  const auto data = open_dataset({"", path}, options);
  REQUIRE(data.ok());
  REQUIRE(data->train_sequences() == 100);
  REQUIRE(data->validation_sequences() == 0);
  const auto epoch = [](const Dataset& d, int64_t e) {
    std::vector<int32_t> starts;
    for (int64_t i = 0; i < 100; ++i) starts.push_back(sequence(d.train(), e * 100 + i, 4)[0]);
    return starts;
  };
  const auto first = epoch(*data, 0), second = epoch(*data, 1);
  REQUIRE(first != second);
  REQUIRE(std::set<int32_t>(first.begin(), first.end()).size() == 100);
  REQUIRE(std::set<int32_t>(second.begin(), second.end()).size() == 100);
  REQUIRE(epoch(*open_dataset({"", path}, options), 0) == first);
  REQUIRE(epoch(*open_dataset({"", path}, {4, 65536, 0, 6}), 0) != first);
}

TEST_CASE("a folder is read in the order of its paths, without hidden, built and binary files, each file split on its own") {
  const Scratch scratch("folder");
  scratch.write("b.txt", "bbbbbbbbbbBB");
  scratch.write("a/z.txt", "zzzzzzzzzzZZ");
  scratch.write("a.txt", "aaaaaaaaaaAA");
  scratch.write("empty.txt", "");
  scratch.write(".git/config", "GIT GIT GIT GIT");
  scratch.write(".hidden", "HIDDEN");
  scratch.write("build/log.txt", "BUILD BUILD");
  scratch.write("build-debug/log.txt", "BUILD BUILD");
  scratch.write("out/CMakeCache.txt", "BUILD BUILD");
  scratch.write("out/deep/log.txt", "BUILD BUILD");
  scratch.write("runs/case.yaml", "RUN RUN");
  scratch.write("mine/results.sqlite", "RUN RUN");
  scratch.write("mine/report.html", "RUN RUN");
  scratch.write("image.png", std::string("\x89PNG\0\0", 6));
  fs::create_symlink(scratch.path(), scratch.path() + "/loop");
  const auto data = open_dataset({scratch.path(), ""}, {29, 256, 2.0 / 12, 1});
  REQUIRE(data.ok());
  REQUIRE(data->files() == 3);
  REQUIRE(data->train_tokens() == 30);
  const auto s = sequence(data->train(), 0, 29);
  REQUIRE(std::string(s.begin(), s.end()) == "aaaaaaaaaazzzzzzzzzzbbbbbbbbbb");  // "a.txt" < "a/z.txt" < "b.txt"

  const auto short_ones = open_dataset({scratch.path(), ""}, {5, 256, 2.0 / 12, 1});
  const auto v = sequence(**short_ones->validation(), 0, 5);
  REQUIRE(std::string(v.begin(), v.end()) == "AAZZBB");
}

TEST_CASE("token files: nanoGPT's without a header, llm.c's with one") {
  const Scratch scratch("tokens");
  std::vector<int> tokens{50256, 1, 65535, 256, 255, 7, 3, 9, 2};
  const DatasetOptions options{8, 65536, 0, 1};
  const std::vector<int32_t> want(tokens.begin(), tokens.end());
  const auto plain = open_dataset({"", scratch.write("plain.bin", u16(tokens))}, options);
  REQUIRE(plain.ok());
  REQUIRE(sequence(plain->train(), 0, 8) == want);
  const auto headed = open_dataset({"", scratch.write("headed.bin", llmc(20240520, 1, 9, u16(tokens)))}, options);
  REQUIRE(headed.ok());
  REQUIRE(headed->train_tokens() == 9);
  REQUIRE(sequence(headed->train(), 0, 8) == want);
}

TEST_CASE("the unigram entropy is that of the targets that training sees") {
  const Scratch scratch("entropy");
  // 9 training bytes at seq_len 4: two sequences, targets are bytes 1 to 8; the first byte is never a target.
  const auto half = open_dataset({scratch.write("half.txt", "xababababZZZ"), ""}, {4, 256, 0.25, 1});
  REQUIRE(half.ok());
  REQUIRE(half->train_tokens() == 9);
  REQUIRE(half->unigram_entropy() == Approx(std::log(2.0)).epsilon(1e-12));
  const auto constant = open_dataset({scratch.write("constant.txt", "xaaaaaaaa"), ""}, {4, 256, 0, 1});
  REQUIRE(constant->unigram_entropy() == 0);
  const auto skewed = open_dataset({scratch.write("skewed.txt", "aaabcaaab"), ""}, {4, 256, 0, 1});
  // targets a a b c a a a b: 5, 2, 1 of 8
  REQUIRE(skewed->unigram_entropy() ==
          Approx(-(5. / 8 * std::log(5. / 8) + 2. / 8 * std::log(2. / 8) + 1. / 8 * std::log(1. / 8))).epsilon(1e-12));
}

TEST_CASE("what cannot be read is refused with what was seen and what to do") {
  const Scratch scratch("refused");
  const DatasetOptions options{8, 256, 0.1, 1};
  require_contains(refusal({scratch.path() + "/none.txt", ""}, options), "none.txt`: No such file");
  require_contains(refusal({"", scratch.path() + "/none.bin"}, options), "none.bin`: No such file");
  require_contains(refusal({"", scratch.path()}, options), "not a regular file");
  const std::string pipe = scratch.path() + "/pipe";  // into which nobody writes
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  require_contains(refusal({pipe, ""}, options), "not a regular file");
  fs::remove(pipe);
  require_contains(refusal({scratch.write("empty.txt", ""), ""}, options), "holds no text");
  fs::create_directories(scratch.path() + "/folder");
  require_contains(refusal({scratch.path() + "/folder", ""}, options), "no file that is not empty, hidden or binary");
  require_contains(refusal({scratch.write("short.txt", "12345678"), ""}, options),
                   "has 8 tokens, too few for one sequence of 8 + 1");
  require_contains(refusal({scratch.write("high.txt", std::string(100, '\xc3')), ""}, {8, 128, 0.1, 1}), "holds byte 195");
  require_contains(refusal({"", scratch.write("high.bin", u16(counted(300)))}, options), "holds token 299");
  require_contains(refusal({"", scratch.write("odd.bin", u16(counted(20)) + "x")}, options), "has 41 bytes, an odd number");
  require_contains(refusal({"", scratch.write("empty.bin", "")}, options), "is empty");
  require_contains(refusal({"", scratch.write("cut.bin", llmc(20240520, 1, 30, u16(counted(29))))}, options),
                   "says 30 tokens, but 29 follow");
  require_contains(refusal({"", scratch.write("version.bin", llmc(20240520, 2, 20, u16(counted(20))))}, options), "version 2");
  require_contains(refusal({"", scratch.write("llama.bin", llmc(20240801, 7, 10, u16(counted(20))))}, options), "uint32 tokens");
  require_contains(refusal({"", scratch.write("head.bin", llmc(20240520, 1, 20, "").substr(0, 100))}, options),
                   "less than its header");
  require_contains(refusal({"", ""}, options), "neither data.text nor data.tokens");
  require_contains(refusal({"a", "b"}, options), "both data.text and data.tokens");
  require_contains(refusal({"a", ""}, {0, 256, 0.1, 1}), "seq_len is 0");
  require_contains(refusal({"a", ""}, {8, 256, 1.0, 1}), "validation fraction is 1");
}

TEST_CASE("a validation split that is too short is refused only when it is asked for") {
  const Scratch scratch("validation");
  const auto data = open_dataset({scratch.write("a.txt", std::string(50, 'a')), ""}, {8, 256, 0.1, 1});
  REQUIRE(data.ok());
  REQUIRE(data->validation_sequences() == 0);
  REQUIRE_FALSE(data->validation().ok());
  require_contains(data->validation().error().message, "has 5 tokens, too few for one sequence of 8 + 1");
}

namespace {

struct Packed {
  std::vector<int32_t> tokens, targets, positions;
};
Packed packed(const BatchSource& source, int64_t number, int64_t seq_len) {
  const auto n = static_cast<size_t>(seq_len);
  Packed p{std::vector<int32_t>(n, -1), std::vector<int32_t>(n, -1), std::vector<int32_t>(n, -1)};
  source.packed(number, {p.tokens, p.targets, p.positions});
  return p;
}

}  // namespace

TEST_CASE("packed files: each is a document, no target is another's, and what a sequence cuts off begins anew") {
  const Scratch scratch("packed");
  scratch.write("a.txt", "abcdef");
  scratch.write("b.txt", "x");  // no token of it has a target
  scratch.write("c.txt", "uvwxyz");
  scratch.write("d.txt", "");
  DataSource source{scratch.path(), ""};
  source.packed = true;
  const auto data = open_dataset(source, {4, 256, 0, 1});
  REQUIRE(data.ok());
  REQUIRE(data->train_documents() == 2);
  REQUIRE(data->train_sequences() == 2);  // 5 + 5 places, of which two are left over
  std::set<std::string> seen;
  for (int64_t i = 0; i < 2; ++i) {
    const Packed p = packed(data->train(), i, 4);
    const std::string tokens(p.tokens.begin(), p.tokens.end()), targets(p.targets.begin(), p.targets.end());
    seen.insert(tokens + " " + targets +
                fmt::format(" {} {} {} {}", p.positions[0], p.positions[1], p.positions[2], p.positions[3]));
  }
  REQUIRE(seen == std::set<std::string>{"abcd bcde 0 1 2 3", "euvw fvwx 0 0 1 2"});
  // The losses' baseline counts the targets that are trained on: b c d e f v w x, all different.
  REQUIRE(std::abs(data->unigram_entropy() - std::log(8)) < 1e-12);
}

TEST_CASE("packed tokens: a document ends with its last token, and a file without one is refused") {
  const Scratch scratch("packed-tokens");
  const std::string path = scratch.write("a.bin", u16({1, 2, 9, 9, 3, 4, 5, 9, 6, 7, 8}));
  DataSource source{"", path};
  source.packed = true;
  source.document_end = 9;
  const auto data = open_dataset(source, {7, 10, 0, 1});
  REQUIRE(data.ok());
  REQUIRE(data->train_documents() == 3);  // 1 2 9; 9 alone has no target; 3 4 5 9; 6 7 8
  const Packed p = packed(data->train(), 0, 7);
  REQUIRE(p.tokens == std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7});
  REQUIRE(p.targets == std::vector<int32_t>{2, 9, 4, 5, 9, 7, 8});
  REQUIRE(p.positions == std::vector<int32_t>{0, 1, 0, 1, 2, 0, 1});
  source.document_end = 0;
  require_contains(refusal(source, {7, 10, 0, 1}), "holds no token 0 before its last, so it is one document");
}

}  // namespace shardlab::testing
