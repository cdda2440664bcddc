// Casts between FP32 and bfloat16: oneDNN's, with gradients that can be added to.
#ifndef MPGLUON_BFLOAT16_H_
#define MPGLUON_BFLOAT16_H_

#include "common.h"

namespace mpgluon {

// oneDNN's cast overwrites what it should add to; so it writes apart, and MXNet's copy adds.
inline void cast_bfloat16(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                          const Requests& req, const Arrays& out) {
  if (req[0] == mxnet::kNullOp) return;
  static const nnvm::Op *cast = nnvm::Op::Get("amp_cast"), *copy = nnvm::Op::Get("_copy");
  // Inference in FP32 leaves weights in layouts from which oneDNN does not cast.
  const bool is_weight = in[0].dtype() == mshadow::kFloat32 && layout_of(in[0]) == 0;
  const NDArray from = is_weight ? plain(in[0]) : in[0];
  if (req[0] != mxnet::kAddTo) return call(cast, attrs, ctx, {from}, req, out);
  const NDArray apart = fresh(out[0], out[0].dtype());
  call(cast, attrs, ctx, {from}, {mxnet::kWriteTo}, {apart});
  call(copy, attrs, ctx, {apart}, req, out);
}

}  // namespace mpgluon

#endif  // MPGLUON_BFLOAT16_H_
