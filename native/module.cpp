// The Python module onebit.kernels._native. Tensors come as addresses; onebit/kernels/native.py has checked them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "table.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace onebit;

using Address = uintptr_t;

template <class T>
static T* at(Address address) { return reinterpret_cast<T*>(address); }

// The addresses and types of one tensor per layer, kept while a step uses them.
struct List {
  std::vector<void*> data;
  std::vector<Type> types;
  List(const std::vector<Address>& addresses, const std::vector<int>& kinds) {
    if (addresses.size() != kinds.size()) throw std::invalid_argument("a list needs one type per address");
    for (size_t i = 0; i < addresses.size(); ++i) {
      if (kinds[i] < 0 || kinds[i] > static_cast<int>(Type::f16)) throw std::invalid_argument("unknown element type");
      data.push_back(at<void>(addresses[i]));
      types.push_back(static_cast<Type>(kinds[i]));
    }
  }
  Values values() const { return {data.data(), types.data()}; }
  Values for_plan(const Plan& plan) const {
    if (static_cast<int64_t>(data.size()) != plan.layers)
      throw std::invalid_argument("the list holds " + std::to_string(data.size()) + " tensors; the plan has " +
                                  std::to_string(plan.layers) + " layers");
    return values();
  }
};

static Signs make_signs(Address bits, int64_t stride, Address scales, Address alive) {
  return {at<uint8_t>(bits), stride, at<float>(scales), at<uint8_t>(alive)};
}
static Flat make_flat(Address data, int type, Address scales) {
  return {at<void>(data), at<float>(scales), static_cast<Type>(type)};
}

static std::unique_ptr<double[]> per_piece(const Plan& plan) {
  return std::make_unique_for_overwrite<double[]>(plan.pieces.size());
}

static void zero(double* out, int64_t n) { std::fill(out, out + n, 0.0); }

static int64_t worker_encode(const Plan& plan, const List& grads, Address hyper, const Signs& momentum, Address flat,
                             Address layer_scale, const Flat& error, Address factor, const Signs& message, Address sums,
                             bool absolute, int threads) {
  const auto of_piece = per_piece(plan);
  int64_t asking = 0;
  kernels().worker_encode({plan, grads.for_plan(plan), at<Hyper>(hyper), momentum, at<float>(flat),
                           at<float>(layer_scale), error, at<float>(factor), message, absolute, of_piece.get(), &asking,
                           threads});
  zero(at<double>(sums), plan.blocks());
  sum_blocks(plan, 0, static_cast<int64_t>(plan.pieces.size()), of_piece.get(), 0, at<double>(sums));
  return asking;
}

static void worker_commit(const Plan& plan, const List& grads, Address hyper, const Signs& momentum, Address flat,
                          Address layer_scale, const Flat& error, Address factor, const Signs& message, int threads) {
  kernels().worker_commit({plan, grads.for_plan(plan), at<Hyper>(hyper), momentum, at<float>(flat),
                           at<float>(layer_scale), error, at<float>(factor), message, false, nullptr, nullptr,
                           threads});
}

static void check_chunk(const Plan& plan, int chunk) {
  if (chunk < 0 || chunk >= plan.workers)
    throw std::invalid_argument("chunk is " + std::to_string(chunk) + "; the plan has " +
                                std::to_string(plan.workers) + " chunks");
}

static void server_encode(const Plan& plan, int chunk, int64_t workers, const Signs& received, Address error,
                          Address factor, const Signs& reply, Address sums, bool absolute, int threads) {
  check_chunk(plan, chunk);
  const auto of_piece = per_piece(plan);
  kernels().server_encode({plan, chunk, workers, received, at<float>(error), at<float>(factor), reply, absolute,
                           of_piece.get(), threads});
  const int64_t first = plan.tiles[plan.chunk_tiles[chunk]].first;
  const int64_t last = plan.tiles[plan.chunk_tiles[chunk + 1] - 1].last;
  const int64_t block = plan.chunk_blocks[chunk];
  zero(at<double>(sums), plan.chunk_blocks[chunk + 1] - block);
  sum_blocks(plan, first, last, of_piece.get(), block, at<double>(sums));
}

