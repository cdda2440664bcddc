// Operators of FP32 numbers that are computed one by one, in any layout, with MXNet's bits. MXNet's own are for plain
// arrays. Gradients are MXNet's.
#ifndef MPGLUON_ELEMENTWISE_H_
#define MPGLUON_ELEMENTWISE_H_

#include "common.h"
#include "keep_nan.h"

namespace mpgluon {
namespace elementwise_operators {

// Register an operator of two operands, of which the second may be a number among its options.
template <class Of>
void register_one(const char* name, const Of& of) {
  const nnvm::Op* op = nnvm::Op::Get(name);
  const auto compute = [=](const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                           const Requests& req, const Arrays& out) {
    if (out[0].dtype() != mshadow::kFloat32) return call(op, attrs, ctx, in, req, out);
    if (req[0] == mxnet::kNullOp) return;
    const float scalar = double_option(attrs, "scalar", 0);
    if (in.size() == 1)
      keep_nan::map<float>(req[0], out[0], [=](float x) { return of(x, scalar); }, in[0]);
    else keep_nan::map<float>(req[0], out[0], of, in[0], in[1]);
  };
  Operator made = in_place_of(op, std::string("_mpgluon_any_layout_") + name, compute);
  made.inherit<nnvm::FGradient>("FGradient", op).set<bool>("TIsMKLDNN", true);
}

inline void register_elementwise() {
  register_one("_plus_scalar", [](float x, float y) { return x + y; });
  register_one("_div_scalar", [](float x, float y) { return x / y; });
  register_one("elemwise_mul", [](float x, float y) { return x * y; });
}

}  // namespace elementwise_operators
}  // namespace mpgluon

#endif  // MPGLUON_ELEMENTWISE_H_
