// The activations of a step: numbered buffers of rows, and their way in and out.
#pragma once
#include "buffers.h"
#include "team.h"

namespace aengine {

template <class E>
struct Rows {
  E* data;
  i64 stride;

  E* row(i64 number) const { return data + number * stride; }
};

// The buffers of a model, by number.
template <class E>
class StepRows {
 public:
  // `hidden` takes the place of the model's buffer of hidden states; null: it does not.
  StepRows(const Model& model, const Buffers& space, void* hidden) {
    for (i64 i = 0; i < model.num_buffers; i++) rows_[i] = {space.activations[i].as<E>(), model.strides[i]};
    if (hidden) rows_[model.hidden].data = static_cast<E*>(hidden);
  }
  const Rows<E>& operator[](i32 buffer) const { return rows_[buffer]; }

 private:
  Rows<E> rows_[MAX_BUFFERS];
};

// Copies rows[0..count) of `from`, `width` elements of each, to the first rows of `to`; what lies between width and the stride
// of `to` becomes zero.
template <class E>
void gather_rows(const Member& member, const E* from, i64 stride, const i32* rows, i64 count, i64 width, const Rows<E>& to) {
  member.each_run(count, 16, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; i++) {
      memcpy(static_cast<void*>(to.row(i)), from + rows[i] * stride, (size_t)width * sizeof(E));
      memset(static_cast<void*>(to.row(i) + width), 0, (size_t)(to.stride - width) * sizeof(E));
    }
  });
}

}  // namespace aengine
