#include "runtime/mpi_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

namespace shardlab::runtime {

namespace {

/// Rounds in which nothing moves before the thread leaves its core: about the time of a short message between processes of a node.
constexpr int kRounds = 200;
constexpr std::chrono::microseconds kNap(50);
constexpr int kMostTag = 32767;  ///< the least that MPI_TAG_UB may be

/// `bytes` at `at` in pieces that MPI can count.
template <class At, class Call>
void in_pieces(At* at, int64_t bytes, const Call& call) {
  for (int64_t done = 0; done < bytes; done += Mpi::kMostPiece) call(at + done, std::min(bytes - done, Mpi::kMostPiece));
}

}  // namespace

// ---- MPI of this process

MpiWorld::MpiWorld(std::unique_ptr<Mpi> mpi, Control& control, double timeout_s)
    : control_(control), timeout_s_(timeout_s), shared_(std::make_shared<Shared>()) {
  shared_->mpi = std::move(mpi);
  shared_->on_error = [&control](const std::string& message) { control.fail(message); };
  thread_ = std::thread([shared = shared_] { progress(*shared); });
  int error = 0, rank = 0, size = 0;
  call([&] {
    error = shared_->mpi->init();
    if (error != 0) return;
    rank = shared_->mpi->rank();
    size = shared_->mpi->size();
  });
  const std::string& file = shared_->mpi->file();
  if (error != 0) throw WorldError(fmt::format("MPI of {} does not start: {}", file, shared_->mpi->describe(error)), "");
  if (rank == control.process() && size == control.processes()) return;
  throw WorldError(
      fmt::format("process {} of {} is process {} of {} for MPI ({})", control.process(), control.processes(), rank, size,
                  shared_->mpi->version()),
      fmt::format("start all with the launcher of that library: mpirun -n {} shardlab launch run ...", control.processes()));
}

MpiWorld::~MpiWorld() {
  try {
    control_.barrier();  // nobody sends any more
    call([this] { shared_->mpi->finalize(); });
  } catch (const WorldError&) {}
  bool stuck = false;
  {
    const std::lock_guard lock(shared_->mutex);
    stuck = !shared_->calls.empty();  // a call has not returned
    shared_->ends = true;
    shared_->on_error = nullptr;
  }
  shared_->changed.notify_all();
  if (!thread_.joinable()) return;
  if (stuck)
    thread_.detach();
  else
    thread_.join();
}

int MpiWorld::next_tag() {
  const int tag = next_tag_;
  next_tag_ += 2;
  if (next_tag_ > kMostTag) throw WorldError("a process has had more transports over MPI than there are tags", "fewer phases");
  return tag;
}

/// The call stays in front of the queue while it lasts, so that others see that it has not returned.
void MpiWorld::call(const std::function<void()>& body) {
  const auto done = std::make_shared<std::promise<void>>();
  std::future<void> end = done->get_future();
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->calls.emplace_back([done, body] {
      try {
        body();
        done->set_value();
      } catch (...) { done->set_exception(std::current_exception()); }
    });
  }
  shared_->changed.notify_all();
  if (end.wait_for(std::chrono::duration<double>(timeout_s_)) != std::future_status::ready)
    throw WorldError(fmt::format("MPI has not returned within {:.3g} s", timeout_s_),
                     "see that the launcher has started every process of the group");
  end.get();
}

void MpiWorld::attach(MpiLine& line) {
  call([&] { shared_->lines.push_back(&line); });
}
void MpiWorld::detach(MpiLine& line) {
  call([&] { std::erase(shared_->lines, &line); });
}

void MpiWorld::wake() {
  if (!shared_->posted.exchange(true)) shared_->changed.notify_all();
}

/// Calls what is to be called and moves every line, until the end. An error ends the group.
void MpiWorld::progress(Shared& shared) {
  int idle = 0;
  std::unique_lock lock(shared.mutex);
  while (!shared.ends) {
    while (!shared.calls.empty()) {
      const std::function<void()> call = shared.calls.front();
      lock.unlock();
      call();
      lock.lock();
      shared.calls.pop_front();
      idle = 0;
    }
    lock.unlock();
    bool moved = shared.posted.exchange(false);
    try {
      for (MpiLine* line : shared.lines) moved = line->advance() || moved;
    } catch (const WorldError& error) {
      lock.lock();
      shared.lines.clear();
      if (shared.on_error) shared.on_error(error.what());
      continue;
    }
    idle = moved ? 0 : idle + 1;
    if (idle > 0 && idle < kRounds) std::this_thread::yield();
    lock.lock();
    if (shared.lines.empty())
      shared.changed.wait(lock, [&] { return shared.ends || !shared.calls.empty(); });
    else if (idle >= kRounds)
      shared.changed.wait_for(lock, kNap, [&] { return shared.ends || !shared.calls.empty() || shared.posted; });
  }
}

// ---- one plan's messages

