// Codes that only the native operators read, in a layout that follows from the shape. To MXNet they
// are float16, which has their size.
#ifndef MPGLUON_PACKING_H_
#define MPGLUON_PACKING_H_

#include "common.h"

namespace mpgluon {

inline uint16_t* packed_numbers(const NDArray& array) {
  return static_cast<uint16_t*>(array.data().dptr_);
}

// Return FP32 values of packed numbers, in the same layout.
template <class Format>
NDArray unpack(const Format& format, const NDArray& array) {
  const NDArray made = fresh(array, mshadow::kFloat32);
  float* y = prepare(made, packed_layout(array.shape()));
  widen_codes(format, packed_numbers(array), array.shape().Size(), y);
  return made;
}

// Round FP32 values in any layout.
template <class Format>
void pack(const Format& format, const NDArray& in, OpReqType req, const NDArray& out) {
  if (req == mxnet::kNullOp) return;
  CHECK_NE(req, mxnet::kAddTo);
  const auto& shape = in.shape();
  const int layout = packed_layout(shape);
  uint16_t* y = packed_numbers(out);
  if (layout_of(in) != layout && layout != 1) {
    const NDArray x = plain(in);
    return block(address(x), y, shape, layout, [&](float one) { return format.narrow_one(one); });
  }
  const NDArray array = layout == 1 ? plain(in) : in;
  const float* x = address(array);
  for_all(shape.Size(), [&](int64_t i) { format.narrow_to(y + i, x + i); },
          [&](int64_t i) { y[i] = format.narrow_one(x[i]); });
}

}  // namespace mpgluon

#endif  // MPGLUON_PACKING_H_
