#include "interop/settings.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/base/limits.h"
#include "plan/base/values.h"

namespace shardlab::interop {

void Settings::set(std::string_view path, std::string value) {
  const auto found = std::ranges::find(out_.settings, path, [](const auto& s) { return std::string_view(s.first); });
  if (found != out_.settings.end())
    found->second = std::move(value);
  else
    out_.settings.emplace_back(path, std::move(value));
}
void Settings::set(std::string_view path, int64_t value) { set(path, fmt::to_string(value)); }
void Settings::set(std::string_view path, const char* value) { set(path, std::string(value)); }
void Settings::set(std::string_view path, bool value) { set(path, std::string(value ? "true" : "false")); }

std::optional<std::string> Settings::get(std::string_view path) const {
  const auto found = std::ranges::find(out_.settings, path, [](const auto& s) { return std::string_view(s.first); });
  return found == out_.settings.end() ? std::nullopt : std::optional(found->second);
}

int64_t Settings::count(std::string_view path, int64_t otherwise) const {
  const auto text = get(path);
  return text ? parse_count(*text).value_or(otherwise) : otherwise;
}

void Settings::problem(std::string_view key, std::string why) {
  std::string text = fmt::format("{}: {}", key, why);
  if (std::ranges::find(problems_, text) == problems_.end()) problems_.push_back(std::move(text));  // a setting may be read twice
}

void Settings::unread(std::string text) { out_.unread.push_back(std::move(text)); }

void Settings::differs(std::string_view key, std::string how) {
  std::string line = fmt::format("{}: {}", key, how);
  std::ranges::replace(line, '\n', ' ');  // it becomes a comment
  out_.differs.push_back(std::move(line));
}

Result<Imported> Settings::finish(const std::string& name, std::string_view framework) {
  out_.profile = std::string(framework);
  if (problems_.empty()) return std::move(out_);
  if (problems_.size() > limits::kProblems) problems_.resize(limits::kProblems);
  const bool one = problems_.size() == 1;
  return Error{ExitCode::kUsage,
               fmt::format("{} {} wrong, missing or not supported:\n    {}", problems_.size(), one ? "setting is" : "settings are",
                           fmt::join(problems_, "\n    ")),
               one ? "correct or add it; a wrong one that does not matter to you may be removed from a copy of the file"
                   : "correct or add them; wrong ones that do not matter to you may be removed from a copy of the file",
               name};
}

int64_t whole(Settings& out, std::string_view key, const std::string& text, int64_t least) {
  const auto n = parse_count(text);
  if (n && *n >= least && *n <= kMost) return *n;
  out.problem(key, n && *n > kMost ? fmt::format("{} is beyond 2^40", text)
                                   : fmt::format("`{}` is not a whole number of {} or more", text, least));
  return least;
}

int64_t product(int64_t a, int64_t b) { return a <= kMost / std::max<int64_t>(b, 1) ? a * b : kMost + 1; }

void set_batch(Settings& out, std::string_view key, int64_t sequences, int64_t dp, int64_t accumulation) {
  const int64_t micro_batch = std::max<int64_t>(out.count("train.micro_batch", 1), 1), seq_len = out.count("train.seq_len", 0);
  if (dp == 0 && sequences > 0 && accumulation > 0 && sequences % product(micro_batch, accumulation) == 0)
    dp = sequences / product(micro_batch, accumulation);
  if (dp > 0) out.set("layout.dp", dp);
  const int64_t together = product(micro_batch, std::max<int64_t>(dp, 1));
  if (sequences == 0 && dp > 0 && accumulation > 0 && product(together, accumulation) <= kMost) sequences = together * accumulation;
  if (dp > 0 && sequences > 0) {
    if (sequences % together != 0)
      return out.problem(key, fmt::format("{} is not a multiple of micro-batch {} * {} data-parallel ranks = {}", sequences,
                                          micro_batch, dp, together));
    accumulation = sequences / together;
  }
  if (accumulation > 0) out.set("train.grad_accumulation", accumulation);
  if (sequences > 0 && seq_len > 0 && product(sequences, seq_len) <= kMost)
    out.set("train.global_batch_tokens", sequences * seq_len);
}

}  // namespace shardlab::interop
