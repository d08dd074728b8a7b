// Everyone's side of the compressed stage: from the new momentum's bits to the new parameters.
#pragma once

#include "quotient.hpp"
#include "state.hpp"

namespace onebit::ONEBIT_ISA {

// The rebuilt gradient g = (m - beta1 * m_before) / (1 - beta1), and v = beta2 * v + (1 - beta2) * g * g, where alive.
// m is sign * m, and beta1 * m_before is sign * before, or where m_before is not yet signs a float times beta1.
struct Refresh {
  const uint8_t *now, *before, *alive, *alive_before;
  const float* before_flat;
  V8 m, m_before, divisor, keep, add, if_same, if_other;

  Refresh(const LambMeasureArgs& k, const Tile& t, const Piece& p, float momentum, float s)
      : now(bits_of(k.now, t)),
        before(k.before_flat != nullptr ? nullptr : bits_of(k.before, t)),
        alive(mask_of(k.now.alive, t)),
        alive_before(mask_of(k.before.alive, t)),
        before_flat(k.before_flat != nullptr ? k.before_flat + t.at : nullptr) {
    const Hyper& h = k.hyper[p.layer];
    const float beta1 = static_cast<float>(h.beta1), below = static_cast<float>(1.0 - h.beta1);
    const float share = static_cast<float>(1.0 - h.beta2);
    const float old = before_flat != nullptr ? beta1 : beta1 * (k.before.scales[p.block] / s);
    m = splat(momentum), m_before = splat(old), divisor = splat(below);
    keep = splat(static_cast<float>(h.beta2)), add = splat(share);
    const float same = (momentum - old) / below, other = (momentum + old) / below;
    if_same = splat(share * same * same), if_other = splat(share * other * other);
  }

  template <class Lanes>
  ONEBIT_INLINE V8 operator()(Lanes lanes, int64_t i, V8 v) const {
    if (before_flat == nullptr && alive == nullptr && alive_before == nullptr) {
      // two signs: g has two magnitudes, so its square needs no arithmetic per element
      const U8 differ = spread_bits(now[i >> 3] ^ before[i >> 3]);
      return v * keep + (differ != 0 ? if_other : if_same);
    }
    const V8 old =
        before_flat != nullptr ? lanes.load(before_flat + i) * m_before : signed8(before, alive_before, i, m_before);
    const V8 g = (signed8(now, alive, i, m) - old) / divisor;
    const V8 fresh = v * keep + add * g * g;
    return alive == nullptr ? fresh : mask8(alive[i >> 3]) != 0.0f ? fresh : v;
  }
};

struct Measured {  // of a piece
  Largest largest;
  Sum8 direction, update;
};

inline void lamb_measure(const LambMeasureArgs& k) {
  for_tiles(k.plan, k.threads, [&](const Tile& t) {
    Stage frozen_stage, fresh_stage, x_stage;
    const float* frozen = flat_of(k.plan, k.frozen, t, frozen_stage);
    const float* fresh = flat_of(k.plan, k.fresh, t, fresh_stage);
    float* refreshed = room_for(k.fresh, t, fresh_stage);
    const uint8_t *bits = bits_of(k.now, t), *alive = mask_of(k.now.alive, t);
    for_pieces(k.plan, t, [&](const Piece& p, int64_t number, int64_t at) {
      const Hyper& h = k.hyper[p.layer];
      const float s = of_layer(k.layer_scale, p), momentum = k.now.scales[p.block] / s;
      const V8 m = splat(momentum), eps = splat(static_cast<float>(h.eps));
      const V8 wd = splat(static_cast<float>(h.weight_decay));
      const Refresh refresh(k, t, p, momentum, s);
      const bool decays = h.weight_decay != 0.0;
      const float* x = decays ? values_of(k.x, p, x_stage) : nullptr;
      Measured found{{eps, k.variance_form}, {}, {}};
      for_octets(at, p.length, found, [=](auto lanes, int64_t i, Measured& own) ONEBIT_INLINE {
        const V8 a = lanes.load(frozen + i), b = refresh(lanes, i, lanes.load(fresh + i));
        lanes.store(refreshed + i, b);
        own.largest.add(lanes, a, b, alive == nullptr ? splat(1.0f) : mask8(alive[i >> 3]));
        if (!decays) return;
        const V8 u = lanes.keep(signed8(bits, alive, i, m) / (root(a) + eps));
        own.direction.add_squares(u);
        own.update.add_squares(u + lanes.load(x + (i - at)) * wd);
      });
      k.largest[number] = found.largest.best;
      k.direction[number] = found.direction.total();
      k.update[number] = found.update.total();
      if (k.fresh.type == Type::bf16)
        narrow_bf16_random(refreshed + at, p.length, static_cast<uint16_t*>(k.fresh.data) + p.at, k.seed, k.step,
                           k.index + static_cast<uint64_t>(p.at));
    });
  });
}

// x -= step * (m / (sqrt(v) + eps) + weight_decay * x)
inline void apply(const ApplyArgs& k) {
  for_tiles(k.plan, k.threads, [&](const Tile& t) {
    Stage frozen_stage, x_stage, room;
    const float* frozen = flat_of(k.plan, k.frozen, t, frozen_stage);
    const uint8_t *bits = bits_of(k.now, t), *alive = mask_of(k.now.alive, t);
    for_pieces(k.plan, t, [&](const Piece& p, int64_t, int64_t at) {
      const Hyper& h = k.hyper[p.layer];
      const V8 m = splat(k.now.scales[p.block] / of_layer(k.layer_scale, p)), eps = splat(static_cast<float>(h.eps));
      const V8 wd = splat(static_cast<float>(h.weight_decay)), step = splat(k.step[p.layer]);
      const float* x = values_of(k.x, p, x_stage);
      float* to = room_for(k.x, p, room);
      for_octets(at, p.length, [=](auto lanes, int64_t i, NoState) ONEBIT_INLINE {
        const V8 direction = signed8(bits, alive, i, m) / (root(lanes.load(frozen + i)) + eps);
        const V8 parameter = lanes.load(x + (i - at));
        lanes.store(to + (i - at), parameter - (direction + parameter * wd) * step);
      });
      put_back(k.x, p, room);
    });
  });
}

}  // namespace onebit::ONEBIT_ISA
