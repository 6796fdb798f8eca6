// `memory --interactive`: the screen without a terminal, key by key, and the program on a terminal of its own.
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "cli/memory_screen.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/paths.h"

namespace shardlab::testing {
namespace {

using Code = ScreenKey::Code;

CaseFlags flags_of(std::string model, std::string machine, int64_t devices,
                   std::vector<std::pair<std::string, std::string>> words) {
  CaseFlags flags;
  flags.model = std::move(model), flags.machine = std::move(machine), flags.devices = devices;
  for (const char* key : {"dp", "tp", "pp", "vpp", "cp", "ep", "zero", "schedule", "sequence_parallel", "recompute", "offload",
                          "precision", "micro_batch", "grad_accumulation", "seq_len", "global_batch_tokens"})
    flags.layout.emplace_back(key, "");
  for (const auto& [key, value] : words) set_word(flags, key, value);
  return flags;
}

MemoryScreen screen_of(const CaseFlags& flags) {
  auto screen = MemoryScreen::create(flags);
  INFO((screen.ok() ? "" : screen.error().message));
  REQUIRE(screen.ok());
  return std::move(*screen);
}

std::string text_of(const std::vector<ScreenLine>& lines) {
  std::string text;
  for (const ScreenLine& line : lines) {
    std::string row;
    for (const StyledText& part : line) row += part.text;
    row.resize(row.find_last_not_of(' ') + 1);
    text += row + "\n";
  }
  return text;
}

std::string page(const MemoryScreen& screen) { return text_of(screen.draw(100, 40)); }

void press(MemoryScreen& screen, std::string_view characters) {
  for (const char c : characters) REQUIRE(screen.press({Code::kCharacter, c}));
}
void press(MemoryScreen& screen, Code code, int times = 1) {
  for (int i = 0; i < times; ++i) REQUIRE(screen.press({code}));
}

/// Moves to a field, whatever is between.
void go_to(MemoryScreen& screen, const std::string& field) {
  for (int i = 0; i < 30 && page(screen).find("> " + field) == std::string::npos; ++i) press(screen, Code::kDown);
  REQUIRE(page(screen).find("> " + field) != std::string::npos);
}

TEST_CASE("each key asks the calculator again, and the answer is that of the flags") {
  MemoryScreen screen = screen_of(flags_of("llama-3-8b", "hgx-h100-ndr", 8, {{"micro_batch", "1"}, {"profile", "megatron"}}));
  REQUIRE(!screen.told().answer.fits());
  go_to(screen, "zero");
  press(screen, Code::kRight);
  REQUIRE(screen.told().question.point.zero == 1);
  go_to(screen, "tp");
  press(screen, Code::kRight, 2);
  REQUIRE(screen.told().question.point.tp == 4);
  REQUIRE(screen.told().question.point.dp == 2);
  press(screen, Code::kLeft);
  REQUIRE(screen.told().question.point.tp == 2);
  go_to(screen, "seq_len");
  press(screen, "1536");
  REQUIRE(screen.told().question.point.seq_len != 1536);  // not before Enter
  press(screen, Code::kEnter);
  REQUIRE(screen.told().question.point.seq_len == 1536);
  const auto same =
      tell_memory(flags_of("llama-3-8b", "hgx-h100-ndr", 8,
                           {{"micro_batch", "1"}, {"profile", "megatron"}, {"zero", "1"}, {"tp", "2"}, {"seq_len", "1536"}}),
                  {}, false);
  REQUIRE(same.ok());
  REQUIRE(screen.told().answer.worst().device() == same->answer.worst().device());
  REQUIRE(
      screen.command() ==
      "shardlab memory --model llama-3-8b --machine hgx-h100-ndr --devices 8 --tp 2 --zero 1 --micro-batch 1 --seq-len 1536 --set "
      "profile=megatron");
}

TEST_CASE("what is refused keeps the last answer, says why, and can be undone; what is undone is as it was") {
  MemoryScreen screen = screen_of(flags_of("gpt2", "a100-sxm4-80gb", 8, {}));
  const std::string first = page(screen);
  go_to(screen, "pp");
  const std::string before = page(screen);
  const int64_t bytes = screen.told().answer.worst().device();
  press(screen, "16");
  press(screen, Code::kEnter);
  REQUIRE(page(screen).find("--devices 8 is not a multiple of tp*pp*cp = 16") != std::string::npos);
  REQUIRE(page(screen).find("u undoes") != std::string::npos);
  REQUIRE(screen.told().answer.worst().device() == bytes);
  REQUIRE(screen.command() == "shardlab memory --model gpt2 --machine a100-sxm4-80gb --devices 8");
  press(screen, "u");
  REQUIRE(page(screen) == before);
  press(screen, "u");  // nothing is left to undo
  REQUIRE(page(screen) == before);
  press(screen, Code::kUp, 2);
  REQUIRE(page(screen) == first);
  for (const char* wrong : {"0", "99999999999999999999", "seven"}) {
    INFO(wrong);
    press(screen, Code::kEnter);
    press(screen, Code::kBackspace, 4);
    press(screen, wrong);
    press(screen, Code::kEnter);
    REQUIRE(page(screen).find("is not a number of devices") != std::string::npos);
    press(screen, "u");
  }
  press(screen, "12");
  press(screen, Code::kEscape);
  REQUIRE(page(screen) == first);
}

TEST_CASE("a change that is taken fits, and what it is compared with stays until it is kept") {
  MemoryScreen screen = screen_of(flags_of("llama-3-8b", "hgx-h100-ndr", 8, {{"micro_batch", "2"}, {"profile", "megatron"}}));
  const int64_t before = screen.told().answer.worst().device();
  press(screen, "w");
  REQUIRE(page(screen).find("what to change, the fastest first") != std::string::npos);
  press(screen, "1");
  REQUIRE(screen.told().answer.fits());
  const int64_t gained = before - screen.told().answer.worst().device();
  REQUIRE(gained > 0);
  REQUIRE(page(screen).find(signed_bytes(-gained)) != std::string::npos);
  press(screen, "n");
  REQUIRE(page(screen).find(signed_bytes(-gained)) == std::string::npos);
}

TEST_CASE("the screen as its users see it") {
  MemoryScreen screen = screen_of(flags_of("llama-3-8b", "hgx-h100-ndr", 8, {{"micro_batch", "2"}, {"profile", "megatron"}}));
  std::string text = text_of(screen.draw(80, 24));
  go_to(screen, "recompute");
  press(screen, Code::kRight);
  text += "\n---- recompute: selective\n" + text_of(screen.draw(80, 24));
  press(screen, "w");
  text += "\n---- what to change\n" + text_of(screen.draw(110, 24));
  REQUIRE_GOLDEN("cli/memory_screen.txt", text);
}

TEST_CASE("a screen of any size gets lines that fit it") {
  MemoryScreen screen = screen_of(flags_of("gpt2", "a100-sxm4-80gb", 4, {{"zero", "1"}}));
  for (const int width : {0, 1, 20, 39, 80, 300})
    for (const int height : {0, 1, 5, 24, 100}) {
      const auto lines = screen.draw(width, height);
      REQUIRE(static_cast<int>(lines.size()) <= height);
      for (const ScreenLine& line : lines) {
        size_t n = 0;
        for (const StyledText& part : line) n += part.text.size();
        REQUIRE(static_cast<int>(n) <= width);
      }
    }
}

/// The program on a pseudo-terminal.
class OnTerminal {
 public:
  explicit OnTerminal(std::vector<std::string> words) {
    winsize size{};
    size.ws_row = 30, size.ws_col = 100;
    pid_ = forkpty(&terminal_, nullptr, nullptr, &size);
    REQUIRE(pid_ >= 0);
    if (pid_ != 0) return;
    setenv("TERM", "xterm", 1);
    words.insert(words.begin(), testing::program_path());
    std::vector<char*> arguments;
    for (std::string& w : words) arguments.push_back(w.data());
    arguments.push_back(nullptr);
    execv(testing::program_path().c_str(), arguments.data());
    _exit(127);
  }
  ~OnTerminal() {
    close(terminal_);
    if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
  }
  void type(std::string_view keys) { REQUIRE(write(terminal_, keys.data(), keys.size()) == static_cast<ssize_t>(keys.size())); }
  /// Reads on until the text was drawn; false where the program is silent for a minute or has ended.
  bool shows(std::string_view text) {
    while (drawn_.find(text) == std::string::npos) {
      pollfd ready{terminal_, POLLIN, 0};
      std::array<char, 4096> buffer;
      if (poll(&ready, 1, 60'000) <= 0) return false;
      const ssize_t n = read(terminal_, buffer.data(), buffer.size());
      if (n <= 0) return false;
      drawn_.append(buffer.data(), static_cast<size_t>(n));
    }
    drawn_.erase(0, drawn_.find(text) + text.size());
    return true;
  }
  int wait() {
    int status = 0;
    while (!shows("no such text")) {  // drains the terminal to the program's end
      if (waitpid(pid_, &status, 0) == pid_) break;
    }
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  int terminal_ = -1;
  pid_t pid_ = -1;
  std::string drawn_;
};

TEST_CASE("on a terminal keys work, and leaving prints the command that asks the same again") {
  OnTerminal program(
      {"memory", "--model", "llama-3-8b", "--machine", "hgx-h100-ndr", "--devices", "8", "--profile", "megatron", "--interactive"});
  REQUIRE(program.shows("parameters"));
  REQUIRE(program.shows("q quit"));
  program.type("\x1bOB\x1bOC");  // down to tp, right, as a terminal in keypad mode sends them
  REQUIRE(program.shows("tp2"));
  program.type("q");
  REQUIRE(program.shows("shardlab memory --model llama-3-8b --machine hgx-h100-ndr --devices 8 --tp 2 --set profile=megatron"));
  const int code = program.wait();
  REQUIRE((code == 0 || code == 3));
}

TEST_CASE("without a terminal the screen is refused, and so is it beside other questions") {
  const testing::Scratch scratch;
  const std::string words = "memory --model gpt2 --machine a100-sxm4-80gb --interactive ";
  const auto piped = testing::shardlab_program(scratch, words);
  REQUIRE(piped.code == 2);
  REQUIRE(piped.err.find("needs a terminal") != std::string::npos);
  for (const char* other : {"--what-if zero=1", "--zero 0,1", "--plan", "--format json"}) {
    INFO(other);
    const auto refused = testing::shardlab_program(scratch, words + other);
    REQUIRE(refused.code == 2);
    REQUIRE(refused.err.find("--interactive with") != std::string::npos);
  }
}

}  // namespace
}  // namespace shardlab::testing
