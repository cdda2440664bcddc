// Batch normalization in the layout of its data; the result and the gradient are rounded.
#ifndef MPGLUON_BATCH_NORM_OPERATOR_H_
#define MPGLUON_BATCH_NORM_OPERATOR_H_

#include "batch_norm.h"
#include "common.h"
#include "packing.h"

namespace mpgluon {
namespace batch_normalization {

enum { kData, kGamma, kBeta, kMovingMean, kMovingVar };  // operands
enum { kOut, kMean, kInvStd };                           // results

const nnvm::Op *mxnet_forward, *mxnet_backward;

struct Settings {
  double eps;
  float momentum;
  bool fix_gamma, use_global_stats;

  explicit Settings(const NodeAttrs& attrs) {
    const auto numbers = settings_of<4>(attrs);
    eps = numbers[0];
    momentum = static_cast<float>(numbers[1]);
    fix_gamma = numbers[2] != 0;
    use_global_stats = numbers[3] != 0;
  }
};

float inverse_deviation(float variance, double eps) {
  return 1.0 / std::sqrt(variance + static_cast<float>(eps));
}
float variance_of(float inverse, double eps) { return 1.0 / (inverse * inverse) - eps; }

Shape shape_of(const NDArray& array) {
  const auto& shape = array.shape();
  return {shape[0], shape[1], static_cast<int64_t>(shape.ProdShape(2, shape.ndim()))};
}

float* values(const NDArray& array) { return array.data().dptr<float>(); }

bool same_bits(const std::vector<float>& ours, const NDArray& theirs) {
  return std::memcmp(ours.data(), values(theirs), ours.size() * sizeof(float)) == 0;
}

// Whether MXNet's own operator gives the same bits for data of a shape and a number of threads. How
// it divides the sums of a channel among threads is unknown, so both compute the first time.
class Agreement {
 public:
  enum Answer { kUnknown, kYes, kNo };

  Answer answer(const Shape& shape) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(key(shape));
    return found == known_.end() ? kUnknown : found->second;
  }

