// All kernels for one instruction set. CMake compiles this file several times, with ONEBIT_ISA naming the namespace.
#include "copy.hpp"
#include "lamb.hpp"
#include "quantise.hpp"
#include "server.hpp"
#include "warmup.hpp"
#include "worker.hpp"

#define ONEBIT_NAME_(x) #x
#define ONEBIT_NAME(x) ONEBIT_NAME_(x)

namespace onebit::ONEBIT_ISA {

extern const Kernels table;
const Kernels table = {
    ONEBIT_NAME(ONEBIT_ISA), worker_encode, worker_commit, server_encode, server_commit,  decode,       gather,
    lamb_measure,            apply,    warmup_measure, warmup_apply, sum_squares,    quantise,      dequantise,
};

}  // namespace onebit::ONEBIT_ISA
