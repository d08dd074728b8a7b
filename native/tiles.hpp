// Going through the tiles of a plan, and what a kernel needs to know of one.
#pragma once

#include "octet.hpp"
#include "plan.hpp"
#include "table.hpp"
#include "team.hpp"

namespace onebit::ONEBIT_ISA {

typedef uint32_t __attribute__((may_alias)) Bits32;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// body(i) for every i in [first, last), in any order, on several threads.
template <class Body>
inline void for_range(int64_t first, int64_t last, int threads, const Body& body) {
  run_team(first, last, threads, [](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
           &body);
}

template <class Body>
inline void for_tiles(const Plan& plan, int threads, const Body& body) {
  for_range(0, plan.chunk_tiles[plan.workers], threads, [&](int64_t i) { body(plan.tiles[i]); });
}

// body(piece, its number, its offset in the tile)
template <class Body>
inline void for_pieces(const Plan& plan, const Tile& t, const Body& body) {
  for (int64_t i = t.first; i < t.last; ++i) body(plan.pieces[i], i, plan.pieces[i].at - t.at);
}

// A buffer for one tile, on the stack of the thread that works on it.
struct alignas(64) Stage {
  float at[kMaxTile];
};

// Where a tile's bits lie.
inline uint8_t* bits_of(const Signs& s, const Tile& t) { return s.bits + t.chunk * s.stride + t.in_chunk / 8; }
inline const uint8_t* mask_of(const uint8_t* alive, const Tile& t) {
  return alive == nullptr ? nullptr : alive + t.at / 8;
}

inline float of_layer(const float* values, const Piece& p) { return values == nullptr ? 1.0f : values[p.layer]; }

}  // namespace onebit::ONEBIT_ISA
