// Float16 numbers that only operators of ours read, in a layout that follows from the shape.
#ifndef MPGLUON_PACKING_H_
#define MPGLUON_PACKING_H_

#include "common.h"

namespace mpgluon {

inline uint16_t* packed_numbers(const NDArray& array) {
  return static_cast<uint16_t*>(array.data().dptr_);
}

// Return FP32 values of packed numbers, in the same layout.
inline NDArray unpack(const NDArray& array) {
  const NDArray made = fresh(array, mshadow::kFloat32);
  const uint16_t* x = packed_numbers(array);
  float* y = prepare(made, packed_layout(array.shape()));
  for_all(array.shape().Size(), [&](int64_t i) { widen_to(y + i, x + i); },
          [&](int64_t i) { y[i] = widen_one(x[i]); });
  return made;
}

// Round FP32 values in any layout.
inline void pack(const NodeAttrs&, const OpContext&, const Arrays& in, const Requests& req,
                 const Arrays& out) {
  if (req[0] == mxnet::kNullOp) return;
  CHECK_NE(req[0], mxnet::kAddTo);
  const auto& shape = in[0].shape();
  const int layout = packed_layout(shape);
  uint16_t* y = packed_numbers(out[0]);
  if (layout_of(in[0]) != layout && layout != 1) {
    const NDArray x = plain(in[0]);
    return block(address(x), y, shape, layout, narrow_one);
  }
  const NDArray array = layout == 1 ? plain(in[0]) : in[0];
  const float* x = address(array);
  for_all(shape.Size(), [&](int64_t i) { narrow_to(y + i, x + i); },
          [&](int64_t i) { y[i] = narrow_one(x[i]); });
}

}  // namespace mpgluon

#endif  // MPGLUON_PACKING_H_
