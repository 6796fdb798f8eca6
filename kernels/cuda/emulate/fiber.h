// Stacks that one thread changes between. On x86-64 a change is a dozen instructions; elsewhere it is swapcontext, which asks the
// kernel for the signal mask each time. The sanitizers are told of every change.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace shardlab::gpu::emulate {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes a fiber that, when it is first switched to, calls entry(argument) on the stack given; entry must never return.
  void prepare(unsigned char* stack, size_t bytes, void (*entry)(void*), void* argument);
  /// Leaves this fiber, which is running, for another; returns when somebody switches back. `last`: nobody will.
  void switch_to(Fiber& other, bool last = false);

 private:
  static void enter(Fiber* me);
  static void enter_halves(unsigned high, unsigned low);
  /// Tells the sanitizers that this stack goes on; called first on it.
  void entered();

  void* stack_pointer_ = nullptr;  ///< while it is left, on x86-64 but under the thread sanitizer
#if !defined(__x86_64__) || defined(__SANITIZE_THREAD__)
  ucontext_t context_{};  ///< elsewhere
#endif
  Fiber* from_ = nullptr;          ///< who switched here last
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  const void* stack_ = nullptr;  ///< of a fiber that was not prepared: found when it is first left
  size_t bytes_ = 0;
  void* fake_stack_ = nullptr;
};

}  // namespace shardlab::gpu::emulate
