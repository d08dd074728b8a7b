// The largest quotient of old and new variance, exactly, mostly without computing the others.
//
// Only few elements of a piece raise the running maximum R. Whether one could is told by a comparison that needs no
// square root and no division: for R >= 1, sqrt(a) <= R sqrt(b) implies (sqrt(a) + eps) / (sqrt(b) + eps) <= R. For
// R < 1 it takes sqrt(a) <= (R - d) sqrt(b) and (1 - R) eps <= d sqrt(b); d = R / 100 is used. The comparison leaves a
// margin for the rounding of both sides, so a skipped element cannot have had a larger rounded quotient.
#pragma once

#include "simd.hpp"

namespace onebit::ONEBIT_ISA {

constexpr int kRow = 16;  // elements that are skipped or computed together

struct Filter {
  float slope = -1.0f, least = 0.0f;  // an element may be skipped where a <= slope * b and b >= least

  void raise(float r, float eps, bool variance_form) {
    if (!(r > 1e-6f && r < 1e12f)) return;  // keep clear of underflow and overflow
    const float margin = 1.0f - 1e-5f;
    least = 1e-20f;
    if (variance_form) {
      slope = r * margin;
    } else if (r >= 1.0f) {
      slope = r * r * margin;
    } else {
      const float far = (1.0f - r) * eps / (0.01f * r) / margin;
      slope = 0.99f * r * (0.99f * r) * margin;
      least = far * far > least ? far * far : least;
    }
  }

  // Whether any element of a row must be computed; nan counts as such.
  bool wants(const float* a, const float* b) const {
#if defined(__AVX__)
    const __m256 m = _mm256_set1_ps(slope), l = _mm256_set1_ps(least);
    int skip = 0xff;
    for (int i = 0; i < kRow; i += 8) {
      const __m256 x = _mm256_loadu_ps(a + i), y = _mm256_loadu_ps(b + i);
      skip &= _mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(x, _mm256_mul_ps(m, y), _CMP_LE_OQ),
                                               _mm256_cmp_ps(y, l, _CMP_GE_OQ)));
    }
    return skip != 0xff;
#else
    int skip = 1;
    for (int i = 0; i < kRow; ++i) skip &= (a[i] <= slope * b[i]) & (b[i] >= least);
    return skip == 0;
#endif
  }
};

inline void quotients(const float* a, const float* b, int64_t n, float eps, bool variance_form, float* __restrict q) {
  if (variance_form)
    for (int64_t i = 0; i < n; ++i) q[i] = b[i] > 0.0f ? a[i] / b[i] : 1.0f;
  else
    for (int64_t i = 0; i < n; ++i) q[i] = (__builtin_sqrtf(a[i]) + eps) / (__builtin_sqrtf(b[i]) + eps);
}

// The largest of 0 and (sqrt(a) + eps) / (sqrt(b) + eps), or in the variance form a / b (1 where b is 0); nan if there
// is one. Elements whose mask is 0 do not count; null: all do.
inline float largest_quotient(const float* a, const float* b, const float* mask, int64_t n, float eps,
                              bool variance_form) {
  float best = 0.0f;
  Filter filter;
  for (int64_t from = 0; from < n; from += kRow) {
    const int64_t length = smaller(kRow, n - from);
    if (length == kRow && !filter.wants(a + from, b + from)) continue;
    float q[kRow] = {};
    if (length == kRow)
      quotients(a + from, b + from, kRow, eps, variance_form, q);
    else
      quotients(a + from, b + from, length, eps, variance_form, q);
    if (mask != nullptr)
      for (int i = 0; i < length; ++i) q[i] = mask[from + i] != 0.0f ? q[i] : 0.0f;
    int unlike = 0;
    for (float v : q) unlike |= !(v <= best);
    if (!unlike) continue;
    for (float v : q)
      if (v > best || v != v) best = v;
    filter.raise(best, eps, variance_form);
  }
  return best;
}

}  // namespace onebit::ONEBIT_ISA
