// Plans with traces made by rule, for the tests of the forms that traces are written in.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/memory.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

struct TracedPlan {
  Plan plan;
  std::vector<Program> programs;
  std::vector<ArenaLayout> arenas;
  Trace trace;
};

/// The golden plan NAME with a trace of two steps. On every rank op k takes 1 + k % 7 us from the end of what it waits for on; a
/// wait is traced where it has a length, and six tenths of a communication on odd ranks are a wait for peers.
TracedPlan golden_trace(const std::string& name);

/// One field of a message in protocol buffers' wire format.
struct WireField {
  int number = 0;
  int type = 0;            ///< 0 varint, 1 eight bytes, 2 length and bytes
  uint64_t value = 0;      ///< of types 0 and 1
  std::string_view bytes;  ///< of type 2
};

/// The fields of a message. Fails the test where the bytes are none.
std::vector<WireField> wire_fields(std::string_view message);

/// Messages that have their length before them.
std::vector<std::string_view> delimited_messages(std::string_view bytes);

/// The one field of that number; the value 0 and no bytes where there is none.
WireField only_field(const std::vector<WireField>& fields, int number);

}  // namespace shardlab::testing
