#include "kernels/cuda/emulate/fiber.h"

#include <cstdint>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define SHARDLAB_OWN_SWITCH 1
// Saves what a call must keep (System V x86-64) on the stack that is left, and takes it from the one that is entered. The
// floating-point modes are the same on all.
extern "C" void shardlab_switch_stack(void** left, void* entered);
// Where a new stack begins: calls the function in r12 with rbx.
extern "C" void shardlab_enter_stack();
asm(R"(
.text
.globl shardlab_switch_stack
.type shardlab_switch_stack, @function
shardlab_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shardlab_switch_stack, .-shardlab_switch_stack
.globl shardlab_enter_stack
.type shardlab_enter_stack, @function
shardlab_enter_stack:
  movq %rbx, %rdi
  jmp *%r12
.size shardlab_enter_stack, .-shardlab_enter_stack
)");
#endif

namespace shardlab::gpu::emulate {
void Fiber::prepare(unsigned char* stack, size_t bytes, void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  stack_ = stack;
  bytes_ = bytes;
  fake_stack_ = nullptr;
#ifdef SHARDLAB_OWN_SWITCH
  // What switching pops: r15, r14, r13, r12, rbx, rbp and where to return to; above it a null return address, so that the stack is
  // aligned as after a call.
  auto* top = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack) + bytes) / 16 * 16);
  const uintptr_t frame[8] = {0,
                              0,
                              0,
                              reinterpret_cast<uintptr_t>(&Fiber::enter),
                              reinterpret_cast<uintptr_t>(this),
                              0,
                              reinterpret_cast<uintptr_t>(&shardlab_enter_stack),
                              0};
  top -= 8;
  for (int i = 0; i < 8; ++i) top[i] = frame[i];
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = bytes;
  context_.uc_link = nullptr;
  // makecontext passes ints only: the pointer goes in two halves.
  const auto me = reinterpret_cast<uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter_halves), 2, static_cast<unsigned>(me >> 32),
              static_cast<unsigned>(me));
#endif
}

void Fiber::enter_halves(unsigned high, unsigned low) { enter(reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low)); }

void Fiber::enter(Fiber* me) {
  me->entered();
  me->entry_(me->argument_);
  std::abort();
}

void Fiber::entered() {
#if defined(__SANITIZE_ADDRESS__)
  // The stack of a fiber that was not prepared is known to the sanitizer only.
  const bool unknown = from_->entry_ == nullptr;
  __sanitizer_finish_switch_fiber(fake_stack_, unknown ? &from_->stack_ : nullptr, unknown ? &from_->bytes_ : nullptr);
#endif
}

void Fiber::switch_to(Fiber& other, [[maybe_unused]] bool last) {
  other.from_ = this;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, other.stack_, other.bytes_);
#endif
#ifdef SHARDLAB_OWN_SWITCH
  shardlab_switch_stack(&stack_pointer_, other.stack_pointer_);
#else
  swapcontext(&context_, &other.context_);
#endif
  entered();
}

}  // namespace shardlab::gpu::emulate
