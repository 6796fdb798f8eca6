// The output of `memory`: tables for people, and the JSON of the contract (ARCHITECTURE.md, section 3) with later additions.
#pragma once

#include <fmt/format.h>
#include <span>
#include <string>
#include <vector>

#include "answers/memory_json.h"
#include "answers/memory_question.h"
#include "cli/namespaces.h"
#include "reports/table.h"

namespace shardlab::cli {

/// "1 device", "8 devices".
inline std::string devices_text(int64_t n) { return fmt::format("{} {}", n, n == 1 ? "device" : "devices"); }

/// "dp4 pp2 1f1b", "dp8 tp8 zero1 recompute-selective offload optimizer=cpu".
std::string layout_line(const analytic::Point& point);

/// One row a stage: the classes of the contract, then reserved and device bytes.
Table stage_table(const whatif::Answer& answer);
/// The stages for people: the deciding figures first, equal stages in one row, no empty columns.
Table stage_summary(const whatif::Answer& answer);
/// Every item of one stage with its share of what the device holds.
Table item_table(const whatif::StageAnswer& stage);
/// Changes that make the layout fit, the fastest first.
Table change_table(const whatif::Advice& advice);
/// Two answers on their worst stages: item by item, then the sums, and the gain.
Table difference_table(const ToldMemory& before, const ToldMemory& after);
/// One row a question: `keys` and their values, then the figures of the worst stage; `people`: with verdicts as sentences have them.
Table variant_table(const std::vector<std::string>& keys, std::span<const std::vector<std::string>> values,
                    std::span<const Result<ToldMemory>> told, bool people);

/// A group in tables for people, which tell what it adds from the sums: "allocator slack".
std::string_view group_words(whatif::ItemGroup group);
/// "fits", "likely fits", "likely does not fit", "does not fit", "unknown".
std::string verdict_words(const whatif::Answer& answer);
/// Why rows have no step time; empty where all that stand have one.
std::string untimed_text(std::span<const Result<ToldMemory>> told, int width);
/// What an answer rests on, a line each, below a title.
std::string assumptions_text(const ToldMemory& told, int width);
/// "fits: a rank needs 3.557 GiB and may use 79.10 GiB (4.5 %), 75.54 GiB are left", or why not; empty where nobody knows.
std::string verdict_text(const whatif::Answer& answer);
/// "a run of 1.00 trillion tokens takes 152 days and $584k at $3.99 a device-hour"; empty where no run was asked for.
std::string run_text(const ToldMemory& told);
/// The whole page for one question.
std::string memory_page(const ToldMemory& told, int width);

/// "+1.2 GiB", "-3 MiB".
std::string signed_bytes(int64_t bytes);

}  // namespace shardlab::cli
