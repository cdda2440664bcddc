// Operators on arrays of 16-bit codes other than products and batch normalization.
//
// Operators on elements take and return codes in either layout, all arrays of a call in the same.
#ifndef MPGLUON_CODES_H_
#define MPGLUON_CODES_H_

#include "clip.h"
#include "common.h"
#include "keep_nan.h"
#include "packing.h"
#include "pad.h"
#include "pooling.h"

namespace mpgluon {
namespace codes {

bool all_codes(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  std::fill(in->begin(), in->end(), mshadow::kFloat16);
  std::fill(out->begin(), out->end(), mshadow::kFloat16);
  return true;
}

bool one_shape(const NodeAttrs&, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  mxnet::TShape known;
  for (const auto* shapes : {in, out})
    for (const mxnet::TShape& shape : *shapes)
      if (mxnet::shape_is_known(shape)) known = shape;
  if (!mxnet::shape_is_known(known)) return false;
  std::fill(in->begin(), in->end(), known);
  std::fill(out->begin(), out->end(), known);
  return true;
}

// ---- ReLU, which keeps NaN (keep_nan.h). oneDNN multiplies the gradient by 1 or 0.

template <class Format>
void relu(const Format& format, const Arrays& in, const Requests& req, const Arrays& out) {
  const uint16_t* x = codes_of(in[0]);
  const auto one = [](uint16_t x) { return keep_nan::relu_of<Format::kInfinity>(x); };
  write_codes(format, req[0], out[0], [&](uint16_t* y) {
    keep_nan::map_chunks(out[0].shape().Size(), y, one, x);
  });
}

template <class Format>
void relu_backward(const Format& format, const Arrays& in, const Requests& req,
                   const Arrays& out) {
  const uint16_t *dy = codes_of(in[0]), *y = codes_of(in[1]);
  const uint16_t nan = format.narrow_one(NAN) & 0x7fff;
  const auto one = [=](uint16_t dy, uint16_t y) {
    return keep_nan::gradient_of<Format::kInfinity>(dy, y, nan);
  };
  write_codes(format, req[0], out[0], [&](uint16_t* dx) {
    keep_nan::map_chunks(out[0].shape().Size(), dx, one, dy, y);
  });
}

// ---- Sums.

template <class Format>
void add(const Format& format, const Arrays& in, const Requests& req, const Arrays& out) {
  write_codes(format, req[0], out[0], [&](uint16_t* y) {
    add_codes(format, codes_of(in[0]), codes_of(in[1]), out[0].shape().Size(), y);
  });
}

// Supply two consumers of a value, so that the sum of their gradients is rounded. It takes the value
// twice: then MXNet gives both results its memory.
void fork(const Arrays& in, const Requests& req, const Arrays& out) {
  for (int i : {0, 1}) {
    if (req[i] == mxnet::kNullOp || codes_of(out[i]) == codes_of(in[i])) continue;
    CHECK_NE(req[i], mxnet::kAddTo);
    std::memcpy(codes_of(out[i]), codes_of(in[i]), in[i].shape().Size() * sizeof(uint16_t));
  }
}

std::vector<std::pair<int, int>> both_in_place(const NodeAttrs&) { return {{0, 0}, {1, 1}}; }
std::vector<bool> both_unchanged(const NodeAttrs&) { return {true, true}; }

// Return a gradient function for fork: the sum for the first operand, zeros for the second.
nnvm::FGradient gradient_of_fork(const std::string& sum) {
  const nnvm::FGradient add = node_of_gradient(sum);
  return [add](const nnvm::ObjectPtr& node, const std::vector<nnvm::NodeEntry>& grads) {
    static const auto& gradients = table<nnvm::FGradient>("FGradient");
    static const nnvm::Op* without = nnvm::Op::Get("BlockGrad");
    auto entries = gradients.data_[without->index_].first(node, grads);
    entries[0] = add(node, grads)[0];
    return entries;
  };
}

// ---- Concatenation of channels.

// Copy each image's share of one array between it and the joined array.
template <bool kJoin>
void copy_shares(const std::vector<uint16_t*>& parts, const std::vector<int64_t>& sizes,
                 uint16_t* joined, int64_t images) {
  int64_t all = 0;
  for (int64_t size : sizes) all += size;
  in_parallel(images, [&](int64_t image) {
    uint16_t* place = joined + image * all;
    for (size_t i = 0; i < parts.size(); place += sizes[i++]) {
      if (parts[i] == nullptr) continue;
      uint16_t* part = parts[i] + image * sizes[i];
      std::memcpy(kJoin ? place : part, kJoin ? part : place, sizes[i] * sizeof(uint16_t));
    }
  });
}

// Join packed arrays, or split one. Blocks of channels stay whole where all arrays have the same.
template <bool kJoin, class Format>
void join(const Format& format, const Arrays& parts, const Requests& requests,
          const NDArray& joined, OpReqType joined_request) {
  const auto& shape = joined.shape();
  bool same = true;
  for (const NDArray& part : parts)
    same = same && packed_layout(part.shape()) == packed_layout(shape);
  const auto apart = [](const NDArray& like) { return fresh(like, mshadow::kFloat16); };
  std::vector<uint16_t*> places;
  std::vector<int64_t> sizes;
  Arrays used;
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool direct = same && requests[i] != mxnet::kAddTo;
    used.push_back(direct ? parts[i] : apart(parts[i]));
    if (kJoin && !same) move_codes<false>(parts[i], mxnet::kWriteTo, used[i]);
    places.push_back(requests[i] == mxnet::kNullOp ? nullptr : codes_of(used[i]));
    sizes.push_back(parts[i].shape().Size() / shape[0]);
  }
  const NDArray whole = same && joined_request != mxnet::kAddTo ? joined : apart(joined);
  if (!kJoin && !same) move_codes<false>(joined, mxnet::kWriteTo, whole);
  copy_shares<kJoin>(places, sizes, codes_of(whole), shape[0]);
  const auto finish = [&](const NDArray& from, OpReqType req, const NDArray& to) {
    if (req == mxnet::kNullOp || codes_of(from) == codes_of(to)) return;
    write_codes(format, req, to, [&](uint16_t* y) {
      if (same) std::memcpy(y, codes_of(from), to.shape().Size() * sizeof *y);
      else move_codes_to<true>(from, y);
    });
  };
  if (kJoin) finish(whole, joined_request, joined);
  else for (size_t i = 0; i < parts.size(); ++i) finish(used[i], requests[i], parts[i]);
}

// ---- MXNet's operators on FP32 copies.

// Whether oneDNN pools blocks of channels with the bits of plain arrays, which imperative runs have. With AVX-512 one
// code is for both; others add the gradients of windows that overlap in another order.
inline bool pools_blocks_as_plain(const NodeAttrs& attrs) {
#ifdef __AVX512F__
  static const bool one_code = [] {
    const char* limit = std::getenv("DNNL_MAX_CPU_ISA");
    std::string name = limit == nullptr ? "" : limit;
    std::transform(name.begin(), name.end(), name.begin(), ::toupper);
    return name.find("SSE") != 0 && (name.find("AVX") != 0 || name.find("AVX512") == 0);
  }();
  if (one_code) return true;
#endif
  const Sizes kernel = sizes_of(attrs, "kernel", 2, 1), stride = sizes_of(attrs, "stride", 2, 1);
  return flag_option(attrs, "global_pool") || (kernel[1] <= stride[1] && kernel[2] <= stride[2]);
}

// Let an operator compute on FP32 copies of codes, and round what it returns. Other arrays, such as
// the positions of largest elements, it takes as they are. All but poolings may take packed numbers for plain ones.
template <class Format>
void on_copies(const Format& format, bool pools, const nnvm::Op* op,
               const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in, const Requests& req,
               const Arrays& out) {
  // The largest operand is where products have theirs.
  const Slot for_operands[] = {kDataSlot, kGradientSlot, kWeightSlot};
  const Slot for_results[] = {kResultSlot, kWeightGradientSlot};
  Arrays wide = in, results = out;
  Requests requests = req;
  const auto layout = [&](const NDArray& array) { return pools ? packed_layout(array.shape()) : 1; };
  const bool is_max = pools && keep_nan::is_max_pooling(attrs), is_forward = op == nnvm::Op::Get("Pooling");
  const bool differs = pools && !is_forward && packed_layout(out[0].shape()) > 1 && !pools_blocks_as_plain(attrs);
  // One array may be several operands, as a gradient that stands in for another one.
  const auto place_in = [](const Arrays& arrays, const NDArray& wanted) {
    const auto is_it = [&](const NDArray& one) { return holds_codes(one) && codes_of(one) == codes_of(wanted); };
    return static_cast<size_t>(std::find_if(arrays.begin(), arrays.end(), is_it) - arrays.begin());
  };
  Arrays by_size;
  for (const NDArray& array : in)
    if (holds_codes(array) && place_in(by_size, array) == by_size.size()) by_size.push_back(array);
  std::stable_sort(by_size.begin(), by_size.end(), [](const NDArray& one, const NDArray& other) {
    return one.shape().Size() > other.shape().Size();
  });
  for (size_t i = 0; i < in.size(); ++i) {
    if (!holds_codes(in[i])) continue;
    const size_t first = place_in(in, in[i]), place = place_in(by_size, in[i]);
    wide[i] = first < i ? wide[first]
              : differs && !is_max ? unpacked(format, in[i], for_operands[place])
                        : widened(format, in[i], layout(in[i]), for_operands[place]);
  }
  size_t number = 0;
  for (size_t i = 0; i < out.size(); ++i)
    if (holds_codes(out[i])) {  // wanted or not: MXNet looks at the dtype of both
      results[i] = scratch(out[i], for_results[number++]);
      if (req[i] != mxnet::kNullOp) requests[i] = mxnet::kWriteTo;
    }
  if (differs && is_max) pooling::write_gradient_in_blocks(attrs, wide, results[0]);
  else call(op, attrs, ctx, wide, requests, results);
  if (is_forward && is_max && req[0] != mxnet::kNullOp)
    keep_nan::keep_in_pooling(op, attrs, ctx, wide[0], results);
  for (size_t i = 0; i < out.size(); ++i)
    if (holds_codes(out[i])) narrow_array(format, results[i], req[i], out[i], layout(out[i]));
}

// ---- Registration.

// Return what MXNet calls, from a function of operands, requests and results.
template <class Function>
FComputeEx computing(const Function& function) {
  return [function](const NodeAttrs&, const OpContext&, const Arrays& in, const Requests& req,
                    const Arrays& out) { function(in, req, out); };
}

Operator elements(const std::string& name, int inputs, int outputs, const FComputeEx& compute) {
  Operator made(name, inputs, outputs);
  made.set<mxnet::FInferShape>("FInferShape", old_function(one_shape))
      .set<nnvm::FInferType>("FInferType", old_function(all_codes))
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<nnvm::FInplaceOption>("FInplaceOption", in_place)
      .set<FComputeEx>("FComputeEx<cpu>", compute);
  return made;
}

// The operators on elements, and those whose gradients they name, that MXNet computes on copies.
// Those whose gradients are made from results, before these are rounded, cannot be among them.
const char* const kOfElements[] = {
    "clip",         "_backward_clip",       "_mul_scalar",  "_backward_mul_scalar",
    "_div_scalar",  "_backward_div_scalar", "_plus_scalar", "_minus_scalar",
    "_rminus_scalar", "elemwise_mul",       "_backward_mul"};
const char* const kOfImages[] = {"Pooling", "_backward_Pooling"};

const std::string kOnCopies = "_mpgluon_on_copies_";

// Return a gradient function whose nodes have the operators with this suffix.
nnvm::FGradient gradient_on_copies(const nnvm::Op* op, const std::string& suffix) {
  return [op, suffix](const nnvm::ObjectPtr& node, const std::vector<nnvm::NodeEntry>& grads) {
    auto entries = mxnet_gradient(op, node, grads);
    for (auto& entry : entries) {
      const std::string name = entry.node->attrs.op->name;
      const nnvm::Op* own = dmlc::Registry<nnvm::Op>::Find(kOnCopies + name + suffix);
      if (own != nullptr) entry.node->attrs.op = own;
    }
    return entries;
  };
}

bool images_are_codes(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(0) = out->at(0) = mshadow::kFloat16;
  for (size_t i = 1; i < out->size(); ++i) out->at(i) = mshadow::kInt32;
  return true;
}

template <class Format>
void register_on_copies(const Format& format, const std::string& name, const std::string& suffix, bool pools,
                        const nnvm::FInferType& types) {
  const nnvm::Op* op = nnvm::Op::Get(name);
  const bool clips = name == "clip" || name == "_backward_clip";
  const auto compute = [=](const auto& watched, const NodeAttrs& attrs, const OpContext& ctx,
                           const auto&... arrays) {
    if (clips) {
      const clipping::Bounds<Format> bounds(format, attrs);
      if (bounds.fit()) return clipping::clip(watched, bounds, arrays...);
    }
    on_copies(watched, pools, op, attrs, ctx, arrays...);
  };
  Operator made = in_place_of(op, kOnCopies + name + suffix, watched(format, compute));
  if (name.find("_backward") == 0) return;
  made.set<nnvm::FInferType>("FInferType", types)
      .set<nnvm::FGradient>("FGradient", gradient_on_copies(op, suffix));
}

template <class Format>
void register_codes(const Format& format, const std::string& suffix) {
  const auto with_format = [&](auto function) {
    return watched(format, [function](const auto& format, const NodeAttrs&, const OpContext&,
                                      const auto&... all) { function(format, all...); });
  };
  const nnvm::Op *activation = nnvm::Op::Get("Activation"), *sum = nnvm::Op::Get("elemwise_add");
  Operator back = elements("_mpgluon_relu_backward" + suffix, 2, 1,
                           with_format([](const auto&... all) { relu_backward(all...); }));
  Operator forward = elements("_mpgluon_relu" + suffix, 1, 1,
                              with_format([](const auto&... all) { relu(all...); }));
  // MXNet's function reads the kind of activation from the node, and makes this kind's gradient.
  forward.op().attr_parser = back.op().attr_parser = activation->attr_parser;
  forward.set<nnvm::FGradient>("FGradient", gradient_by(activation, &back.op()));

  Operator sums = elements("_mpgluon_add" + suffix, 2, 1,
                           with_format([](const auto&... all) { add(all...); }));
  sums.inherit<nnvm::FListInputNames>("FListInputNames", sum)
      .set<nnvm::FGradient>(
          "FGradient", [](const nnvm::ObjectPtr&, const std::vector<nnvm::NodeEntry>& grads) {
            return std::vector<nnvm::NodeEntry>{grads[0], grads[0]};
          });
  elements("_mpgluon_fork" + suffix, 2, 2, computing(fork))
      .set<nnvm::FInplaceOption>("FInplaceOption", both_in_place)
      .set<nnvm::FInplaceIdentity>("FInplaceIdentity", both_unchanged)
      .set<nnvm::FGradient>("FGradient", gradient_of_fork("_mpgluon_add" + suffix));

  const nnvm::Op *concat = nnvm::Op::Get("Concat"), *split = nnvm::Op::Get("_backward_Concat");
  Operator joined = in_place_of(
      concat, "_mpgluon_concat" + suffix,
      with_format([](const auto& format, const Arrays& in, const Requests& req, const Arrays& out) {
        join<true>(format, in, Requests(in.size(), mxnet::kWriteTo), out[0], req[0]);
      }));
  joined.set<nnvm::FInferType>("FInferType", old_function(all_codes))
      .set_gradient("_mpgluon_split" + suffix);
  Operator made_split = in_place_of(
      split, "_mpgluon_split" + suffix,
      with_format([](const auto& format, const Arrays& in, const Requests& req, const Arrays& out) {
        join<false>(format, out, req, in[0], mxnet::kWriteTo);
      }));
  made_split.op().get_num_inputs = nullptr;
  made_split.op().num_inputs = 1;  // and not also the arrays that were joined, whose shapes MXNet knows

  const auto with_options = [&](auto function) {
    return watched(format, [function](const auto& format, const NodeAttrs& attrs, const OpContext&,
                                      const auto&... all) { function(format, attrs, all...); });
  };
  const nnvm::Op *pad = nnvm::Op::Get("Pad"), *crop = nnvm::Op::Get("_backward_Pad");
  Operator cropped =
      in_place_of(crop, "_mpgluon_pad_backward" + suffix,
                  with_options([](const auto&... all) { padding::pad_codes<true>(all...); }));
  Operator padded = in_place_of(pad, "_mpgluon_pad" + suffix,
                                with_options([](const auto&... all) { padding::pad_codes<false>(all...); }));
  padded.set<nnvm::FInferType>("FInferType", old_function(all_codes))
      .set<nnvm::FGradient>("FGradient", gradient_by(pad, &cropped.op()));

  const nnvm::FInferType of_elements = old_function(all_codes);
  const nnvm::FInferType of_images = old_function(images_are_codes);
  for (const char* name : kOfElements) register_on_copies(format, name, suffix, false, of_elements);
  for (const char* name : kOfImages) register_on_copies(format, name, suffix, true, of_images);
}

}  // namespace codes
}  // namespace mpgluon

#endif  // MPGLUON_CODES_H_