MpiTransport::MpiTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, MpiWorld& world)
    : MessageTransport(kernels, placed, control), world_(world), tag_(world.next_tag()) {
  for (int p = 0; p < control.processes(); ++p) peers_.push_back(p == control.process() ? nullptr : std::make_unique<Peer>());
  world_.call([&] {
    for (int p = 0; p < control.processes(); ++p)
      if (peers_[static_cast<size_t>(p)] != nullptr) expect_header(p, *peers_[static_cast<size_t>(p)]);
  });
  world_.attach(*this);
}

MpiTransport::~MpiTransport() {
  try {
    world_.detach(*this);
    world_.call([this] { close(); });
  } catch (const WorldError&) {
    // MPI does not return, or fails: it may still write where its messages were to go.
    for (auto& peer : peers_) (void)peer.release();
  }
}

void MpiTransport::check(int error, const char* what, int process) const {
  if (error != 0)
    throw WorldError(
        fmt::format("MPI of process {} cannot {} process {}: {}", control().process(), what, process, world_.mpi().describe(error)),
        "");
}

void MpiTransport::post(int process, const MessageHeader& header, std::span<const Slice> slices) {
  Peer& peer = *peers_[static_cast<size_t>(process)];
  {
    const std::lock_guard lock(peer.mutex);
    peer.posted.push_back({header, {slices.begin(), slices.end()}, {}, {}});
  }
  world_.wake();
}

bool MpiTransport::advance() {
  bool moved = false;
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (peers_[p] == nullptr) continue;
    moved = receive_some(static_cast<int>(p), *peers_[p]) || moved;
    moved = send_some(static_cast<int>(p), *peers_[p]) || moved;
  }
  return moved;
}

void MpiTransport::expect_header(int process, Peer& peer) {
  peer.into = nullptr;
  check(world_.mpi().receive(&peer.header, sizeof peer.header, process, tag_, peer.header_request), "hear of", process);
}

/// Drops the requests that are done. True: all are.
bool MpiTransport::done(std::vector<MpiRequest>& requests, int process) {
  std::erase_if(requests, [&](MpiRequest& request) {
    bool is_done = false;
    check(world_.mpi().test(request, is_done), "exchange messages with", process);
    return is_done;
  });
  return requests.empty();
}

bool MpiTransport::receive_some(int process, Peer& peer) {
  bool moved = false;
  while (true) {
    if (peer.into == nullptr) {
      bool came = false;
      check(world_.mpi().test(peer.header_request, came), "hear of", process);
      if (!came) return moved;
      peer.into = &begin(peer.header);
      in_pieces(peer.into->message.data(), peer.header.following(), [&](std::byte* at, int64_t bytes) {
        check(world_.mpi().receive(at, bytes, process, tag_ + 1, peer.requests.emplace_back()), "receive from", process);
      });
    }
    if (!done(peer.requests, process)) return moved;
    complete(peer.header, *peer.into);
    expect_header(process, peer);
    moved = true;
  }
}

/// The header, and behind it what it announces: messages of one tag between two processes stay in order.
void MpiTransport::start(int process, Outgoing& message) {
  Mpi& mpi = world_.mpi();
  const auto send = [&](const std::byte* at, int64_t all, int tag) {
    in_pieces(at, all, [&](const std::byte* piece, int64_t bytes) {
      check(mpi.send(piece, bytes, process, tag, message.requests.emplace_back()), "send to", process);
    });
  };
  send(reinterpret_cast<const std::byte*>(&message.header), sizeof message.header, tag_);
  if (message.slices.size() == 1) {
    send(message.slices.front().at, message.slices.front().bytes, tag_ + 1);
    return;
  }
  message.packed.reserve(static_cast<size_t>(message.header.following()));
  for (const Slice& slice : message.slices) message.packed.insert(message.packed.end(), slice.at, slice.at + slice.bytes);
  send(message.packed.data(), static_cast<int64_t>(message.packed.size()), tag_ + 1);
}

bool MpiTransport::send_some(int process, Peer& peer) {
  std::list<Outgoing> fresh;
  {
    const std::lock_guard lock(peer.mutex);
    fresh.swap(peer.posted);
  }
  const bool any = !fresh.empty();
  for (Outgoing& message : fresh) start(process, message);
  peer.under_way.splice(peer.under_way.end(), fresh);
  while (!peer.under_way.empty() && done(peer.under_way.front().requests, process)) peer.under_way.pop_front();
  return any;
}

/// Lets what is under way end, and takes back what waits for messages that do not come.
void MpiTransport::close() {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::seconds(1);
  std::vector<MpiRequest> waiting;
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (peers_[p] == nullptr) continue;
    Peer& peer = *peers_[p];
    const int process = static_cast<int>(p);
    send_some(process, peer);
    while (!peer.under_way.empty() && Clock::now() < deadline)
      if (done(peer.under_way.front().requests, process)) peer.under_way.pop_front();
    if (peer.into == nullptr) peer.requests.push_back(peer.header_request);
    for (MpiRequest& request : peer.requests) world_.mpi().cancel(request);
    while (!done(peer.requests, process) && Clock::now() < deadline) {}
    if (!peer.requests.empty() || !peer.under_way.empty()) throw WorldError("messages of MPI do not end", "");
  }
}

}  // namespace shardlab::runtime
