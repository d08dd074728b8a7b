// Signs as bits: 8 to a byte, the first element in the most significant bit, 1 where x >= 0 (so -0.0 is 1, nan is 0).
#pragma once

#include "simd.hpp"

namespace onebit::ONEBIT_ISA {

#if defined(__AVX__)
constexpr int kGroup = 8;
#else
constexpr int kGroup = 4;
#endif
typedef uint32_t GroupV __attribute__((vector_size(4 * kGroup)));
typedef int32_t MaskV __attribute__((vector_size(4 * kGroup)));
typedef uint32_t GroupU __attribute__((vector_size(4 * kGroup), aligned(4), may_alias));

// For each bit of a byte, from the most significant: all ones where it is set. `part` counts groups within the byte.
inline GroupV spread_bits(uint8_t byte, int part) {
#if defined(__AVX__)
  (void)part;
  const GroupV weights = {128, 64, 32, 16, 8, 4, 2, 1};
#else
  const GroupV weights = part == 0 ? GroupV{128, 64, 32, 16} : GroupV{8, 4, 2, 1};
#endif
  const GroupV word = GroupV{} + byte;
  return reinterpret_cast<GroupV>((word & weights) == weights);
}

constexpr uint32_t kOne = 0x3f800000u, kMinus = 0x80000000u;  // 1.0f and the sign of a float

// n / 8 bytes -> n floats, n a multiple of 8: +1 and -1, and +0 and -0 where not alive.
inline void unpack_signs(const uint8_t* bits, const uint8_t* alive, int64_t n, float* out) {
  for (int64_t i = 0; i < n / 8; ++i)
    for (int part = 0; part < 8 / kGroup; ++part) {
      GroupV one = GroupV{} + kOne;
      if (alive != nullptr) one &= spread_bits(alive[i], part);
      *reinterpret_cast<GroupU*>(out + 8 * i + kGroup * part) = one | (~spread_bits(bits[i], part) & kMinus);
    }
}

// n / 8 bytes -> n floats, 1 where the bit is set, else 0.
inline void unpack_mask(const uint8_t* bits, int64_t n, float* out) {
  for (int64_t i = 0; i < n / 8; ++i)
    for (int part = 0; part < 8 / kGroup; ++part)
      *reinterpret_cast<GroupU*>(out + 8 * i + kGroup * part) = spread_bits(bits[i], part) & kOne;
}

// n floats -> n / 8 bytes.
inline void pack_signs(const float* x, int64_t n, uint8_t* bits) {
  for (int64_t i = 0; i < n / 8; ++i, x += 8) {
#if defined(__AVX2__)
    const __m256 ge = _mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_setzero_ps(), _CMP_GE_OQ);
    const __m256i backwards = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    bits[i] = static_cast<uint8_t>(_mm256_movemask_ps(_mm256_permutevar8x32_ps(ge, backwards)));
#elif defined(__SSE2__)
    const __m128 a = _mm_cmpge_ps(_mm_loadu_ps(x), _mm_setzero_ps());
    const __m128 b = _mm_cmpge_ps(_mm_loadu_ps(x + 4), _mm_setzero_ps());
    bits[i] = static_cast<uint8_t>(_mm_movemask_ps(_mm_shuffle_ps(a, a, 0x1b)) << 4 |
                                   _mm_movemask_ps(_mm_shuffle_ps(b, b, 0x1b)));
#else
    unsigned byte = 0;
    for (int j = 0; j < 8; ++j) byte = byte << 1 | (x[j] >= 0.0f);
    bits[i] = static_cast<uint8_t>(byte);
#endif
  }
}

// Where a tile's bits lie.
inline uint8_t* bits_of(const Signs& s, const Tile& t) { return s.bits + t.chunk * s.stride + t.in_chunk / 8; }
inline const uint8_t* mask_of(const uint8_t* alive, const Tile& t) {
  return alive == nullptr ? nullptr : alive + t.at / 8;
}

inline const float* signs_of(const Signs& s, const Tile& t, Stage& stage) {
  unpack_signs(bits_of(s, t), mask_of(s.alive, t), t.length, stage.at);
  return stage.at;
}

}  // namespace onebit::ONEBIT_ISA
