// What the operators have in common.
#ifndef MPGLUON_COMMON_H_
#define MPGLUON_COMMON_H_

#include "bridge.h"
#include "flags.h"
#include "format.h"
#include "lanes.h"
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

inline std::vector<std::pair<int, int>> in_place(const NodeAttrs&) { return {{0, 0}}; }

// Return where an operator of plain arrays writes a result, or adds it.
inline TBlob plain_result(OpReqType req, const NDArray& out) {
  if (out.IsMKLDNNData()) {
    const NDArray before = req == mxnet::kAddTo ? plain(out) : NDArray();
    const_cast<NDArray&>(out).InvalidateMKLDNNData();
    if (req == mxnet::kAddTo)
      std::memcpy(out.data().dptr_, before.data().dptr_,
                  before.shape().Size() * mshadow::mshadow_sizeof(out.dtype()));
  }
  return out.data();
}

// Let one of MXNet's operators compute.
inline void call(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                 const Requests& req, const Arrays& out) {
  static const auto& on_arrays = table<FComputeEx>("FComputeEx<cpu>");
  static const auto& on_blobs = table<FCompute>("FCompute<cpu>");
  static const auto& any_layout = table<bool>("TIsMKLDNN");
  // Some have functions of arrays for sparse ones only.
  const auto& rows = any_layout.data_;
  if (op->index_ < rows.size() && rows[op->index_].second != 0 && rows[op->index_].first)
    return on_arrays.data_[op->index_].first(attrs, ctx, in, req, out);
  Arrays turned;  // kept until the operator has read them
  Blobs operands, results;
  for (const NDArray& array : in) turned.push_back(plain(array));
  for (const NDArray& array : turned) operands.push_back(array.data());
  for (size_t i = 0; i < out.size(); ++i) results.push_back(plain_result(req[i], out[i]));
  on_blobs.data_[op->index_].first(attrs, ctx, operands, req, results);
}

// ---- Results of any type.

// Sums of two numbers of an array; uint16_t is the type of bfloat16's codes, whose sums MXNet's type cuts off.
template <class X>
X sum_of(X x, X y) { return X(x + y); }
inline uint16_t sum_of(uint16_t x, uint16_t y) { return bfloat16_of(widened(x) + widened(y)); }

template <class X>
X* elements_of(const NDArray& array) {
  return reinterpret_cast<X*>(address(array));
}

// Return where to write the result in blocks of channels, or as a plain array.
template <class X>
X* room_in(const NDArray& out, int layout) {
  if (layout > 1) return reinterpret_cast<X*>(prepare(out, layout));
  const_cast<NDArray&>(out).InvalidateMKLDNNData();
  return static_cast<X*>(out.data().dptr_);
}

// Return an array in a layout: the array itself, or a copy.
template <class X>
NDArray in_layout(const NDArray& array, int layout) {
  if (layout_of(array) == layout) return array;
  const NDArray from = plain(array);
  if (layout == 1) return from;
  const NDArray made = fresh(array, array.dtype());
  block(elements_of<const X>(from), room_in<X>(made, layout), array.shape(), layout,
        [](X one) { return one; });
  return made;
}

// Let compute(to) write a result in a layout; or add what it writes.
template <class X, class Compute>
void write_in(int layout, OpReqType req, const NDArray& out, const Compute& compute) {
  if (req == mxnet::kNullOp) return;
  if (req != mxnet::kAddTo) return compute(room_in<X>(out, layout));
  const NDArray apart = fresh(out, out.dtype()), before = plain(out);
  compute(room_in<X>(apart, layout));
  const NDArray added = plain(apart);
  const X *x = elements_of<const X>(before), *y = elements_of<const X>(added);
  X* sums = room_in<X>(out, 1);
  for (size_t i = 0; i < out.shape().Size(); ++i) sums[i] = sum_of(x[i], y[i]);
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

// Round n FP32 numbers to codes.
template <class Format>
void narrow_codes(const Format& format, const float* x, int64_t n, uint16_t* y) {
  for_all(n, [&](int64_t i) { format.narrow_to(y + i, x + i); },
          [&](int64_t i) { y[i] = format.narrow_one(x[i]); });
}

// Write the FP32 values of n codes.
template <class Format>
void widen_codes(const Format& format, const uint16_t* x, int64_t n, float* y) {
  for_all(n, [&](int64_t i) { format.widen_to(y + i, x + i); },
          [&](int64_t i) { y[i] = format.widen_one(x[i]); });
}

// Return what MXNet calls, from function(format, attrs, ctx, in, req, out), whose roundings to the format
// raise the flags of the node's layer.
template <class Format, class Function>
FComputeEx watched(const Format& format, const Function& function) {
  return [format, function](const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                            const Requests& req, const Arrays& out) {
    flags::Call call(attrs, ctx, Format::kInfinity);
    function(flags::Watched<Format>(format, &call), attrs, ctx, in, req, out);
    call.finish(in, out);
  };
}

// Return what the gradient function of an operator of MXNet returns. Where no gradient arrives, it makes zeros, and so
// in every step for the workspace that is the second result of Pooling: nothing reads them, and the gradient of the
// first stands in.
inline std::vector<nnvm::NodeEntry> mxnet_gradient(const nnvm::Op* op, const nnvm::ObjectPtr& node,
                                                   std::vector<nnvm::NodeEntry> arriving) {
  static const auto& gradients = table<nnvm::FGradient>("FGradient");
  if (op == nnvm::Op::Get("Pooling")) std::fill(arriving.begin(), arriving.end(), arriving[0]);
  return gradients.data_[op->index_].first(node, arriving);
}

// Return the gradient function of one of MXNet's operators, with another operator to compute it.
inline nnvm::FGradient gradient_by(const nnvm::Op* mxnet_forward, const nnvm::Op* own_backward) {
  return [=](const nnvm::ObjectPtr& node, const std::vector<nnvm::NodeEntry>& grads) {
    auto entries = mxnet_gradient(mxnet_forward, node, grads);
    const nnvm::Op*& op = entries[0].node->attrs.op;  // the first member of a node's first member
    if (op->name.find("backward") != std::string::npos) op = own_backward;
    return entries;
  };
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
inline Operator in_place_of(const nnvm::Op* op, const std::string& name,
                            const FComputeEx& compute) {
  Operator made(name, op->num_inputs, op->num_outputs);
  made.op().get_num_inputs = op->get_num_inputs;
  made.op().get_num_outputs = op->get_num_outputs;
  inherit_all(&made, op);
  made.set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<FComputeEx>("FComputeEx<cpu>", compute);
  return made;
}

// Register operators for arrays in any layout in the places of one of MXNet's and of its gradient. They are
// called as forward(op, ...) and backward(op, ...), with MXNet's.
template <class Forward, class Backward>
void in_places_of(const std::string& name, const std::string& prefix, const Forward& forward,
                  const Backward& backward, const std::string& gradient = "") {
  const nnvm::Op* op = nnvm::Op::Get(name);
  const nnvm::Op* back = nnvm::Op::Get(gradient.empty() ? "_backward_" + name : gradient);
  Operator made_back = in_place_of(back, prefix + "backward_" + name,
                                   [=](const auto&... all) { backward(back, all...); });
  Operator made =
      in_place_of(op, prefix + name, [=](const auto&... all) { forward(op, all...); });
  made.set<nnvm::FGradient>("FGradient", gradient_by(op, &made_back.op()));
  for (Operator* one : {&made_back, &made}) one->set<bool>("TIsMKLDNN", true);
}

}  // namespace mpgluon

#endif  // MPGLUON_COMMON_H_
