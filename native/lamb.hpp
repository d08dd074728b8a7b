// Everyone's side of the compressed stage: from the new momentum's bits to the new parameters.
#pragma once

#include "bits.hpp"
#include "quotient.hpp"
#include "reduce.hpp"
#include "state.hpp"

namespace onebit::ONEBIT_ISA {

// The rebuilt gradient g = (m - beta1 * m_before) / (1 - beta1) and with it v = beta2 * v + (1 - beta2) * g * g.
// m = now * a and beta1 * m_before = before * b, where a sign may be zero or, with a flat m_before, any float.
// Both write to `v` itself or to a buffer of its own.
inline void refresh(const float* now, const float* before, const float* v, int64_t n, float a, float b, const Hyper& h,
                    float* out) {
  const float divisor = static_cast<float>(1.0 - h.beta1), keep = static_cast<float>(h.beta2);
  const float add = static_cast<float>(1.0 - h.beta2);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float g = (now[i] * a - before[i] * b) / divisor;
    out[i] = v[i] * keep + add * g * g;
  }
}

// The same where both are signs: g has two magnitudes, so its square needs no arithmetic per element.
inline void refresh_signs(const float* now, const float* before, const float* v, int64_t n, float a, float b,
                          const Hyper& h, float* out) {
  const float divisor = static_cast<float>(1.0 - h.beta1), keep = static_cast<float>(h.beta2);
  const float add = static_cast<float>(1.0 - h.beta2);
  const float same = (a - b) / divisor, other = (a + b) / divisor;
  const float if_same = add * same * same, if_other = add * other * other;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = v[i] * keep + (now[i] * before[i] > 0.0f ? if_same : if_other);
}

// u = now * m / (sqrt(v) + eps) and u_decayed = u + x * weight_decay
inline void directions(const float* now, const float* v, const float* x, int64_t n, float m, float eps, float wd,
                       float* __restrict u, float* __restrict u_decayed) {
  for (int64_t i = 0; i < n; ++i) {
    u[i] = now[i] * m / (__builtin_sqrtf(v[i]) + eps);
    u_decayed[i] = u[i] + x[i] * wd;
  }
}

inline void lamb_measure(const LambMeasureArgs& k) {
  for_tiles(k.plan, k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Stage now_stage, before_stage, mask, frozen_stage, fresh_stage, x_stage, refreshed, u, decayed;
    const float* now = signs_of(k.now, t, now_stage);
    const float* before = k.before_flat != nullptr ? k.before_flat + t.at : signs_of(k.before, t, before_stage);
    const uint8_t* alive = mask_of(k.now.alive, t);
    if (alive != nullptr) unpack_mask(alive, t.length, mask.at);
    const float* frozen = flat_of(k.plan, k.frozen, t, frozen_stage);
    const float* fresh = flat_of(k.plan, k.fresh, t, fresh_stage);
    const bool in_place = k.fresh.type == Type::f32 && alive == nullptr;
    const bool two_signs = k.before_flat == nullptr && k.now.alive == nullptr && k.before.alive == nullptr;
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      const Hyper& h = k.hyper[p.layer];
      const int64_t at = p.at - t.at, n = p.length;
      const float s = k.layer_scale == nullptr ? 1.0f : k.layer_scale[p.layer];
      const float m = k.now.scales[p.block] / s, beta1 = static_cast<float>(h.beta1);
      const float m_before = k.before_flat != nullptr ? beta1 : beta1 * (k.before.scales[p.block] / s);
      const float eps = static_cast<float>(h.eps), wd = static_cast<float>(h.weight_decay);

      float* v = in_place ? static_cast<float*>(k.fresh.data) + p.at : refreshed.at;
      (two_signs ? refresh_signs : refresh)(now + at, before + at, fresh + at, n, m, m_before, h, v);
      if (alive != nullptr)
        for (int64_t j = 0; j < n; ++j) v[j] = mask.at[at + j] != 0.0f ? v[j] : fresh[at + j];
      k.largest[i] = largest_quotient(frozen + at, v, alive == nullptr ? nullptr : mask.at + at, n, eps,
                                      k.variance_form);
      if (k.fresh.type == Type::bf16)
        narrow_bf16_random(v, n, static_cast<uint16_t*>(k.fresh.data) + p.at, k.seed, k.step,
                           k.index + static_cast<uint64_t>(p.at));
      else if (!in_place)
        std::memcpy(static_cast<float*>(k.fresh.data) + p.at, v, static_cast<size_t>(n) * sizeof(float));

      k.direction[i] = k.update[i] = 0;
      if (wd == 0.0f) continue;
      directions(now + at, frozen + at, values_of(k.x, p, x_stage), n, m, eps, wd, u.at, decayed.at);
      k.direction[i] = sum_squares(u.at, n);
      k.update[i] = sum_squares(decayed.at, n);
    }
  });
}

// x -= step * (m / (sqrt(v) + eps) + weight_decay * x)
inline void lamb_apply(const ApplyArgs& k) {
  for_tiles(k.plan, k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Stage signs_stage, frozen_stage, x_stage, room;
    const float* signs = signs_of(k.now, t, signs_stage);
    const float* frozen = flat_of(k.plan, k.frozen, t, frozen_stage);
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      const Hyper& h = k.hyper[p.layer];
      const float m = k.now.scales[p.block] / (k.layer_scale == nullptr ? 1.0f : k.layer_scale[p.layer]);
      const float eps = static_cast<float>(h.eps), wd = static_cast<float>(h.weight_decay), step = k.step[p.layer];
      const float *x = values_of(k.x, p, x_stage), *sign = signs + (p.at - t.at), *v = frozen + (p.at - t.at);
      float* to = room_for(k.x, p, room);
#pragma GCC ivdep  // `to` is `x` or a buffer of its own
      for (int64_t j = 0; j < p.length; ++j) {
        const float u = sign[j] * m / (__builtin_sqrtf(v[j]) + eps) + x[j] * wd;
        to[j] = x[j] - u * step;
      }
      put_back(k.x, p, room);
    }
  });
}

// x = x * (1 - lr * weight_decay) - lr * m / (sqrt(v) + eps)
inline void adam_apply(const ApplyArgs& k) {
  for_tiles(k.plan, k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Stage signs_stage, frozen_stage, x_stage, room;
    const float* signs = signs_of(k.now, t, signs_stage);
    const float* frozen = flat_of(k.plan, k.frozen, t, frozen_stage);
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      const Hyper& h = k.hyper[p.layer];
      const float m = k.now.scales[p.block] / (k.layer_scale == nullptr ? 1.0f : k.layer_scale[p.layer]);
      const float eps = static_cast<float>(h.eps), keep = static_cast<float>(1.0 - h.lr * h.weight_decay);
      const float step = static_cast<float>(h.lr) * m;
      const float *x = values_of(k.x, p, x_stage), *sign = signs + (p.at - t.at), *v = frozen + (p.at - t.at);
      float* to = room_for(k.x, p, room);
#pragma GCC ivdep  // `to` is `x` or a buffer of its own
      for (int64_t j = 0; j < p.length; ++j) to[j] = x[j] * keep - sign[j] * step / (__builtin_sqrtf(v[j]) + eps);
      put_back(k.x, p, room);
    }
  });
}

}  // namespace onebit::ONEBIT_ISA
