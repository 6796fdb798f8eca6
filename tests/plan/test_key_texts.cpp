// Cases one after another: the texts of their keys, the hashes of their lines, the set of their ids.
#include "plan/key_texts.h"

#include <fmt/format.h>

#include <set>
#include <string>
#include <vector>

#include "plan/base/hashed_text.h"
#include "plan/base/id_set.h"
#include "plan/keys.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

std::vector<const CaseKey*> keys_of_cases() {
  std::vector<const CaseKey*> keys;
  for (const CaseKey& key : case_keys())
    if (key.get != nullptr) keys.push_back(&key);
  return keys;
}

/// The case with every key at a value that is not its first, where it has one.
Case changed_by(const CaseKey& key) {
  Case c;
  std::vector<std::string> values = words_of(key);
  for (const char* text : {"3", "0.5", "true", "false", "/some/where", "{optimizer: cpu}"}) values.emplace_back(text);
  for (const std::string& value : values)
    if (has_form(key, value) && key.set(c, value) && key.get(c) != key.get(Case())) return c;
  return c;
}

}  // namespace

TEST_CASE("texts of keys are those of each case, and what has changed is told") {
  const std::vector<const CaseKey*> keys = keys_of_cases();
  KeyTexts texts(keys);
  CHECK(texts.read(Case()).size() == keys.size());
  CHECK(texts.read(Case()).empty());
  size_t different = 0;
  for (size_t k = 0; k < keys.size(); ++k) {
    INFO(std::string(keys[k]->path));
    const Case c = changed_by(*keys[k]);
    for (const Case& next : {c, c, Case()}) {
      std::vector<std::string> before;
      for (size_t i = 0; i < keys.size(); ++i) before.push_back(texts[i]);
      const std::span<const size_t> changed = texts.read(next);
      std::vector<size_t> expected;
      for (size_t i = 0; i < keys.size(); ++i) {
        CHECK(texts[i] == keys[i]->get(next));
        if (texts[i] != before[i]) expected.push_back(i);
      }
      CHECK(std::vector<size_t>(changed.begin(), changed.end()) == expected);
    }
    different += keys[k]->get(c) != keys[k]->get(Case()) ? 1 : 0;
  }
  // Rates of a machine are set on described machines only, and a case has no word for some names.
  CHECK(different >= keys.size() - 12);
}

TEST_CASE("the hash of a text behind another is the hash of both, whatever the low byte before it") {
  for (const char* text : {"", "x", "layout:\n", "  tp: 4\n", "  schedule: \"\xc3\xa9\xff interleaved with a long text\"\n"}) {
    HashedText hashed{text};
    CHECK(hashed.text() == text);
    for (uint64_t i = 0; i < 3 * 256; ++i) {
      const uint64_t seed = (mix(i) & ~uint64_t{0xff}) | (i & 0xff);
      REQUIRE(hashed.behind(seed) == hash_text(text, seed));
    }
  }
}

TEST_CASE("a set of ids tells new ones from old ones, zero among them, and grows") {
  IdSet ids;
  std::set<uint64_t> expected;
  for (uint64_t i = 0; i < 5000; ++i) {
    const uint64_t id = mix(i % 1700) % 3000;  // many twice, and neighbours that collide
    CHECK(ids.insert(id) == expected.insert(id).second);
  }
  CHECK(ids.insert(0) == expected.insert(0).second);
  CHECK(!ids.insert(0));
  CHECK(ids.size() == expected.size());
}

}  // namespace shardlab::testing
