// The worker's side: momentum + gradient + error -> signs and sums; later, once the scales are known to be finite,
// the same input again -> the new error. Recomputing costs less memory traffic than keeping the input.
#pragma once

#include "state.hpp"

namespace onebit::ONEBIT_ISA {

// input = (g * (1 - beta1) + m * beta1) * layer_scale + error * error_factor, for the octets of one piece.
struct WorkerInput {
  const float *grad, *error, *momentum;  // by offset in the piece, the tile, the tile
  const uint8_t *bits, *alive;           // of the momentum, where `momentum` is null
  V8 add, keep, scale, factor;
  int64_t at;

  template <class Lanes>
  ONEBIT_INLINE V8 operator()(Lanes lanes, int64_t i) const {
    const V8 kept = momentum != nullptr ? lanes.load(momentum + i) * keep : signed8(bits, alive, i, keep);
    return (lanes.load(grad + (i - at)) * add + kept) * scale + lanes.load(error + i) * factor;
  }
};

// body(piece, its number, its offset in the tile, its WorkerInput)
template <class Body>
inline void for_inputs(const WorkerArgs& k, const Tile& t, const Body& body) {
  Stage error, grad;
  const float* e = flat_of(k.plan, k.error, t, error);
  const bool flat = k.momentum_flat != nullptr;
  for_pieces(k.plan, t, [&](const Piece& p, int64_t number, int64_t at) {
    const double beta1 = k.hyper[p.layer].beta1;
    const float s = of_layer(k.layer_scale, p), keep = static_cast<float>(beta1);
    const WorkerInput input{
        values_of(k.grads, p, grad),
        e,
        flat ? k.momentum_flat + t.at : nullptr,
        flat ? nullptr : bits_of(k.momentum, t),
        mask_of(k.momentum.alive, t),
        splat(static_cast<float>(1.0 - beta1)),
        splat(flat ? keep : k.momentum.scales[p.block] / s * keep),
        splat(s),
        splat(of_layer(k.error_factor, p)),
        at,
    };
    body(p, number, at, input);
  });
}

// What an encoder finds out about a piece.
struct Found {
  Sum8 sum;
  int64_t asking = 0;

  void add(V8 x, bool absolute) {
    if (absolute)
      sum.add_magnitudes(x);
    else
      sum.add_squares(x);
  }

  // Dead elements count as zero, by a product, so that inf and nan show in the sums. Counts those that are not zero.
  V8 drop_dead(V8 x, uint8_t alive) {
    const V8 mask = mask8(alive);
    const auto asks = (x != 0.0f) & (mask == 0.0f);
    if (any(asks))
      for (int l = 0; l < 8; ++l) asking += asks[l] != 0;
    return x * mask;
  }
};

inline void worker_encode(const WorkerArgs& k) {
  for_tiles(k.plan, k.threads, [&](const Tile& t) {
    uint8_t* bits = bits_of(k.message, t);
    const uint8_t* alive = mask_of(k.message.alive, t);
    const bool absolute = k.absolute;
    int64_t asking = 0;
    if (!t.full) std::memset(bits, 0xff, static_cast<size_t>(t.length / 8));
    for_inputs(k, t, [&](const Piece& p, int64_t number, int64_t at, const WorkerInput& input) {
      Found found;
      for_octets(at, p.length, found, [=](auto lanes, int64_t i, Found& own) ONEBIT_INLINE {
        V8 x = lanes.keep(input(lanes, i));
        if (alive != nullptr) x = own.drop_dead(x, alive[i >> 3]);
        own.add(x, absolute);
        lanes.store(bits + (i >> 3), pack8(x));
      });
      k.of_piece[number] = found.sum.total();
      asking += found.asking;
    });
    if (asking != 0) __atomic_fetch_add(k.asking, asking, __ATOMIC_RELAXED);
  });
}

inline void worker_commit(const WorkerArgs& k) {
  for_tiles(k.plan, k.threads, [&](const Tile& t) {
    Stage room;
    float* e = room_for(k.error, t, room);
    if (!t.full && e == room.at) clear(e, t.length);
    const uint8_t *bits = bits_of(k.message, t), *alive = mask_of(k.message.alive, t);
    for_inputs(k, t, [&](const Piece& p, int64_t, int64_t at, const WorkerInput& input) {
      const V8 scale = splat(k.message.scales[p.block]);
      for_octets(at, p.length, [=](auto lanes, int64_t i, NoState) ONEBIT_INLINE {
        lanes.store(e + i, input(lanes, i) - signed8(bits, alive, i, scale));
      });
    });
    put_back(k.plan, k.error, t, room);
    keep_dead_apart(k.error, t, room, alive);
  });
}

}  // namespace onebit::ONEBIT_ISA
