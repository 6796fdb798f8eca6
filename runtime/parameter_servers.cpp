#include "runtime/parameter_servers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "plan/base/check.h"
#include "plan/optimizers.h"
#include "plan/run_state.h"
#include "runtime/reduction.h"

namespace shardlab::runtime {
namespace {

Error no_servers(const std::string& why) {
  return {ExitCode::kUsage, "the plan is no parameter server whose workers may run apart: " + why,
          "run it in step (staleness -1), or lower a case with parameter_server.staleness", ""};
}

const Collective* collective_of(const Instruction& i, CollectiveKind kind) {
  if (i.kind != Instruction::Kind::kRun) return nullptr;
  const auto* c = std::get_if<Collective>(&i.op->work);
  return c != nullptr && c->kind == kind && c->algorithm == Algorithm::kDirect ? c : nullptr;
}

/// Bytes of one rank's part of a push or a pull.
int64_t part_bytes(const CollectiveCall& call, int ranks) { return bytes_of(call.dtype, call.elements / ranks); }

const std::byte* part_of(const void* whole, int64_t bytes, int part) {
  return whole == nullptr ? nullptr : static_cast<const std::byte*>(whole) + part * bytes;
}

}  // namespace

ParameterServers::ParameterServers(const PlacedPlan& placed, std::span<const std::unique_ptr<Rank>> ranks,
                                   const RunOptions& options)
    : placed_(placed), program_(placed.programs.front()), ranks_(ranks), options_(options), news_(ranks.size()) {
  for (size_t i = 0; i < placed.plan->streams.size(); ++i)
    if (placed.plan->streams[i] == kServerStream) stream_ = static_cast<int>(i);
  for (size_t i = 0; i < ranks.size(); ++i) progress_.push_back(std::make_unique<Progress>());
}

Result<std::unique_ptr<ParameterServers>> ParameterServers::create(const PlacedPlan& placed,
                                                                   std::span<const std::unique_ptr<Rank>> ranks,
                                                                   const RunOptions& options) {
  std::unique_ptr<ParameterServers> made(new ParameterServers(placed, ranks, options));
  if (made->stream_ < 0) return no_servers("it has no stream for servers");
  if (placed.plan->mesh.size("dp") != placed.plan->mesh.world_size()) return no_servers("a worker is several ranks");
  SHARDLAB_TRY(made->find_buckets());
  const size_t workers = ranks.size();
  for (size_t server = 0; server < workers; ++server) {
    ArrivalLog& log = made->log_.emplace_back();
    log.server = static_cast<int>(server), log.workers = static_cast<int>(workers), log.staleness = options.staleness;
    for (const Bucket& bucket : made->buckets_) {
      made->services_.push_back(std::make_unique<Service>(workers));
      log.buckets.push_back({placed.plan->roles.front().buffers[bucket.sum.index()].name, {}});
    }
  }
  SHARDLAB_TRY(made->check_replay());
  return made;
}

/// Finds the instructions of each bucket: an update on the servers' stream and its rounding, the push into the update's operand,
/// and the pull of its result.
Result<void> ParameterServers::find_buckets() {
  const auto& mine = program_.streams[static_cast<size_t>(stream_)];
  for (size_t i = 0; i < mine.size(); ++i) {
    const Instruction& in = instruction(mine[i]);
    if (in.kind != Instruction::Kind::kRun) return no_servers("memory comes and goes on the servers' stream");
    const BufferId read = program_.reads(in)[0].root, written = program_.writes(in)[0].root;
    if (update_of(in.op->work) != nullptr)
      buckets_.push_back({.update = {i}, .sum = read, .served = written, .pulled_from = written});
    else if (std::holds_alternative<Copy>(in.op->work) && !buckets_.empty() && buckets_.back().served == read)
      buckets_.back().update.push_back(i), buckets_.back().pulled_from = written;
    else
      return no_servers(fmt::format("`{}` is no update", describe(*placed_.plan, in)));
  }
  pushes_.assign(program_.instructions.size(), -1), pulls_ = pushes_;
  for (const Instruction& in : program_.instructions)
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (collective_of(in, CollectiveKind::kReduceScatter) != nullptr && program_.writes(in)[0].root == buckets_[b].sum)
        buckets_[b].push = in.id, pushes_[static_cast<size_t>(in.id)] = static_cast<int>(b);
      if (collective_of(in, CollectiveKind::kAllGather) != nullptr && program_.reads(in)[0].root == buckets_[b].pulled_from)
        buckets_[b].pull = in.id, pulls_[static_cast<size_t>(in.id)] = static_cast<int>(b);
    }
  if (buckets_.empty()) return no_servers("its servers update nothing");
  for (const Bucket& bucket : buckets_)
    if (bucket.push < 0 || bucket.pull < 0) return no_servers("an update is not between a push and a pull");
  return {};
}

