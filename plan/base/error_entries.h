// What can be said of a kind of refusal beyond its message, by a code that stays from version to version: `shardlab explain E101`.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "plan/base/result.h"

namespace shardlab {

struct ErrorEntry {
  ErrorKind kind;
  std::string_view code;   ///< "E101"
  std::string_view title;  ///< a few words
  std::string_view why;    ///< sentences: what was asked for, and why it is refused
  std::string_view next;   ///< sentences: what to do
};

/// One row a kind but `kPlain`, in the order of the kinds.
std::span<const ErrorEntry> error_entries();

/// The row of a kind; null for `kPlain`.
const ErrorEntry* entry_of(ErrorKind kind);

/// The row of a code. Refuses what is no code, with those that there are.
Result<ErrorEntry> entry_named(std::string_view code);

/// The entry as `shardlab explain` prints it, each sentence from the table within 100 characters a line.
std::string to_string(const ErrorEntry& entry);

}  // namespace shardlab
