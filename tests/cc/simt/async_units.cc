#include "simt/async_units.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "simt/machine.h"
#include "simt/tensor_map.h"

namespace jflux::simt {

CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                     const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                     const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                     CUtensorMapFloatOOBfill fill) {
  TensorMap out{};
  out.magic = TensorMap::kMagic;
  out.rank = static_cast<uint8_t>(rank);
  out.data = static_cast<char*>(data);
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      out.element_bytes = 1;
      break;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      out.element_bytes = 2;
      break;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      out.element_bytes = 4;
      break;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
  out.swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                             : 0;
  bool valid =
      1 <= rank && rank <= 5 && data != nullptr && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
      interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  for (cuuint32_t i = 0; valid && i < rank; ++i) {
    valid = 0 < sizes[i] && sizes[i] <= uint64_t{1} << 32 && 0 < box[i] && box[i] <= 256 &&
            0 < element_strides[i] && element_strides[i] <= 8;
    out.size[i] = sizes[i];
    out.box[i] = static_cast<uint16_t>(box[i]);
    out.element_stride[i] = static_cast<uint8_t>(element_strides[i]);
    if (i == 0) continue;
    valid &= strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t{1} << 40;
    out.stride_bytes[i - 1] = strides[i - 1];
  }
  valid = valid && out.RowBytes() % 16 == 0 &&
          (out.swizzle_bytes == 0 || out.RowBytes() <= out.swizzle_bytes);
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &out, sizeof(out));
  return CUDA_SUCCESS;
}

namespace {

using Vector = std::array<char, 16>;

TensorMap MapOf(const CUtensorMap* map, const Coordinates& at) {
  TensorMap m;
  std::memcpy(&m, map, sizeof(m));
  if (m.magic != TensorMap::kMagic) Fail("TMA reads a tensor map that was not encoded");
  if (m.rank != at.rank) Fail("a tensor map of %d dimensions gets %d coordinates", m.rank, at.rank);
  if (m.swizzle_bytes != 0 && m.RowBytes() != m.swizzle_bytes) {
    Fail("the simulator has no boxes with rows of %u bytes and a swizzle of %d", m.RowBytes(),
         m.swizzle_bytes);
  }
  return m;
}

// Calls visit(element address, or null outside of the tensor, place in the box) for each element.
template <typename Visit>
void ForEachElement(const TensorMap& m, const Coordinates& at, Visit&& visit) {
  const uint32_t elements = m.BoxBytes() / m.element_bytes;
  uint32_t index[5]{};
  for (uint32_t e = 0; e < elements; ++e) {
    bool inside = true;
    char* p = m.data;
    for (int i = 0; i < m.rank; ++i) {
      const int64_t c = at.at[i] + int64_t{index[i]} * (i == 0 ? 1 : m.element_stride[i]);
      inside &= 0 <= c && c < static_cast<int64_t>(m.size[i]);
      p += c * static_cast<int64_t>(i == 0 ? m.element_bytes : m.stride_bytes[i - 1]);
    }
    visit(inside ? p : nullptr, e * m.element_bytes);
    for (int i = 0; i < m.rank && ++index[i] == m.BoxSize(i); ++i) index[i] = 0;
  }
}

uint32_t SmemOffset(const TensorMap& m, uint32_t box, uint32_t byte) {
  return Swizzled(box + byte, m.swizzle_bytes);
}

void CheckLives(const SmemPlace& place, const char* what) {
  if (place.cta->ended) Fail("%s: CTA %u has ended", what, place.cta->block.x);
}

CopyGroup* OpenGroup(std::vector<std::shared_ptr<CopyGroup>>* groups) {
  if (groups->empty()) groups->push_back(std::make_shared<CopyGroup>());
  return groups->back().get();
}

void Wake(CopyGroup* group) {
  if (group->waiter != nullptr) Unblock(group->waiter);
  group->waiter = nullptr;
}

void WaitForGroups(std::vector<std::shared_ptr<CopyGroup>>* groups, int pending, bool until_written,
                   const char* what) {
  OpenGroup(groups);
  const int committed = static_cast<int>(groups->size()) - 1;
  for (int i = 0; i < committed - pending; ++i) {
    CopyGroup* group = (*groups)[i].get();
    while (group->unread > 0 || (until_written && group->unwritten > 0)) {
      group->waiter = current;
      Block(what, 0, pending);
    }
  }
  while (groups->size() > 1 && groups->front()->unread == 0 && groups->front()->unwritten == 0) {
    groups->erase(groups->begin());
  }
}

// A store from shared memory: reads all of it at one step, and writes at a later one.
template <typename Read, typename Write>
void DeferStore(const SmemPlace& from, Read read, Write write) {
  Thread* thread = current;
  OpenGroup(&thread->bulk_groups);
  std::shared_ptr<CopyGroup> group = thread->bulk_groups.back();
  ++group->unread;
  ++group->unwritten;
  auto data = std::make_shared<std::vector<char>>();
  Defer([=] {
    if (data->empty()) {
      CheckLives(from, "a bulk store reads shared memory");
      *data = read();
      --group->unread;
      Wake(group.get());
      return Step::kAgain;
    }
    write(*data);
    --group->unwritten;
    Wake(group.get());
    return Step::kDone;
  });
}

void CheckBulk(const void* global, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0) {
    Fail("a bulk copy of %u bytes at %p: both are multiples of 16", bytes, global);
  }
}

}  // namespace

