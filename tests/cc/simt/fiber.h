// A fiber: a function with a stack of its own, which runs until it switches back to the one loop
// that resumes fibers. All of them run on one thread of the operating system.
#ifndef JFLUX_TESTS_CC_SIMT_FIBER_H_
#define JFLUX_TESTS_CC_SIMT_FIBER_H_

#include <setjmp.h>
#include <ucontext.h>

namespace jflux::simt {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() { FreeStack(); }

  // body(argument) runs at the first Resume. It must not return: its last act is a Leave.
  void Start(void (*body)(void*), void* argument);
  // Runs the fiber until it calls Leave. Not from within a fiber.
  void Resume();
  // Back to the caller of Resume. Returns at the next Resume.
  void Leave();
  // After its last Leave.
  void FreeStack();

 private:
  static void Enter(unsigned low, unsigned high);

  char* stack_ = nullptr;
  bool entered_ = false;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  ucontext_t context_;
  jmp_buf inside_, outside_;
};

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_FIBER_H_
