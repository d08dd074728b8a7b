// Which compiled set of kernels runs on this processor.
#include <atomic>
#include <stdexcept>

#include "table.hpp"

namespace onebit {

namespace portable { extern const Kernels table; }
#ifdef ONEBIT_X86
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

static std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found{&portable::table};
#ifdef ONEBIT_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) found.push_back(&avx2::table);
  if (found.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back(&avx512::table);
#endif
  return found;
}

static std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> pointer{runnable().back()};
  return pointer;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* set : runnable()) names.emplace_back(set->isa);
  return names;
}

void use_isa(const std::string& name) {
  std::string known;
  for (const Kernels* set : runnable()) {
    if (name == set->isa) {
      chosen() = set;
      return;
    }
    known += std::string(known.empty() ? "" : ", ") + set->isa;
  }
  throw std::invalid_argument("instruction set '" + name + "' is unknown or not on this processor; it has " + known);
}

const Kernels& kernels() { return *chosen(); }

}  // namespace onebit
