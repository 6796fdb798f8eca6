// Reasons of many cases as a person reads them: one row each, however many values a reason has.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plan/base/result.h"

namespace shardlab {

/// An error as it stands in a row of results: what is wrong, after "; " what to do about it, and in parentheses where.
std::string reason_of(const Error& error);

/// One reason and the cases that have it.
struct Reason {
  std::string text;  ///< "zero=1, 2 or 3 with dp=1: there is nothing to shard over": values that differ are listed
  int64_t cases = 0;
  std::string example;  ///< name of the first case
};

/// Counts reasons that differ in their values alone as one. What to do about it, after the first "; ", tells no reasons apart, and
/// is left out where it is not the same. A value is a word with a digit in it, or one that follows "=". Of more than four values of
/// a place the first two and the last stand in the text: "tp=1, 2, ..., 64"; where other places have several values too, all values
/// are those of the first case, and the text says so.
class Reasons {
 public:
  /// `text` as it stands in a row of results.
  void add(std::string_view text, std::string_view example);
  /// The commonest first; of equally common ones the first.
  std::vector<Reason> list() const;
  bool empty() const { return kinds_.empty(); }

 private:
  struct Place {
    std::vector<std::string> values;  ///< distinct, as they came; at most `kValues`
    std::string last;
    bool more = false;  ///< than `values` has come
  };
  struct Kind {
    std::string frame;  ///< the text before the advice, with '\0' where values are
    std::string advice;
    bool one_advice = true;
    std::vector<Place> places;
    int64_t cases = 0;
    std::string example;
  };
  static constexpr size_t kValues = 4;
  static std::string values_of(const Place& place);
  std::vector<Kind> kinds_;
  std::unordered_map<std::string, size_t> position_;  ///< in `kinds_`, by frame
};

}  // namespace shardlab