void TmaLoad(uint32_t smem, const CUtensorMap* map, uint32_t bar, const Coordinates& at,
             uint32_t ctas) {
  Point();
  const TensorMap m = MapOf(map, at);
  const uint32_t own = current->cta->rank;
  for (uint32_t rank = 0; rank < current->cta->cluster->ctas.size(); ++rank) {
    if (ctas == 0 ? rank != own : (ctas >> rank & 1) == 0) continue;
    const auto address = [&](uint32_t a) { return rank == own ? a : AddressIn(rank, a); };
    const SmemPlace to = PlaceOf(address(smem), m.BoxBytes(), 128);
    const SmemPlace full = PlaceOf(address(bar), 8, 8);
    Defer([=] {
      CheckLives(to, "a TMA load arrives");
      ForEachElement(m, at, [&](const char* element, uint32_t byte) {
        char* p = to.cta->smem + SmemOffset(m, to.offset, byte);
        if (element != nullptr) {
          std::memcpy(p, element, m.element_bytes);
        } else {
          std::memset(p, 0, m.element_bytes);
        }
      });
      NoteWrite(to, m.BoxBytes(), nullptr);
      CompleteBytes(full, m.BoxBytes());
      return Step::kDone;
    });
  }
}

void TmaStore(const CUtensorMap* map, uint32_t smem, const Coordinates& at) {
  Point();
  const TensorMap m = MapOf(map, at);
  const SmemPlace from = PlaceOf(smem, m.BoxBytes(), 128);
  CheckRead(from, m.BoxBytes(), current->fenced, "a TMA store");
  DeferStore(
      from,
      [=] {
        std::vector<char> data(m.BoxBytes());
        for (uint32_t byte = 0; byte < m.BoxBytes(); byte += 16) {
          std::memcpy(&data[byte], from.cta->smem + SmemOffset(m, from.offset, byte), 16);
        }
        return data;
      },
      [=](const std::vector<char>& data) {
        ForEachElement(m, at, [&](char* element, uint32_t byte) {
          if (element != nullptr) std::memcpy(element, &data[byte], m.element_bytes);
        });
      });
}

