// Plain conversions: signs to floats, a list of tensors to a flat buffer, and the size of tensors.
#pragma once

#include "state.hpp"

namespace onebit::ONEBIT_ISA {

inline void decode(const DecodeArgs& k) {
  for_tiles(k.plan, k.threads, [&](const Tile& t) {
    const uint8_t *bits = bits_of(k.from, t), *alive = mask_of(k.from.alive, t);
    float* out = k.out + t.at;
    if (!t.full) clear(out, t.length);
    for_pieces(k.plan, t, [&](const Piece& p, int64_t, int64_t at) {
      const V8 value = splat(k.from.scales[p.block] / of_layer(k.layer_scale, p));
      for_octets(at, p.length, [=](auto lanes, int64_t i, NoState) ONEBIT_INLINE {
        lanes.store(out + i, signed8(bits, alive, i, value));
      });
    });
  });
}

inline void gather(const GatherArgs& k) {
  for_tiles(k.plan, k.threads, [&](const Tile& t) {
    Stage stage;
    if (!t.full) clear(k.out + t.at, t.length);
    for_pieces(k.plan, t, [&](const Piece& p, int64_t, int64_t) {
      std::memcpy(k.out + p.at, values_of(k.from, p, stage), static_cast<size_t>(p.length) * sizeof(float));
    });
  });
}

inline void sum_squares(const SquaresArgs& k) {
  for_range(0, k.parts, k.threads, [&](int64_t part) {
    Stage stage;
    const int64_t tensor = k.tensor[part];
    const float* x = widen(k.from.data[tensor], k.from.types[tensor], k.offset[part], k.length[part], stage.at);
    Sum8 sum;
    for_octets(0, k.length[part], sum, [=](auto lanes, int64_t i, Sum8& own) ONEBIT_INLINE {
      own.add_squares(lanes.load(x + i));
    });
    k.of_part[part] = sum.total();
  });
}

}  // namespace onebit::ONEBIT_ISA
