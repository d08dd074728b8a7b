#include "team.hpp"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace onebit {

constexpr int64_t kGrain = 16;  // tiles taken at a time: about 20 us of work, as much as starting a thread costs

void run_team(int64_t first, int64_t last, int threads, void (*body)(const void*, int64_t), const void* context) {
  const int64_t shares = (last - first + kGrain - 1) / kGrain;
  threads = static_cast<int>(std::min<int64_t>(threads, shares));
  if (threads <= 1) {
    for (int64_t i = first; i < last; ++i) body(context, i);
    return;
  }
  std::atomic<int64_t> next{first};
  const auto work = [&] {
    for (;;) {
      const int64_t from = next.fetch_add(kGrain), to = std::min(from + kGrain, last);
      if (from >= last) return;
      for (int64_t i = from; i < to; ++i) body(context, i);
    }
  };
  std::vector<std::thread> team;
  team.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int t = 1; t < threads; ++t) team.emplace_back(work);
  } catch (const std::system_error&) {
    // no more threads to be had: those that started and this one do the work
  }
  work();
  for (std::thread& member : team) member.join();
}

}  // namespace onebit