void BulkLoad(uint32_t smem, const void* global, uint32_t bytes, uint32_t bar) {
  Point();
  CheckBulk(global, bytes);
  const SmemPlace to = PlaceOf(smem, bytes, 16), full = PlaceOf(bar, 8, 8);
  Defer([=] {
    CheckLives(to, "a bulk load arrives");
    std::memcpy(to.data(), global, bytes);
    NoteWrite(to, bytes, nullptr);
    CompleteBytes(full, bytes);
    return Step::kDone;
  });
}

void BulkStore(void* global, uint32_t smem, uint32_t bytes) {
  Point();
  CheckBulk(global, bytes);
  if (bytes == 0) return;
  const SmemPlace from = PlaceOf(smem, bytes, 16);
  CheckRead(from, bytes, current->fenced, "a bulk store");
  DeferStore(
      from, [=] { return std::vector<char>(from.data(), from.data() + bytes); },
      [=](const std::vector<char>& data) { std::memcpy(global, data.data(), bytes); });
}

void BulkCommit() {
  OpenGroup(&current->bulk_groups);
  current->bulk_groups.push_back(std::make_shared<CopyGroup>());
}

void BulkWait(int pending, bool until_written) {
  Point();
  WaitForGroups(&current->bulk_groups, pending, until_written,
                until_written ? "cp.async.bulk.wait_group" : "cp.async.bulk.wait_group.read");
}

namespace {

// Copies `bytes` bytes to a vector of `size`, whose others become zeros.
void CopyAsync(uint32_t smem, const void* global, uint32_t bytes, uint32_t size) {
  if (bytes > size || reinterpret_cast<uintptr_t>(global) % size != 0) {
    Fail("cp.async of %u bytes at %p", bytes, global);
  }
  Thread* thread = current;
  const SmemPlace to = PlaceOf(smem, size, size);
  OpenGroup(&thread->copy_groups);
  std::shared_ptr<CopyGroup> group = thread->copy_groups.back();
  ++group->unwritten;
  const uint64_t number = thread->copies_begun++;
  thread->copies.push_back(number);
  Defer([=] {
    CheckLives(to, "cp.async arrives");
    std::memcpy(to.data(), global, bytes);
    std::memset(to.data() + bytes, 0, size - bytes);
    NoteWrite(to, size, thread);
    thread->copies.erase(std::find(thread->copies.begin(), thread->copies.end(), number));
    --group->unwritten;
    Wake(group.get());
    return Step::kDone;
  });
}

}  // namespace

void CopyAsync4(uint32_t smem, const void* global) { CopyAsync(smem, global, 4, 4); }
void CopyAsync16(uint32_t smem, const void* global, uint32_t bytes) {
  CopyAsync(smem, global, bytes, 16);
}

void CopyAsyncArrive(uint32_t bar) {
  Point();
  const SmemPlace place = PlaceOf(bar, 8, 8);
  Thread* thread = current;
  const uint64_t before = thread->copies_begun;
  Defer([=] {
    for (uint64_t number : thread->copies) {
      if (number < before) return Step::kNotReady;
    }
    CheckLives(place, "cp.async arrives");
    Arrive(place, 1, 0);
    return Step::kDone;
  });
}

void CopyAsyncCommit() {
  OpenGroup(&current->copy_groups);
  current->copy_groups.push_back(std::make_shared<CopyGroup>());
}

void CopyAsyncWait(int pending) {
  Point();
  WaitForGroups(&current->copy_groups, pending, /*until_written=*/true, "cp.async.wait_group");
}

void SendRemote(uint32_t remote, const void* bytes16, uint32_t remote_bar) {
  Point();
  const SmemPlace to = PlaceOf(remote, 16, 16), full = PlaceOf(remote_bar, 8, 8);
  Vector v;
  std::memcpy(v.data(), bytes16, 16);
  Defer([=] {
    CheckLives(to, "st.async arrives");
    std::memcpy(to.data(), v.data(), 16);
    NoteWrite(to, 16, nullptr);
    CompleteBytes(full, 16);
    return Step::kDone;
  });
}

}  // namespace jflux::simt
