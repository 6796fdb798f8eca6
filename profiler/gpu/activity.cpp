#include "profiler/gpu/activity.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "profiler/json_integer.h"

namespace shardlab::profiler {

using nlohmann::json;

int32_t NameTable::number(std::string_view name) {
  const auto [found, fresh] = numbers_.try_emplace(std::string(name), static_cast<int32_t>(names_.size()));
  if (fresh) names_.emplace_back(name);
  return found->second;
}

bool hands_work_over(std::string_view call) {
  constexpr std::string_view kPrefixes[] = {"cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cudaMemcpy", "cudaMemset",
                                            "cuLaunchKernel",   "cuLaunchCooperativeKernel",   "cuMemcpy",   "cuMemset"};
  return std::ranges::any_of(kPrefixes, [&](std::string_view prefix) { return call.starts_with(prefix); });
}

std::array<int64_t, 5> peak_allocated(const std::vector<AllocationRecord>& allocations) {
  std::vector<const AllocationRecord*> order;
  for (const AllocationRecord& a : allocations) order.push_back(&a);
  std::ranges::stable_sort(order, {}, &AllocationRecord::time_ns);
  std::unordered_map<uint64_t, const AllocationRecord*> live;  // by address
  std::array<int64_t, 5> now{}, peak{};
  for (const AllocationRecord* a : order) {
    if (a->release) {
      const auto found = live.find(a->address);
      if (found == live.end()) continue;
      now[static_cast<size_t>(found->second->space)] -= found->second->bytes;
      live.erase(found);
      continue;
    }
    const auto [found, fresh] = live.try_emplace(a->address, a);
    if (!fresh) {  // its release was dropped
      now[static_cast<size_t>(found->second->space)] -= found->second->bytes;
      found->second = a;
    }
    const size_t space = static_cast<size_t>(a->space);
    now[space] += a->bytes;
    peak[space] = std::max(peak[space], now[space]);
  }
  return peak;
}

std::string to_lines(const ActivityLog& log) {
  std::string out;
  const auto line = [&](const json& record) { out += record.dump() + "\n"; };
  line({{"version", 1},
        {"dropped", log.dropped},
        {"unknown", log.unknown},
        {"unreadable", log.unreadable},
        {"names", log.names.all()}});
  for (const DeviceWork& w : log.work)
    line({{"work", static_cast<int>(w.kind)},
          {"begin", w.begin_ns},
          {"end", w.end_ns},
          {"correlation", w.correlation},
          {"device", w.device},
          {"context", w.context},
          {"stream", w.stream},
          {"name", w.name},
          {"bytes", w.bytes},
          {"grid", w.grid},
          {"block", w.block},
          {"registers", w.registers},
          {"shared", w.shared_bytes}});
  for (const HostCall& c : log.calls)
    line({{"call", c.name}, {"begin", c.begin_ns}, {"end", c.end_ns}, {"correlation", c.correlation}, {"thread", c.thread}});
  for (const AllocationRecord& a : log.allocations)
    line({{"allocation", static_cast<int>(a.space)},
          {"release", a.release},
          {"time", a.time_ns},
          {"address", a.address},
          {"bytes", a.bytes},
          {"device", a.device}});
  for (const SynchronisationRecord& s : log.synchronisations)
    line({{"synchronisation", s.name},
          {"begin", s.begin_ns},
          {"end", s.end_ns},
          {"correlation", s.correlation},
          {"stream", s.stream}});
  for (const OverheadRecord& o : log.overheads) line({{"overhead", o.name}, {"begin", o.begin_ns}, {"end", o.end_ns}});
  for (const ExternalLink& l : log.links) line({{"link", l.id}, {"correlation", l.correlation}});
  return out;
}

namespace {

void read_record(const json& r, ActivityLog& log) {
  const auto number = [&](const char* key) { return json_integer<int64_t>(r.at(key)); };
  const auto id = [&](const char* key) { return json_integer<uint32_t>(r.at(key)); };
  const auto name = [&](const char* key) {
    const int64_t n = number(key);
    if (n < 0 || n >= static_cast<int64_t>(log.names.all().size())) throw std::out_of_range("no name of this number");
    return static_cast<int32_t>(n);
  };
  const auto choice = [&](const char* key, int64_t count) {
    const int64_t n = number(key);
    if (n < 0 || n >= count) throw std::out_of_range("no kind of this number");
    return n;
  };
  if (r.contains("work")) {
    DeviceWork w;
    w.kind = static_cast<DeviceWork::Kind>(choice("work", 3));
    w.begin_ns = number("begin"), w.end_ns = number("end"), w.correlation = id("correlation");
    w.device = id("device"), w.context = id("context"), w.stream = id("stream"), w.name = name("name"), w.bytes = number("bytes");
    for (size_t i = 0; i < 3; ++i)
      w.grid[i] = json_integer<int32_t>(r.at("grid").at(i)), w.block[i] = json_integer<int32_t>(r.at("block").at(i));
    w.registers = json_integer<int32_t>(r.at("registers")), w.shared_bytes = json_integer<int32_t>(r.at("shared"));
    log.work.push_back(w);
  } else if (r.contains("call")) {
    log.calls.push_back({number("begin"), number("end"), id("correlation"), id("thread"), name("call")});
  } else if (r.contains("allocation")) {
    log.allocations.push_back({static_cast<AllocationRecord::Space>(choice("allocation", 5)), r.at("release").get<bool>(),
                               number("time"), json_integer<uint64_t>(r.at("address")), number("bytes"), id("device")});
  } else if (r.contains("synchronisation")) {
    log.synchronisations.push_back({number("begin"), number("end"), id("correlation"), id("stream"), name("synchronisation")});
  } else if (r.contains("overhead")) {
    log.overheads.push_back({number("begin"), number("end"), name("overhead")});
  } else {
    log.links.push_back({id("correlation"), json_integer<uint64_t>(r.at("link"))});
  }
}

}  // namespace

Result<ActivityLog> parse_activity_lines(const std::string& text) {
  ActivityLog log;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    try {
      const json record = json::parse(line);
      if (number > 1) {
        read_record(record, log);
        continue;
      }
      if (json_integer<int>(record.at("version")) != 1) throw std::out_of_range("a version that this program does not know");
      log.dropped = json_integer<int64_t>(record.at("dropped"));
      log.unknown = json_integer<int64_t>(record.at("unknown"));
      log.unreadable = json_integer<int64_t>(record.at("unreadable"));
      for (const std::string& name : record.at("names").get<std::vector<std::string>>()) log.names.number(name);
    } catch (const std::exception& error) {
      return Error{ExitCode::kUsage, fmt::format("these device records are damaged: {}", error.what()), "record the run again",
                   fmt::format("line {}", number)};
    }
  }
  if (number == 0) return Error{ExitCode::kUsage, "there are no device records", "record the run again", ""};
  return log;
}

}  // namespace shardlab::profiler
