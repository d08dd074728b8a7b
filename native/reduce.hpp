// Reductions in an order that depends on neither the vector width nor the threads: 16 lanes of double, element i of a
// piece in lane i mod 16, the lanes then joined as a tree.
#pragma once

#include "simd.hpp"

namespace onebit::ONEBIT_ISA {

constexpr int kLanes = 16;

template <class Scalar>
inline double join(const DoubleV (&lanes)[kLanes / kDoubles], const float* rest, int64_t n, const Scalar& term) {
  double sum[kLanes];
  std::memcpy(sum, lanes, sizeof sum);
  for (int64_t i = 0; i < n; ++i) sum[i] += term(static_cast<double>(rest[i]));
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  return sum[0];
}

template <class Vector, class Scalar>
inline double sum_terms(const float* x, int64_t n, const Vector& vector_term, const Scalar& term) {
  DoubleV lanes[kLanes / kDoubles] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int k = 0; k < kLanes / kDoubles; ++k)
      lanes[k] += vector_term(widen(x + i + k * kDoubles));
  return join(lanes, x + i, n - i, term);
}

inline double sum_squares(const float* x, int64_t n) {
  const auto square = [](auto v) { return v * v; };
  return sum_terms(x, n, square, square);
}

inline double sum_absolute(const float* x, int64_t n) {
  return sum_terms(
      x, n, [](DoubleV v) { return v < 0 ? -v : v; }, [](double v) { return v < 0 ? -v : v; });
}

inline double sum_of(const float* x, int64_t n, bool absolute) {
  return absolute ? sum_absolute(x, n) : sum_squares(x, n);
}

// Whether any element is inf or nan.
inline bool any_bad(const float* x, int64_t n) {
  const Bits32* bits = reinterpret_cast<const Bits32*>(x);
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= (bits[i] & 0x7f800000u) == 0x7f800000u;
  return bad != 0;
}

}  // namespace onebit::ONEBIT_ISA
