// The handler on CPUs.
#include "every_primitive.h"

namespace ffi = xla::ffi;
namespace shmem = jflux::shmem;

static ffi::Future Cpu(ffi::Context context, ffi::Dictionary attrs, ffi::Buffer<ffi::S32> x,
                       ffi::Result<ffi::Buffer<ffi::S32>> y) {
  const auto count = every_primitive::CountOf(x, *y);
  if (!count.has_value()) return shmem::FailedCall(count.error());
  return shmem::JoinCall(
      context, attrs,
      [count = *count, from = x.typed_data(), to = y->typed_data()](const shmem::Context& ctx) {
        return every_primitive::EveryPrimitive(ctx, count, from, to);
      });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(EveryPrimitiveCpu, Cpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::Context>()
                                  .Attrs()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
