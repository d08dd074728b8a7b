// Plain conversions: signs to floats, a list of tensors to a flat buffer, and the size of tensors.
#pragma once

#include "bits.hpp"
#include "reduce.hpp"
#include "state.hpp"

namespace onebit::ONEBIT_ISA {

inline void decode(const DecodeArgs& k) {
  for_tiles(k.plan, k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Stage stage;
    const float* signs = signs_of(k.from, t, stage);
    if (!t.full) clear(k.out + t.at, t.length);
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      const float s = k.layer_scale == nullptr ? 1.0f : k.layer_scale[p.layer];
      const float value = k.from.scales[p.block] / s;
      const float* from = signs + (p.at - t.at);
      float* __restrict to = k.out + p.at;
      for (int64_t j = 0; j < p.length; ++j) to[j] = from[j] * value;
    }
  });
}

inline void gather(const GatherArgs& k) {
  for_tiles(k.plan, k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Stage stage;
    if (!t.full) clear(k.out + t.at, t.length);
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      std::memcpy(k.out + p.at, values_of(k.from, p, stage), static_cast<size_t>(p.length) * sizeof(float));
    }
  });
}

inline void sum_squares(const SquaresArgs& k) {
  for_tiles(0, k.parts, k.threads, [&](int64_t i) {
    Stage stage;
    const int64_t tensor = k.tensor[i];
    k.of_part[i] = sum_squares(
        widen(k.from.data[tensor], k.from.types[tensor], k.offset[i], k.length[i], stage.at), k.length[i]);
  });
}

}  // namespace onebit::ONEBIT_ISA
