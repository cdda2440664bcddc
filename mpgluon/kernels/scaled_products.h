// Convolutions and dense layers whose operands are rounded to formats with little range: data and weight
// to one, the gradient that arrives to another one. Each is multiplied by a scale before.
//
// Each exists on codes, as those in products.h, and on FP32 arrays, where other operators before and
// behind it round to the format between products.
#ifndef MPGLUON_SCALED_PRODUCTS_H_
#define MPGLUON_SCALED_PRODUCTS_H_

#include "history.h"
#include "products.h"

namespace mpgluon {
namespace products {

struct Recipe {
  ScaledFormat value, gradient;
  History* history;  // or nullptr: a scale follows from the values that it scales

  // Return what chooses the value that an operand is scaled by.
  auto to_scale(Operand operand, const OpContext& ctx, bool note) const {
    return [this, operand, device = ctx.run_ctx.ctx.dev_id, note](float own) {
      return history == nullptr ? own : history->largest(device, operand, own, note);
    };
  }
};

// How blocks lie in the operands of each product: along what it sums over. That of a convolution's
// weight gradient sums over the pixels of an image (and over images), a dense layer's over rows.
struct Views {
  View data, weight;                         // forward
  View gradient, turned_weight;              // for the gradient of the data
  View summed_gradient, summed_data;  // for that of the weight

  Views(const mxnet::TShape& data_shape, const mxnet::TShape& weight_shape, int64_t results) {
    const int64_t units = weight_shape[0], width = weight_shape[1], all = data_shape.Size();
    const bool dense = weight_shape.ndim() == 2;
    const int64_t images = dense ? all / width : data_shape[0];
    const int64_t channels = dense ? width : data_shape[1], groups = channels / width;
    const int64_t pixels = all / (images * channels), made = results / (images * units);
    const int64_t kernel = weight_shape.Size() / (units * width);
    data = {images * groups, width, pixels};
    weight = {units, width, kernel};
    gradient = {images * groups, units / groups, made};
    turned_weight = {groups, units / groups, width * kernel};
    summed_gradient = dense ? View{1, images, units} : View{images * units, made, 1};
    summed_data = dense ? View{1, images, width} : View{images * channels, pixels, 1};
  }
};

template <class Format>
void forward_scaled(const Format& format, const Recipe& recipe, bool packed, const nnvm::Op* op,
                    const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                    const Requests& req, const Arrays& out) {
  if (req[0] == mxnet::kNullOp) return;
  const Views views(in[kData].shape(), in[kWeight].shape(), out[0].shape().Size());
  if (recipe.history != nullptr) recipe.history->begin_forward(ctx.run_ctx.ctx.dev_id);
  Arrays wide = in;
  wide[kData] = fill_scaled(format, recipe.value, views.data, in[kData],
                            layout_of_codes(in[kData], packed), scratch(in[kData], kDataSlot),
                            recipe.to_scale(kDataOperand, ctx, ctx.is_train));
  wide[kWeight] = fill_scaled(format, recipe.value, views.weight, in[kWeight], 1,
                              room_for(in[kWeight], ctx.is_train),
                              recipe.to_scale(kWeightOperand, ctx, ctx.is_train));
  write_result(format, packed, req[0], out[0], kResultSlot, [&](OpReqType request, NDArray result) {
    call(op, attrs, ctx, wide, {request}, {result});
  });
}

template <class Format>
void backward_scaled(const Format& format, const Recipe& recipe, bool packed, const nnvm::Op* op,
                     const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                     const Requests& req, const Arrays& out) {
  const NDArray &gradient = in[kOutGrad], &data = in[kBackwardData], &weight = in[kBackwardWeight];
  const Views views(data.shape(), weight.shape(), gradient.shape().Size());
  const auto filled = [&](const ScaledFormat& scaled, const View& view, const NDArray& array,
                          int layout, Slot slot, Operand operand) {
    return fill_scaled(format, scaled, view, array, layout, scratch(array, slot),
                       recipe.to_scale(operand, ctx, operand == kGradientOperand));
  };
  const int layout_of_gradient = layout_of_codes(gradient, packed);
  Arrays wide = in;
  wide[kBackwardData] = scratch(data, kDataSlot);  // where no one reads it, its dtype counts
  wide[kBackwardWeight] = scratch(weight, kWeightSlot);
  bool filled_gradient = false;
  const auto operands = [&](bool for_weight) {
    if (!filled_gradient || recipe.gradient.sharing() == kBlocks)  // which lie along the sum
      wide[kOutGrad] = filled(recipe.gradient, for_weight ? views.summed_gradient : views.gradient,
                              gradient, layout_of_gradient, kResultSlot, kGradientOperand);
    filled_gradient = true;
    if (for_weight)
      wide[kBackwardData] = filled(recipe.value, views.summed_data, data,
                                   layout_of_codes(data, packed), kDataSlot, kDataOperand);
    else
      wide[kBackwardWeight] = filled(recipe.value, views.turned_weight, weight, 1, kWeightSlot, kWeightOperand);
    return wide;
  };
  backward_from(format, packed, op, attrs, ctx, operands, req, out);
}

template <class Format>
void register_on(const Format& format, const Recipe& recipe, const std::string& prefix,
                 const char* mxnet_name, bool of_codes) {
  const bool packed = of_codes && std::strcmp(mxnet_name, "Convolution") == 0;
  const nnvm::Op* op = nnvm::Op::Get(mxnet_name);
  const nnvm::Op* back = nnvm::Op::Get(std::string("_backward_") + mxnet_name);
  const std::string name = prefix + "_" + mxnet_name;
  Operator made_backward =
      in_place_of(back, "_backward" + name,
                  watched(format, [recipe, packed, back](const auto& format, const auto&... all) {
                    backward_scaled(format, recipe, packed, back, all...);
                  }));
  Operator made = in_place_of(
      op, name, watched(format, [recipe, packed, op](const auto& format, const auto&... all) {
        forward_scaled(format, recipe, packed, op, all...);
      }));
  made.op().arguments = op->arguments;  // from which MXNet makes Python functions
  made.set<nnvm::FGradient>("FGradient", gradient_by(op, &made_backward.op()));
  if (of_codes) made.set<nnvm::FInferType>("FInferType", old_function(infer_types));
}

template <class Format>
void register_scaled(const Format& format, const Recipe& recipe, const std::string& suffix) {
  static const Grid single(24, -126, FLT_MAX, INFINITY);  // which rounds nothing
  for (const char* name : {"Convolution", "FullyConnected"}) {
    register_on(single, recipe, "_mpgluon_scaled" + suffix, name, false);
    register_on(format, recipe, "_mpgluon_scaled_codes" + suffix, name, true);
  }
}

}  // namespace products
}  // namespace mpgluon

#endif  // MPGLUON_SCALED_PRODUCTS_H_
