// Products by AMX with the model of its instructions, as a library of their own.
#define AENGINE_AMX_MODEL "amx_model.h"
#include "gemm.cpp"

namespace aengine {

template <class E>
void multiply_codes(const Member&, const E*, i64, i64, i64, const Groups&, const PackedLinear&, const Output&, const Buffers&) {}
template void multiply_codes(const Member&, const Bf16*, i64, i64, i64, const Groups&, const PackedLinear&, const Output&, const Buffers&);
template void multiply_codes(const Member&, const float*, i64, i64, i64, const Groups&, const PackedLinear&, const Output&, const Buffers&);

}  // namespace aengine

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
