// The warm-up stage: LAMB on an averaged gradient. `measure` changes nothing, so a step whose gradient is not finite
// is skipped by not calling `apply`; the new momentum and variance are computed in both.
#pragma once

#include "state.hpp"

namespace onebit::ONEBIT_ISA {

// m = m * beta1 + g * (1 - beta1); v = v * beta2 + (1 - beta2) * g * g; u = m / (sqrt(v) + eps)
struct Moments {
  V8 keep1, add1, keep2, add2, eps;
  explicit Moments(const Hyper& h)
      : keep1(splat(static_cast<float>(h.beta1))),
        add1(splat(static_cast<float>(1.0 - h.beta1))),
        keep2(splat(static_cast<float>(h.beta2))),
        add2(splat(static_cast<float>(1.0 - h.beta2))),
        eps(splat(static_cast<float>(h.eps))) {}
  V8 momentum(V8 m, V8 g) const { return m * keep1 + g * add1; }
  V8 variance(V8 v, V8 g) const { return v * keep2 + add2 * g * g; }
  V8 direction(V8 m, V8 v) const { return m / (root(v) + eps); }
};

// The piece's gradient.
inline const float* gradient_of(const WarmupArgs& k, const Piece& p, Stage& stage) {
  return k.g != nullptr ? k.g + p.at : values_of(k.grads, p, stage);
}

struct WarmupSums {  // of a piece
  Sum8 direction, update, weight;
  V8 bad = {};  // nan once the square of an element was not finite
};

inline void warmup_measure(const WarmupArgs& k) {
  for_tiles(k.plan, k.threads, [&](const Tile& t) {
    Stage x_stage, g_stage;
    for_pieces(k.plan, t, [&](const Piece& p, int64_t number, int64_t at) {
      const Moments next(k.hyper[p.layer]);
      const V8 wd = splat(static_cast<float>(k.hyper[p.layer].weight_decay));
      const float *x = values_of(k.x, p, x_stage), *g = gradient_of(k, p, g_stage), *m = k.m + t.at, *v = k.v + t.at;
      WarmupSums found;
      for_octets(at, p.length, found, [=](auto lanes, int64_t i, WarmupSums& own) ONEBIT_INLINE {
        const V8 grad = lanes.load(g + (i - at)), parameter = lanes.load(x + (i - at));
        const V8 u = lanes.keep(next.direction(next.momentum(lanes.load(m + i), grad),
                                               next.variance(lanes.load(v + i), grad)));
        own.bad += grad * grad * 0.0f;
        own.direction.add_squares(u);
        own.update.add_squares(u + parameter * wd);
        own.weight.add_squares(parameter);
      });
      k.bad[number] = any(found.bad != found.bad);
      k.direction[number] = found.direction.total();
      k.update[number] = found.update.total();
      k.weight[number] = found.weight.total();
    });
  });
}

inline void warmup_apply(const WarmupArgs& k) {
  for_tiles(k.plan, k.threads, [&](const Tile& t) {
    Stage x_stage, g_stage, room;
    for_pieces(k.plan, t, [&](const Piece& p, int64_t, int64_t at) {
      const Moments next(k.hyper[p.layer]);
      const V8 wd = splat(static_cast<float>(k.hyper[p.layer].weight_decay)), step = splat(k.step[p.layer]);
      const float *x = values_of(k.x, p, x_stage), *g = gradient_of(k, p, g_stage);
      float *to = room_for(k.x, p, room), *m = k.m + t.at, *v = k.v + t.at;
      for_octets(at, p.length, [=](auto lanes, int64_t i, NoState) ONEBIT_INLINE {
        const V8 grad = lanes.load(g + (i - at)), parameter = lanes.load(x + (i - at));
        const V8 m_new = next.momentum(lanes.load(m + i), grad), v_new = next.variance(lanes.load(v + i), grad);
        lanes.store(m + i, m_new);
        lanes.store(v + i, v_new);
        lanes.store(to + (i - at), parameter - (next.direction(m_new, v_new) + parameter * wd) * step);
      });
      put_back(k.x, p, room);
    });
  });
}

}  // namespace onebit::ONEBIT_ISA
