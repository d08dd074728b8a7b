// Reading and writing lists of tensors and compact state, a tile or a piece at a time, as floats.
#pragma once

#include "convert.hpp"

namespace onebit::ONEBIT_ISA {

inline const float* widen(const void* data, Type type, int64_t at, int64_t n, float* stage) {
  switch (type) {
    case Type::f32: return static_cast<const float*>(data) + at;  // no copy
    case Type::bf16: widen_bf16(static_cast<const uint16_t*>(data) + at, n, stage); return stage;
    case Type::f16: widen_f16(static_cast<const uint16_t*>(data) + at, n, stage); return stage;
    default: std::memset(stage, 0, static_cast<size_t>(n) * sizeof(float)); return stage;
  }
}

// The piece's elements of its layer.
inline const float* values_of(const Values& list, const Piece& p, Stage& stage) {
  return widen(list.data[p.layer], list.types[p.layer], p.layer_at, p.length, stage.at);
}

// Where to write them: in place for f32, else in the stage, from which `put_back` takes them.
inline float* room_for(const Values& list, const Piece& p, Stage& stage) {
  return list.types[p.layer] == Type::f32 ? static_cast<float*>(list.data[p.layer]) + p.layer_at : stage.at;
}

inline void put_back(const Values& list, const Piece& p, const Stage& stage) {
  uint16_t* to = static_cast<uint16_t*>(list.data[p.layer]) + p.layer_at;
  if (list.types[p.layer] == Type::bf16) narrow_bf16(stage.at, p.length, to);
  if (list.types[p.layer] == Type::f16) narrow_f16(stage.at, p.length, to);
}

// int8: value = q * scale, scale = largest magnitude of its 128 elements / 127. Rounding drops at most half a scale.
inline void widen_i8(const int8_t* q, const float* scales, int64_t n, float* to) {
  for (int64_t from = 0; from < n; from += kErrorGroup) {
    const float scale = scales[from / kErrorGroup];
    const int64_t stop = smaller(n, from + kErrorGroup);
    for (int64_t i = from; i < stop; ++i) to[i] = static_cast<float>(q[i]) * scale;
  }
}

inline void narrow_i8(const float* x, int64_t n, int8_t* q, float* scales) {
  for (int64_t from = 0; from < n; from += kErrorGroup) {
    const int64_t stop = smaller(n, from + kErrorGroup);
    uint32_t top = 0;  // of the magnitudes' bits: ordered as the magnitudes are, and reduced in any order
    for (int64_t i = from; i < stop; ++i) {
      const uint32_t size = reinterpret_cast<const Bits32*>(x)[i] & 0x7fffffffu;
      top = size > top ? size : top;
    }
    float largest;
    std::memcpy(&largest, &top, 4);
    scales[from / kErrorGroup] = largest / 127.0f;
    const float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;  // all smaller ones are dropped
    // |x * inverse| rounds to at most 127; adding 1.5 * 2^23 leaves the nearest integer in the low bits
    for (int64_t i = from; i < stop; ++i)
      q[i] = static_cast<int8_t>(static_cast<int32_t>((x[i] * inverse + 12582912.0f) - 12582912.0f));
  }
}

// The tile's elements of a flat state.
inline const float* flat_of(const Plan& plan, const Flat& flat, const Tile& t, Stage& stage) {
  if (flat.type != Type::i8) return widen(flat.data, flat.type, t.at, t.length, stage.at);
  const float* scales = flat.scales + t.chunk * plan.groups + t.in_chunk / kErrorGroup;
  widen_i8(static_cast<const int8_t*>(flat.data) + t.at, scales, t.length, stage.at);
  return stage.at;
}

inline float* room_for(const Flat& flat, const Tile& t, Stage& stage) {
  return flat.type == Type::f32 ? static_cast<float*>(flat.data) + t.at : stage.at;
}

// To nearest. f32 was written in place. Elements of no piece must be zero in the stage.
inline void put_back(const Plan& plan, const Flat& flat, const Tile& t, const Stage& stage) {
  if (flat.type == Type::bf16) narrow_bf16(stage.at, t.length, static_cast<uint16_t*>(flat.data) + t.at);
  if (flat.type == Type::i8)
    narrow_i8(stage.at, t.length, static_cast<int8_t*>(flat.data) + t.at,
              flat.scales + t.chunk * plan.groups + t.in_chunk / kErrorGroup);
}

// What a dead element holds is not rounded to zero but to the next number: that it holds something wakes it.
inline void keep_dead_apart(const Flat& flat, const Tile& t, const Stage& stage, const uint8_t* alive) {
  if (alive == nullptr || flat.type != Type::i8) return;
  int8_t* q = static_cast<int8_t*>(flat.data) + t.at;
  for (int64_t i = 0; i < t.length; ++i) {
    if (i % 8 == 0 && alive[i >> 3] == 0xff) i += 7;
    else if ((alive[i >> 3] >> (7 - i % 8) & 1) == 0 && q[i] == 0 && stage.at[i] != 0.0f) q[i] = stage.at[i] > 0.0f ? 1 : -1;
  }
}

inline void clear(float* x, int64_t n) { std::memset(x, 0, static_cast<size_t>(n) * sizeof(float)); }

}  // namespace onebit::ONEBIT_ISA
