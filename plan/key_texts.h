// What the keys of many cases say, one case after another.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "plan/case.h"
#include "plan/keys.h"

namespace shardlab {

/// The texts of keys of one case after another. Cases of a sweep differ in few keys: keys are asked again only where their part of the case
/// (`model`, `machine`, `layout`, `train`, `data`, `measure`, `checkpoint`) is not equal to the same part of the case before.
class KeyTexts {
 public:
  /// Every one of `keys` has a `get`.
  explicit KeyTexts(std::span<const CaseKey* const> keys);

  /// Takes the next case. Returns the places, in `keys`, of the texts that are not what they were, ascending: of the first case all.
  std::span<const size_t> read(const Case& config);

  /// What the case says of `keys[key]`: `get` of that key.
  const std::string& operator[](size_t key) const { return texts_[key]; }
  size_t size() const { return texts_.size(); }
  const CaseKey& key(size_t key) const { return *keys_[key]; }

 private:
  static constexpr size_t kParts = 7;
  std::vector<const CaseKey*> keys_;
  std::vector<size_t> part_;        ///< of each key; kParts: of none, and asked of every case
  std::vector<std::string> texts_;  ///< of the case that was read last
  std::vector<size_t> changed_;
  bool begun_ = false;
  Case last_;  ///< its parts are those of the case that was read last
};

}  // namespace shardlab
