// Blocks of elements as 8-bit integers with a bfloat16 scale each: what the quantised warm-up sends.
#pragma once

#include "convert.hpp"

namespace onebit::ONEBIT_ISA {

constexpr int64_t kTask = 64;  // blocks that one thread takes at a time

// body(block) for every block, on several threads.
template <class Body>
inline void for_blocks(int64_t blocks, int threads, const Body& body) {
  for_range(0, (blocks + kTask - 1) / kTask, threads, [&](int64_t task) {
    const int64_t stop = smaller(blocks, (task + 1) * kTask);
    for (int64_t block = task * kTask; block < stop; ++block) body(block);
  });
}

// The smallest bfloat16 that is at least x, x >= 0 and finite.
inline uint16_t round_up_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<uint16_t>((u + 0xffffu) >> 16);
}

inline float widen_bf16(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// scale = the largest magnitude / levels, rounded up; integer = x / scale to nearest. A block that is not finite gets a
// scale that is not, one below 1e-36 the scale 0, and both zeros.
inline void quantise(const QuantiseArgs& k) {
  for_blocks(k.blocks, k.threads, [&](int64_t block) {
    const int64_t from = k.starts[block], stop = k.starts[block + 1];
    uint32_t top = 0;  // of the magnitudes' bits: ordered as the magnitudes are, nan last
    for (int64_t i = from; i < stop; ++i) {
      const uint32_t size = reinterpret_cast<const Bits32*>(k.x)[i] & 0x7fffffffu;
      top = size > top ? size : top;
    }
    float largest;
    std::memcpy(&largest, &top, 4);
    const bool special = top >= 0x7f800000u, tiny = !special && largest <= 1e-36f;
    if (special || tiny) {
      k.scales[block] = tiny ? 0 : top > 0x7f800000u ? 0x7fc0u : 0x7f80u;
      std::memset(k.integers + from, 0, static_cast<size_t>(stop - from));
      return;
    }
    k.scales[block] = round_up_bf16(largest / k.levels);
    const float inverse = 1.0f / widen_bf16(k.scales[block]);
    // adding 1.5 * 2^23 leaves the nearest integer in the low bits
    for (int64_t i = from; i < stop; ++i)
      k.integers[i] = static_cast<int8_t>(static_cast<int32_t>((k.x[i] * inverse + 12582912.0f) - 12582912.0f));
  });
}

// out += integer * scale, or out -= it.
inline void dequantise(const DequantiseArgs& k) {
  for_blocks(k.blocks, k.threads, [&](int64_t block) {
    const float scale = k.subtract ? -widen_bf16(k.scales[block]) : widen_bf16(k.scales[block]);
    const int64_t stop = k.starts[block + 1];
    for (int64_t i = k.starts[block]; i < stop; ++i) k.out[i] += static_cast<float>(k.integers[i]) * scale;
  });
}

}  // namespace onebit::ONEBIT_ISA
