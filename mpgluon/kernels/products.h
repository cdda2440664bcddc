// Convolution and dense layer on 16-bit codes; the gradients are codes too.
//
// MXNet's own operator computes, on FP32 copies that are valid during the call. The weight may be
// codes, or FP32 numbers, which are rounded during the call, as their gradient is.
#ifndef MPGLUON_PRODUCTS_H_
#define MPGLUON_PRODUCTS_H_

#include "scaled.h"

namespace mpgluon {
namespace products {

enum { kData, kWeight, kBias };                            // operands, and the results of backward
enum { kOutGrad, kBackwardData, kBackwardWeight };  // operands of backward

// How the data and the result lie: a dense layer may take four-dimensional data as it is.
int layout_of_codes(const NDArray& array, bool packed) {
  return packed ? packed_layout(array.shape()) : 1;
}

// Whether oneDNN computes a convolution for inference with the channels of a pixel side by side. It
// computes the same if this is wrong, but first turns the data around.
bool computes_channels_last(const NDArray& data, const NDArray& weight) {
#ifdef __AVX512F__
  constexpr bool kSixteenLanes = true;
#else
  constexpr bool kSixteenLanes = false;
#endif
  return kSixteenLanes && packed_layout(data.shape()) != 1 && weight.shape()[1] == data.shape()[1];
}

// Return FP32 memory for a weight. For inference MXNet rearranges the weight later, when memory that
// calls share would hold another one.
inline NDArray room_for(const NDArray& weight, bool for_this_call) {
  return for_this_call ? scratch(weight, kWeightSlot) : fresh(weight, mshadow::kFloat32);
}

// Return the values of a weight in FP32, on the format's grid.
template <class Format>
NDArray weight_of(const Format& format, const NDArray& weight, bool for_this_call) {
  const NDArray made = room_for(weight, for_this_call);
  fill(format, weight, 1, made);
  return made;
}

// Let compute(request, result) write FP32 numbers to an array, or to one apart whose codes are made.
template <class Format, class Compute>
void write_result(const Format& format, bool packed, OpReqType req, const NDArray& out, Slot slot,
                  const Compute& compute) {
  if (!holds_codes(out)) return compute(req, out);
  const NDArray result = scratch(out, slot);
  compute(mxnet::kWriteTo, result);
  narrow_array(format, result, req, out, layout_of_codes(out, packed));
}

// kRounded says that a weight in FP32 is on the grid already.
template <bool kRounded, class Format>
void forward(const Format& format, bool packed, const nnvm::Op* op, const NodeAttrs& attrs,
             const OpContext& ctx, const Arrays& in, const Requests& req, const Arrays& out) {
  if (req[0] == mxnet::kNullOp) return;
  Arrays wide = in;
  if (packed && !ctx.is_train && computes_channels_last(in[kData], in[kWeight]))
    wide[kData] = widened_channels_last(format, in[kData], kDataSlot);
  else
    wide[kData] = widened(format, in[kData], layout_of_codes(in[kData], packed), kDataSlot);
  if (!kRounded || holds_codes(in[kWeight]))
    wide[kWeight] = weight_of(format, in[kWeight], ctx.is_train);
  write_result(format, packed, req[0], out[0], kResultSlot, [&](OpReqType request, NDArray result) {
    call(op, attrs, ctx, wide, {request}, {result});
  });
}

// Compute gradients; operands(true) are those for the weight's, operands(false) for the data's.
template <class Format, class Operands>
void backward_from(const Format& format, bool packed, const nnvm::Op* op, const NodeAttrs& attrs,
                   const OpContext& ctx, const Operands& operands, const Requests& req,
                   const Arrays& out) {
  Arrays results = out;
  // MXNet makes the gradient of the bias together with that of the weight: a convolution writes both,
  // wanted or not, and a dense layer neither where the weight's is not wanted.
  const bool wanted = req[kWeight] != mxnet::kNullOp, codes = holds_codes(out[kWeight]);
  if (wanted || (req.size() > kBias && req[kBias] != mxnet::kNullOp)) {
    Requests requests = req;
    requests[kData] = mxnet::kNullOp;
    results[kData] = scratch(out[kData], kDataSlot);  // MXNet may look at its dtype, no more
    const bool in_its_place = wanted && !codes && req[kWeight] != mxnet::kAddTo;
    if (!in_its_place) {
      results[kWeight] = scratch(out[kWeight], kWeightGradientSlot);
      requests[kWeight] = mxnet::kWriteTo;
    }
    call(op, attrs, ctx, operands(true), requests, results);
    if (wanted && codes) narrow_array(format, results[kWeight], req[kWeight], out[kWeight], 1);
    else if (in_its_place) round_in_place(format, out[kWeight]);
    else if (wanted) round_array(format, plain(results[kWeight]), req[kWeight], out[kWeight]);
  }
  if (req[kData] == mxnet::kNullOp) return;
  const Arrays wide = operands(false);
  // No one reads the data any more, so its memory may hold the gradient.
  results[kWeight] = scratch(out[kWeight], kWeightGradientSlot);
  write_result(format, packed, req[kData], out[kData], kDataSlot, [&](OpReqType req, NDArray result) {
    Requests requests(out.size(), mxnet::kNullOp);
    requests[kData] = req;
    results[kData] = result;
    call(op, attrs, ctx, wide, requests, results);
  });
}

template <class Format>
void backward(const Format& format, bool packed, const nnvm::Op* op, const NodeAttrs& attrs,
              const OpContext& ctx, const Arrays& in, const Requests& req, const Arrays& out) {
  Arrays wide = in;
  for (int i : {kOutGrad, kBackwardData})
    wide[i] = widened(format, in[i], layout_of_codes(in[i], packed),
                      i == kOutGrad ? kResultSlot : kDataSlot);
  wide[kBackwardWeight] = weight_of(flags::unwatched(format), in[kBackwardWeight], true);
  backward_from(format, packed, op, attrs, ctx, [&](bool) { return wide; }, req, out);
}

// The data and the result are codes, and the weight may be. Gradients have the types of what they are
// the gradients of.
bool infer_types(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(kData) = out->at(0) = mshadow::kFloat16;
  for (size_t i = kBias; i < in->size(); ++i) in->at(i) = mshadow::kFloat32;
  return in->at(kWeight) != -1;
}

template <class Format>
void register_one(const Format& format, const nnvm::Op* op, const nnvm::Op* back,
                  const std::string& name, const std::string& suffix, bool packed) {
  Operator made_backward =
      in_place_of(back, name + "_backward" + suffix,
                  watched(format, [packed, back](const auto& format, const auto&... all) {
                    backward(format, packed, back, all...);
                  }));
  const auto finish = [op, &made_backward](Operator made) {
    made.set<nnvm::FInferType>("FInferType", old_function(infer_types))
        .set<nnvm::FGradient>("FGradient", gradient_by(op, &made_backward.op()));
  };
  const auto rounding = [&](auto rounded) {
    return watched(format, [packed, op](const auto& format, const auto&... all) {
      forward<decltype(rounded)::value>(format, packed, op, all...);
    });
  };
  finish(in_place_of(op, name + suffix, rounding(std::false_type())));
  finish(in_place_of(op, name + "_rounded" + suffix, rounding(std::true_type())));
}

// The operators that compute have MXNet's names, or those with something before and after them.
template <class Format>
void register_products(const Format& format, const std::string& suffix,
                       const std::string& before = "", const std::string& after = "") {
  const auto one = [&](const std::string& computing, const std::string& name, bool packed) {
    register_one(format, nnvm::Op::Get(before + computing + after),
                 nnvm::Op::Get(before + "_backward_" + computing + after), name, suffix, packed);
  };
  one("Convolution", "_mpgluon_convolution", true);
  one("FullyConnected", "_mpgluon_fully_connected", false);
}

}  // namespace products
}  // namespace mpgluon

#endif  // MPGLUON_PRODUCTS_H_
