#include "cases/seats.h"

#include <fmt/format.h>
#include <signal.h>
#include <stdlib.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "cases/children.h"
#include "cases/interrupt.h"
#include "cases/pipeline.h"
#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"

namespace shardlab::cases {
namespace {

constexpr double kAnyTime_s = 1e9;  ///< nobody knows how long the first process is busy with cases of its own
constexpr size_t kMostLog = 65536;

enum class Said : uint8_t { kCase, kEnd };

std::string text_of(const CaseOrder& order) {
  std::string text;
  put(text, Said::kCase);
  for (const std::string* word : {&order.case_id, &order.config, &order.machine, &order.server, &order.token})
    put_text(text, *word);
  put(text, order.timeout_s);
  put(text, order.traces);
  return text;
}

CaseOrder order_of(Taking& from) {
  CaseOrder order;
  for (std::string* word : {&order.case_id, &order.config, &order.machine, &order.server, &order.token}) *word = from.take_text();
  order.timeout_s = from.take<double>();
  order.traces = from.take<bool>();
  return order;
}

/// The end of a file; empty where it cannot be read.
std::string end_of(const std::string& path) {
  const auto text = read_file(path);
  if (!text.ok()) return {};
  return text->size() > kMostLog ? text->substr(text->size() - kMostLog) : *text;
}

/// A folder that goes with its owner.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    path_ = (std::filesystem::temp_directory_path() / "shardlab-XXXXXX").string();
    if (mkdtemp(path_.data()) == nullptr)
      throw WorldError(fmt::format("no folder {}: {}", path_, std::strerror(errno)), "set TMPDIR to a folder that can be written");
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// This process's part of one case. `lost` ends it early.
SeatEnd run_part(const CaseOrder& order, const JobPlace& placement, const std::string& program, const std::string& folder,
                 const std::atomic<bool>& lost) {
  const CaseFiles files{folder + "/" + order.case_id};
  std::filesystem::create_directories(files.directory);
  write_file_atomically(files.config(), order.config);
  write_file_atomically(files.machine(), order.machine);
  Children children;
  children.add(
      start_child(program, files, order.traces, {placement.rank, placement.world_size, order.server, order.token, /*group=*/0}));
  interrupt::set_case_group(children.processes.front());
  constexpr double kLonger_s = 10;  // the first process's own time-out comes first, and ends the group
  const ChildEnd end = wait_for(children, order.timeout_s + kLonger_s, files, lost);
  interrupt::set_case_group(0);
  SeatEnd said{children.statuses.front(), end_of(files.log(placement.rank))};
  if (!children.all_ended()) said.status = SIGKILL;
  std::error_code ignored;
  std::filesystem::remove_all(files.directory, ignored);
  return said;
}

/// One part after the other, until the first process has no more.
void take_orders(Control& control, const JobPlace& placement, const std::string& program, const std::string& folder,
                 const std::atomic<bool>& lost) {
  while (true) {
    const std::vector<std::string> all = control.gather({});
    Taking from(all.front());
    if (from.take<Said>() == Said::kEnd) return;
    const SeatEnd end = run_part(order_of(from), placement, program, folder, lost);
    std::string said;
    put(said, end.status);
    put_text(said, end.log);
    control.gather(said);
  }
}

}  // namespace

Seats::Seats(const JobPlace& placement, double join_s)
    : host_(placement.master.host), server_(placement.world_size, placement.master, placement.token) {
  control_ = std::make_unique<Control>(server_.endpoint(), placement.token, 0, placement.world_size, join_s);
  control_->barrier();
  control_->set_timeout(kAnyTime_s);
}

Seats::~Seats() {
  if (listener_) control_->leave(*listener_);
  try {
    std::string text;
    put(text, Said::kEnd);
    control_->gather(text);
  } catch (const WorldError&) {  // they end by themselves where the group has failed
  }
}

void Seats::start(const CaseOrder& order, ControlServer& group) {
  listener_ = control_->listen([&group](const GroupFailure& failure) {
    // A process of the job is the process of the group with its number.
    if (failure.kind == GroupFailure::Kind::kGone || failure.kind == GroupFailure::Kind::kUnreachable)
      group.fail({.kind = failure.kind, .process = failure.process, .hint = failure.hint});
    else
      group.fail({.message = failure.message.empty() ? "a process of the job has ended" : failure.message, .hint = failure.hint});
    return Control::Known();
  });
  try {
    control_->gather(text_of(order));
  } catch (...) {
    control_->leave(*std::exchange(listener_, std::nullopt));  // the group does not outlive this call
    throw;
  }
}

std::vector<SeatEnd> Seats::collect() {
  control_->leave(*std::exchange(listener_, std::nullopt));
  std::vector<SeatEnd> ends;
  for (const std::string& said : control_->gather({})) {
    SeatEnd& end = ends.emplace_back();
    if (said.empty()) continue;  // this process
    Taking from(said);
    end.status = from.take<int>();
    end.log = from.take_text();
  }
  return ends;
}

Result<ExitCode> follow(const JobPlace& placement, const std::string& program, double join_s) {
  Control control(placement.master, placement.token, placement.rank, placement.world_size, join_s);
  control.barrier();
  control.set_timeout(kAnyTime_s);
  std::atomic<bool> lost{false};
  const int listener = control.listen([&](const GroupFailure&) {
    lost = true;
    return Control::Known();
  });
  try {
    const TemporaryFolder folder;
    take_orders(control, placement, program, folder.path(), lost);
  } catch (const WorldError& failure) {
    control.leave(listener);
    control.fail(fmt::format("process {}: {}", placement.rank, failure.what()), failure.hint());
    throw;
  } catch (const std::exception& failure) {
    control.leave(listener);
    control.fail(fmt::format("process {}: {}", placement.rank, failure.what()));
    throw;
  }
  control.leave(listener);
  return ExitCode::kDone;
}

}  // namespace shardlab::cases
