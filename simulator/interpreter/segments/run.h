// The event simulation of a condensed plan.
#pragma once

#include <cstdint>
#include <vector>

#include "simulator/interpreter/segments/condense.h"
#include "simulator/interpreter/segments/prices.h"
#include "simulator/interpreter/segments/progress.h"

namespace shardlab::simulator::segments {

/// When an entry ran, in seconds from the start of the step.
struct Ran {
  double blocked = -1;  ///< since when its stream waited for others; negative: it did not
  double ready = 0;     ///< its waits are over and its stream is awake
  double begin = 0;     ///< launched as well
  double moving = 0;    ///< its peers were there
  double end = 0;
};

/// Times of all entries, by stage and stream.
struct Times {
  std::vector<std::vector<std::vector<Ran>>> stages;
  std::vector<double> ends;                  ///< by stage
  std::vector<std::vector<Moment>> moments;  ///< by stage, ascending
  int64_t events = 0;                        ///< moments at which something began or ended
};

/// Runs one step, by the rules of simulator/interpreter/timeline.h for ranks with a device each. The head of run.cpp lists what
/// is left out.
void run(const Condensed& text, Prices& prices, Times& times);

}  // namespace shardlab::simulator::segments
