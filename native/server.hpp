// The server's side, for the one chunk this worker serves: mean of the decoded messages + error -> signs and sums;
// later the same mean again -> the new error. No float buffer larger than a few registers.
#pragma once

#include "worker.hpp"

namespace onebit::ONEBIT_ISA {

// A = (sum over workers of sign * scale) / n + error * error_factor, for the octets of one piece.
struct ServerMean {
  const uint8_t *bits, *alive;  // of the tile, in the first message
  int64_t stride, workers;
  const float* scales;  // of the piece's block, in the first message
  int64_t blocks;
  const float* error;  // of the tile
  bool power_of_two;  // then multiplying by 1 / n gives the same bits as dividing by n, sooner
  V8 divisor, factor;

  template <class Lanes>
  ONEBIT_INLINE V8 operator()(Lanes lanes, int64_t i) const {
    V8 sum = signed8(bits, alive, i, splat(scales[0]));
    for (int64_t w = 1; w < workers; ++w) sum += signed8(bits + w * stride, alive, i, splat(scales[w * blocks]));
    return (power_of_two ? sum * divisor : sum / divisor) + lanes.load(error + i) * factor;
  }
};

// body(tile, piece, its number, its offset in the tile, its ServerMean) for the pieces of the chunk; begin(tile) before.
template <class Begin, class Body>
inline void for_means(const ServerArgs& k, const Begin& begin, const Body& body) {
  const int64_t first_block = k.plan.chunk_blocks[k.chunk];
  const int64_t blocks = k.plan.chunk_blocks[k.chunk + 1] - first_block;
  const bool power_of_two = (k.workers & (k.workers - 1)) == 0;
  const float divisor = power_of_two ? 1.0f / static_cast<float>(k.workers) : static_cast<float>(k.workers);
  for_range(k.plan.chunk_tiles[k.chunk], k.plan.chunk_tiles[k.chunk + 1], k.threads, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    begin(t);
    for_pieces(k.plan, t, [&](const Piece& p, int64_t number, int64_t at) {
      const ServerMean mean{
          k.received.bits + t.in_chunk / 8,
          mask_of(k.received.alive, t),
          k.received.stride,
          k.workers,
          k.received.scales + (p.block - first_block),
          blocks,
          k.error + t.in_chunk,
          power_of_two,
          splat(divisor),
          splat(of_layer(k.error_factor, p)),
      };
      body(t, p, number, at, mean);
    });
  });
}

inline void server_encode(const ServerArgs& k) {
  const auto all_ones = [&](const Tile& t) {
    if (!t.full) std::memset(k.reply.bits + t.in_chunk / 8, 0xff, static_cast<size_t>(t.length / 8));
  };
  for_means(k, all_ones, [&](const Tile& t, const Piece& p, int64_t number, int64_t at, const ServerMean& mean) {
    uint8_t* bits = k.reply.bits + t.in_chunk / 8;
    const bool absolute = k.absolute;
    Found found;
    for_octets(at, p.length, found, [=](auto lanes, int64_t i, Found& own) ONEBIT_INLINE {
      V8 x = lanes.keep(mean(lanes, i));
      if (mean.alive != nullptr) x = own.drop_dead(x, mean.alive[i >> 3]);
      own.add(x, absolute);
      lanes.store(bits + (i >> 3), pack8(x));
    });
    k.of_piece[number] = found.sum.total();
  });
}

inline void server_commit(const ServerArgs& k) {
  const int64_t first_block = k.plan.chunk_blocks[k.chunk];
  const auto nothing = [](const Tile&) {};
  for_means(k, nothing, [&](const Tile& t, const Piece& p, int64_t, int64_t at, const ServerMean& mean) {
    const uint8_t* bits = k.reply.bits + t.in_chunk / 8;
    const V8 scale = splat(k.reply.scales[p.block - first_block]);
    float* e = k.error + t.in_chunk;
    for_octets(at, p.length, [=](auto lanes, int64_t i, NoState) ONEBIT_INLINE {
      lanes.store(e + i, mean(lanes, i) - signed8(bits, mean.alive, i, scale));
    });
  });
}

}  // namespace onebit::ONEBIT_ISA
