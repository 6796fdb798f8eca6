// Bounds on foreign input, checked before anything is allocated for it. A file beyond a bound is refused by a message that names
// the value and the bound. Each bound is far above what people and this program write, and low enough that a refusal takes seconds
// and at most a gibibyte.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardlab::limits {

inline constexpr int64_t kYamlBytes = int64_t{8} << 20;  ///< a sweep, case, machine or profile: a calibration has under 1 MiB
inline constexpr int64_t kYamlNodes = 1'000'000;         ///< with what anchors unfold to
inline constexpr int kYamlDepth = 64;
inline constexpr int64_t kModelFileBytes = int64_t{4} << 20;  ///< a config.json: the longest that ships has 3 KiB
inline constexpr int kJsonDepth = 64;
inline constexpr int64_t kScheduleBytes = int64_t{16} << 20;  ///< a pipeline schedule: 64 stages of 4096 slots have 2 MiB
inline constexpr int64_t kPlanBytes = int64_t{256} << 20;      ///< a plan's text
inline constexpr int64_t kRowsBytes = int64_t{16} << 20;       ///< a table of measured runs
inline constexpr size_t kRowsColumns = 1000;                   ///< of such a table
inline constexpr int64_t kTraceLineBytes = int64_t{16} << 20;  ///< a line of a trace: its first names every stream
inline constexpr int64_t kTraceIntervals = int64_t{1} << 24;   ///< ranks times steps of a trace
inline constexpr int64_t kManifestBytes = int64_t{64} << 20;   ///< of a checkpoint
inline constexpr int64_t kArrivalsBytes = int64_t{256} << 20;  ///< the arrivals at one server
inline constexpr int64_t kSweepPoints = 1'000'000;             ///< of one sweep, and values of one axis
inline constexpr size_t kExpressionLength = 4096;              ///< characters, which bounds the tree
inline constexpr int kExpressionDepth = 100;                   ///< nested operators: recursion must end before the stack does
inline constexpr size_t kProblems = 100;                       ///< told of one file; the rest are counted
inline constexpr size_t kShownBytes = 400;                     ///< of a value that a message quotes

}  // namespace shardlab::limits
