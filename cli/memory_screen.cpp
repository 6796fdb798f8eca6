#include "cli/memory_screen.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/memory_report.h"
#include "cli/namespaces.h"
#include "plan/base/units.h"
#include "plan/base/values.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

using Code = ScreenKey::Code;
using whatif::StageAnswer;

constexpr int kFieldWidth = 36;  ///< columns of the fields, left of the answer

ScreenLine line(std::string text, Style style = Style::kPlain) { return {{std::move(text), style}}; }

/// A bar of at most `width` cells: bytes against the largest that is shown.
std::string bar(int64_t bytes, int64_t most, int width) {
  if (most <= 0 || width <= 0) return "";
  const double cells = static_cast<double>(bytes) / static_cast<double>(most) * width;
  return std::string(static_cast<size_t>(std::clamp<int>(static_cast<int>(cells + 0.5), bytes > 0 ? 1 : 0, width)), '#');
}

/// At most `width` characters, two dots in place of what is left out.
std::string cut(const std::string& text, size_t width) {
  return text.size() <= width ? text : width < 2 ? std::string() : text.substr(0, width - 2) + "..";
}

std::string difference_text(int64_t before, int64_t after) { return before == after ? "" : signed_bytes(after - before); }

Style style_of(const whatif::Answer& answer) {
  switch (answer.verdict()) {
    case whatif::Verdict::kUnknown: return Style::kPlain;
    case whatif::Verdict::kFits: return Style::kGood;
    case whatif::Verdict::kTight: return Style::kChanged;
    case whatif::Verdict::kUnlikely:
    case whatif::Verdict::kNo: return Style::kBad;
  }
  return Style::kPlain;
}

/// Words that a shell takes as they are.
std::string quoted(const std::string& word) {
  const bool plain =
      word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=.,:/+@%") == std::string::npos;
  if (plain && !word.empty()) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

/// Cuts a line off at `width` characters.
void clip(ScreenLine& line, int width) {
  auto left = static_cast<size_t>(std::max(width, 0));
  for (StyledText& part : line) {
    part.text.resize(std::min(part.text.size(), left));
    left -= part.text.size();
  }
  std::erase_if(line, [](const StyledText& part) { return part.text.empty(); });
}

size_t width_of(const ScreenLine& line) {
  size_t width = 0;
  for (const StyledText& part : line) width += part.text.size();
  return width;
}

}  // namespace

Result<MemoryScreen> MemoryScreen::create(CaseFlags flags) {
  auto told = tell_memory(flags, {}, false);
  if (!told.ok()) return told.error();
  return MemoryScreen(std::move(flags), std::move(*told));
}

MemoryScreen::MemoryScreen(CaseFlags flags, ToldMemory told)
    : flags_(std::move(flags)), told_flags_(flags_), base_flags_(flags_), told_(std::move(told)), base_(told_) {
  const bool own = told_.question.exact;
  fields_.push_back({flags_.devices > 0 ? "devices" : "dp", {}});
  for (const char* size : {"tp", "pp"}) fields_.push_back({size, {}});
  if (!own)
    for (const char* size : {"vpp", "cp", "ep"}) fields_.push_back({size, {}});
  fields_.push_back({"zero", {"0", "1", "2", "3"}});
  const auto& schedules = analytic::schedule_words();
  fields_.push_back({"schedule", {schedules.begin(), schedules.end()}});
  if (!own) fields_.push_back({"sequence_parallel", {"false", "true"}});
  fields_.push_back({"recompute", {"none", "selective", "full"}});
  fields_.push_back({"offload",
                     {"none", "activations=cpu", "optimizer=cpu", "optimizer=nvme", "activations=cpu,optimizer=cpu",
                      "activations=cpu,optimizer=nvme"}});
  fields_.push_back({"precision", {"fp32", "bf16", "fp16", "fp8"}});
  for (const char* size : {"micro_batch", "grad_accumulation", "seq_len"}) fields_.push_back({size, {}});
}

