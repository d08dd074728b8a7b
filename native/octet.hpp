// Eight elements at a time: one byte of signs, one vector of floats, two of doubles.
//
// Everything here is in a namespace of its own per instruction set, and no std templates are used: an inline function
// compiled for AVX2 must never be the copy that the linker keeps for all. Eight lanes also for AVX-512: its divisions
// and square roots are no faster per element, and memory is the limit for the rest.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace onebit::ONEBIT_ISA {

typedef float V8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef double D4 __attribute__((vector_size(32)));

inline V8 splat(float x) { return V8{x, x, x, x, x, x, x, x}; }
inline V8 as_floats(U8 x) { return reinterpret_cast<V8>(x); }

inline V8 root(V8 x) {
#if defined(__AVX__)
  return _mm256_sqrt_ps(x);
#else
  for (int l = 0; l < 8; ++l) x[l] = __builtin_sqrtf(x[l]);
  return x;
#endif
}

// Whether any lane of a comparison's result is set.
template <class Mask>
inline bool any(Mask m) {
#if defined(__AVX__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(m)) != 0;
#else
  int found = 0;
  for (int l = 0; l < 8; ++l) found |= m[l] != 0;
  return found != 0;
#endif
}

// All eight elements of an octet.
struct Whole {
  V8 load(const float* p) const {
    V8 v;
    __builtin_prefetch(p + 512);  // the processor's own stops at each page
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  void store(float* p, V8 v) const { std::memcpy(p, &v, sizeof v); }
  void store(uint8_t* bits, uint8_t byte) const { *bits = byte; }
  V8 keep(V8 v) const { return v; }
};

// Lanes [first, last) of an octet, at the edges of a piece; the others belong to a neighbour and are not touched.
struct Part {
  int first, last;
  V8 load(const float* p) const {
    V8 v = {};
    for (int l = first; l < last; ++l) v[l] = p[l];
    return v;
  }
  void store(float* p, V8 v) const {
    for (int l = first; l < last; ++l) p[l] = v[l];
  }
  void store(uint8_t* bits, uint8_t byte) const {
    const int mask = (0xff >> first) & (0xff << (8 - last));
    *bits = static_cast<uint8_t>((*bits & ~mask) | (byte & mask));
  }
  V8 keep(V8 v) const {  // zero in the other lanes
    V8 kept = {};
    for (int l = first; l < last; ++l) kept[l] = v[l];
    return kept;
  }
};

// On the bodies of loops. They capture by value: then the compiler keeps constants and sums in registers, where
// otherwise every store of a byte or a float might have changed them.
#define ONEBIT_INLINE __attribute__((always_inline))

template <class State, class Body>
__attribute__((noinline)) void edge(Part lanes, int64_t i, State& state, const Body& body) {
  body(lanes, i, state);
}

// body(lanes, i, state) for the octets i = 0, 8, ... that meet the elements [at, at + n).
template <class State, class Body>
inline void for_octets(int64_t at, int64_t n, State& state, const Body& body) {
  const int64_t end = at + n;
  int64_t i = at & ~int64_t{7};
  if (at != i) {
    edge(Part{static_cast<int>(at - i), static_cast<int>(end < i + 8 ? end - i : 8)}, i, state, body);
    i += 8;
  }
  if (i + 8 <= end) {
    State own = state;
    const Body copy = body;
    for (; i + 8 <= end; i += 8) copy(Whole{}, i, own);
    state = own;
  }
  if (i < end) edge(Part{0, static_cast<int>(end - i)}, i, state, body);
}

struct NoState {};

// The same for bodies that keep nothing: body(lanes, i, NoState).
template <class Body>
inline void for_octets(int64_t at, int64_t n, const Body& body) {
  NoState none;
  for_octets(at, n, none, body);
}

// Signs as bits: the first element in the most significant bit, 1 where x >= 0 (so -0.0 is 1, nan is 0).
inline U8 spread_bits(uint8_t byte) {  // all ones in the lanes whose bit is set
  const U8 weights = {128, 64, 32, 16, 8, 4, 2, 1};
  const uint32_t b = byte;
  return reinterpret_cast<U8>((U8{b, b, b, b, b, b, b, b} & weights) == weights);
}

constexpr uint32_t kOne = 0x3f800000u, kMinus = 0x80000000u;  // 1.0f and the sign of a float

inline V8 mask8(uint8_t byte) { return as_floats(spread_bits(byte) & kOne); }

// sign * value: +value and -value, times 0 where dead (so inf and nan become nan there). `alive` may be null.
inline V8 signed8(const uint8_t* bits, const uint8_t* alive, int64_t i, V8 value) {
  const V8 x = as_floats(reinterpret_cast<U8>(value) ^ (~spread_bits(bits[i >> 3]) & kMinus));
  return alive == nullptr ? x : x * mask8(alive[i >> 3]);
}

inline uint8_t pack8(V8 x) {
#if defined(__AVX2__)
  const __m256 ge = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ);
  const __m256i backwards = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  return static_cast<uint8_t>(_mm256_movemask_ps(_mm256_permutevar8x32_ps(ge, backwards)));
#else
  unsigned byte = 0;
  for (int l = 0; l < 8; ++l) byte = byte << 1 | (x[l] >= 0.0f);
  return static_cast<uint8_t>(byte);
#endif
}

// A sum in an order that depends on neither the instruction set nor the threads: eight lanes of double, joined as a
// tree. Squares of floats are exact in double. Adding four octets up as floats first was 6 % faster in lamb_measure and
// not at all elsewhere, which is not worth its rounding and range.
struct Sum8 {
  D4 low = {}, high = {};

  static D4 widen_low(V8 x) {
#if defined(__AVX__)
    return _mm256_cvtps_pd(_mm256_castps256_ps128(x));
#else
    return D4{x[0], x[1], x[2], x[3]};
#endif
  }
  static D4 widen_high(V8 x) {
#if defined(__AVX__)
    return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
#else
    return D4{x[4], x[5], x[6], x[7]};
#endif
  }
  void add_squares(V8 x) {
    const D4 a = widen_low(x), b = widen_high(x);
    low += a * a;
    high += b * b;
  }
  void add_magnitudes(V8 x) {
    const V8 size = as_floats(reinterpret_cast<U8>(x) & ~kMinus);
    low += widen_low(size);
    high += widen_high(size);
  }
  double total() const {
    const D4 s = low + high;
    return (s[0] + s[2]) + (s[1] + s[3]);
  }
};

}  // namespace onebit::ONEBIT_ISA
