// Convolution and dense layer that take their weight, and return its gradient, in float16.
//
// MXNet's own operator computes, on an FP32 copy of the weight that is good as long as the call.
// Behind "|" in a node's name stands whether the gradient of the data is rounded too.
#ifndef MPGLUON_PRODUCTS_H_
#define MPGLUON_PRODUCTS_H_

#include <cstdlib>

#include "common.h"

namespace mpgluon {
namespace products {

enum { kConvolution, kFullyConnected, kHowMany };
enum { kWeight = 1, kBackwardWeight = 2 };  // among the operands, and those of the gradient

const nnvm::Op *mxnet_forward[kHowMany], *mxnet_backward[kHowMany], *own_backward[kHowMany];

bool rounds_gradient(const NodeAttrs& attrs) {
  return std::strchr(attrs.name.c_str(), '|')[1] == '1';
}

enum Use { kForWeight, kForGradient, kUses };
constexpr int64_t kMostKept = 1 << 23;  // numbers: 32 MiB

// An FP32 array for one call, in memory that calls on this thread share: fresh memory costs more in
// page faults than in arithmetic. A large array, of a dense layer, is not worth keeping.
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

NDArray widened(const NDArray& weight, bool for_this_call) {
  if (weight.dtype() != mshadow::kFloat16) return weight;
  const NDArray made =
      for_this_call ? scratch(weight, kForWeight) : fresh(weight, mshadow::kFloat32);
  const uint16_t* x = static_cast<const uint16_t*>(weight.data().dptr_);
  float* y = made.data().dptr<float>();
  for_all(weight.shape().Size(), [&](int64_t i) { widen_to(y + i, x + i); },
          [&](int64_t i) { y[i] = widen_one(x[i]); });
  return made;
}

template <int kKind>
void forward(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in, const Requests& req,
             const Arrays& out) {
  Arrays wide = in;
  // For inference MXNet rearranges the weight later, when shared memory would hold another one.
  wide[kWeight] = widened(in[kWeight], ctx.is_train);
  call(mxnet_forward[kKind], attrs, ctx, wide, req, out);
}

template <int kKind>
void backward(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in, const Requests& req,
              const Arrays& out) {
  if (rounds_gradient(attrs) && req[0] == mxnet::kAddTo)
    return separately(req, out, [&](const Requests& requests, const Arrays& results) {
      backward<kKind>(attrs, ctx, in, requests, results);
    });
  Arrays wide = in, results = out;
  Requests requests = req;
  wide[kBackwardWeight] = widened(in[kBackwardWeight], true);
  const bool narrows = out[kWeight].dtype() == mshadow::kFloat16 && req[kWeight] != mxnet::kNullOp;
  if (narrows) {
    results[kWeight] = scratch(out[kWeight], kForGradient);
    requests[kWeight] = mxnet::kWriteTo;
  }
  call(mxnet_backward[kKind], attrs, ctx, wide, requests, results);
  if (narrows) {
    const TBlob gradient = plain(results[kWeight]).data();
    narrow_blob(gradient, req[kWeight], out[kWeight].data());
  }
  if (rounds_gradient(attrs) && req[0] != mxnet::kNullOp) round_in_place(out[0]);
}

template <int kKind>
std::vector<nnvm::NodeEntry> gradient(const nnvm::ObjectPtr& node,
                                      const std::vector<nnvm::NodeEntry>& grads) {
  static const auto& gradients = table<nnvm::FGradient>("FGradient");
  auto entries = gradients.data_[mxnet_forward[kKind]->index_].first(node, grads);
  entries[0].node->attrs.op = own_backward[kKind];  // the first member of a node's first member
  return entries;
}

// The weight is float16 or FP32; everything else is FP32.
bool infer_forward_type(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  for (size_t i = 0; i < in->size(); ++i)
    if (i != kWeight) in->at(i) = mshadow::kFloat32;
  out->at(0) = mshadow::kFloat32;
  return in->at(kWeight) != -1;
}

bool infer_backward_type(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  for (size_t i = 0; i < in->size(); ++i)
    if (i != kBackwardWeight) in->at(i) = mshadow::kFloat32;
  for (size_t i = 0; i < out->size(); ++i)
    out->at(i) = i == kWeight ? in->at(kBackwardWeight) : mshadow::kFloat32;
  return in->at(kBackwardWeight) != -1;
}

template <int kKind>
void register_one(const std::string& mxnet_name, const std::string& name) {
  const FComputeEx compute = forward<kKind>, compute_backward = backward<kKind>;
  const nnvm::FGradient make_gradient = gradient<kKind>;
  const nnvm::Op* op = mxnet_forward[kKind] = nnvm::Op::Get(mxnet_name);
  const nnvm::Op* back = mxnet_backward[kKind] = nnvm::Op::Get("_backward_" + mxnet_name);
  Operator made_backward(name + "_backward", back->num_inputs, back->num_outputs);
  made_backward.op().get_num_outputs = back->get_num_outputs;
  inherit_all(&made_backward, back);
  made_backward.set<nnvm::FInferType>("FInferType", old_function(infer_backward_type))
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<FComputeEx>("FComputeEx<cpu>", compute_backward);
  own_backward[kKind] = &made_backward.op();
  Operator made(name, op->num_inputs, op->num_outputs);
  made.op().get_num_inputs = op->get_num_inputs;
  inherit_all(&made, op);
  made.set<nnvm::FInferType>("FInferType", old_function(infer_forward_type))
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<FComputeEx>("FComputeEx<cpu>", compute)
      .set<nnvm::FGradient>("FGradient", make_gradient);
}

void register_products() {
  register_one<kConvolution>("Convolution", "_mpgluon_convolution");
  register_one<kFullyConnected>("FullyConnected", "_mpgluon_fully_connected");
}

}  // namespace products
}  // namespace mpgluon

#endif  // MPGLUON_PRODUCTS_H_
