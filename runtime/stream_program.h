// What a rank's threads issue to a device that runs later: for each stream of the plan, launches in order, events recorded after
// some of them, and waits for events of other streams in front of others. A pure function of a role's program; no device needed.
//
//   stream compute          stream comm
//     launch #3 linear.W      wait   e0 (compute #3)
//     record e0               meet   #4 all_reduce
//     launch #5 norm.W        record e1
//     wait   e1 (comm #4)
//     launch #9 adamw
//
// The edges are those of plan/program.h. What is special to a device is how few of them need an event:
//   - allocations and frees are book-keeping of the host and hold nothing up. What waits for one waits for the last real work in
//     front of it (for nothing where there is none: every stream is idle when a step begins) and for what the frees on the way
//     wait for; the next work of the control stream waits for the latter too;
//   - edges that meet at one place share an event, and edges that other waits imply are gone.
// So each event is waited for at least once, no two are recorded at one place, and leaving out any wait leaves out an edge.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"
#include "plan/program.h"

namespace shardlab::runtime {

/// A wait for an event of another stream of the rank.
struct EventWait {
  int32_t event = 0;
  int32_t stream = 0;  ///< that records it
  int32_t count = 0;   ///< how many instructions `stream` has issued once it is recorded: the host waits for that first
};

/// The actions of a stream's thread for one instruction: issue the waits, then the work, then record.
struct StreamAction {
  enum class Kind : uint8_t {
    kNothing,  ///< book-keeping of the host: an alloc, or a free. Neither waits nor records
    kLaunch,   ///< enqueues work
    kMeet,     ///< meets peers on the host, then enqueues: a collective, a send, a receive
    kFetch,    ///< the free of a metric: its value is copied to the host before its storage goes
  } kind = Kind::kNothing;
  uint32_t first_wait = 0;  ///< into StreamProgram::waits
  uint32_t waits = 0;
  int32_t record = -1;  ///< event recorded behind it, or -1
};

struct StreamProgram {
  int role = 0;
  int events = 0;
  std::vector<StreamAction> actions;  ///< by Instruction::id
  std::vector<EventWait> waits;

  std::span<const EventWait> waits_of(const StreamAction& a) const { return {waits.data() + a.first_wait, a.waits}; }
};

struct StreamOptions {
  bool poison = false;  ///< allocations and frees fill storage, which is work
};

/// The stream program of a role whose program is `program`.
StreamProgram stream_program(const Plan& plan, const Program& program, const StreamOptions& options = {});

/// One line an action, by stream, as above; book-keeping is left out.
std::string to_text(const Plan& plan, const Program& program, const StreamProgram& streams);

/// The figures of a step that the session reports, by the name of the buffer that holds them.
inline constexpr std::array<std::string_view, 2> kMetricNames{"loss", "grad_norm2"};
/// The metric that the role buffer `name` holds, if any: an index into `kMetricNames`.
std::optional<int> metric_named(std::string_view name);

}  // namespace shardlab::runtime
