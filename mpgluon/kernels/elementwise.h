// Operators of FP32 numbers that are computed one by one, in any layout, and their gradients, with MXNet's bits.
// MXNet's own are for plain arrays.
#ifndef MPGLUON_ELEMENTWISE_H_
#define MPGLUON_ELEMENTWISE_H_

#include "common.h"
#include "keep_nan.h"

namespace mpgluon {
namespace elementwise_operators {

// Return of, of two operands or of one and a number among the options, as a function of arrays that MXNet's operator
// computes if they are not FP32.
template <class Of>
auto in_any_layout(const Of& of) {
  return [=](const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
             const Requests& req, const Arrays& out) {
    if (out[0].dtype() != mshadow::kFloat32) return call(op, attrs, ctx, in, req, out);
    if (req[0] == mxnet::kNullOp) return;
    const float scalar = double_option(attrs, "scalar", 0);
    if (in.size() == 1)
      keep_nan::map<float>(req[0], out[0], [=](float x) { return of(x, scalar); }, in[0]);
    else keep_nan::map<float>(req[0], out[0], of, in[0], in[1]);
  };
}

// Write both gradients of a product; the second may take the place of the gradient that arrives.
inline void product_backward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                             const Arrays& in, const Requests& req, const Arrays& out) {
  if (in[0].dtype() != mshadow::kFloat32) return call(op, attrs, ctx, in, req, out);
  for (int operand : {0, 1})
    if (req[operand] != mxnet::kNullOp)
      keep_nan::map<float>(req[operand], out[operand], [](float dy, float x) { return dy * x; }, in[0],
                           in[2 - operand]);
}

inline void register_elementwise() {
  const std::string prefix = "_mpgluon_any_layout_";
  const nnvm::Op* plus = nnvm::Op::Get("_plus_scalar");
  const auto add = in_any_layout([](float x, float y) { return x + y; });
  const auto multiply = in_any_layout([](float x, float y) { return x * y; });
  const auto divide = in_any_layout([](float x, float y) { return x / y; });
  Operator made = in_place_of(plus, prefix + "_plus_scalar", [=](const auto&... all) { add(plus, all...); });
  made.inherit<nnvm::FGradient>("FGradient", plus).set<bool>("TIsMKLDNN", true);  // a copy of the gradient
  in_places_of("_div_scalar", prefix, divide, divide, "_backward_div_scalar");
  in_places_of("elemwise_mul", prefix, multiply, product_backward, "_backward_mul");
}

}  // namespace elementwise_operators
}  // namespace mpgluon

#endif  // MPGLUON_ELEMENTWISE_H_