std::string MemoryScreen::value_of(const ToldMemory& told, const CaseFlags& flags, const Field& field) {
  if (field.key == "devices") return std::to_string(flags.devices);
  for (const auto& [key, value] : flags.layout)
    if (key == field.key && !value.empty()) return value;
  const auto json = layout_json(told.question);
  const auto found = json.find(field.key);
  if (found == json.end()) return "";
  return found->is_string() ? found->get<std::string>() : found->dump();
}

std::string MemoryScreen::value(const Field& field) const { return value_of(told_, flags_, field); }

std::string MemoryScreen::command() const {
  const CaseFlags& f = told_flags_;
  std::string out = fmt::format("shardlab memory --model {} --machine {}", quoted(f.model), quoted(f.machine));
  if (!f.machine_file.empty()) out += " --machine-file " + quoted(f.machine_file);
  if (f.devices > 0) out += fmt::format(" --devices {}", f.devices);
  for (const auto& [key, value] : f.layout) {
    if (value.empty()) continue;
    std::string flag = key;
    std::ranges::replace(flag, '_', '-');
    out += fmt::format(" --{} {}", flag, quoted(value));
  }
  for (const std::string& set : f.set) out += " --set " + quoted(set);
  return out;
}

// ---- keys ----------------------------------------------------------------------------------------------------------------------

bool MemoryScreen::press(ScreenKey key) {
  if (edited_) {
    edit(key);
    return true;
  }
  const char c = key.code == Code::kCharacter ? key.character : '\0';
  if (c == 'q') return false;
  if (changes_ && c >= '1' && c <= '9') {
    take_change(static_cast<size_t>(c - '1'));
  } else if (key.code == Code::kUp || c == 'k') {
    cursor_ = (cursor_ + fields_.size() - 1) % fields_.size();
  } else if (key.code == Code::kDown || c == 'j') {
    cursor_ = (cursor_ + 1) % fields_.size();
  } else if (key.code == Code::kLeft || c == 'h') {
    step(-1);
  } else if (key.code == Code::kRight || c == 'l') {
    step(+1);
  } else if (key.code == Code::kEnter) {
    edited_ = value(fields_[cursor_]);
  } else if (c >= '0' && c <= '9') {
    edited_ = std::string(1, c);
  } else if (key.code == Code::kEscape) {
    changes_.reset();
  } else if (c == 'u') {
    undo();
  } else if (c == 'n' && !refusal_) {
    base_ = told_, base_flags_ = told_flags_;
  } else if (c == 'w') {
    if (changes_)
      changes_.reset();
    else
      changes_ = memory_advice(told_.question);
  }
  return true;
}

void MemoryScreen::edit(ScreenKey key) {
  switch (key.code) {
    case Code::kCharacter:
      if (key.character >= ' ' && key.character <= '~') edited_->push_back(key.character);
      break;
    case Code::kBackspace:
      if (!edited_->empty()) edited_->pop_back();
      break;
    case Code::kEscape: edited_.reset(); break;
    case Code::kUp:
    case Code::kDown:
    case Code::kLeft:
    case Code::kRight: break;
    case Code::kEnter: {
      const std::string text = *std::exchange(edited_, std::nullopt);
      if (!text.empty()) set({{fields_[cursor_].key, text}});
      break;
    }
  }
}

void MemoryScreen::step(int direction) {
  const Field& field = fields_[cursor_];
  const std::string now = value(field);
  if (!field.choices.empty()) {
    const auto n = static_cast<std::ptrdiff_t>(field.choices.size());
    const auto at = std::ranges::find(field.choices, now) - field.choices.begin();
    const std::ptrdiff_t next = at == n ? 0 : (at + direction + n) % n;
    return set({{field.key, field.choices[static_cast<size_t>(next)]}});
  }
  const int64_t size = parse_count(now).value_or(1);
  int64_t power = 1;
  while (power * 2 <= size) power *= 2;
  const int64_t next = direction > 0 ? power * 2 : power < size ? power : power / 2;
  if (next >= 1) set({{field.key, std::to_string(next)}});
}