Result<void> ParameterServers::check_replay() const {
  if (options_.replay.empty()) return {};
  const auto other = [](const std::string& what) {
    return Error{ExitCode::kUsage, "the arrivals to be replayed are of another run: " + what, "give the logs of this very case",
                 ""};
  };
  if (options_.replay.size() != log_.size()) return other(fmt::format("{} servers, not {}", options_.replay.size(), log_.size()));
  for (size_t s = 0; s < log_.size(); ++s) {
    const ArrivalLog& have = options_.replay[s];
    if (have.server != log_[s].server || have.workers != log_[s].workers)
      return other(fmt::format("server {} of {} workers in place of {} of {}", have.server, have.workers, s, log_.size()));
    if (!std::ranges::equal(have.buckets, log_[s].buckets, {}, &BucketArrivals::bucket, &BucketArrivals::bucket))
      return other(fmt::format("server {} has other buckets", s));
    for (const BucketArrivals& bucket : have.buckets)
      for (const auto& update : bucket.updates)
        for (const Arrival& a : update)
          if (a.worker >= have.workers) return other(fmt::format("worker {} of {}", a.worker, have.workers));
  }
  return {};
}

const BoundInstruction& ParameterServers::bound(int rank, int32_t id) const {
  const Instruction& in = instruction(id);
  return ranks_[static_cast<size_t>(rank)]->instructions(in.stream)[static_cast<size_t>(in.sequence)];
}

void ParameterServers::begin(int64_t first, int64_t count, int32_t number) {
  done_ += count_;
  first_ = first, count_ = count, number_ = number;
  results_.assign(ranks_.size(), std::vector<WorkerStep>(static_cast<size_t>(count)));
  for (const auto& p : progress_) p->begins.assign(static_cast<size_t>(count), 0);
}

void ParameterServers::run(Rank& rank, int stream, Task& task) {
  if (stream == 0) work(rank, task);
  if (stream == stream_) serve(rank, task);
  task.set_instruction(-1);
}

// ---- workers

void ParameterServers::work(Rank& rank, Task& task) {
  Progress& progress = *progress_[static_cast<size_t>(rank.number())];
  for (int64_t k = 0; k < count_; ++k) {
    StepFrame frame;
    frame.states = {{first_ + k, first_ + k, learning_rate_at(options_.learning_rate, first_ + k)}};
    frame.number = number_ + static_cast<int32_t>(k);
    frame.begin = options_.clock->now();
    progress.begins[static_cast<size_t>(k)] = frame.begin;
    progress.step.store(k, std::memory_order_release);
    for (const Instruction& in : program_.instructions) {
      if (in.stream == stream_) continue;
      task.set_instruction(in.id);
      task.pause();
      const int pushed = pushes_[static_cast<size_t>(in.id)], pulled = pulls_[static_cast<size_t>(in.id)];
      if (pushed >= 0)
        push(rank, static_cast<size_t>(pushed), frame, task);
      else if (pulled >= 0)
        pull(rank, static_cast<size_t>(pulled), done_ + k + 1, frame, task);
      else
        rank.carry_out(bound(rank.number(), in.id), in.stream, frame, task);
    }
    results_[static_cast<size_t>(rank.number())][static_cast<size_t>(k)] = {options_.clock->now() - frame.begin,
                                                                            rank.metric(Rank::kLoss)};
  }
  progress.step.store(-1, std::memory_order_release);
}

