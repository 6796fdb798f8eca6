#pragma once

#include <cstdint>
#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {

/// See offload_gradients.cpp.
void offload_gradients(Draft& draft);

/// Whether gradients stay in host memory until the end of the step: something reads all of them at once (a norm, a search for
/// infinities), or they have their place there anyway.
bool keeps_host_gradients(const Case& config);

/// The buffer that owns the storage of another.
BufferId storage_of(const StageDraft& stage, BufferId id);
/// The first and the last event of a timetable that reads a storage, writes it or takes it.
struct Touched {
  size_t first = SIZE_MAX, last = 0;
  bool any() const { return first != SIZE_MAX; }
};
/// Of every storage, by the index of the buffer that owns it, in one pass over the timetable.
std::vector<Touched> touched_storages(const StageDraft& stage);
/// A buffer like `id` in host memory, with storage of its own, for as long as is said elsewhere.
BufferId host_copy(StageDraft& stage, BufferId id, const std::string& suffix, BufferClass kind);
/// A copy between two buffers of one type but for where they are.
Event copy_event(Draft& draft, StageDraft& stage, const std::string& what, BufferId from, BufferId to, StreamId on,
                 std::string_view strategy);

}  // namespace shardlab::strategies
