// What outlives a call: scratch memory and threads. One workspace serves one call at a time.
#pragma once
#include "exchange.h"
#include "worker_threads.h"

namespace aengine {

struct Workspace : Buffers {
  Exchange* exchange = nullptr;  // with the other ranks of a model; null: there are none
  WorkerThreads workers;  // run steps in the background; destroyed before the buffers
};

// Whether a step is to end early.
inline bool has_failed(const Workspace& space) { return space.exchange && failure_of(*space.exchange); }

}  // namespace aengine
