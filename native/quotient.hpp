// The largest quotient of old and new variance, exactly, mostly without computing the others.
//
// Only few elements of a piece raise the running maximum R. Whether one could is told by a comparison that needs no
// square root and no division: for R >= 1, sqrt(a) <= R sqrt(b) implies (sqrt(a) + eps) / (sqrt(b) + eps) <= R. For
// R < 1 it takes sqrt(a) <= (R - d) sqrt(b) and (1 - R) eps <= d sqrt(b); d = R / 100 is used. The comparison leaves a
// margin for the rounding of both sides, so a skipped element cannot have had a larger rounded quotient.
#pragma once

#include "tiles.hpp"

namespace onebit::ONEBIT_ISA {

struct Largest {
  V8 eps;
  bool variance_form;
  float best = 0.0f;                           // nan stays
  float slope = -1.0f, least = 0.0f;           // an element is skipped where a <= slope * b and b >= least

  // Take in (sqrt(a) + eps) / (sqrt(b) + eps), or in the variance form a / b (1 where b is 0), where `counts` is not 0.
  template <class Lanes>
  void add(Lanes lanes, V8 a, V8 b, V8 counts) {
    if (!any(~((a <= splat(slope) * b) & (b >= splat(least))))) return;
    V8 q;
    if (variance_form)
      q = b > 0.0f ? a / b : splat(1.0f);
    else
      q = (root(a) + eps) / (root(b) + eps);
    q = lanes.keep(counts != 0.0f ? q : V8{});
    if (!any(~(q <= splat(best)))) return;
    for (int l = 0; l < 8; ++l)
      if (q[l] > best || q[l] != q[l]) best = q[l];
    raise();
  }

  void raise() {
    const float r = best, e = eps[0], margin = 1.0f - 1e-5f;
    if (!(r > 1e-6f && r < 1e12f)) return;  // keep clear of underflow and overflow
    least = 1e-20f;
    if (variance_form) {
      slope = r * margin;
    } else if (r >= 1.0f) {
      slope = r * r * margin;
    } else {
      const float far = (1.0f - r) * e / (0.01f * r) / margin;
      slope = 0.99f * r * (0.99f * r) * margin;
      least = far * far > least ? far * far : least;
    }
  }
};

}  // namespace onebit::ONEBIT_ISA
