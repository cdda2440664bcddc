// Casts between FP32 and bfloat16: oneDNN's, with gradients that can be added to.
#ifndef MPGLUON_BFLOAT16_H_
#define MPGLUON_BFLOAT16_H_

#include "common.h"

namespace mpgluon {

inline void call_mxnet(const char* name, const NodeAttrs& attrs, const OpContext& ctx,
                       const NDArray& in, OpReqType req, const NDArray& out) {
  static const auto& functions = table<FComputeEx>("FComputeEx<cpu>");
  functions.data_[nnvm::Op::Get(name)->index_].first(attrs, ctx, {in}, {req}, {out});
}

// oneDNN's cast overwrites what it should add to; so it writes apart, and MXNet's copy adds.
inline void cast_bfloat16(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                          const Requests& req, const Arrays& out) {
  if (req[0] == mxnet::kNullOp) return;
  // Inference in FP32 leaves weights in layouts from which oneDNN does not cast.
  const bool is_weight = in[0].dtype() == mshadow::kFloat32 && layout_of(in[0]) == 0;
  const NDArray from = is_weight ? plain(in[0]) : in[0];
  if (req[0] != mxnet::kAddTo) return call_mxnet("amp_cast", attrs, ctx, from, req[0], out[0]);
  const NDArray apart = fresh(out[0], out[0].dtype());
  call_mxnet("amp_cast", attrs, ctx, from, mxnet::kWriteTo, apart);
  call_mxnet("_copy", attrs, ctx, apart, mxnet::kAddTo, out[0]);
}

}  // namespace mpgluon

#endif  // MPGLUON_BFLOAT16_H_