  void note(const Shape& shape, bool yes) {
    std::lock_guard<std::mutex> lock(mutex_);
    known_[key(shape)] = yes ? kYes : kNo;
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, int>;
  static Key key(const Shape& shape) {
    return Key(shape.images, shape.channels, shape.pixels, omp_get_max_threads());
  }

  std::mutex mutex_;
  std::map<Key, Answer> known_;
};

// Let MXNet's operator compute, on plain FP32 arrays.
template <class Format>
void mxnet_batch_norm(const Format& format, const nnvm::Op* op, const NodeAttrs& attrs,
                      const OpContext& ctx, Arrays in, const Requests& req, const Arrays& out) {
  for (NDArray& array : in)
    array = plain(array.dtype() == mshadow::kFloat16 ? unpack(format, array) : array);
  call(op, attrs, ctx, in, req, out);
}

// Call use(numbers) with those of an array, FP32 or packed codes.
template <class Use>
void with_numbers(const NDArray& array, const Use& use) {
  if (array.dtype() == mshadow::kFloat16) use(packed_numbers(array));
  else use(static_cast<const float*>(address(array)));
}

// Return the layout of what is normalized, 0 where MXNet's own operator must do it.
int layout_of_data(const NDArray& data) {
  if (data.shape().ndim() != 4) return 0;
  return data.dtype() == mshadow::kFloat16 ? packed_layout(data.shape()) : layout_of(data);
}

Agreement forward_agreement, backward_agreement;  // of all formats: of sums before they are rounded

template <class Format>
void batch_norm(const Format& format, const NodeAttrs& attrs, const OpContext& ctx,
                const Arrays& in, const Requests& req, const Arrays& out) {
  Agreement& agreement = forward_agreement;
  const Settings settings(attrs);
  const float eps = settings.eps;
  const bool batch_statistics = ctx.is_train && !settings.use_global_stats;
  const int layout = layout_of_data(in[kData]);
  const Shape shape = shape_of(in[kData]);
  std::vector<float> mean(shape.channels), variance(shape.channels), inverse(shape.channels);
  Agreement::Answer same = layout == 0 ? Agreement::kNo : Agreement::kYes;
  if (layout != 0 && batch_statistics) {
    same = agreement.answer(shape);
    if (same != Agreement::kNo)
      with_numbers(in[kData], [&](const auto* x) {
        for_groups(format, shape, layout, [&](const auto& group) {
          group.statistics(x, mean.data(), variance.data());
        });
      });
  } else {
    mean.assign(values(in[kMovingMean]), values(in[kMovingMean]) + shape.channels);
    variance.assign(values(in[kMovingVar]), values(in[kMovingVar]) + shape.channels);
  }
  for (int64_t c = 0; c < shape.channels; ++c)
    inverse[c] = inverse_deviation(variance[c], settings.eps);
  if (same != Agreement::kYes) {
    for (const NDArray& array : out) const_cast<NDArray&>(array).InvalidateMKLDNNData();
    mxnet_batch_norm(format, mxnet_forward, attrs, ctx, in, req, out);
    if (same == Agreement::kUnknown)
      agreement.note(shape, same_bits(mean, out[kMean]) && same_bits(inverse, out[kInvStd]));
    return round_in_place(format, out[kOut]);
  }
  if (settings.fix_gamma) std::fill_n(values(in[kGamma]), shape.channels, 1.0f);
  const float *gamma = values(in[kGamma]), *beta = values(in[kBeta]);
  with_numbers(in[kData], [&](const auto* x) {
    float* y = prepare(out[kOut], layout);
    for_groups(format, shape, layout, [&](const auto& group) {
      group.normalize(x, mean.data(), variance.data(), gamma, beta, eps, y);
    });
  });
  std::copy(mean.begin(), mean.end(), values(out[kMean]));
  std::copy(inverse.begin(), inverse.end(), values(out[kInvStd]));
}

enum { kOutGrad, kSavedMean, kSavedInvStd, kSavedData, kSavedGamma, kSavedBeta, kOldMean, kOldVar };

template <class Format>
void batch_norm_backward(const Format& format, const NodeAttrs& attrs, const OpContext& ctx,
                         const Arrays& in, const Requests& req, const Arrays& out) {
  Agreement& agreement = backward_agreement;
  const Settings settings(attrs);
  const float eps = settings.eps;
  if (req[0] == mxnet::kAddTo || req[0] == mxnet::kNullOp)
    return separately(format, req, out, [&](const Requests& requests, const Arrays& results) {
      batch_norm_backward(format, attrs, ctx, in, requests, results);
    });
  NDArray dy = in[kOutGrad], x = in[kSavedData];
  const Shape shape = shape_of(x);
  const bool batch_statistics = ctx.is_train && !settings.use_global_stats;
  const bool ours = x.shape().ndim() == 4 && batch_statistics;
  const Agreement::Answer same = ours ? agreement.answer(shape) : Agreement::kNo;
  if (same == Agreement::kNo) {
    mxnet_batch_norm(format, mxnet_backward, attrs, ctx, in, req, out);
    return round_in_place(format, out[0]);
  }
  int layout = layout_of_data(x);
  if (x.dtype() == mshadow::kFloat16) dy = in_layout(dy, layout);
  else if (layout == 0 || layout_of(dy) != layout) dy = plain(dy), x = plain(x), layout = 1;

  const float *mean = values(in[kSavedMean]), *inverse = values(in[kSavedInvStd]);
  std::vector<float> variance(shape.channels), dgamma(shape.channels), dbeta(shape.channels);
  std::vector<float> moving_mean(shape.channels), moving_var(shape.channels);
  const float rest = 1.0f - settings.momentum;
  for (int64_t c = 0; c < shape.channels; ++c) {
    variance[c] = variance_of(inverse[c], settings.eps);
    moving_mean[c] = values(in[kOldMean])[c] * settings.momentum + mean[c] * rest;
    moving_var[c] = values(in[kOldVar])[c] * settings.momentum + variance[c] * rest;
  }
  const float* grad = address(dy);
  with_numbers(x, [&](const auto* data) {
    for_groups(format, shape, layout, [&](const auto& group) {
      group.sum_gradients(data, grad, mean, variance.data(), eps, dgamma.data(), dbeta.data());
    });
  });
  if (same == Agreement::kUnknown) {
    const Arrays grads = {out[0], fresh(out[1], mshadow::kFloat32),
                          fresh(out[2], mshadow::kFloat32)};
    const Requests write = {req[0], mxnet::kWriteTo, mxnet::kWriteTo};
    mxnet_batch_norm(format, mxnet_backward, attrs, ctx, in, write, grads);
    agreement.note(shape, (settings.fix_gamma || same_bits(dgamma, grads[1])) &&
                              same_bits(dbeta, grads[2]) && same_bits(moving_mean, in[kOldMean]) &&
                              same_bits(moving_var, in[kOldVar]));
    dgamma.assign(values(grads[1]), values(grads[1]) + shape.channels);
    dbeta.assign(values(grads[2]), values(grads[2]) + shape.channels);
    round_in_place(format, out[0]);
  } else {
    std::copy(moving_mean.begin(), moving_mean.end(), values(in[kOldMean]));
    std::copy(moving_var.begin(), moving_var.end(), values(in[kOldVar]));
    const std::vector<float> ones(shape.channels, 1.0f);
    const float* gamma = settings.fix_gamma ? ones.data() : values(in[kSavedGamma]);
    float* dx = address(out[0]) == grad ? address(out[0]) : prepare(out[0], layout);
    with_numbers(x, [&](const auto* data) {
      for_groups(format, shape, layout, [&](const auto& group) {
        group.gradient_of_data(data, grad, mean, variance.data(), gamma, eps, dgamma.data(),
                               dbeta.data(), dx);
      });
    });
    if (settings.fix_gamma) std::fill(dgamma.begin(), dgamma.end(), 0.0f);
  }
  for (int which : {1, 2}) {
    const std::vector<float>& grads = which == 1 ? dgamma : dbeta;
    float* to = values(out[which]);
    for (int64_t c = 0; c < shape.channels; ++c)
      if (req[which] == mxnet::kAddTo) to[c] += grads[c];
      else if (req[which] != mxnet::kNullOp) to[c] = grads[c];
  }
}

bool infer_backward_shape(const NodeAttrs&, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  const mxnet::TShape& data = in->at(kSavedData);
  if (!mxnet::shape_is_known(data)) return false;
  in->at(kOutGrad) = out->at(0) = data;
  for (size_t i = 1; i < in->size(); ++i)
    if (i != kSavedData) in->at(i) = mxnet::TShape({data[1]});
  for (size_t i = 1; i < out->size(); ++i) out->at(i) = mxnet::TShape({data[1]});
  return true;
}

template <class Format>
void register_batch_norm(const Format& format, const std::string& suffix) {
  mxnet_forward = nnvm::Op::Get("BatchNorm");
  mxnet_backward = nnvm::Op::Get("_backward_BatchNorm");
  const FComputeEx compute = [format](const NodeAttrs& attrs, const OpContext& ctx,
                                      const Arrays& in, const Requests& req, const Arrays& out) {
    batch_norm(format, attrs, ctx, in, req, out);
  };
  const FComputeEx compute_backward = [format](const NodeAttrs& attrs, const OpContext& ctx,
                                               const Arrays& in, const Requests& req,
                                               const Arrays& out) {
    batch_norm_backward(format, attrs, ctx, in, req, out);
  };
  Operator backward =
      in_place_of(mxnet_backward, "_mpgluon_batch_norm_backward" + suffix, compute_backward,
                  old_function(infer_types_beside<kSavedData, -1>));
  // MXNet gives a result of a backward operator the type of the operand whose gradient it is.
  backward.set<nnvm::TIsBackward>("TIsBackward", false)
      .set<mxnet::FInferShape>("FInferShape", old_function(infer_backward_shape));
  in_place_of(mxnet_forward, "_mpgluon_batch_norm" + suffix, compute,
              old_function(infer_types_with_settings<kData, 4>))
      .set<nnvm::FGradient>("FGradient", gradient_by(mxnet_forward, &backward.op()));
}

}  // namespace batch_normalization
}  // namespace mpgluon

#endif  // MPGLUON_BATCH_NORM_OPERATOR_H_
