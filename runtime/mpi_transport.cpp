#include "runtime/mpi_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
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
  try {
    start();
  } catch (...) {
    end_thread();
    throw;
  }
}

void MpiWorld::start() {
  struct Started {
    int error = 0, rank = 0, size = 0;
  };
  const auto started = std::make_shared<Started>();
  call([started, mpi = mpi()] {
    started->error = mpi->init();
    if (started->error != 0) return;
    started->rank = mpi->rank();
    started->size = mpi->size();
  });
  const auto [error, rank, size] = *started;
  if (error != 0) throw WorldError(fmt::format("MPI of {} does not start: {}", mpi()->file(), mpi()->describe(error)), "");
  if (rank == control_.process() && size == control_.processes()) return;
  throw WorldError(
      fmt::format("process {} of {} is process {} of {} for MPI ({})", control_.process(), control_.processes(), rank, size,
                  mpi()->version()),
      fmt::format("start all with the launcher of that library: mpirun -n {} shardlab launch run ...", control_.processes()));
}

MpiWorld::~MpiWorld() {
  try {
    control_.barrier();  // nobody sends any more
    call([mpi = mpi()] { mpi->finalize(); });
  } catch (const WorldError&) {}
  end_thread();
}

/// Waits for the thread's end, and leaves it alone where it is in a call that does not return.
void MpiWorld::end_thread() noexcept {
  bool stuck = false;
  {
    const std::lock_guard lock(shared_->mutex);
    stuck = shared_->late;
    shared_->ends = true;
    shared_->on_error = nullptr;
  }
  shared_->changed.notify_all();
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

void MpiWorld::call(std::function<void()> body) {
  const auto call = std::make_shared<Call>();
  call->body = std::move(body);
  std::future<void> done = call->done.get_future();
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->calls.push_back(call);
  }
  shared_->changed.notify_all();
  if (done.wait_for(std::chrono::duration<double>(timeout_s_)) != std::future_status::ready) {
    const std::lock_guard lock(shared_->mutex);
    if (!call->begun) std::erase(shared_->calls, call);
    // It may have returned a moment ago.
    if (done.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      shared_->late = true;
      throw WorldError(fmt::format("MPI has not returned within {:.3g} s", timeout_s_),
                       "see that the launcher has started every process of the group");
    }
  }
  done.get();
}

void MpiWorld::attach(std::shared_ptr<MpiLine> line) {
  call([shared = shared_, line = std::move(line)] { shared->lines.push_back(line); });
}
void MpiWorld::detach(const std::shared_ptr<MpiLine>& line) {
  call([shared = shared_, line] { std::erase(shared->lines, line); });
}

void MpiWorld::wake() {
  if (!shared_->posted.exchange(true)) shared_->changed.notify_all();
}

/// The first of the calls, without the lock. It is done before its caller is told.
void MpiWorld::carry_out(Shared& shared, std::unique_lock<std::mutex>& lock) {
  const std::shared_ptr<Call> call = std::move(shared.calls.front());
  shared.calls.pop_front();
  call->begun = true;
  lock.unlock();
  std::exception_ptr failure;
  try {
    call->body();
  } catch (...) { failure = std::current_exception(); }
  call->body = nullptr;
  lock.lock();
  shared.late = false;
  if (failure)
    call->done.set_exception(failure);
  else
    call->done.set_value();
}

