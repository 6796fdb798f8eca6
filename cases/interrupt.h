// Ctrl-C and SIGTERM: any verb ends with exit code 130 and the command that goes on, and leaves no process behind.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <string>

namespace shardlab::cases::interrupt {

/// From this call on, SIGINT, SIGTERM and SIGHUP end the program at once, with "interrupted; to go on: `command`" on stderr.
void end_on_signal(const std::string& command);

/// For a verb that ends by itself soon after `asked`, and then calls `say_how_to_go_on`: the first signal only asks. A second
/// signal, or the end of a few seconds of grace, ends the program at once. `command` goes on from the stored results.
void ask_on_signal(const std::string& command);
/// Whether a signal came.
const std::atomic<bool>& asked();
/// Says how to go on, where a signal came; the grace has no end any more.
void say_how_to_go_on();

/// The process group of a running case, which ends with the program; 0: none.
void set_case_group(pid_t group);

}  // namespace shardlab::cases::interrupt
