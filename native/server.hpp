// The server's side, for the one chunk this worker serves: mean of the decoded messages + error -> signs and sums;
// later the same mean again -> the new error. No float buffer larger than a tile.
#pragma once

#include "worker.hpp"

namespace onebit::ONEBIT_ISA {

inline void server_mean(const ServerArgs& k, const Tile& t, float* mean) {
  Stage stage;
  const int64_t first_block = k.plan.chunk_blocks[k.chunk];
  const int64_t blocks = k.plan.chunk_blocks[k.chunk + 1] - first_block;
  const float divisor = static_cast<float>(k.workers);
  if (!t.full) clear(mean, t.length);
  for (int64_t worker = 0; worker < k.workers; ++worker) {
    unpack_signs(k.received.bits + worker * k.received.stride + t.in_chunk / 8, mask_of(k.received.alive, t), t.length,
                 stage.at);
    const float* scales = k.received.scales + worker * blocks - first_block;
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      const float scale = scales[p.block], *signs = stage.at + (p.at - t.at);
      float* __restrict sum = mean + (p.at - t.at);
      if (worker == 0)
        for (int64_t j = 0; j < p.length; ++j) sum[j] = signs[j] * scale;
      else
        for (int64_t j = 0; j < p.length; ++j) sum[j] += signs[j] * scale;
    }
  }
  for (int64_t i = t.first; i < t.last; ++i) {
    const Piece& p = k.plan.pieces[i];
    const float f = k.error_factor == nullptr ? 1.0f : k.error_factor[p.layer];
    const float* e = k.error + t.in_chunk + (p.at - t.at);
    float* __restrict sum = mean + (p.at - t.at);
    for (int64_t j = 0; j < p.length; ++j) sum[j] = sum[j] / divisor + e[j] * f;
  }
}

inline void for_chunk(const ServerArgs& k, const auto& body) {
  for_tiles(k.plan.chunk_tiles[k.chunk], k.plan.chunk_tiles[k.chunk + 1], k.threads, body);
}

inline void server_encode(const ServerArgs& k) {
  for_chunk(k, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Stage mean;
    server_mean(k, t, mean.at);
    if (k.received.alive != nullptr) drop_dead(mean.at, mask_of(k.received.alive, t), t.length);
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      k.of_piece[i] = sum_of(mean.at + (p.at - t.at), p.length, k.absolute);
    }
    pack_signs(mean.at, t.length, k.reply.bits + t.in_chunk / 8);
  });
}

inline void server_commit(const ServerArgs& k) {
  for_chunk(k, [&](int64_t index) {
    const Tile& t = k.plan.tiles[index];
    Stage mean, stage;
    server_mean(k, t, mean.at);
    unpack_signs(k.reply.bits + t.in_chunk / 8, mask_of(k.received.alive, t), t.length, stage.at);
    for (int64_t i = t.first; i < t.last; ++i) {
      const Piece& p = k.plan.pieces[i];
      const int64_t at = p.at - t.at;
      residue(mean.at + at, stage.at + at, p.length, k.reply.scales[p.block - k.plan.chunk_blocks[k.chunk]],
              k.error + t.in_chunk + at);
    }
  });
}

}  // namespace onebit::ONEBIT_ISA