/// Calls what is to be called and moves every line, until the end. An error ends the group.
void MpiWorld::progress(Shared& shared) {
  int idle = 0;
  std::unique_lock lock(shared.mutex);
  while (!shared.ends) {
    shared.late = false;
    while (!shared.ends && !shared.calls.empty()) {
      carry_out(shared, lock);
      idle = 0;
    }
    if (shared.ends) return;
    lock.unlock();
    bool moved = shared.posted.exchange(false);
    try {
      for (const auto& line : shared.lines) moved = line->advance() || moved;
    } catch (const std::exception& error) {
      shared.lines.clear();
      lock.lock();
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

/// What MPI reads and writes, and what moves it: it stays for as long as MPI may use it, which can be longer than the transport.
class MpiTransport::Line final : public MpiLine {
 public:
  Line(MpiTransport& owner, std::shared_ptr<Mpi> mpi, int tag, int process, int processes)
      : mpi_(std::move(mpi)), tag_(tag), process_(process), owner_(&owner) {
    for (int p = 0; p < processes; ++p) peers_.push_back(p == process ? nullptr : std::make_unique<Peer>());
  }

  /// From the progress thread, as `close` is.
  void open();
  void close();
  bool advance() override;
  void post(int process, const MessageHeader& header, std::span<const Slice> slices);
  /// The transport goes: nothing is begun or completed after it.
  void disown() {
    const std::lock_guard lock(owning_);
    owner_ = nullptr;
  }

 private:
  /// A message on its way out. It stays where it is until MPI is done with it.
  struct Outgoing {
    MessageHeader header;
    std::vector<Slice> slices;
    std::vector<std::byte> packed;  ///< of several slices
    std::vector<MpiRequest> requests;
  };
  struct Peer {
    std::mutex mutex;  ///< guards `posted`
    std::list<Outgoing> posted;
    std::list<Outgoing> under_way;
    MessageHeader header;  ///< of the message that comes
    MpiRequest header_request;
    std::vector<MpiRequest> requests;  ///< of what follows it
    std::vector<std::byte> following;  ///< the channel's memory for that, which is here while MPI writes it
    MessageChannel* into = nullptr;    ///< none: the header has not come
  };

  bool receive_some(int process, Peer& peer);
  bool send_some(int process, Peer& peer);
  bool has_owner();
  bool begin_message(Peer& peer);
  bool complete_message(Peer& peer);
  void expect_header(int process, Peer& peer);
  void start(int process, Outgoing& message);
  bool done(std::vector<MpiRequest>& requests, int process);
  void check(int error, const char* what, int process) const;

  const std::shared_ptr<Mpi> mpi_;
  const int tag_, process_;
  std::vector<std::unique_ptr<Peer>> peers_;  ///< by process; none to this one
  std::mutex owning_;                         ///< guards `owner_`
  MpiTransport* owner_;                       ///< null: it has gone
};

MpiTransport::MpiTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, MpiWorld& world)
    : MessageTransport(kernels, placed, control),
      world_(world),
      line_(std::make_shared<Line>(*this, world.mpi(), world.next_tag(), control.process(), control.processes())) {
  try {
    world_.call([line = line_] { line->open(); });
    world_.attach(line_);
  } catch (...) {
    leave_to_mpi();
    throw;
  }
}

MpiTransport::~MpiTransport() {
  try {
    world_.detach(line_);
    world_.call([line = line_] { line->close(); });
  } catch (const std::exception&) { leave_to_mpi(); }
}

/// MPI does not return, or fails: it may still write where its messages were to go, until the process ends.
void MpiTransport::leave_to_mpi() noexcept {
  line_->disown();
  static std::mutex mutex;
  static auto& left = *new std::vector<std::shared_ptr<Line>>;
  const std::lock_guard lock(mutex);
  left.push_back(line_);
}

void MpiTransport::post(int process, const MessageHeader& header, std::span<const Slice> slices) {
  line_->post(process, header, slices);
  world_.wake();
}

void MpiTransport::Line::open() {
  for (size_t p = 0; p < peers_.size(); ++p)
    if (peers_[p] != nullptr) expect_header(static_cast<int>(p), *peers_[p]);
}

void MpiTransport::Line::check(int error, const char* what, int process) const {
  if (error != 0)
    throw WorldError(fmt::format("MPI of process {} cannot {} process {}: {}", process_, what, process, mpi_->describe(error)), "");
}

void MpiTransport::Line::post(int process, const MessageHeader& header, std::span<const Slice> slices) {
  Peer& peer = *peers_[static_cast<size_t>(process)];
  const std::lock_guard lock(peer.mutex);
  peer.posted.push_back({header, {slices.begin(), slices.end()}, {}, {}});
}

bool MpiTransport::Line::advance() {
  bool moved = false;
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (peers_[p] == nullptr) continue;
    moved = receive_some(static_cast<int>(p), *peers_[p]) || moved;
    moved = send_some(static_cast<int>(p), *peers_[p]) || moved;
  }
  return moved;
}

void MpiTransport::Line::expect_header(int process, Peer& peer) {
  peer.into = nullptr;
  check(mpi_->receive(&peer.header, sizeof peer.header, process, tag_, peer.header_request), "hear of", process);
}

/// Drops the requests that are done. True: all are.
bool MpiTransport::Line::done(std::vector<MpiRequest>& requests, int process) {
  std::erase_if(requests, [&](MpiRequest& request) {
    bool is_done = false;
    check(mpi_->test(request, is_done), "exchange messages with", process);
    return is_done;
  });
  return requests.empty();
}

bool MpiTransport::Line::has_owner() {
  const std::lock_guard lock(owning_);
  return owner_ != nullptr;
}

/// False: the transport has gone.
bool MpiTransport::Line::begin_message(Peer& peer) {
  const std::lock_guard lock(owning_);
  if (owner_ == nullptr) return false;
  peer.into = &owner_->begin(peer.header);
  if (peer.header.following() > 0) peer.following = std::move(peer.into->message);
  return true;
}
bool MpiTransport::Line::complete_message(Peer& peer) {
  const std::lock_guard lock(owning_);
  if (owner_ == nullptr) return false;
  if (peer.header.following() > 0) peer.into->message = std::move(peer.following);
  owner_->complete(peer.header, *peer.into);
  return true;
}

bool MpiTransport::Line::receive_some(int process, Peer& peer) {
  bool moved = false;
  while (true) {
    if (peer.into == nullptr) {
      bool came = false;
      check(mpi_->test(peer.header_request, came), "hear of", process);
      if (!came || !begin_message(peer)) return moved;
      in_pieces(peer.following.data(), peer.header.following(), [&](std::byte* at, int64_t bytes) {
        check(mpi_->receive(at, bytes, process, tag_ + 1, peer.requests.emplace_back()), "receive from", process);
      });
    }
    if (!done(peer.requests, process) || !complete_message(peer)) return moved;
    expect_header(process, peer);
    moved = true;
  }
}

/// The header, and behind it what it announces: messages of one tag between two processes stay in order.
void MpiTransport::Line::start(int process, Outgoing& message) {
  const auto send = [&](const std::byte* at, int64_t all, int tag) {
    in_pieces(at, all, [&](const std::byte* piece, int64_t bytes) {
      check(mpi_->send(piece, bytes, process, tag, message.requests.emplace_back()), "send to", process);
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

bool MpiTransport::Line::send_some(int process, Peer& peer) {
  std::list<Outgoing> fresh;
  {
    const std::lock_guard lock(peer.mutex);
    fresh.swap(peer.posted);
  }
  const bool any = !fresh.empty();
  if (any && !has_owner()) return false;  // what its ranks were to send has gone with them
  for (Outgoing& message : fresh) start(process, message);
  peer.under_way.splice(peer.under_way.end(), fresh);
  while (!peer.under_way.empty() && done(peer.under_way.front().requests, process)) peer.under_way.pop_front();
  return any;
}

/// Lets what is under way end, and takes back what waits for messages that do not come.
void MpiTransport::Line::close() {
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
    for (MpiRequest& request : peer.requests) mpi_->cancel(request);
    while (!done(peer.requests, process) && Clock::now() < deadline) {}
    if (!peer.requests.empty() || !peer.under_way.empty()) throw WorldError("messages of MPI do not end", "");
  }
}

}  // namespace shardlab::runtime
