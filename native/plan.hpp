// Plan: how a bucket is cut into tiles and pieces. Built once, read by every kernel.
#pragma once

#include <cstdint>
#include <vector>

#include "args.hpp"

namespace onebit {

struct Plan {
  std::vector<Piece> pieces;           // in bucket order; those of a block and those of a layer are neighbours
  std::vector<Tile> tiles;             // in bucket order
  std::vector<int64_t> chunk_tiles;    // [workers + 1], first tile of each chunk
  std::vector<int64_t> chunk_blocks;   // [workers + 1], first block of each chunk
  int64_t numel = 0, chunk = 0, layers = 0, groups = 0;  // groups: int8 scales of one chunk
  int workers = 0;

  // table: int64 [count, 5] of block, layer, offset in the layer, offset in the bucket, length.
  // Throws std::invalid_argument where the table does not fit the rest.
  Plan(const int64_t* table, int64_t count, const std::vector<int64_t>& blocks_per_chunk, int64_t layers,
       int64_t numel, int64_t tile);

  int64_t blocks() const { return chunk_blocks.back(); }
};

// Add the values of pieces [first, last), in piece order, to out[block - first_block] or out[layer].
void sum_blocks(const Plan& plan, int64_t first, int64_t last, const double* of_piece, int64_t first_block, double* out);
void sum_layers(const Plan& plan, const double* of_piece, double* out);
void max_layers(const Plan& plan, const float* of_piece, float* out);

}  // namespace onebit