void MemoryScreen::take_change(size_t index) {
  if (index >= changes_->changes.size()) return;
  set(changes_->changes[index].words);
  changes_.reset();
}

void MemoryScreen::set(const whatif::Words& words) {
  history_.push_back(flags_);
  refusal_.reset();
  for (const auto& [key, value] : words) {
    if (key != "devices") {
      set_word(flags_, key, value);
      continue;
    }
    const auto devices = parse_count(value);
    if (devices && *devices >= 1 && *devices <= (1 << 20))
      flags_.devices = *devices;
    else
      refusal_ = Error{ExitCode::kUsage, fmt::format("devices={} is not a number of devices", value), "use 1 to 1Mi", {}};
  }
  if (refusal_) return;
  auto told = tell_memory(flags_, {}, false);
  if (!told.ok()) {
    refusal_ = told.error();
    return;
  }
  told_ = std::move(*told), told_flags_ = flags_;
  if (changes_) changes_ = memory_advice(told_.question);
}

void MemoryScreen::undo() {
  if (history_.empty()) return;
  flags_ = history_.back();
  history_.pop_back();
  const size_t kept = history_.size();
  set({});
  history_.resize(kept);
}

// ---- drawing -------------------------------------------------------------------------------------------------------------------

ScreenLine MemoryScreen::field_line(size_t index) const {
  const Field& field = fields_[index];
  const bool here = index == cursor_;
  const std::string text = here && edited_ ? *edited_ + "_" : value(field);
  const bool changed = text != value_of(base_, base_flags_, field);
  ScreenLine out;
  out.push_back({fmt::format("{} {:<18}", here ? ">" : " ", field.key), here ? Style::kTitle : Style::kPlain});
  out.push_back({fmt::format("{:<16}", cut(text, 15)), here ? Style::kCursor : changed ? Style::kChanged : Style::kPlain});
  return out;
}

/// The items of the stage that needs most, beside those of what is compared with.
std::vector<ScreenLine> MemoryScreen::answer_lines(int width) const {
  const whatif::Answer& answer = told_.answer;
  const StageAnswer &worst = answer.worst(), &before = base_.answer.worst();
  std::vector<ScreenLine> lines;
  lines.push_back(
      line(fmt::format("{:<12}{:>10}  {:>11}", fmt::format("stage {}", worst.stage), "bytes", "against now"), Style::kTitle));
  int64_t most = 1;
  for (size_t g = 0; g < whatif::kGroups; ++g) most = std::max(most, worst.of(static_cast<whatif::ItemGroup>(g)));
  for (size_t g = 0; g < whatif::kGroups; ++g) {
    const auto group = static_cast<whatif::ItemGroup>(g);
    const int64_t bytes = worst.of(group);
    // Narrower than in tables.
    const std::string_view words = group == whatif::ItemGroup::kReserved ? "slack"
                                   : group == whatif::ItemGroup::kDevice ? "driver"
                                                                         : name_of(group);
    lines.push_back({{fmt::format("{:<12}{:>10}  ", words, bytes_text(bytes)), Style::kPlain},
                     {fmt::format("{:>11}  ", difference_text(before.of(group), bytes)), Style::kChanged},
                     {bar(bytes, most, width - 37), Style::kDim}});
  }
  lines.push_back({{fmt::format("{:<12}{:>10}  ", "needs", bytes_text(worst.device())), Style::kTitle},
                   {fmt::format("{:>11}", difference_text(before.device(), worst.device())), Style::kChanged}});
  if (answer.capacity > 0) {
    const whatif::Interval range = answer.device();
    lines.push_back(
        line(fmt::format("{:<12}{:>10}  {}", "of", bytes_text(answer.capacity), verdict_words(answer)), style_of(answer)));
    lines.push_back(line(fmt::format("{:<12}{:>10}", answer.headroom() < 0 ? "missing" : "left",
                                     bytes_text(answer.headroom() < 0 ? -answer.headroom() : answer.headroom())),
                         style_of(answer)));
    if (!answer.exact)
      lines.push_back(line(fmt::format("nine of ten: {} to {}", bytes_text(range.low), bytes_text(range.high)), Style::kDim));
  }
  if (worst.host_bytes + worst.nvme_bytes > 0)
    lines.push_back(line(fmt::format("host {}, NVMe {} a rank", bytes_text(worst.host_bytes), bytes_text(worst.nvme_bytes))));
  if (answer.step_s > 0) {
    const double was = base_.answer.step_s;
    const std::string against =
        was > 0 && was != answer.step_s ? signed_percent_text(100 * (answer.step_s / was - 1)) : std::string();
    lines.push_back({{fmt::format("{:<12}{:>10}  ", "step", seconds_text(answer.step_s)), Style::kPlain},
                     {fmt::format("{:>11}", against), Style::kChanged}});
  }
  lines.push_back(line(fmt::format("peak at {}", worst.moment), Style::kDim));
  return lines;
}

