#include "runtime/process_transport.h"

#include <fmt/format.h>

#include <new>

#include "runtime/stepped_communicator.h"

namespace shardlab::runtime {

namespace {

constexpr int64_t kPage = 4096;
int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

/// Bytes of a rank's arena that its peers read from, each space on pages of its own.
int64_t shared_bytes(const ArenaLayout& arena, Space space) {
  return space == Space::kNvme ? 0 : whole_pages(arena.bytes[static_cast<size_t>(space)]);
}

}  // namespace

ProcessTransport::ProcessTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, bool has_storage)
    : kernels_(kernels),
      placed_(placed),
      control_(control),
      has_storage_(has_storage),
      world_size_(placed.plan->mesh.world_size()),
      ranks_here_(world_size_ / control.processes()) {}

Result<std::unique_ptr<ProcessTransport>> ProcessTransport::create(const kernels::Kernels& kernels, const PlacedPlan& placed,
                                                                   Control& control, bool has_storage,
                                                                   const ProcessTransport* beside) {
  has_storage = has_storage && beside == nullptr;
  std::unique_ptr<ProcessTransport> made(new ProcessTransport(kernels, placed, control, has_storage));
  made->beside_ = beside;
  const int first = control.process() * made->ranks_here_;
  int64_t bytes = made->channel_place(CommId(static_cast<int32_t>(placed.plan->comms.size())), first, 0);
  bytes = whole_pages(std::max<int64_t>(bytes, 1));
  for (int r = first; has_storage && r < first + made->ranks_here_; ++r)
    for (const Space space : {Space::kDevice, Space::kHost})
      bytes += shared_bytes(placed.arenas[static_cast<size_t>(placed.plan->mesh.role_of(placed.plan->mesh.coordinates(r)))], space);
  made->memory_ = std::make_unique<SharedMemory>(bytes);
  // A process that is alone may take turns on its cores, and is then told of counters.
  const bool shared = control.processes() > 1;
  for (size_t c = 0; c < placed.plan->comms.size(); ++c)
    for (int from = first; from < first + made->ranks_here_; ++from)
      for (int to = 0; to < made->world_size_; ++to)
        new (made->memory_->own().data() + made->channel_place(CommId(static_cast<int32_t>(c)), from, to)) Channel(shared);
  made->memory_->exchange(control);
  for (int p = 0; p < control.processes(); ++p)
    if (made->memory_->of(p).empty())
      return Error{
          ExitCode::kEnvironment,
          fmt::format("transport processes with process {} of the group on another machine than process {}", p, control.process()),
          "use transport: tcp, which reaches every machine", ""};
  return made;
}

int64_t ProcessTransport::channel_place(CommId comm, int from, int to) const {
  const int64_t own = from % ranks_here_;
  return ((static_cast<int64_t>(comm.value) * ranks_here_ + own) * world_size_ + to) * static_cast<int64_t>(sizeof(Channel));
}

Channel& ProcessTransport::channel(CommId comm, int from, int to) const {
  std::byte* const at = memory_->of(from / ranks_here_).data() + channel_place(comm, from, to);
  return *std::launder(reinterpret_cast<Channel*>(at));
}

std::unique_ptr<Communicator> ProcessTransport::join(int rank, CommId comm, std::span<const int> members) {
  return join_by(kernels_, rank, members, [&](int peer) {
    const SharedMemory& arenas = beside_ == nullptr ? *memory_ : *beside_->memory_;
    const CommonMemory memory{arenas.own().data(), arenas.of(peer / ranks_here_).data()};
    return std::make_unique<MemoryWire>(peer, channel(comm, rank, peer), channel(comm, peer, rank), memory);
  });
}

std::byte* ProcessTransport::storage(int rank, Space space) {
  if (!has_storage_ || space == Space::kNvme) return nullptr;
  const Mesh& mesh = placed_.plan->mesh;
  const int first = control_.process() * ranks_here_;
  int64_t place =
      whole_pages(std::max<int64_t>(channel_place(CommId(static_cast<int32_t>(placed_.plan->comms.size())), first, 0), 1));
  for (int r = first; r <= rank; ++r)
    for (const Space s : {Space::kDevice, Space::kHost}) {
      if (r == rank && s == space) return memory_->own().data() + place;
      place += shared_bytes(placed_.arenas[static_cast<size_t>(mesh.role_of(mesh.coordinates(r)))], s);
    }
  return nullptr;
}

}  // namespace shardlab::runtime
