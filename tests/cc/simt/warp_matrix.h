// stmatrix, ldmatrix, movmatrix and mma.sync: a warp's matrices of 16-bit elements.
//
// Lane l has, of an 8x8 matrix, the elements 2 (l % 4) and the next of row l / 4, in one word.
#ifndef JFLUX_TESTS_CC_SIMT_WARP_MATRIX_H_
#define JFLUX_TESTS_CC_SIMT_WARP_MATRIX_H_

#include <cuda_fp8.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/collectives.h"
#include "simt/machine.h"

namespace jflux::simt {

using Words4 = std::array<uint32_t, 4>;

// Four 8x8 matrices: lane i gives the address of row i % 8 of matrix i / 8, and has a word of each.
inline void StoreMatrix4(uint32_t smem, Words4 words) {
  struct Offer {
    SmemPlace row;
    Words4 words;
  } mine{PlaceOf(smem, 16, 16), words};
  Meet("stmatrix", 0xffffffff, &mine, [](void* const* offers) {
    const auto of = [&](int lane) { return static_cast<Offer*>(offers[lane]); };
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int lane = 0; lane < 32; ++lane) {
        const SmemPlace row = of(8 * matrix + lane / 4)->row;
        std::memcpy(row.data() + lane % 4 * 4, &of(lane)->words[matrix], 4);
      }
    }
  });
  NoteWrite(mine.row, 16, current);
}

inline void LoadMatrix4(uint32_t (&r)[4], uint32_t smem, bool transposed) {
  struct Offer {
    SmemPlace row;
    bool transposed;
    Words4 words;
  } mine{PlaceOf(smem, 16, 16), transposed, {}};
  Meet("ldmatrix", 0xffffffff, &mine, [](void* const* offers) {
    const auto of = [&](int lane) { return static_cast<Offer*>(offers[lane]); };
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t rows[8][8];
      for (int row = 0; row < 8; ++row) {
        std::memcpy(rows[row], of(8 * matrix + row)->row.data(), 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int i = lane / 4, j = 2 * (lane % 4);
        const bool t = of(lane)->transposed;
        const uint32_t low = t ? rows[j][i] : rows[i][j],
                       high = t ? rows[j + 1][i] : rows[i][j + 1];
        of(lane)->words[matrix] = low | high << 16;
      }
    }
  });
  std::memcpy(r, mine.words.data(), sizeof(r));
}

inline uint32_t TransposeMatrix(uint32_t two) {
  return Exchange<uint32_t, uint32_t>(
      "movmatrix", 0xffffffff, two, [](int lane, InOfLanes<uint32_t> all) {
        const int row = lane / 4, column = 2 * (lane % 4);
        const auto of = [&](int i) { return *all[4 * i + row / 2] >> row % 2 * 16 & 0xffff; };
        return of(column) | of(column + 1) << 16;
      });
}

// c [16, 8] += a [16, 8 w] @ b [8 w, 8] (mma.sync.m16n8k16, and m16n8k8 of floats). A word has w
// elements. Lane l has, with g = l / 4 and p = w (l % 4):
//
//   a[0..3]  rows g, g + 8, g, g + 8 and columns p, p, p + 4 w, p + 4 w (and the next ones)
//   b0, b1   rows p and p + 4 w (and the next ones), column g
//   c        rows g, g, g + 8, g + 8 and columns q, q + 1, q, q + 1, with q = 2 (l % 4)
template <typename T>
void Multiply16x8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Offer {
    Words4 a;
    uint32_t b[2];
    float* c;
  } mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, c};
  Meet("mma.sync", 0xffffffff, &mine, [](void* const* offers) {
    const auto of = [&](int lane) { return static_cast<Offer*>(offers[lane]); };
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    constexpr int kOfWord = 4 / sizeof(T), kDepth = 8 * kOfWord;
    const auto element = [](uint32_t word, int i) {
      return static_cast<float>(BitsAs<T>(static_cast<Bits>(word >> 8 * sizeof(T) * i)));
    };
    float rows[16][kDepth], columns[kDepth][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, p = kOfWord * (lane % 4);
      for (int e = 0; e < kOfWord; ++e) {
        for (int i = 0; i < 4; ++i) {
          rows[g + 8 * (i % 2)][p + 4 * kOfWord * (i / 2) + e] = element(of(lane)->a[i], e);
        }
        for (int i = 0; i < 2; ++i)
          columns[p + 4 * kOfWord * i + e][g] = element(of(lane)->b[i], e);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        for (int k = 0; k < kDepth; ++k) of(lane)->c[i] += rows[row][k] * columns[k][column];
      }
    }
  });
}

// The same of 32 bytes of k (mma.sync.m16n8k32): a word has four, and the second half of a lane's
// are 16 bytes on. Sums of int8 are int32, in the registers of floats.
template <typename T>
void Multiply16x8Of8Bits(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  constexpr bool kIsWhole = std::is_same_v<T, int8_t>;
  using W = std::conditional_t<kIsWhole, int8_t, __nv_fp8_e4m3>;
  using Sum = std::conditional_t<kIsWhole, int32_t, float>;
  struct Offer {
    Words4 a;
    uint32_t b[2];
    float* c;
  } mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, c};
  Meet("mma.sync", 0xffffffff, &mine, [](void* const* offers) {
    const auto of = [&](int lane) { return static_cast<Offer*>(offers[lane]); };
    Sum rows[16][32], columns[32][8];
    const auto byte = [](uint32_t word, int i) { return static_cast<uint8_t>(word >> 8 * i); };
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, p = 4 * (lane % 4);
      for (int i = 0; i < 16; ++i) {
        rows[g + 8 * (i / 4 % 2)][p + 16 * (i / 8) + i % 4] =
            static_cast<Sum>(BitsAs<T>(byte(of(lane)->a[i / 4], i % 4)));
      }
      for (int i = 0; i < 8; ++i) {
        columns[p + 16 * (i / 4) + i % 4][g] =
            static_cast<Sum>(BitsAs<W>(byte(of(lane)->b[i / 4], i % 4)));
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        auto sum = BitsAs<Sum>(of(lane)->c[i]);
        for (int k = 0; k < 32; ++k) sum += rows[row][k] * columns[k][column];
        of(lane)->c[i] = BitsAs<float>(sum);
      }
    }
  });
}

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_WARP_MATRIX_H_
