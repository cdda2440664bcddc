// Convolution and dense layer that take their weight, and return its gradient, in 16-bit codes.
//
// MXNet's own operator computes, on an FP32 copy of the weight that is valid during the call.
// A node has one setting (settings.h): whether the gradient of the data is rounded too.
#ifndef MPGLUON_PRODUCTS_H_
#define MPGLUON_PRODUCTS_H_

#include <cstdlib>

#include "common.h"

namespace mpgluon {
namespace products {

enum { kWeight = 1, kBias = 2, kBackwardWeight = 2 };  // the last among the gradient's operands

bool rounds_gradient(const NodeAttrs& attrs) { return settings_of<1>(attrs)[0] != 0; }

enum Use { kForWeight, kForGradient, kUses };
constexpr int64_t kMostKept = 1 << 23;  // numbers: 32 MiB

// An FP32 array for one call, in memory that all calls on this thread share: new memory costs more
// in page faults than in arithmetic. A dense layer's large array is not worth keeping.
NDArray scratch(const NDArray& like, Use use) {
  thread_local float* kept[kUses] = {};
  thread_local int64_t sizes[kUses] = {};
  const int64_t needed = like.shape().Size();
  if (needed > kMostKept) return fresh(like, mshadow::kFloat32);
  if (sizes[use] < needed) {
    std::free(kept[use]);
    sizes[use] = (needed + 15) / 16 * 16;
    kept[use] = static_cast<float*>(aligned_alloc(64, sizes[use] * sizeof(float)));
    CHECK(kept[use] != nullptr) << "no memory for " << needed << " numbers";
  }
  return NDArray(TBlob(kept[use], like.shape(), mshadow::cpu::kDevMask), like.ctx().dev_id);
}

template <class Format>
NDArray widened(const Format& format, const NDArray& weight, bool for_this_call) {
  if (weight.dtype() != mshadow::kFloat16) return weight;
  const NDArray made =
      for_this_call ? scratch(weight, kForWeight) : fresh(weight, mshadow::kFloat32);
  widen_codes(format, static_cast<const uint16_t*>(weight.data().dptr_), weight.shape().Size(),
              made.data().dptr<float>());
  return made;
}

template <class Format>
void forward(const Format& format, const nnvm::Op* op, const NodeAttrs& attrs,
             const OpContext& ctx, const Arrays& in, const Requests& req, const Arrays& out) {
  Arrays wide = in;
  // For inference MXNet rearranges the weight later, when shared memory would hold another one.
  wide[kWeight] = widened(format, in[kWeight], ctx.is_train);
  call(op, attrs, ctx, wide, req, out);
}

template <class Format>
void backward(const Format& format, const nnvm::Op* op, const NodeAttrs& attrs,
              const OpContext& ctx, const Arrays& in, const Requests& req, const Arrays& out) {
  if (rounds_gradient(attrs) && req[0] == mxnet::kAddTo)
    return separately(format, req, out, [&](const Requests& requests, const Arrays& results) {
      backward(format, op, attrs, ctx, in, requests, results);
    });
  Arrays wide = in, results = out;
  Requests requests = req;
  wide[kBackwardWeight] = widened(format, in[kBackwardWeight], true);
  const bool wanted = req[kWeight] != mxnet::kNullOp, codes = out[kWeight].dtype() == mshadow::kFloat16;
  // MXNet makes the gradient of the bias together with that of the weight: a convolution writes both,
  // wanted or not, and a dense layer neither where the weight's is not wanted.
  const bool made = wanted || (req.size() > kBias && req[kBias] != mxnet::kNullOp);
  if (made && (codes || !wanted)) {
    results[kWeight] = scratch(out[kWeight], kForGradient);
    requests[kWeight] = mxnet::kWriteTo;
  }
  call(op, attrs, ctx, wide, requests, results);
  if (wanted && codes) {
    const TBlob gradient = plain(results[kWeight]).data();
    narrow_blob(format, gradient, req[kWeight], out[kWeight].data());
  }
  if (rounds_gradient(attrs) && req[0] != mxnet::kNullOp) round_in_place(format, out[0]);
}

template <class Format>
void register_one(const Format& format, const std::string& mxnet_name, const std::string& name,
                  const std::string& suffix) {
  const nnvm::Op *op = nnvm::Op::Get(mxnet_name), *back = nnvm::Op::Get("_backward_" + mxnet_name);
  const FComputeEx compute = [format, op](const NodeAttrs& attrs, const OpContext& ctx,
                                          const Arrays& in, const Requests& req,
                                          const Arrays& out) {
    forward(format, op, attrs, ctx, in, req, out);
  };
  const FComputeEx compute_backward = [format, back](const NodeAttrs& attrs, const OpContext& ctx,
                                                     const Arrays& in, const Requests& req,
                                                     const Arrays& out) {
    backward(format, back, attrs, ctx, in, req, out);
  };
  Operator made_backward = in_place_of(
      back, name + "_backward" + suffix, compute_backward,
      old_function(infer_types_beside<kBackwardWeight, kWeight>));
  in_place_of(op, name + suffix, compute, old_function(infer_types_with_settings<kWeight, 1>))
      .set<nnvm::FGradient>("FGradient", gradient_by(op, &made_backward.op()));
}

template <class Format>
void register_products(const Format& format, const std::string& suffix) {
  register_one(format, "Convolution", "_mpgluon_convolution", suffix);
  register_one(format, "FullyConnected", "_mpgluon_fully_connected", suffix);
}

}  // namespace products
}  // namespace mpgluon

#endif  // MPGLUON_PRODUCTS_H_
