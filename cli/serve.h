// A page that follows a run, for browsers of this machine.
#pragma once

#include <functional>
#include <string>

#include "plan/base/result.h"

namespace shardlab::cli {

/// What a server answers with. Both are asked from one thread at a time.
struct Served {
  std::function<Result<std::string>(const std::string& revision)> page;  ///< the whole page, as of a revision
  std::function<std::string()> revision;                                 ///< another text whenever the page may be another
  std::function<bool()> live;                                            ///< whether a run goes on
};

/// Serves `/` and `/state` on the loopback interface until the program is interrupted. Port 0: any that is free. Prints the address.
/// A page is made once for each revision, when it is asked for. Requests that name another host are refused, so that no page of
/// another site reads this one (DNS rebinding). Refuses (usage) a port that is taken.
Result<ExitCode> serve(const Served& served, int port);

}  // namespace shardlab::cli