static void server_commit(const Plan& plan, int chunk, int64_t workers, const Signs& received, Address error,
                          Address factor, const Signs& reply, int threads) {
  check_chunk(plan, chunk);
  kernels().server_commit(
      {plan, chunk, workers, received, at<float>(error), at<float>(factor), reply, false, nullptr, threads});
}

static void lamb_measure(const Plan& plan, Address hyper, const List& x, const Signs& now, const Signs& before,
                         Address before_flat, Address layer_scale, const Flat& frozen, const Flat& fresh,
                         bool variance_form, uint64_t seed, uint64_t step, uint64_t index, Address largest,
                         Address direction, Address update, int threads) {
  const auto direction_of = per_piece(plan), update_of = per_piece(plan);
  const auto largest_of = std::make_unique_for_overwrite<float[]>(plan.pieces.size());
  kernels().lamb_measure({plan, at<Hyper>(hyper), x.for_plan(plan), now, before, at<float>(before_flat),
                          at<float>(layer_scale), frozen, fresh, variance_form, seed, step, index, largest_of.get(),
                          direction_of.get(), update_of.get(), threads});
  std::fill(at<float>(largest), at<float>(largest) + plan.layers, 0.0f);
  zero(at<double>(direction), plan.layers);
  zero(at<double>(update), plan.layers);
  max_layers(plan, largest_of.get(), at<float>(largest));
  sum_layers(plan, direction_of.get(), at<double>(direction));
  sum_layers(plan, update_of.get(), at<double>(update));
}

// g is [numel]; or 0, and `grads` holds one tensor per layer.
static Values gradients(const Plan& plan, Address g, const List& grads) {
  return g != 0 ? Values{} : grads.for_plan(plan);
}

static bool warmup_measure(const Plan& plan, Address hyper, const List& x, Address g, const List& grads, Address m,
                           Address v, Address direction, Address update, Address weight, int threads) {
  const auto direction_of = per_piece(plan), update_of = per_piece(plan), weight_of = per_piece(plan);
  const auto bad = std::make_unique<uint8_t[]>(plan.pieces.size());
  kernels().warmup_measure({plan, at<Hyper>(hyper), x.for_plan(plan), at<float>(g), gradients(plan, g, grads), at<float>(m),
                            at<float>(v), nullptr,
                            direction_of.get(), update_of.get(), weight_of.get(), bad.get(), threads});
  const std::pair<Address, const double*> results[] = {
      {direction, direction_of.get()}, {update, update_of.get()}, {weight, weight_of.get()}};
  for (const auto& [out, of_piece] : results) {
    zero(at<double>(out), plan.layers);
    sum_layers(plan, of_piece, at<double>(out));
  }
  return std::none_of(bad.get(), bad.get() + plan.pieces.size(), [](uint8_t b) { return b != 0; });
}

static void sum_squares(const List& list, const std::vector<int64_t>& sizes, Address out, int threads) {
  if (sizes.size() != list.data.size()) throw std::invalid_argument("a list needs one size per tensor");
  std::vector<int64_t> tensor, offset, length;
  for (size_t i = 0; i < sizes.size(); ++i)
    for (int64_t from = 0; from < sizes[i]; from += kMaxTile) {
      tensor.push_back(static_cast<int64_t>(i));
      offset.push_back(from);
      length.push_back(std::min<int64_t>(kMaxTile, sizes[i] - from));
    }
  std::vector<double> of_part(tensor.size());
  kernels().sum_squares({list.values(), tensor.data(), offset.data(), length.data(),
                         static_cast<int64_t>(tensor.size()), of_part.data(), threads});
  zero(at<double>(out), static_cast<int64_t>(sizes.size()));
  for (size_t part = 0; part < tensor.size(); ++part) at<double>(out)[tensor[part]] += of_part[part];
}

