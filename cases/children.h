// The processes of one measured case on this machine: started, waited for, ended, and asked what they were at.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "cases/namespaces.h"
#include "plan/base/result.h"
#include "runtime/control.h"

namespace shardlab::cases {

struct CaseFiles;

/// A process of a case: which of how many, and where they meet; of a case in one process there is no server.
struct ChildPlace {
  int process = 0, processes = 1;
  std::string server, token;
  pid_t group = 0;  ///< the process group to join; 0: one of its own
  /// Of MPI: starts all processes, each of which finds its number. None: this is one of them.
  std::vector<std::string> launcher = {};
};

/// Starts `program measure-case directory`, its output in a log of the case. Throws WorldError where no process can be made.
pid_t start_child(const std::string& program, const CaseFiles& files, bool traces, const ChildPlace& place);

/// Starts `words` (a program and its arguments) with this process's own output, in the process group `group`, 0: one of its own, and
/// with `token` in the environment. It ends with the thread that starts it. Throws WorldError where no process can be made.
pid_t start_process(const std::vector<std::string>& words, const std::string& token, pid_t group);
/// `launcher -n N words`: how a launcher of MPI starts a program. `launcher` is split at blanks.
std::vector<std::string> launched_by(const std::string& launcher, int processes, const std::vector<std::string>& words);
/// What nobody else knows, for a group that is started here.
std::string new_token();

/// The processes of one case that run here.
struct Children {
  std::vector<pid_t> processes;
  std::vector<int> statuses;  ///< of those that have ended, as waitpid(2) has them
  std::vector<bool> ended;
  void add(pid_t process);
  bool all_ended() const;
  /// One has ended otherwise than well.
  bool any_failed() const;
};

struct ChildEnd {
  bool timed_out = false, interrupted = false;
  std::string picture;     ///< of one that timed out: what it was at, where a process has said so
  std::string stopped;     ///< names the first child that has stopped threads, and those threads; empty: no child has
  std::vector<int> still;  ///< children that stood still: a thread was stopped, or nothing answered `kAskForPicture`
  int taken = 0;           ///< children that were lost: a signal from outside has ended them, or they stood still beside no fault
};
/// Whether a process that has ended was ended from outside, by a signal that is no fault of the program (an abort, a bad access).
bool was_taken(int status);

/// Waits for the children's end. Where they take longer than `timeout_s` one is asked what the ranks are at, and all are killed; so
/// they are when `interrupted` is set, and where one has failed and others do not end. A child that is slow answers and is not lost: it
/// would be slow again. A dead process can stay a while: a debugger that holds one of its threads keeps it, and
/// nobody waits for that.
ChildEnd wait_for(Children& children, double timeout_s, const CaseFiles& files, const std::atomic<bool>& interrupted);

/// Whether all children end before `timeout_s` has passed; of those that do not none is left. Where one fails the others have a little
/// longer.
bool wait_for_end(Children& children, double timeout_s);
/// What a process that has ended says by its exit code; of one that a signal ended, that some failed.
ExitCode exit_code_of(int status);

/// Why a case has not ended well: what its group says, with the processes that a signal ended; or the end of one that failed.
/// `statuses` are of all processes of the case, as waitpid(2) has them.
std::string why_failed(const std::vector<int>& statuses, const std::optional<GroupFailure>& failure, const CaseFiles& files);
/// "the process ended with exit code 4: ...", with the last lines of its log.
std::string how_it_ended(int status, const std::string& log);

}  // namespace shardlab::cases
