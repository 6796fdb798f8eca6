#include "kernels/cuda/emulate/lanes.h"

#include <ucontext.h>

#include <cstring>
#include <memory>
#include <vector>

#include "plan/base/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace shardlab::gpu::emulate {
namespace {

/// A context to switch to, with what the sanitizers want to know of it.
struct Fiber {
  ucontext_t context{};
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
  void* tsan = nullptr;
};

/// Leaves `from` for `to`; returns when somebody switches back. `last`: never.
void switch_fiber(Fiber& from, Fiber& to, bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.tsan, 0);
#endif
  static_cast<void>(last);
  swapcontext(&from.context, &to.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

struct Copy {
  void* to;
  const void* from;  ///< null: zeros
};
/// Asynchronous copies of one thread, oldest group first; the last group is still open.
using CopyGroups = std::vector<std::vector<Copy>>;

struct Warp {
  Lane::Slots slots[2];
  WarpOp op{};
  int arrived = 0;
  uint64_t done = 0;  ///< warp operations completed
};

enum class Waits : uint8_t { kNo, kBarrier, kWarp, kEnded };

struct Thread {
  Lane lane;
  Fiber fiber;
  Waits waits = Waits::kNo;
  uint64_t until = 0;  ///< barriers, or warp operations, that must be done before it goes on
  CopyGroups copies;
};

constexpr size_t kStackBytes = 256 * 1024;

}  // namespace

/// One block at a time; its fibers' stacks serve all blocks of a grid.
class Block {
 public:
  Block(const char* kernel, const Geometry& g, bool reversed, void (*body)(const void*, Lane&), const void* args)
      : kernel_(kernel),
        geometry_(g),
        reversed_(reversed),
        body_(body),
        args_(args),
        threads_(static_cast<size_t>(g.threads)),
        warps_(static_cast<size_t>(g.threads / Lane::kWarp)),
        stacks_(new unsigned char[threads_.size() * kStackBytes]) {
#if defined(__SANITIZE_THREAD__)
    scheduler_.tsan = __tsan_get_current_fiber();
    for (Thread& t : threads_) t.fiber.tsan = __tsan_create_fiber(0);
#endif
  }
  ~Block() {
#if defined(__SANITIZE_THREAD__)
    for (Thread& t : threads_) __tsan_destroy_fiber(t.fiber.tsan);
#endif
  }

  void run(int64_t x, int64_t y, int64_t z) {
    shared_.reset(new unsigned char[static_cast<size_t>(geometry_.shared)]);
    std::memset(shared_.get(), 0xff, static_cast<size_t>(geometry_.shared));
    barriers_ = 0;
    for (Warp& w : warps_) w = {};
    for (size_t i = 0; i < threads_.size(); ++i) start(i, x, y, z);
    size_t running = threads_.size();
    while (running != 0) {
      const size_t before = running, steps = steps_;
      for (size_t i = 0; i < threads_.size(); ++i) running -= step(threads_[reversed_ ? threads_.size() - 1 - i : i]);
      SHARDLAB_CHECK(running != before || steps_ != steps, "kernel {}: block ({}, {}, {}) is stuck: {}", kernel_, x, y, z,
                     who_waits());
    }
  }

  void barrier(Lane& lane) {
    Thread& me = threads_[static_cast<size_t>(lane.thread_)];
    const uint64_t until = barriers_ + 1;
    if (++at_barrier_ == geometry_.threads) {
      at_barrier_ = 0;
      ++barriers_;
      return;
    }
    wait(me, Waits::kBarrier, until);
  }

  const Lane::Slots& exchange(Lane& lane, WarpOp op, const void* mine, size_t bytes) {
    Warp& warp = warps_[static_cast<size_t>(lane.thread_ / Lane::kWarp)];
    SHARDLAB_CHECK(bytes <= Lane::kSlot, "{} bytes given to a warp operation", bytes);
    SHARDLAB_CHECK(warp.arrived == 0 || warp.op == op, "kernel {}: lanes of one warp are at different operations", kernel_);
    warp.op = op;
    // Two sets of slots: no lane begins the operation after the next before all have left this one.
    Lane::Slots& slots = warp.slots[warp.done % 2];
    if (bytes != 0) std::memcpy(slots.bytes[lane.thread_ % Lane::kWarp], mine, bytes);
    const uint64_t until = warp.done + 1;
    if (++warp.arrived == Lane::kWarp) {
      warp.arrived = 0;
      ++warp.done;
    } else {
      wait(threads_[static_cast<size_t>(lane.thread_)], Waits::kWarp, until);
    }
    return slots;
  }