NB_MODULE(_native, m) {
  using Free = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Plan>(m, "Plan")
      .def("__init__",
           [](Plan* self, Address table, int64_t count, const std::vector<int64_t>& blocks_per_chunk, int64_t layers,
              int64_t numel, int64_t tile) {
             new (self) Plan(at<int64_t>(table), count, blocks_per_chunk, layers, numel, tile);
           },
           "table"_a, "count"_a, "blocks_per_chunk"_a, "layers"_a, "numel"_a, "tile"_a);
  nb::class_<List>(m, "List").def(nb::init<const std::vector<Address>&, const std::vector<int>&>(), "addresses"_a,
                                  "types"_a);
  nb::class_<Signs>(m, "Signs")
      .def("__init__",
           [](Signs* self, Address bits, int64_t stride, Address scales, Address alive) {
             new (self) Signs(make_signs(bits, stride, scales, alive));
           },
           "bits"_a, "stride"_a, "scales"_a, "alive"_a);
  nb::class_<Flat>(m, "Flat").def(
      "__init__",
      [](Flat* self, Address data, int type, Address scales) { new (self) Flat(make_flat(data, type, scales)); },
      "data"_a, "type"_a, "scales"_a);

  m.def("worker_encode", worker_encode, Free());
  m.def("worker_commit", worker_commit, Free());
  m.def("server_encode", server_encode, Free());
  m.def("server_commit", server_commit, Free());
  m.def("decode",
        [](const Plan& plan, const Signs& from, Address layer_scale, Address out, int threads) {
          kernels().decode({plan, from, at<float>(layer_scale), at<float>(out), threads});
        },
        Free());
  m.def("gather",
        [](const Plan& plan, const List& from, Address out, int threads) {
          kernels().gather({plan, from.for_plan(plan), at<float>(out), threads});
        },
        Free());
  m.def("lamb_measure", lamb_measure, Free());
  m.def("apply",
        [](const Plan& plan, Address hyper, const List& x, const Signs& now, Address layer_scale, const Flat& frozen,
           Address step, int threads) {
          kernels().apply({plan, at<Hyper>(hyper), x.for_plan(plan), now, at<float>(layer_scale), frozen,
                                at<float>(step), threads});
        },
        Free());
  m.def("warmup_measure", warmup_measure, Free());
  m.def("warmup_apply",
        [](const Plan& plan, Address hyper, const List& x, Address g, const List& grads, Address momentum, Address v,
           Address step, int threads) {
          kernels().warmup_apply({plan, at<Hyper>(hyper), x.for_plan(plan), at<float>(g), gradients(plan, g, grads),
                                  at<float>(momentum), at<float>(v), at<float>(step), nullptr, nullptr, nullptr,
                                  nullptr, threads});
        },
        Free());
  m.def("sum_squares", sum_squares, Free());
  m.def("quantise",
        [](Address starts, int64_t blocks, int levels, Address x, Address integers, Address scales, int threads) {
          kernels().quantise({at<int64_t>(starts), blocks, static_cast<float>(levels), at<float>(x),
                              at<int8_t>(integers), at<uint16_t>(scales), threads});
        },
        Free());
  m.def("dequantise",
        [](Address starts, int64_t blocks, Address integers, Address scales, bool subtract, Address out, int threads) {
          kernels().dequantise({at<int64_t>(starts), blocks, at<int8_t>(integers), at<uint16_t>(scales), subtract,
                                at<float>(out), threads});
        },
        Free());
  m.def("isa", [] { return std::string(kernels().isa); });
  m.def("isas", available_isas);
  m.def("use_isa", use_isa);
  m.attr("MAX_TILE") = kMaxTile;
  m.attr("ERROR_GROUP") = kErrorGroup;
}
