// Traces read back from disk, and laid on the plan that ran.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::profiler {

/// A trace as its file has it. Instruction numbers are those of the program that wrote the file.
struct RecordedTrace {
  Trace trace;
  std::string plan;                  ///< digest of the plan that ran (`plan_digest`); empty where an older file does not say
  std::vector<std::string> ops;      ///< texts of ops (`describe`), each once
  std::vector<int32_t> op_of_event;  ///< index into `ops`, by event
};

/// Reads what `write_trace_lines` wrote, packed or not. Refuses a file that is missing, of a newer version, damaged or cut off,
/// naming the line.
Result<RecordedTrace> read_trace_lines(const std::string& path);

/// Reads a trace from a stream of lines that are not packed; `path` stands in messages. Every line must agree with the ranks,
/// steps and streams of the first line, and the sizes that the first line promises are bounded (plan/base/limits.h) before there
/// is room for them.
Result<RecordedTrace> read_trace_lines(std::istream& lines, const std::string& path);

/// The digest of the plan that the trace at `path` is of, from the file's first line alone. Refuses as `read_trace_lines` does.
Result<std::string> read_trace_plan(const std::string& path);

/// Events of a trace on the instructions of a plan.
struct JoinedTrace {
  Trace trace;                       ///< without the events that could not be joined
  int64_t left_out = 0;              ///< events that could not be joined
  std::vector<std::string> unknown;  ///< texts of their ops, each once
};

/// Joins by the text of ops, whatever number an op had when it ran. Several ops of one text on a role are taken in their
/// order; where trace and plan have different numbers of them, none is joined. Ranks and streams that the plan does not have
/// are not joined.
JoinedTrace join_by_text(RecordedTrace recorded, const Plan& plan, const std::vector<Program>& programs);

}  // namespace shardlab::profiler
