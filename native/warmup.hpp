// The warm-up stage: LAMB on an averaged gradient. `measure` changes nothing, so a step whose gradient is not finite
// is skipped by not calling `apply`; the new momentum and variance are computed in both.
#pragma once

#include "lamb.hpp"

namespace onebit::ONEBIT_ISA {

struct Moments {  // of a piece
  Stage m, v, u;
};

// m = m * beta1 + g * (1 - beta1); v = v * beta2 + (1 - beta2) * g * g; u = m / (sqrt(v) + eps)
inline void next_moments(const float* g, const float* m, const float* v, int64_t n, const Hyper& h,
                         float* __restrict m_new, float* __restrict v_new, float* __restrict u) {
  const float keep1 = static_cast<float>(h.beta1), add1 = static_cast<float>(1.0 - h.beta1);
  const float keep2 = static_cast<float>(h.beta2), add2 = static_cast<float>(1.0 - h.beta2);
  const float eps = static_cast<float>(h.eps);
  for (int64_t i = 0; i < n; ++i) {
    m_new[i] = m[i] * keep1 + g[i] * add1;
    v_new[i] = v[i] * keep2 + add2 * g[i] * g[i];
    u[i] = m_new[i] / (__builtin_sqrtf(v_new[i]) + eps);
  }
}

inline void warmup_measure(const WarmupArgs& k) {
  for_tiles(k.plan, k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Moments next;
    Stage x_stage;
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      const Hyper& h = k.hyper[p.layer];
      const int64_t n = p.length;
      k.bad[i] = any_bad(k.g + p.at, n);
      next_moments(k.g + p.at, k.m + p.at, k.v + p.at, n, h, next.m.at, next.v.at, next.u.at);
      const float* x = values_of(k.x, p, x_stage);
      k.direction[i] = k.update[i] = sum_squares(next.u.at, n);
      k.weight[i] = sum_squares(x, n);
      if (h.weight_decay == 0.0) continue;
      const float wd = static_cast<float>(h.weight_decay);
      for (int64_t j = 0; j < n; ++j) next.u.at[j] += x[j] * wd;
      k.update[i] = sum_squares(next.u.at, n);
    }
  });
}

inline void warmup_apply(const WarmupArgs& k) {
  for_tiles(k.plan, k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Moments next;
    Stage x_stage, room;
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      const Hyper& h = k.hyper[p.layer];
      const int64_t n = p.length;
      next_moments(k.g + p.at, k.m + p.at, k.v + p.at, n, h, next.m.at, next.v.at, next.u.at);
      std::memcpy(k.m + p.at, next.m.at, static_cast<size_t>(n) * sizeof(float));
      std::memcpy(k.v + p.at, next.v.at, static_cast<size_t>(n) * sizeof(float));
      const float wd = static_cast<float>(h.weight_decay), step = k.step[p.layer];
      const float* x = values_of(k.x, p, x_stage);
      float* to = room_for(k.x, p, room);
#pragma GCC ivdep  // `to` is `x` or a buffer of its own
      for (int64_t j = 0; j < n; ++j) to[j] = x[j] - (next.u.at[j] + x[j] * wd) * step;
      put_back(k.x, p, room);
    }
  });
}

}  // namespace onebit::ONEBIT_ISA
