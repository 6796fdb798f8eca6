#include "runtime/gloo/mesh.h"

#include <gloo/common/error.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "plan/base/world_error.h"

namespace shardlab::runtime {

namespace {

using gloo::transport::UnboundBuffer;

constexpr std::chrono::hours kNoLimit(24 * 365);  // waits have their limits above: the task that waits, and the control plane

class Mesh final : public GlooMesh {
 public:
  explicit Mesh(const GlooWish& wish) {
    std::shared_ptr<gloo::transport::Device> device =
        gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(wish.host.c_str()));
    context_ = device->createContext(wish.process, wish.processes);
    context_->setTimeout(std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(wish.timeout_s)));
    const auto processes = static_cast<size_t>(wish.processes), own = static_cast<size_t>(wish.process);
    std::vector<std::string> addresses(processes);
    for (size_t p = 0; p < processes; ++p) {
      if (p == own) continue;
      const std::vector<char> bytes = context_->createPair(static_cast<int>(p))->address().bytes();
      addresses[p].assign(bytes.begin(), bytes.end());
    }
    const std::vector<std::vector<std::string>> all = wish.exchange(addresses);
    for (size_t p = 0; p < processes; ++p) {
      if (p == own) continue;
      const std::string& there = all[p][own];
      context_->getPair(static_cast<int>(p))->connect(std::vector<char>(there.begin(), there.end()));
    }
  }

  bool send(int process, uint64_t slot, const std::byte* at, int64_t bytes) override {
    return carry(slot, const_cast<std::byte*>(at), bytes, [&](UnboundBuffer& buffer) {
      buffer.send(process, slot);
      return buffer.waitSend(nullptr, kNoLimit);
    });
  }
  bool receive(int process, uint64_t slot, std::byte* at, int64_t bytes) override {
    return carry(slot, at, bytes, [&](UnboundBuffer& buffer) {
      buffer.recv(process, slot);
      return buffer.waitRecv(nullptr, kNoLimit);
    });
  }
  void close(uint64_t slot) override {
    const std::lock_guard lock(mutex_);
    closed_.insert(slot);
    const auto [begin, end] = under_way_.equal_range(slot);
    for (auto at = begin; at != end; ++at) {
      at->second->abortWaitSend();
      at->second->abortWaitRecv();
    }
  }

 private:
  /// One call on a buffer that `close` can find.
  template <class Call>
  bool carry(uint64_t slot, std::byte* at, int64_t bytes, const Call& call) {
    const std::unique_ptr<UnboundBuffer> buffer = context_->createUnboundBuffer(at, static_cast<size_t>(bytes));
    decltype(under_way_)::iterator place;
    {
      const std::lock_guard lock(mutex_);
      if (closed_.contains(slot)) return false;
      place = under_way_.emplace(slot, buffer.get());
    }
    bool done = false;
    try {
      done = call(*buffer);
    } catch (const std::exception&) {  // the connection is broken: the control plane says whose process has gone
    }
    const std::lock_guard lock(mutex_);
    under_way_.erase(place);
    return done;
  }

  std::shared_ptr<gloo::transport::Context> context_;
  std::mutex mutex_;  ///< guards the two below
  std::set<uint64_t> closed_;
  std::multimap<uint64_t, UnboundBuffer*> under_way_;
};

}  // namespace

}  // namespace shardlab::runtime

/// Gloo's own errors become text; what the group throws goes through.
extern "C" shardlab::runtime::GlooMesh* shardlab_gloo_connect_1(const shardlab::runtime::GlooWish& wish, std::string& error) {
  try {
    return new shardlab::runtime::Mesh(wish);
  } catch (const shardlab::WorldError&) {
    throw;
  } catch (const std::exception& failure) {  // gloo::Exception, and gloo::EnforceNotMet, which is none
    error = failure.what();
    return nullptr;
  }
}