std::vector<ScreenLine> MemoryScreen::change_lines(int width) const {
  const whatif::Advice& advice = *changes_;
  std::vector<ScreenLine> lines;
  lines.push_back(line(fmt::format("what to change, the fastest first ({} looked at)", advice.looked_at), Style::kTitle));
  for (size_t i = 0; i < advice.changes.size() && i < 9; ++i) {
    const whatif::Change& c = advice.changes[i];
    lines.push_back(
        line(fmt::format("{} {:>10} {:>9}  {}", i + 1, bytes_text(c.device_bytes), signed_percent_text(100 * c.slowdown),
                         cut(whatif::text_of(c.words), static_cast<size_t>(std::max(width - 25, 0))))));
  }
  if (advice.changes.empty())
    lines.push_back(line(
        cut(advice.looked_at == 0 ? "not ranked: " + why_not_ranked(told_.question) : "no change of up to three keys makes it fit",
            static_cast<size_t>(std::max(width, 0))),
        Style::kBad));
  lines.push_back(line("1-9 takes one, w or Esc goes back", Style::kDim));
  return lines;
}

std::vector<ScreenLine> MemoryScreen::draw(int width, int height) const {
  const MemoryQuestion& q = told_.question;
  std::vector<ScreenLine> lines;
  lines.push_back(line(fmt::format("{}, {} parameters, {} of {}, under {}", q.config.model.name,
                                   count_words(static_cast<double>(parameter_count(q.shape))), devices_text(q.point.world_size()),
                                   q.config.machine.id, q.config.profile),
                       Style::kTitle));
  lines.push_back(line(layout_line(q.point)));
  lines.push_back({});
  const std::vector<ScreenLine> right = changes_ ? change_lines(width - kFieldWidth) : answer_lines(width - kFieldWidth);
  for (size_t i = 0; i < std::max(fields_.size(), right.size()); ++i) {
    ScreenLine row = i < fields_.size() ? field_line(i) : ScreenLine{};
    if (i < right.size()) {
      row.push_back({std::string(kFieldWidth - width_of(row), ' '), Style::kPlain});
      row.insert(row.end(), right[i].begin(), right[i].end());
    }
    lines.push_back(std::move(row));
  }
  lines.push_back({});
  if (refusal_) {
    lines.push_back(line(refusal_->message, Style::kBad));
    if (!refusal_->hint.empty()) lines.push_back(line(refusal_->hint));
    lines.push_back(line("the figures are of the last layout that stands; u undoes", Style::kDim));
  }
  const ScreenLine help = line("arrows change, Enter types, u undo, n keep as now, w what to change, q quit", Style::kDim);
  if (static_cast<int>(lines.size()) >= height) lines.resize(static_cast<size_t>(std::max(height - 1, 0)));
  if (height > 0) lines.push_back(help);
  for (ScreenLine& l : lines) clip(l, width);
  return lines;
}

}  // namespace shardlab::cli
