// A refusal is a value: what was asked for cannot be had, why, and what to change.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "plan/base/check.h"

namespace shardlab {

/// The process exit codes (ARCHITECTURE.md, section 3). An `Error` carries the one that fits it.
enum class ExitCode : int {
  kDone = 0,
  kBug = 1,
  kUsage = 2,             ///< usage or configuration error: nothing ran
  kNo = 3,                ///< the answer is no: does not fit, no feasible layout
  kSomeFailed = 4,        ///< some cases failed
  kThresholdCrossed = 5,  ///< a --fail-if threshold was crossed
  kEnvironment = 6,       ///< no GPU, no permission, no such library
  kInterrupted = 130,
};

/// Kinds of refusals of which more can be said than a message does: rows of plan/base/error_entries.cpp, each with its code.
enum class ErrorKind : uint8_t {
  kPlain,          ///< the message says it all
  kMissing,        ///< a value that this version does not implement
  kApart,          ///< two settings that do not go together
  kOnlyEstimated,  ///< a model that is estimated and not executed
  kTooManyRanks,   ///< more ranks than devices
  kBatch,          ///< a batch that the ranks cannot share out
  kDoesNotFit,     ///< a rank needs more memory than it may use
  kNotMeasured,    ///< no measurement to deal layers out by
  kNotCounted,     ///< no counted rows to place experts by
  kLast = kNotCounted
};

/// One refusal. `message` states the value seen and the rule; `hint` says what to do next; `where` is
/// "file:line:column" when a file is to blame; `kind` leads to what else is to be said.
struct Error {
  ExitCode code = ExitCode::kUsage;
  std::string message;
  std::string hint;
  std::string where;
  ErrorKind kind = ErrorKind::kPlain;
};

/// A request that cannot be met as it stands.
inline Error refusal(std::string message, std::string hint, ErrorKind kind = ErrorKind::kPlain) {
  return {ExitCode::kUsage, std::move(message), std::move(hint), {}, kind};
}

/// "where: message\n  hint", as every verb prints it.
inline std::string to_string(const Error& e) {
  std::string text = e.where.empty() ? e.message : e.where + ": " + e.message;
  if (!e.hint.empty()) text += "\n  " + e.hint;
  return text;
}

/// A value or the reason why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }
  const T& value() const& {
    check_ok();
    return std::get<0>(state_);
  }
  T& value() & {
    check_ok();
    return std::get<0>(state_);
  }
  T&& value() && {
    check_ok();
    return std::get<0>(std::move(state_));
  }
  const T& operator*() const& { return value(); }
  T& operator*() & { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  const T* operator->() const { return &value(); }
  T* operator->() { return &value(); }
  const Error& error() const {
    SHARDLAB_CHECK(!ok(), "error() of a Result that holds a value");
    return std::get<1>(state_);
  }

 private:
  void check_ok() const { SHARDLAB_CHECK(ok(), "value() of a refused Result: {}", to_string(std::get<1>(state_))); }
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}
  bool ok() const { return !error_; }
  explicit operator bool() const { return ok(); }
  const Error& error() const {
    SHARDLAB_CHECK(!ok(), "error() of a Result that holds no error");
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

}  // namespace shardlab

/// Returns the error of a `Result`-valued expression from the enclosing function, if it has one.
#define SHARDLAB_TRY(expression)                                                           \
  do {                                                                                     \
    if (auto shardlab_try = (expression); !shardlab_try.ok()) return shardlab_try.error(); \
  } while (false)
