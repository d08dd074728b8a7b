// Elements of other types: to float and back. Nearest-even, except where a random number decides.
#pragma once

#include "tiles.hpp"

namespace onebit::ONEBIT_ISA {

inline void widen_bf16(const uint16_t* from, int64_t n, float* to) {
  Bits32* out = reinterpret_cast<Bits32*>(to);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint32_t>(from[i]) << 16;
}

inline void narrow_bf16(const float* from, int64_t n, uint16_t* to) {
  const Bits32* in = reinterpret_cast<const Bits32*>(from);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = in[i], rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    to[i] = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

// A hash of 32 bits (C. Wellons, "lowbias32", public domain).
inline uint32_t mix(uint32_t h) {
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15) * 0x846ca68bu;
  return h ^ h >> 16;
}

// Round up with the probability that makes the expectation exact. The random bits are a function of (seed, step,
// index of the element), so all workers draw the same. inf and nan keep their kind.
inline void narrow_bf16_random(const float* from, int64_t n, uint16_t* to, uint64_t seed, uint64_t step,
                               uint64_t index) {
  const Bits32* in = reinterpret_cast<const Bits32*>(from);
  uint32_t key = mix(static_cast<uint32_t>(seed) ^ 0x9e3779b9u);
  key = mix(key ^ static_cast<uint32_t>(seed >> 32));
  key = mix(key ^ static_cast<uint32_t>(step));
  key = mix(key ^ static_cast<uint32_t>(step >> 32));
  int64_t i = 0;
  while (i < n) {  // runs in which the upper half of the index does not change
    const uint64_t at = index + static_cast<uint64_t>(i);
    const int64_t stop = smaller(n, i + static_cast<int64_t>(0x100000000u - (at & 0xffffffffu)));
    const uint32_t upper = mix(key ^ static_cast<uint32_t>(at >> 32)), base = static_cast<uint32_t>(index);
    for (; i < stop; ++i) {
      const uint32_t u = in[i], noise = mix((base + static_cast<uint32_t>(i)) ^ upper) & 0xffffu;
      const uint32_t special = u >> 16 | ((u & 0x7fffffffu) > 0x7f800000u ? 0x40u : 0u);
      to[i] = static_cast<uint16_t>((u & 0x7f800000u) == 0x7f800000u ? special : (u + noise) >> 16);
    }
  }
}

inline float widen_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = h >> 10 & 31u, fraction = h & 1023u;
  uint32_t u;
  float f;
  if (exponent == 0) {
    f = static_cast<float>(fraction) * 0x1p-24f;
    std::memcpy(&u, &f, 4);
  } else {
    u = exponent == 31 ? 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0u) : (exponent + 112) << 23 | fraction << 13;
  }
  u |= sign;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint16_t narrow_f16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = u >> 16 & 0x8000u, size = u & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (size >> 13 & 1023u));
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (size < 0x38800000u) {  // below the smallest normal: let the float adder round, at the right bit
    float positive;
    std::memcpy(&positive, &size, 4);
    positive += 0.5f;
    std::memcpy(&u, &positive, 4);
    return static_cast<uint16_t>(sign | (u - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13);
}

inline void widen_f16(const uint16_t* from, int64_t n, float* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < n; ++i) to[i] = widen_f16(from[i]);
}

inline void narrow_f16(const float* from, int64_t n, uint16_t* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) to[i] = narrow_f16(from[i]);
}

}  // namespace onebit::ONEBIT_ISA
