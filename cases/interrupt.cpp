#include "cases/interrupt.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "cases/namespaces.h"
#include "plan/base/result.h"
#include "plan/base/utf8.h"

namespace shardlab::cases::interrupt {
namespace {

constexpr unsigned kGrace_s = 5;

// State that a signal handler touches: lock-free and never freed.
std::atomic<bool> was_asked{false}, asks{false};
std::atomic<pid_t> case_group{0};
std::array<char, 8192> message;
std::atomic<size_t> message_size{0};

void end_now() {
  if (const pid_t group = case_group.load(); group > 0) kill(-group, SIGKILL);
  (void)!write(STDERR_FILENO, message.data(), message_size.load());
  _exit(static_cast<int>(ExitCode::kInterrupted));
}

void on_signal(int signal) {
  const bool again = was_asked.exchange(true);
  if (!asks.load() || again || signal == SIGALRM) end_now();
  alarm(kGrace_s);
}

void set_message(const std::string& command) {
  const std::string text = fmt::format("\ninterrupted; to go on: {}\n", visible(command));
  message_size.store(0);
  std::memcpy(message.data(), text.data(), std::min(text.size(), message.size()));
  message_size.store(std::min(text.size(), message.size()));
}

}  // namespace

void end_on_signal(const std::string& command) {
  set_message(command);
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigfillset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM, SIGALRM}) sigaction(signal, &action, nullptr);
  struct sigaction hang_up {};
  sigaction(SIGHUP, nullptr, &hang_up);
  if (hang_up.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);  // nohup stays what it is
}

void ask_on_signal(const std::string& command) {
  set_message(command);
  asks.store(true);
}

const std::atomic<bool>& asked() { return was_asked; }

void say_how_to_go_on() {
  alarm(0);
  if (was_asked.load()) fmt::print(stderr, "{}", std::string_view(message.data(), message_size.load()));
}

void set_case_group(pid_t group) { case_group.store(group); }

}  // namespace shardlab::cases::interrupt
