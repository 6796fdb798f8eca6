#include "plan/key_texts.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "plan/base/check.h"
#include "plan/same_machine.h"

namespace shardlab {

namespace {

/// A part of a case, which is all that keys of one section read.
struct CasePart {
  std::string_view section;                      ///< how the paths of its keys begin
  bool (*update)(Case& last, const Case& next);  ///< takes the part over; whether it has changed
};

template <auto Part>
bool update(Case& last, const Case& next) {
  if (last.*Part == next.*Part) return false;
  last.*Part = next.*Part;
  return true;
}

bool update_machine(Case& last, const Case& next) {
  if (same(last.machine, next.machine)) return false;
  last.machine = next.machine;
  return true;
}

constexpr std::array<CasePart, 7> kCaseParts = {{{"model.", update<&Case::model>},
                                                 {"machine.", update_machine},
                                                 {"layout.", update<&Case::layout>},
                                                 {"train.", update<&Case::train>},
                                                 {"data.", update<&Case::data>},
                                                 {"measure.", update<&Case::measure>},
                                                 {"checkpoint.", update<&Case::checkpoint>}}};

}  // namespace

KeyTexts::KeyTexts(std::span<const CaseKey* const> keys) : keys_(keys.begin(), keys.end()), texts_(keys.size()) {
  static_assert(kCaseParts.size() == kParts);
  for (const CaseKey* key : keys_) {
    SHARDLAB_CHECK(key->get != nullptr, "no case says {}", key->path);
    const auto part = std::ranges::find_if(kCaseParts, [&](const CasePart& p) { return key->path.starts_with(p.section); });
    part_.push_back(static_cast<size_t>(part - kCaseParts.begin()));
  }
}

std::span<const size_t> KeyTexts::read(const Case& config) {
  const bool first = !std::exchange(begun_, true);
  std::array<bool, kParts + 1> ask;
  for (size_t p = 0; p < kParts; ++p) ask[p] = kCaseParts[p].update(last_, config) || first;
  ask[kParts] = true;
  changed_.clear();
  for (size_t k = 0; k < keys_.size(); ++k) {
    if (!ask[part_[k]]) continue;
    std::string text = keys_[k]->get(config);
    if (!first && text == texts_[k]) continue;
    texts_[k] = std::move(text);
    changed_.push_back(k);
  }
  return changed_;
}

}  // namespace shardlab
