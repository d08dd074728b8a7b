#include "plan.hpp"

#include <stdexcept>
#include <string>

namespace onebit {

static void require(bool good, const std::string& what) {
  if (!good) throw std::invalid_argument("plan: " + what);
}

Plan::Plan(const int64_t* table, int64_t count, const std::vector<int64_t>& blocks_per_chunk, int64_t layers_,
           int64_t numel_, int64_t tile)
    : numel(numel_), layers(layers_), workers(static_cast<int>(blocks_per_chunk.size())) {
  require(workers >= 1 && numel > 0 && numel % (8 * workers) == 0,
          std::to_string(numel) + " elements are no multiple of 8 * " + std::to_string(workers) + " workers");
  require(tile >= kErrorGroup && tile <= kMaxTile && tile % kErrorGroup == 0,
          "tile is " + std::to_string(tile) + "; allowed are multiples of 128 up to " + std::to_string(kMaxTile));
  chunk = numel / workers;
  groups = (chunk + kErrorGroup - 1) / kErrorGroup;
  chunk_blocks.push_back(0);
  for (int64_t blocks : blocks_per_chunk) {
    require(blocks >= 0, "a chunk has a negative number of blocks");
    chunk_blocks.push_back(chunk_blocks.back() + blocks);
  }

  pieces.reserve(static_cast<size_t>(count));
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i, table += 5) {
    const int64_t block = table[0], layer = table[1], layer_at = table[2], at = table[3], length = table[4];
    require(at >= end && length > 0 && length <= tile && at + length <= numel, "pieces overlap or leave the bucket");
    require(layer >= 0 && layer < layers && layer_at >= 0, "a piece names a layer that does not exist");
    require(block >= 0 && block < blocks(), "a piece names a block that does not exist");
    if (i > 0) require(block >= pieces.back().block && layer >= pieces.back().layer, "pieces are out of order");
    pieces.push_back({at, layer_at, static_cast<int32_t>(block), static_cast<int32_t>(layer),
                      static_cast<int32_t>(length)});
    end = at + length;
  }

  int64_t piece = 0;
  chunk_tiles.push_back(0);
  for (int32_t c = 0; c < workers; ++c) {
    for (int64_t in = 0; in < chunk; in += tile) {
      const int64_t length = chunk - in < tile ? chunk - in : tile, at = c * chunk + in, first = piece;
      int64_t covered = 0;
      for (; piece < count && pieces[piece].at < at + length; ++piece) {
        covered += pieces[piece].length;
        require(pieces[piece].at + pieces[piece].length <= at + length, "a piece crosses a tile");
        require(pieces[piece].block >= chunk_blocks[c] && pieces[piece].block < chunk_blocks[c + 1],
                "a block crosses a chunk");
      }
      tiles.push_back({at, in, first, piece, c, static_cast<int32_t>(length), covered == length});
    }
    chunk_tiles.push_back(static_cast<int64_t>(tiles.size()));
  }
}

void sum_blocks(const Plan& plan, int64_t first, int64_t last, const double* of_piece, int64_t first_block,
                double* out) {
  for (int64_t p = first; p < last; ++p) out[plan.pieces[p].block - first_block] += of_piece[p];
}

void sum_layers(const Plan& plan, const double* of_piece, double* out) {
  for (size_t p = 0; p < plan.pieces.size(); ++p) out[plan.pieces[p].layer] += of_piece[p];
}

void max_layers(const Plan& plan, const float* of_piece, float* out) {
  for (size_t p = 0; p < plan.pieces.size(); ++p) {
    float& best = out[plan.pieces[p].layer];
    if (of_piece[p] > best || of_piece[p] != of_piece[p]) best = of_piece[p];  // nan stays, as in torch
  }
}

}  // namespace onebit
