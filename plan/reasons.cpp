#include "plan/reasons.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "plan/base/error_entries.h"
#include "plan/reason_code.h"

namespace shardlab {

std::string reason_of(const Error& error) {
  std::string text = error.message;
  if (const ErrorEntry* entry = entry_of(error.kind)) text.append(" [").append(entry->code).append("]");
  if (!error.hint.empty()) text += "; " + error.hint;
  if (!error.where.empty()) text += " (" + error.where + ")";
  return text;
}

std::string_view code_in(std::string_view reason) {
  for (size_t at = reason.rfind(" [E"); at != std::string_view::npos && at > 0; at = reason.rfind(" [E", at - 1)) {
    const size_t end = reason.find(']', at);
    if (end == std::string_view::npos) continue;
    for (const ErrorEntry& entry : error_entries())
      if (reason.substr(at + 2, end - at - 2) == entry.code) return entry.code;
  }
  return {};
}

namespace {

bool ends_word(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0 || std::string_view("=,:;()`'\"[]{}").find(c) != std::string_view::npos;
}

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

/// A text taken apart: its frame, and the values that stand in it.
struct Parts {
  std::string frame;
  std::vector<std::string_view> values;
};

Parts parts_of(std::string_view text) {
  Parts parts;
  for (size_t begin = 0; begin < text.size();) {
    if (ends_word(text[begin])) {
      parts.frame += text[begin++];
      continue;
    }
    size_t end = begin;
    while (end < text.size() && !ends_word(text[end])) ++end;
    const size_t next = end;
    while (end > begin && (text[end - 1] == '.' || text[end - 1] == '?')) --end;  // of the sentence
    const std::string_view word = text.substr(begin, end - begin);
    const bool given = begin > 0 && text[begin - 1] == '=';
    if (!word.empty() && (given || std::ranges::any_of(word, is_digit)))
      parts.frame += '\0', parts.values.push_back(word);
    else
      parts.frame += word;
    parts.frame += text.substr(end, next - end);
    begin = next;
  }
  return parts;
}

}  // namespace

void Reasons::add(std::string_view text, std::string_view example) {
  const size_t end = std::min(text.find("; "), text.size());
  const std::string_view advice = text.substr(end);
  Parts parts = parts_of(text.substr(0, end));
  const auto [at, fresh] = position_.emplace(parts.frame, kinds_.size());
  if (fresh) {
    kinds_.emplace_back();
    kinds_.back().frame = std::move(parts.frame), kinds_.back().places.resize(parts.values.size());
    kinds_.back().advice = advice, kinds_.back().example = example;
  }
  Kind& kind = kinds_[at->second];
  ++kind.cases;
  kind.one_advice = kind.one_advice && kind.advice == advice;
  for (size_t i = 0; i < parts.values.size(); ++i) {
    Place& place = kind.places[i];
    if (place.last == parts.values[i]) continue;
    place.last = parts.values[i];
    if (std::ranges::find(place.values, place.last) != place.values.end()) continue;
    if (place.values.size() < kValues)
      place.values.push_back(place.last);
    else
      place.more = true;
  }
}

std::string Reasons::values_of(const Place& place) {
  std::string text;
  if (place.more) {
    const bool again = place.last == place.values[0] || place.last == place.values[1];
    return fmt::format("{}, {}, ...{}", place.values[0], place.values[1], again ? "" : ", " + place.last);
  }
  for (size_t i = 0; i < place.values.size(); ++i)
    text += (i == 0 ? "" : i + 1 < place.values.size() ? ", " : " or ") + place.values[i];
  return text;
}

std::vector<Reason> Reasons::list() const {
  std::vector<Reason> all;
  for (const Kind& kind : kinds_) {
    Reason reason{"", kind.cases, kind.example};
    // Long lists of several places say nothing of which values go together: there the first case stands for the others.
    const bool first_alone = std::ranges::any_of(kind.places, &Place::more) &&
                             std::ranges::count_if(kind.places, [](const Place& p) { return p.values.size() > 1; }) > 1;
    size_t place = 0;
    for (const char c : kind.frame) {
      if (c != '\0') {
        reason.text += c;
        continue;
      }
      const Place& p = kind.places[place++];
      reason.text += first_alone ? p.values[0] : values_of(p);
    }
    if (first_alone) reason.text += " (the first case; the others have other values)";
    if (kind.one_advice) reason.text += kind.advice;
    all.push_back(std::move(reason));
  }
  std::ranges::stable_sort(all, std::greater(), &Reason::cases);
  return all;
}

}  // namespace shardlab
