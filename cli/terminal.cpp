#include "cli/terminal.h"

#include <curses.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>

#include "cases/interrupt.h"
#include "cli/namespaces.h"

namespace shardlab::cli {
namespace {

/// The terminal in full-screen mode, for the length of a scope.
class FullScreen {
 public:
  static std::optional<FullScreen> enter() {
    std::setlocale(LC_CTYPE, "");
    // Curses writes to the terminal itself, past the filter of the standard streams.
    File terminal(fdopen(dup(STDOUT_FILENO), "w"), fclose);
    SCREEN* screen = terminal == nullptr ? nullptr : newterm(nullptr, terminal.get(), stdin);
    if (screen == nullptr) return std::nullopt;
    return FullScreen(screen, std::move(terminal));
  }
  FullScreen(FullScreen&& other) noexcept : terminal_(std::move(other.terminal_)), screen_(std::exchange(other.screen_, nullptr)) {}
  FullScreen& operator=(FullScreen&&) = delete;
  ~FullScreen() {
    if (screen_ == nullptr) return;
    endwin();
    delscreen(screen_);
  }

 private:
  using File = std::unique_ptr<FILE, int (*)(FILE*)>;

  FullScreen(SCREEN* screen, File terminal) : terminal_(std::move(terminal)), screen_(screen) {
    cbreak();
    noecho();
    keypad(stdscr, true);
    nodelay(stdscr, true);
    set_escdelay(50);
    curs_set(0);
    if (!has_colors()) return;
    start_color();
    use_default_colors();
    init_pair(1, COLOR_YELLOW, -1);
    init_pair(2, COLOR_GREEN, -1);
    init_pair(3, COLOR_RED, -1);
  }
  File terminal_;
  SCREEN* screen_;
};

attr_t attribute(Style style) {
  switch (style) {
    case Style::kPlain: return A_NORMAL;
    case Style::kDim: return A_DIM;
    case Style::kTitle: return A_BOLD;
    case Style::kCursor: return A_REVERSE;
    case Style::kChanged: return static_cast<attr_t>(COLOR_PAIR(1));
    case Style::kGood: return static_cast<attr_t>(COLOR_PAIR(2));
    case Style::kBad: return static_cast<attr_t>(COLOR_PAIR(3)) | A_BOLD;
  }
  return A_NORMAL;
}

void paint(const MemoryScreen& screen) {
  int height = 0, width = 0;
  getmaxyx(stdscr, height, width);
  erase();
  int y = 0;
  for (const ScreenLine& line : screen.draw(width, height)) {
    move(y++, 0);
    for (const StyledText& part : line) {
      attrset(attribute(part.style));
      addstr(part.text.c_str());
    }
  }
  refresh();
}

/// The code of the next key; nothing where the terminal is gone or a signal asks for the end, which is looked for ten
/// times a second.
std::optional<int> next_code() {
  constexpr int kLook_ms = 100;
  for (;;) {
    if (const int code = getch(); code != ERR) return code;
    if (interrupt::asked()) return std::nullopt;
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (poll(&input, 1, kLook_ms) <= 0) continue;
    const int code = getch();
    return code == ERR ? std::nullopt : std::optional(code);
  }
}

/// Nothing for what is no key of ours: a resize, a function key.
std::optional<ScreenKey> key_of(int code) {
  using Code = ScreenKey::Code;
  switch (code) {
    case KEY_UP: return ScreenKey{Code::kUp};
    case KEY_DOWN: return ScreenKey{Code::kDown};
    case KEY_LEFT: return ScreenKey{Code::kLeft};
    case KEY_RIGHT: return ScreenKey{Code::kRight};
    case '\n':
    case '\r':
    case KEY_ENTER: return ScreenKey{Code::kEnter};
    case KEY_BACKSPACE:
    case 127:
    case '\b': return ScreenKey{Code::kBackspace};
    case 27: return ScreenKey{Code::kEscape};
    default: break;
  }
  if (code >= ' ' && code <= '~') return ScreenKey{Code::kCharacter, static_cast<char>(code)};
  return std::nullopt;
}

}  // namespace

Result<void> show(MemoryScreen& screen) {
  if (isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0)
    return Error{ExitCode::kUsage,
                 "--interactive needs a terminal on its input and output",
                 "leave --interactive out, or use --what-if",
                 {}};
  const auto full = FullScreen::enter();
  if (!full) {
    const char* term = std::getenv("TERM");
    return Error{ExitCode::kUsage,
                 fmt::format("the terminal `{}` is not known here", term == nullptr ? "" : term),
                 "set TERM to what your terminal is, such as xterm",
                 {}};
  }
  for (;;) {
    paint(screen);
    const auto code = next_code();
    if (!code) return {};
    if (const auto key = key_of(*code); key && !screen.press(*key)) return {};
  }
}

}  // namespace shardlab::cli
