// The worker's side: momentum + gradient + error -> signs and sums; later, once the scales are known to be finite,
// the same input again -> the new error. Recomputing costs less memory traffic than keeping the input.
#pragma once

#include "bits.hpp"
#include "reduce.hpp"
#include "state.hpp"

namespace onebit::ONEBIT_ISA {

// out = (g * a + m * b) * s + e * f
inline void blend(const float* g, const float* m, const float* e, int64_t n, float a, float b, float s, float f,
                  float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = (g[i] * a + m[i] * b) * s + e[i] * f;
}

inline void worker_input(const WorkerArgs& k, const Tile& t, float* input) {
  Stage momentum, error, grad;
  const float* m = k.momentum_flat != nullptr ? k.momentum_flat + t.at : signs_of(k.momentum, t, momentum);
  const float* e = flat_of(k.plan, k.error, t, error);
  if (!t.full) clear(input, t.length);
  for (int64_t i = t.first; i < t.last; ++i) {
    const Piece& p = k.plan.pieces[i];
    const int64_t at = p.at - t.at;
    const float s = k.layer_scale == nullptr ? 1.0f : k.layer_scale[p.layer];
    const float f = k.error_factor == nullptr ? 1.0f : k.error_factor[p.layer];
    const float keep = static_cast<float>(k.hyper[p.layer].beta1);
    const float add = static_cast<float>(1.0 - k.hyper[p.layer].beta1);
    const float b = k.momentum_flat != nullptr ? keep : k.momentum.scales[p.block] / s * keep;
    blend(values_of(k.grads, p, grad), m + at, e + at, p.length, add, b, s, f, input + at);
  }
}

// Dead elements count as zero, by a product, so that inf and nan show in the sums. Returns how many are not zero.
inline int64_t drop_dead(float* x, const uint8_t* alive, int64_t n) {
  Stage mask;
  unpack_mask(alive, n, mask.at);
  int32_t asking = 0;
  for (int64_t i = 0; i < n; ++i) {
    asking += (x[i] != 0.0f) & (mask.at[i] == 0.0f);
    x[i] *= mask.at[i];
  }
  return asking;
}

inline void worker_encode(const WorkerArgs& k) {
  for_tiles(k.plan, k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Stage input;
    worker_input(k, t, input.at);
    if (k.message.alive != nullptr) {
      const int64_t asking = drop_dead(input.at, mask_of(k.message.alive, t), t.length);
      if (asking != 0) __atomic_fetch_add(k.asking, asking, __ATOMIC_RELAXED);
    }
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      k.of_piece[i] = sum_of(input.at + (p.at - t.at), p.length, k.absolute);
    }
    pack_signs(input.at, t.length, bits_of(k.message, t));
  });
}

// e = input - sign * scale
inline void residue(const float* input, const float* signs, int64_t n, float scale, float* __restrict e) {
  for (int64_t i = 0; i < n; ++i) e[i] = input[i] - signs[i] * scale;
}

inline void worker_commit(const WorkerArgs& k) {
  for_tiles(k.plan, k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Stage input, sent, error;
    worker_input(k, t, input.at);
    const float* signs = signs_of(k.message, t, sent);
    float* e = room_for(k.error, t, error);
    if (!t.full && e == error.at) clear(e, t.length);
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      const int64_t at = p.at - t.at;
      residue(input.at + at, signs + at, p.length, k.message.scales[p.block], e + at);
    }
    put_back(k.plan, k.error, t, error);
  });
}

}  // namespace onebit::ONEBIT_ISA
