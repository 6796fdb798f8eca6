#include "runtime/gloo_transport.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <utility>

namespace shardlab::runtime {

// ---- Gloo of this process

namespace {

/// Whether `file` lies in a folder that CMake builds, where another build helps.
bool is_of_build(const std::string& file) {
  std::error_code none;
  return std::filesystem::exists(std::filesystem::path(file).parent_path() / "CMakeCache.txt", none);
}

}  // namespace

Result<GlooLibrary> GlooLibrary::open(const std::string& file) {
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays: Gloo keeps threads
  if (library == nullptr)
    return Error{ExitCode::kEnvironment, fmt::format("Gloo cannot be used: {}", dlerror()),
                 is_of_build(file)
                     ? "apt-get install libgloo-dev and build again, or ./dev wires; or name the library with SHARDLAB_GLOO"
                     : "install Gloo and a shardlab that was built with it, or name its library with SHARDLAB_GLOO; "
                       "transport: tcp needs no Gloo",
                 ""};
  auto* connect = reinterpret_cast<GlooConnect*>(dlsym(library, kGlooConnect));
  if (connect == nullptr)
    return Error{
        ExitCode::kEnvironment, fmt::format("{} is of another version of this program", file),
        is_of_build(file) ? "build again" : "install program and library together, or name one of this version with SHARDLAB_GLOO",
        ""};
  return GlooLibrary(connect);
}

GlooWorld::GlooWorld(const GlooLibrary& library, Control& control, double timeout_s) : control_(control) {
  GlooWish wish{control.process(), control.processes(), control.address(), timeout_s, {}};
  wish.exchange = [&control](const std::vector<std::string>& own) {
    std::string said;
    for (const std::string& address : own) put_text(said, address);
    std::vector<std::vector<std::string>> all;
    for (const std::string& text : control.gather(said)) {
      all.emplace_back();
      for (Taking from(text); !from.done();) all.back().emplace_back(from.take_text());
    }
    return all;
  };
  std::string error;
  mesh_.reset(library.connect(wish, error));
  if (mesh_ == nullptr)
    throw WorldError(fmt::format("Gloo does not connect process {}: {}", control.process(), error),
                     fmt::format("see that {} can be reached from the other hosts", wish.host));
}

GlooWorld::~GlooWorld() {
  try {
    control_.barrier();  // whoever goes first would break connections that others still read
  } catch (const WorldError&) {}
}

// ---- one plan's messages

GlooTransport::GlooTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, GlooWorld& world)
    : MessageTransport(kernels, placed, control), world_(world), slot_(world.next_slot()) {
  for (int p = 0; p < control.processes(); ++p) peers_.push_back(p == control.process() ? nullptr : std::make_unique<Peer>());
  for (int p = 0; p < control.processes(); ++p) {
    if (peers_[static_cast<size_t>(p)] == nullptr) continue;
    Peer& peer = *peers_[static_cast<size_t>(p)];
    peer.sender = std::thread([this, p, &peer] { send_all(p, peer); });
    peer.receiver = std::thread([this, p] { receive_all(p); });
  }
}

/// What is queued is sent first, the answer to a peer's last message; a peer that stands still is not waited for long.
GlooTransport::~GlooTransport() {
  constexpr std::chrono::seconds kPatience(1);
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    std::unique_lock lock(peer->mutex);
    peer->ends = true;
    peer->changed.notify_all();
    peer->changed.wait_for(lock, kPatience, [&] { return peer->sent; });
  }
  world_.mesh().close(slot_);
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    peer->sender.join();
    peer->receiver.join();
  }
}

void GlooTransport::post(int process, const MessageHeader& header, std::span<const Slice> slices) {
  Peer& peer = *peers_[static_cast<size_t>(process)];
  const std::lock_guard lock(peer.mutex);
  peer.queue.push_back({header, {slices.begin(), slices.end()}});
  peer.changed.notify_one();
}

bool GlooTransport::send(int process, const Outgoing& message, std::vector<std::byte>& packed) {
  GlooMesh& mesh = world_.mesh();
  if (!mesh.send(process, slot_, reinterpret_cast<const std::byte*>(&message.header), sizeof message.header)) return false;
  if (message.header.following() == 0) return true;
  if (message.slices.size() == 1) return mesh.send(process, slot_, message.slices.front().at, message.slices.front().bytes);
  packed.clear();
  for (const Slice& slice : message.slices) packed.insert(packed.end(), slice.at, slice.at + slice.bytes);
  return mesh.send(process, slot_, packed.data(), static_cast<int64_t>(packed.size()));
}

/// Until the end. A connection that breaks is left: its ranks wait, and the control plane says whose process has gone.
void GlooTransport::send_all(int process, Peer& peer) {
  std::vector<std::byte> packed;
  std::unique_lock lock(peer.mutex);
  for (bool goes = true; goes;) {
    peer.changed.wait(lock, [&] { return peer.ends || !peer.queue.empty(); });
    if (peer.queue.empty()) break;
    const Outgoing next = std::move(peer.queue.front());
    peer.queue.pop_front();
    lock.unlock();
    goes = send(process, next, packed);
    lock.lock();
  }
  peer.sent = true;
  peer.changed.notify_all();
}

void GlooTransport::receive_all(int process) {
  GlooMesh& mesh = world_.mesh();
  MessageHeader header;
  while (mesh.receive(process, slot_, reinterpret_cast<std::byte*>(&header), sizeof header)) {
    MessageChannel& channel = begin(header);
    const int64_t bytes = header.following();
    if (bytes > 0 && !mesh.receive(process, slot_, channel.message.data(), bytes)) return;
    complete(header, channel);
  }
}

}  // namespace shardlab::runtime