/// Every server's part is offered at once. What a message costs is paid by the server that reads it.
void ParameterServers::push(Rank& rank, size_t bucket, const StepFrame& frame, Task& task) {
  const BoundInstruction& own = bound(rank.number(), buckets_[bucket].push);
  const int workers = static_cast<int>(ranks_.size());
  const double begin = task.now();
  Moved moved;
  moved.sent_bytes = (workers - 1) * part_bytes(own.call, workers);
  rank.count_sent(own.comm_id, moved.sent_bytes);
  for (int server = 0; server < workers; ++server) {
    service(server, bucket).offered[static_cast<size_t>(rank.number())].advance();
    news_[static_cast<size_t>(server)].advance();
  }
  rank.note(own, instruction(own.id).stream, frame, begin, moved);
}

void ParameterServers::pull(Rank& rank, size_t bucket, int64_t released, const StepFrame& frame, Task& task) {
  const BoundInstruction& own = bound(rank.number(), buckets_[bucket].pull);
  const int workers = static_cast<int>(ranks_.size());
  const int64_t bytes = part_bytes(own.call, workers);
  const size_t worker = static_cast<size_t>(rank.number());
  const double begin = task.now();
  Moved moved;
  for (int server = 0; server < workers; ++server) {
    Service& s = service(server, bucket);
    const double asked = task.now();
    task.wait(s.released[worker], static_cast<uint64_t>(released), {WaitCause::Kind::kMessage, server, 0});
    moved.peer_wait_s += task.now() - asked;
    const void* from = bound(server, buckets_[bucket].pull).call.source;
    if (from != nullptr) std::memcpy(static_cast<std::byte*>(own.call.target) + server * bytes, from, static_cast<size_t>(bytes));
    s.taken[worker].advance();
    news_[static_cast<size_t>(server)].advance();
  }
  rank.note(own, instruction(own.id).stream, frame, begin, moved);
}

// ---- servers

/// Applies what is due, bucket by bucket, until it has the gradients of all steps of all workers.
void ParameterServers::serve(Rank& rank, Task& task) {
  const int server = rank.number();
  Counter& news = news_[static_cast<size_t>(server)];
  int64_t left = static_cast<int64_t>(buckets_.size() * ranks_.size()) * count_;
  while (left > 0) {
    const uint64_t seen = news.value();
    bool idle = true;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (!all_taken(server, b)) continue;
      const std::vector<Arrival> arrivals = options_.replay.empty() ? due(server, b) : next_of_replay(server, b);
      if (arrivals.empty()) continue;
      apply(rank, b, arrivals, task);
      left -= static_cast<int64_t>(arrivals.size());
      idle = false;
    }
    task.pause();
    if (!idle || left == 0) continue;
    // Messages name the worker that is furthest behind.
    const std::vector<Counter>& offered = service(server, buckets_.size() - 1).offered;
    size_t awaited = 0;
    for (size_t w = 1; w < offered.size(); ++w)
      if (offered[w].value() < offered[awaited].value()) awaited = w;
    task.set_instruction(program_.streams[static_cast<size_t>(stream_)].front());
    task.wait(news, seen + 1, {WaitCause::Kind::kMessage, static_cast<int32_t>(awaited), 0});
  }
}

/// Whether nobody still reads what the last update left. A server that waited for that instead of looking at its other buckets
/// could wait in a circle: for a worker that waits for another server, which waits likewise for a worker that waits for this one.
bool ParameterServers::all_taken(int server, size_t bucket) {
  const auto& updates = log_[static_cast<size_t>(server)].buckets[bucket].updates;
  return updates.empty() || std::ranges::all_of(updates.back(), [&](const Arrival& a) {
           return static_cast<int64_t>(service(server, bucket).taken[static_cast<size_t>(a.worker)].value()) > a.step;
         });
}

/// The arrivals that a server can apply. Of each worker at most one gradient of a bucket is under way, since the worker waits for
/// the result of the last one.
std::vector<Arrival> ParameterServers::due(int server, size_t bucket) {
  Service& s = service(server, bucket);
  const int64_t clock = s.clock();
  std::vector<Arrival> arrivals;
  for (size_t w = 0; w < ranks_.size(); ++w) {
    const auto applied = static_cast<int64_t>(s.released[w].value()), offered = static_cast<int64_t>(s.offered[w].value());
    if (applied < offered && applied < clock + options_.staleness) arrivals.push_back({applied, static_cast<int>(w)});
  }
  std::ranges::sort(arrivals);
  return arrivals;
}

