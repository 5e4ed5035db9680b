// The handler on CPUs.
#include "halo_exchange_ffi.h"

static ffi::Future Cpu(ffi::Context context, ffi::Dictionary attrs, ffi::AnyBuffer x,
                       ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(attrs, x, *y);
  if (!p.has_value()) return jflux::shmem::FailedCall(p.error());
  const auto* from = static_cast<const char*>(x.untyped_data());
  auto* to = static_cast<char*>(y->untyped_data());
  return jflux::shmem::JoinCall(context, attrs,
                                [p = *p, from, to](const jflux::shmem::Context& ctx) {
                                  return HaloExchange(ctx, p, from, to);
                                });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    HaloExchangeCpu, Cpu,
    ffi::Ffi::Bind().Ctx<ffi::Context>().Attrs().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
