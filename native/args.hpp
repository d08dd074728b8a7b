// What the kernels are given: plain pointers and numbers, already checked by the Python side.
#pragma once

#include <cstdint>

namespace onebit {

constexpr int kMaxTile = 4096;  // elements; a tile's staging buffers must stay in the first-level cache
constexpr int kErrorGroup = 128;  // elements that share one scale of an int8 error

// Element types of lists and of compact state. The numbers are known to onebit/kernels/native.py.
enum class Type : int32_t { none = 0, f32 = 1, bf16 = 2, f16 = 3, i8 = 4 };

// The part of a block that lies in one tile: the unit of every per-block and per-layer constant and sum.
struct Piece {
  int64_t at;        // offset in the bucket
  int64_t layer_at;  // offset in the layer
  int32_t block, layer, length;
};

// A run of elements that one thread handles at a time. Never crosses a chunk; starts on a byte of the bits.
struct Tile {
  int64_t at;            // offset in the bucket
  int64_t in_chunk;      // offset in its chunk
  int64_t first, last;   // its pieces
  int32_t chunk, length;
  bool full;             // no padding
};

// What one layer's group sets, one row of a float64 [layers, 5] tensor.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay;
};

// Signs and scales. Chunk j's bits start at bits + j * stride; `alive` has one bit per element of the bucket, or is null.
struct Signs {
  uint8_t* bits = nullptr;
  int64_t stride = 0;
  const float* scales = nullptr;
  const uint8_t* alive = nullptr;
};

// One value per element of the bucket. `scales` belongs to i8: [workers, ceil(chunk / 128)].
struct Flat {
  void* data = nullptr;
  float* scales = nullptr;
  Type type = Type::none;
};

// One tensor per layer. Type::none stands for zeros.
struct Values {
  void* const* data = nullptr;
  const Type* types = nullptr;
};

}  // namespace onebit
