#include "simt/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace jflux::simt {
namespace {

// A kernel's arguments take up to 4 KiB of it, and its accumulators 1 KiB. Below is a guard page.
constexpr size_t kStackBytes = 96 << 10, kGuardBytes = 4096;

// Stacks of fibers that have ended: their pages are there already.
std::vector<char*>& FreeStacks() {
  static auto* stacks = new std::vector<char*>;
  return *stacks;
}

char* TakeStack() {
  if (!FreeStacks().empty()) {
    char* stack = FreeStacks().back();
    FreeStacks().pop_back();
    return stack;
  }
  void* p = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED || mprotect(p, kGuardBytes, PROT_NONE) != 0) {
    std::perror("no memory for a fiber's stack");
    std::abort();
  }
  return static_cast<char*>(p);
}

}  // namespace

void Fiber::FreeStack() {
  if (stack_ != nullptr) FreeStacks().push_back(stack_);
  stack_ = nullptr;
}

void Fiber::Start(void (*body)(void*), void* argument) {
  body_ = body;
  argument_ = argument;
  stack_ = TakeStack();
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::Enter), 2,
              static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
}

void Fiber::Enter(unsigned low, unsigned high) {
  auto* fiber = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low);
  fiber->body_(fiber->argument_);
  std::abort();
}

// setcontext saves and restores the signal mask, by a system call. So it only enters a fiber for
// the first time.
void Fiber::Resume() {
  if (_setjmp(outside_) != 0) return;
  if (entered_) _longjmp(inside_, 1);
  entered_ = true;
  setcontext(&context_);
}

void Fiber::Leave() {
  if (_setjmp(inside_) == 0) _longjmp(outside_, 1);
}

}  // namespace jflux::simt
