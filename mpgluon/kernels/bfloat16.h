// Casts between FP32 and bfloat16: oneDNN's, to plain arrays, with gradients that can be added to; and
// our own, which leave oneDNN's blocks of channels as they are.
#ifndef MPGLUON_BFLOAT16_H_
#define MPGLUON_BFLOAT16_H_

#include "common.h"

namespace mpgluon {
namespace bfloat16 {

// Cast an array in oneDNN's layout to an array in the same one.
inline void cast_blocks(const NDArray& in, int layout, const NDArray& out) {
  const Grid& format = bfloat16_grid();
  const int64_t n = in.shape().Size();
  float* to = prepare(out, layout);
  if (in.dtype() == mshadow::kBfloat16)
    widen_codes(format, reinterpret_cast<uint16_t*>(address(in)), n, to);
  else narrow_codes(format, address(in), n, reinterpret_cast<uint16_t*>(to));
}

// oneDNN's cast overwrites what it should add to; so it writes apart, and MXNet's copy adds. Where
// MXNet adds gradients in place it takes the layout of the sum for plain: such a result must be.
template <bool kKeepsBlocks>
void cast(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in, const Requests& req,
          const Arrays& out) {
  if (req[0] == mxnet::kNullOp) return;
  static const nnvm::Op *cast = nnvm::Op::Get("amp_cast"), *copy = nnvm::Op::Get("_copy");
  const int layout = layout_of(in[0]);
  if (kKeepsBlocks && layout > 1 && req[0] != mxnet::kAddTo)
    return cast_blocks(in[0], layout, out[0]);
  // Inference in FP32 leaves weights in layouts from which oneDNN does not cast.
  const bool is_weight =
      in[0].dtype() == mshadow::kFloat32 && (layout == 0 || is_channels_last(in[0].shape(), layout));
  const NDArray from = is_weight ? plain(in[0]) : in[0];
  if (req[0] != mxnet::kAddTo) return call(cast, attrs, ctx, {from}, req, out);
  const NDArray apart = fresh(out[0], out[0].dtype());
  call(cast, attrs, ctx, {from}, {mxnet::kWriteTo}, {apart});
  call(copy, attrs, ctx, {apart}, req, out);
}

}  // namespace bfloat16
}  // namespace mpgluon

#endif  // MPGLUON_BFLOAT16_H_
