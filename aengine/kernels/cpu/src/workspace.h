// What outlives a call: scratch memory and threads. One workspace serves one call at a time.
#pragma once
#include "buffers.h"
#include "worker_threads.h"

namespace aengine {

struct Workspace : Buffers {
  WorkerThreads workers;  // run steps in the background; destroyed before the buffers
};

}  // namespace aengine
