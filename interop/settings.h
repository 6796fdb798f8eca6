// Settings that are read from a framework's file: the account of an import, and what files of all frameworks share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "interop/frameworks.h"

namespace shardlab::interop {

/// Sizes beyond this are slips, and would overflow where they are multiplied.
inline constexpr int64_t kMost = int64_t{1} << 40;

/// What becomes of the keys of one file: settings of a case, problems, and notes.
class Settings {
 public:
  void set(std::string_view path, std::string value);
  void set(std::string_view path, int64_t value);
  void set(std::string_view path, const char* value);
  void set(std::string_view path, bool value);
  std::optional<std::string> get(std::string_view path) const;
  /// The setting as a number, or `otherwise` where it is not set or no number.
  int64_t count(std::string_view path, int64_t otherwise) const;
  /// The key is wrong, missing, or has a meaning that no case can express.
  void problem(std::string_view key, std::string why);
  /// The key of the file that no case has, perhaps with a reason.
  void unread(std::string text);
  /// The key is set by the nearest word that a case has: `how` the two differ.
  void differs(std::string_view key, std::string how);
  /// The settings, or an error that lists every problem. `name`: of the file.
  Result<Imported> finish(const std::string& name, std::string_view framework);

 private:
  Imported out_;
  std::vector<std::string> problems_;
};

/// A whole number that is not below `least` and no slip; otherwise a problem and `least`.
int64_t whole(Settings& out, std::string_view key, const std::string& text, int64_t least = 0);

/// A product that stays a number: beyond `kMost` it is kMost + 1.
int64_t product(int64_t a, int64_t b);

/// Batch, ranks and accumulation: what two of them say of the third. `sequences` of a step over all ranks, which `key` says; 0: not
/// said.
void set_batch(Settings& out, std::string_view key, int64_t sequences, int64_t dp, int64_t accumulation);

/// The readers of one framework each. `name`: of the file; `devices`: ranks, 0 where they are not known.
Result<Imported> import_megatron(std::string_view text, const std::string& name, int64_t devices);
Result<Imported> import_deepspeed(std::string_view text, const std::string& name, int64_t devices);
Result<Imported> import_torchtitan(std::string_view text, const std::string& name, int64_t devices);

}  // namespace shardlab::interop
