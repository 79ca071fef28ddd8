// What outlives a call: scratch memory and threads. One workspace serves one call at a time.
#pragma once
#include "buffers.h"
#include "crew.h"

namespace aengine {

struct Workspace : Buffers {
  Crew crew;  // of a step that goes on by itself; ends before the buffers do
};

}  // namespace aengine
