// Vectors of the width this file is compiled for, through the compiler's vector extensions.
// Everything here is in a namespace of its own per instruction set, and no std templates are used: an inline function
// compiled for AVX2 must never be the copy that the linker keeps for all.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "plan.hpp"
#include "table.hpp"
#include "team.hpp"

namespace onebit::ONEBIT_ISA {

#if defined(__AVX512F__)
constexpr int kVector = 64;
#elif defined(__AVX__)
constexpr int kVector = 32;
#else
constexpr int kVector = 16;
#endif

typedef float FloatV __attribute__((vector_size(kVector)));
typedef double DoubleV __attribute__((vector_size(kVector)));
typedef float FloatU __attribute__((vector_size(kVector), aligned(4), may_alias));      // unaligned in memory
typedef float HalfU __attribute__((vector_size(kVector / 2), aligned(4), may_alias));   // as many lanes as DoubleV

constexpr int kFloats = kVector / 4, kDoubles = kVector / 8;

typedef uint32_t __attribute__((may_alias)) Bits32;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// body(i) for the tiles [first, last).
template <class Body>
inline void for_tiles(int64_t first, int64_t last, int threads, const Body& body) {
  run_team(first, last, threads, [](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
           &body);
}

template <class Body>
inline void for_tiles(const Plan& plan, int threads, const Body& body) {
  for_tiles(0, plan.chunk_tiles[plan.workers], threads, body);
}

// A buffer for one tile, on the stack of the thread that works on it.
struct alignas(64) Stage {
  float at[kMaxTile];
};

}  // namespace onebit::ONEBIT_ISA
