// Counts of rows that the host of a device needs: which ops make them, and which ops read them. A pure function of a role's program.
//
// Routers and exchanges leave counts in device memory. An exchange of packed rows is given to a device as messages of their true sizes, so the
// host has to know its counts first. They are copied to the host behind the op that makes them, once, and every later reader has them from
// there. The exchange back reads what the exchange there has read. Backward does too, where forward's counts were saved. A forward that
// runs again makes new counts.
//
//   compute   route, copy ..........................  | ep   exchange of counts, copy, event
//   host                                                      waits for the event, then gives the device the exchange of rows
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/base/result.h"
#include "plan/expert_rows.h"
#include "plan/plan.h"
#include "plan/program.h"

namespace shardlab::runtime {

/// Counts that an op makes and the host reads.
struct CountCopy {
  int32_t instruction = -1;  ///< that makes them
  uint16_t write = 0;        ///< which of its writes they are
  int64_t bytes = 0;
  int64_t offset = 0;  ///< bytes from where the host's counts begin
  int32_t event =
      -1;  ///< number of the event behind the copy; -1: no exchange waits for it, and it is read when the step has ended
};

/// An op's read of counts that the host has.
struct CountRead {
  int32_t instruction = -1;
  uint16_t read = 0;  ///< which of its reads they are
  int32_t copy = -1;  ///< index into HostCounts::copies
};

struct HostCounts {
  std::vector<CountCopy> copies;  ///< by instruction, ascending
  std::vector<CountRead> reads;   ///< by instruction, and by read, ascending
  int64_t bytes = 0;              ///< of host memory
  int32_t events = 0;

  std::span<const CountCopy> made_by(int32_t instruction) const;
  std::span<const CountRead> read_by(int32_t instruction) const;
};

/// Counts are followed through plain copies. Refuses an exchange whose counts no single op of the step has made.
/// `counting`: ops whose rows are counted, which read counts too.
Result<HostCounts> host_counts(const Plan& plan, const Program& program, const RowCounting& counting);

}  // namespace shardlab::runtime
