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

constexpr int kFloats = kVector / 4, kDoubles = kVector / 8;

// As many floats as a DoubleV has lanes. GCC 12 makes a detour of __builtin_convertvector, hence the intrinsics.
inline DoubleV widen(const float* x) {
#if defined(__AVX512F__)
  return _mm512_cvtps_pd(_mm256_loadu_ps(x));
#elif defined(__AVX__)
  return _mm256_cvtps_pd(_mm_loadu_ps(x));
#else
  return DoubleV{x[0], x[1]};
#endif
}

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
// The odd size keeps equal offsets in different stages out of the same cache set.
struct alignas(64) Stage {
  float at[kMaxTile + 80];
};

}  // namespace onebit::ONEBIT_ISA
