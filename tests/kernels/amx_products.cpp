// Products by AMX with the model of its instructions, as a library of their own.
#define AENGINE_AMX_MODEL "amx_model.h"
#include "codes.cpp"
#include "gemm.cpp"

using namespace aengine;

// out = W x in float32 for the rows of x that are listed, or for the first `count`; [count, out_features].
extern "C" void amx_multiply(const void* x, i64 stride, i64 rows, const PackedLinear* w, const i32* listed, i64 count, float* out, int threads) {
  Buffers space;
  reserve_prepared(space, rows, w->in_features);
  const Group group = {w, listed, count, 0, 0};
  run_team(threads, [&](const Member& member) {
    multiply_groups(member, static_cast<const Bf16*>(x), stride, rows, w->in_features, {&group, 1, count}, *w, StoreLogits{out, w->out_features},
                    space);
  });
}
