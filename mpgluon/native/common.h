// What the operators have in common.
#ifndef MPGLUON_COMMON_H_
#define MPGLUON_COMMON_H_

#include "bridge.h"
#include "format.h"
#include "layout.h"
#include "settings.h"

namespace mpgluon {

using mxnet::FCompute;
using mxnet::FComputeEx;
using mxnet::OpContext;
using mxnet::OpReqType;
using mxnet::TBlob;
using nnvm::NodeAttrs;
using Arrays = std::vector<NDArray>;
using Blobs = std::vector<TBlob>;
using Requests = std::vector<OpReqType>;

inline bool dense(const NodeAttrs&, const int, mxnet::DispatchMode* mode, std::vector<int>* in,
                  std::vector<int>* out) {
  for (int& type : *in) type = mxnet::kDefaultStorage;
  for (int& type : *out) type = mxnet::kDefaultStorage;
  *mode = mxnet::DispatchMode::kFComputeEx;
  return true;
}

// Let one of MXNet's operators compute.
inline void call(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                 const Requests& req, const Arrays& out) {
  static const auto& functions = table<FComputeEx>("FComputeEx<cpu>");
  functions.data_[op->index_].first(attrs, ctx, in, req, out);
}

// Apply a function of chunks, in place or not, to an array in whatever layout it is.
template <class Chunk, class One>
void elementwise(const NDArray& in, OpReqType req, const NDArray& out, const Chunk& chunk,
                 const One& one) {
  if (req == mxnet::kNullOp) return;
  const int64_t n = in.shape().Size();
  if (req == mxnet::kAddTo) {
    int layout = layout_of(in);
    if (layout != layout_of(out)) layout = 0;
    const NDArray x = layout == 0 ? plain(in) : in, former = layout == 0 ? plain(out) : out;
    const float *from = address(x), *before = address(former);
    float* to = layout == 0 ? prepare(out, 1) : address(out);
    const auto add = [&](int64_t i) { to[i] = before[i] + one(from[i]); };
    for_all(n, [&](int64_t i) { for (int64_t j = i; j < i + kChunk; ++j) add(j); }, add);
    return;
  }
  int layout = layout_of(in);
  const NDArray x = layout == 0 ? plain(in) : in;
  if (layout == 0) layout = 1;
  const float* from = address(x);
  float* to = from == address(out) ? address(out) : prepare(out, layout);
  for_all(n, [&](int64_t i) { chunk(to + i, from + i); }, [&](int64_t i) { to[i] = one(from[i]); });
}

// Round the values of an FP32 array in whatever layout it is.
template <class Format>
void round_array(const Format& format, const NDArray& in, OpReqType req, const NDArray& out) {
  elementwise(in, req, out, [&](float* y, const float* x) { format.round_to(y, x); },
              [&](float x) { return format.round_one(x); });
}

template <class Format>
void round_in_place(const Format& format, const NDArray& array) {
  round_array(format, array, mxnet::kWriteInplace, array);
}

// Round FP32 numbers to codes.
template <class Format>
void narrow_blob(const Format& format, const TBlob& in, OpReqType req, const TBlob& out) {
  if (req == mxnet::kNullOp) return;
  const float* x = static_cast<const float*>(in.dptr_);
  uint16_t* y = static_cast<uint16_t*>(out.dptr_);
  if (req == mxnet::kAddTo) {
    for (size_t i = 0; i < in.Size(); ++i)
      y[i] = format.narrow_one(format.widen_one(y[i]) + format.round_one(x[i]));
    return;
  }
  for_all(in.Size(), [&](int64_t i) { format.narrow_to(y + i, x + i); },
          [&](int64_t i) { y[i] = format.narrow_one(x[i]); });
}

// Write the FP32 values of n codes.
template <class Format>
void widen_codes(const Format& format, const uint16_t* x, int64_t n, float* y) {
  for_all(n, [&](int64_t i) { format.widen_to(y + i, x + i); },
          [&](int64_t i) { y[i] = format.widen_one(x[i]); });
}

// Let compute(requests, results) write the gradient of the data to an array of its own; then write
// or add it, rounded, as requested.
template <class Format, class Compute>
void separately(const Format& format, const Requests& req, const Arrays& out,
                const Compute& compute) {
  Arrays separate = out;
  Requests requests = req;
  separate[0] = fresh(out[0], mshadow::kFloat32);
  requests[0] = mxnet::kWriteTo;
  compute(requests, separate);
  round_array(format, separate[0], req[0], out[0]);
}

// Return the gradient function of one of MXNet's operators, with another operator to compute it.
inline nnvm::FGradient gradient_by(const nnvm::Op* mxnet_forward, const nnvm::Op* own_backward) {
  return [mxnet_forward, own_backward](const nnvm::ObjectPtr& node,
                                       const std::vector<nnvm::NodeEntry>& grads) {
    static const auto& gradients = table<nnvm::FGradient>("FGradient");
    auto entries = gradients.data_[mxnet_forward->index_].first(node, grads);
    entries[0].node->attrs.op = own_backward;  // the first member of a node's first member
    return entries;
  };
}

// The types of an operator whose operand kCodes may be 16-bit codes, and whose result kGradient, if
// that is not -1, is the gradient of this operand and has its type. All else is FP32.
template <int kCodes, int kGradient>
bool infer_types_beside(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  for (int i = 0; i < static_cast<int>(in->size()); ++i)
    if (i != kCodes) in->at(i) = mshadow::kFloat32;
  for (int i = 0; i < static_cast<int>(out->size()); ++i)
    out->at(i) = i == kGradient ? in->at(kCodes) : mshadow::kFloat32;
  return in->at(kCodes) != -1;
}

// The same for an operator with settings: a node without them is refused before it computes.
template <int kCodes, int kSettings>
bool infer_types_with_settings(const NodeAttrs& attrs, std::vector<int>* in,
                               std::vector<int>* out) {
  settings_of<kSettings>(attrs);
  return infer_types_beside<kCodes, -1>(attrs, in, out);
}

inline void inherit_all(Operator* made, const nnvm::Op* from) {
  made->op().attr_parser = from->attr_parser;
  made->inherit<nnvm::FNumVisibleOutputs>("FNumVisibleOutputs", from)
      .inherit<nnvm::FListInputNames>("FListInputNames", from)
      .inherit<nnvm::FListOutputNames>("FListOutputNames", from)
      .inherit<nnvm::FMutateInputs>("FMutateInputs", from)
      .inherit<mxnet::FInferShape>("FInferShape", from)
      .inherit<nnvm::FInferType>("FInferType", from)
      .inherit<mxnet::FResourceRequest>("FResourceRequest", from)
      .inherit<nnvm::TIsBackward>("TIsBackward", from)
      .inherit<nnvm::FInplaceOption>("FInplaceOption", from)
      .inherit<mxnet::FInferStorageType>("FInferStorageType", from)
      .inherit<FCompute>("FCompute<cpu>", from)
      .inherit<FComputeEx>("FComputeEx<cpu>", from)
      .inherit<bool>("TIsMKLDNN", from);
}

// Register an operator that takes the place of one of MXNet's, under another name.
inline Operator in_place_of(const nnvm::Op* op, const std::string& name, const FComputeEx& compute,
                            const nnvm::FInferType& types) {
  Operator made(name, op->num_inputs, op->num_outputs);
  made.op().get_num_inputs = op->get_num_inputs;
  made.op().get_num_outputs = op->get_num_outputs;
  inherit_all(&made, op);
  made.set<nnvm::FInferType>("FInferType", types)
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<FComputeEx>("FComputeEx<cpu>", compute);
  return made;
}

}  // namespace mpgluon

#endif  // MPGLUON_COMMON_H_
