// What both handlers share.
#ifndef HALO_EXCHANGE_FFI_H_
#define HALO_EXCHANGE_FFI_H_

#include "halo_exchange.h"
#include "jflux/ffi.h"

namespace ffi = xla::ffi;

// x [rows, columns] and the attribute `halo`, in rows -> what to do.
inline ffi::ErrorOr<HaloParams> ParamsOf(const ffi::Dictionary& attrs, const ffi::AnyBuffer& x,
                                         ffi::AnyBuffer& y) {
  const auto halo = attrs.get<int64_t>("halo");
  if (!halo.has_value()) return ffi::Unexpected(halo.error());
  const auto rows = x.dimensions().front();
  const auto bytes = static_cast<int64_t>(x.size_bytes());
  const HaloParams p{bytes, *halo * (bytes / rows)};
  if (*halo < 1 || *halo > rows ||
      static_cast<int64_t>(y.size_bytes()) != bytes + 2 * p.halo_bytes) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("halo_exchange: x, halo and y do not fit"));
  }
  return p;
}

#endif  // HALO_EXCHANGE_FFI_H_
