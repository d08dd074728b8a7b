// The kernels as a table of functions, one table per instruction set (see kernels.cpp and dispatch.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "args.hpp"
#include "plan.hpp"

namespace onebit {

// input = (g * (1 - beta1) + m * beta1) * layer_scale + error * error_factor
struct WorkerArgs {
  const Plan& plan;
  Values grads;
  const Hyper* hyper;
  Signs momentum;              // where momentum_flat is null
  const float* momentum_flat;
  const float* layer_scale;    // [layers] or null
  Flat error;
  const float* error_factor;   // [layers] or null
  Signs message;               // its mask says which elements take part now; encode writes the bits, commit reads all
  bool absolute;               // sums of |x| instead of squares
  double* of_piece;            // encode: sums
  int64_t* asking;             // encode: dead elements whose input is not zero
  int threads;
};

// A = (sum over workers of sign * scale) / n + error * error_factor, for one chunk
struct ServerArgs {
  const Plan& plan;
  int chunk;
  int64_t workers;
  Signs received;              // message i: bits + i * stride, scales + i * blocks of the chunk; one mask for all
  float* error;                // [chunk]
  const float* error_factor;   // [layers] or null
  Signs reply;                 // bits and scales of this chunk alone
  bool absolute;
  double* of_piece;            // indexed as plan.pieces
  int threads;
};

struct DecodeArgs {
  const Plan& plan;
  Signs from;
  const float* layer_scale;  // [layers] or null: decoded values are divided by it
  float* out;                // [numel]
  int threads;
};

struct GatherArgs {
  const Plan& plan;
  Values from;
  float* out;  // [numel]
  int threads;
};

struct LambMeasureArgs {
  const Plan& plan;
  const Hyper* hyper;
  Values x;
  Signs now, before;
  const float* before_flat;   // in place of `before`
  const float* layer_scale;   // [layers] or null
  Flat frozen, fresh;
  bool variance_form;         // quotient of variances instead of sqrt + eps
  uint64_t seed, step, index; // for the rounding of a bf16 fresh variance; index of the bucket's first element
  float* largest;             // of piece: largest quotient
  double* direction;          // of piece: squares of m / (sqrt(v) + eps), and with weight decay added
  double* update;
  int threads;
};

struct ApplyArgs {  // x -= step * u
  const Plan& plan;
  const Hyper* hyper;
  Values x;
  Signs now;
  const float* layer_scale;
  Flat frozen;
  const float* step;  // [layers]
  int threads;
};

struct WarmupArgs {
  const Plan& plan;
  const Hyper* hyper;
  Values x;
  const float* g;  // [numel], or null: then `grads`
  Values grads;
  float *m, *v;
  const float* step;  // apply only
  double *direction, *update, *weight;  // of piece, measure only
  uint8_t* bad;                         // of piece, measure only: a gradient's square is not finite
  int threads;
};

struct SquaresArgs {  // parts of a list of tensors
  Values from;
  const int64_t *tensor, *offset, *length;  // of part
  int64_t parts;
  double* of_part;
  int threads;
};

struct QuantiseArgs {
  const int64_t* starts;  // [blocks + 1]
  int64_t blocks;
  float levels;
  const float* x;
  int8_t* integers;
  uint16_t* scales;  // bfloat16 [blocks]
  int threads;
};

struct DequantiseArgs {
  const int64_t* starts;
  int64_t blocks;
  const int8_t* integers;
  const uint16_t* scales;
  bool subtract;
  float* out;
  int threads;
};

struct Kernels {
  const char* isa;
  void (*worker_encode)(const WorkerArgs&);
  void (*worker_commit)(const WorkerArgs&);
  void (*server_encode)(const ServerArgs&);
  void (*server_commit)(const ServerArgs&);
  void (*decode)(const DecodeArgs&);
  void (*gather)(const GatherArgs&);
  void (*lamb_measure)(const LambMeasureArgs&);
  void (*apply)(const ApplyArgs&);
  void (*warmup_measure)(const WarmupArgs&);
  void (*warmup_apply)(const WarmupArgs&);
  void (*sum_squares)(const SquaresArgs&);
  void (*quantise)(const QuantiseArgs&);
  void (*dequantise)(const DequantiseArgs&);
};

std::vector<std::string> available_isas();  // lowest first
void use_isa(const std::string& name);      // throws std::invalid_argument
const Kernels& kernels();                   // the best available, unless use_isa said otherwise

}  // namespace onebit