  CopyGroups& copies(const Lane& lane) { return threads_[static_cast<size_t>(lane.thread_)].copies; }

 private:
  void start(size_t i, int64_t x, int64_t y, int64_t z) {
    Thread& t = threads_[i];
    t.lane.block_ = this;
    t.lane.geometry_ = &geometry_;
    t.lane.shared_ = shared_.get();
    t.lane.x_ = x;
    t.lane.y_ = y;
    t.lane.z_ = z;
    t.lane.thread_ = static_cast<int>(i);
    t.waits = Waits::kNo;
    t.copies.assign(1, {});
    unsigned char* stack = stacks_.get() + i * kStackBytes;
    t.fiber.stack = stack;
    t.fiber.stack_bytes = kStackBytes;
    getcontext(&t.fiber.context);
    t.fiber.context.uc_stack.ss_sp = stack;
    t.fiber.context.uc_stack.ss_size = kStackBytes;
    t.fiber.context.uc_link = nullptr;
    // makecontext passes ints only: the pointer goes in two halves.
    const auto address = reinterpret_cast<uintptr_t>(&t);
    makecontext(&t.fiber.context, reinterpret_cast<void (*)()>(&Block::enter), 2, static_cast<unsigned>(address >> 32),
                static_cast<unsigned>(address));
  }

  static void enter(unsigned high, unsigned low) {
    Thread& t = *reinterpret_cast<Thread*>(static_cast<uintptr_t>(high) << 32 | low);
    Block& block = *t.lane.block_;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_.stack, &block.scheduler_.stack_bytes);
#endif
    block.body_(block.args_, t.lane);
    t.waits = Waits::kEnded;
    switch_fiber(t.fiber, block.scheduler_, true);
  }

  /// Runs a thread on if it may; returns whether it ended by that.
  size_t step(Thread& t) {
    if (t.waits == Waits::kEnded) return 0;
    if (t.waits == Waits::kBarrier && barriers_ < t.until) return 0;
    if (t.waits == Waits::kWarp && warps_[static_cast<size_t>(t.lane.thread_ / Lane::kWarp)].done < t.until) return 0;
    ++steps_;
    t.waits = Waits::kNo;
    switch_fiber(scheduler_, t.fiber);
    return t.waits == Waits::kEnded ? 1 : 0;
  }

  void wait(Thread& t, Waits what, uint64_t until) {
    t.waits = what;
    t.until = until;
    switch_fiber(t.fiber, scheduler_);
  }

  std::string who_waits() const {
    int count[4] = {};
    for (const Thread& t : threads_) ++count[static_cast<int>(t.waits)];
    return fmt::format("{} threads wait at a barrier, {} at a warp operation, {} have ended", count[1], count[2], count[3]);
  }

  const char* kernel_;
  const Geometry geometry_;
  const bool reversed_;
  void (*body_)(const void*, Lane&);
  const void* args_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::unique_ptr<unsigned char[]> stacks_, shared_;
  Fiber scheduler_;
  uint64_t barriers_ = 0;
  int at_barrier_ = 0;
  size_t steps_ = 0;
};

void Lane::barrier() { block_->barrier(*this); }
const Lane::Slots& Lane::exchange(WarpOp op, const void* mine, size_t bytes) { return block_->exchange(*this, op, mine, bytes); }
void Lane::copy_later(void* to, const void* from) { block_->copies(*this).back().push_back({to, from}); }
void Lane::commit_copies() { block_->copies(*this).emplace_back(); }
void Lane::wait_copies(int groups_in_flight) {
  CopyGroups& groups = block_->copies(*this);
  const size_t open = 1;
  while (groups.size() > static_cast<size_t>(groups_in_flight) + open) {
    for (const Copy& c : groups.front())
      if (c.from != nullptr)
        std::memcpy(c.to, c.from, 16);
      else
        std::memset(c.to, 0, 16);
    groups.erase(groups.begin());
  }
}

void run_grid(const char* kernel, const Geometry& g, Settings* settings, void (*body)(const void*, Lane&), const void* args) {
  const std::string_view why = refusal(g);
  SHARDLAB_CHECK(why.empty(), "kernel {}: no device takes its launch: {}", kernel, why);
  if (settings != nullptr) settings->launches.push_back({kernel, g});
  const bool reversed = settings != nullptr && settings->reversed;
  Block block(kernel, g, reversed, body, args);
  for (int64_t i = 0; i < g.blocks(); ++i) {
    const int64_t at = reversed ? g.blocks() - 1 - i : i;
    block.run(at % g.x, at / g.x % g.y, at / (g.x * g.y));
  }
}

}  // namespace shardlab::gpu::emulate
