// A team of threads for one call. Started anew each time: nothing to break at a fork, callers never meet.
#pragma once

#include <cstdint>

namespace onebit {

// Run body(context, i) for every i in [first, last), each once, on at most `threads` threads; returns when all are done.
// Which thread runs which i is left open, so a body must write only what belongs to i.
void run_team(int64_t first, int64_t last, int threads, void (*body)(const void* context, int64_t i),
              const void* context);

}  // namespace onebit