/// The next update of the log, once all of its gradients are there.
std::vector<Arrival> ParameterServers::next_of_replay(int server, size_t bucket) {
  Service& s = service(server, bucket);
  const auto& updates = options_.replay[static_cast<size_t>(server)].buckets[bucket].updates;
  const size_t made = log_[static_cast<size_t>(server)].buckets[bucket].updates.size();
  const auto stop = [&](const std::string& why) -> WorldError {
    return WorldError(fmt::format("the arrivals of server {} cannot be replayed: {} in update {} of {}", server, why, made,
                                  log_[static_cast<size_t>(server)].buckets[bucket].bucket),
                      "give the logs of this very case, and run no more steps than they hold");
  };
  if (made == updates.size()) {
    if (s.gradients < static_cast<int64_t>(ranks_.size()) * (done_ + count_)) throw stop("the log ends");
    return {};
  }
  for (const Arrival& a : updates[made]) {
    const size_t w = static_cast<size_t>(a.worker);
    if (a.step != static_cast<int64_t>(s.released[w].value()))
      throw stop(fmt::format("step {} of worker {} comes in place of step {}", a.step, a.worker, s.released[w].value()));
    if (static_cast<int64_t>(s.offered[w].value()) <= a.step) return {};
  }
  return updates[made];
}

void ParameterServers::apply(Rank& rank, size_t bucket, const std::vector<Arrival>& arrivals, Task& task) {
  const int server = rank.number(), workers = static_cast<int>(ranks_.size());
  Service& s = service(server, bucket);
  BucketArrivals& log = log_[static_cast<size_t>(server)].buckets[bucket];
  const Bucket& b = buckets_[bucket];
  StepFrame frame = frame_of_server(server);
  const int64_t progress = s.gradients / workers, updates = static_cast<int64_t>(log.updates.size());
  frame.states = {{progress, updates, learning_rate_at(options_.learning_rate, progress)}};
  const auto& ids = program_.streams[static_cast<size_t>(stream_)];
  task.set_instruction(ids[b.update.front()]);
  const BoundInstruction& own = bound(server, b.push);
  std::vector<const void*> leaves;
  for (const Arrival& a : arrivals)
    leaves.push_back(part_of(bound(a.worker, b.push).call.source, part_bytes(own.call, workers), server));
  if (own.call.target != nullptr)
    tree_combine(kernels::kernels_for_this_processor(), own.call.dtype, ReduceOp::kSum, leaves, own.call.target,
                 own.call.elements / workers);
  for (const size_t i : b.update) {
    task.set_instruction(ids[i]);
    rank.carry_out(bound(server, ids[i]), stream_, frame, task);
  }

  const int64_t clock = s.clock();
  log.updates.push_back(arrivals);
  s.gradients += static_cast<int64_t>(arrivals.size());
  for (const Arrival& a : arrivals) {
    const size_t w = static_cast<size_t>(a.worker);
    const int64_t age = updates - s.seen[w];
    s.figures.gradients += 1, s.figures.sum += age;
    s.figures.worst = std::max(s.figures.worst, age);
    s.figures.ahead = std::max(s.figures.ahead, a.step - clock);
    s.seen[w] = updates + 1;
    if (a.worker != server) rank.count_sent(bound(server, b.pull).comm_id, part_bytes(bound(server, b.pull).call, workers));
    s.released[w].advance();
  }
}

StepFrame ParameterServers::frame_of_server(int server) const {
  const Progress& p = *progress_[static_cast<size_t>(server)];
  const int64_t step = p.step.load(std::memory_order_acquire);
  StepFrame frame;
  frame.number = step < 0 ? -1 : number_ + static_cast<int32_t>(step);
  frame.begin = step < 0 ? 0 : p.begins[static_cast<size_t>(step)];
  return frame;
}

int64_t ParameterServers::Service::clock() const {
  uint64_t least = UINT64_MAX;
  for (const Counter& c : offered) least = std::min(least, c.value());
  return static_cast<int64_t>(least);
}

StalenessFigures ParameterServers::staleness() const {
  StalenessFigures all;
  for (const auto& s : services_) {
    all.gradients += s->figures.gradients, all.sum += s->figures.sum;
    all.worst = std::max(all.worst, s->figures.worst);
    all.ahead = std::max(all.ahead, s->figures.ahead);
  }
  return all;
}

}  // namespace shardlab::runtime
