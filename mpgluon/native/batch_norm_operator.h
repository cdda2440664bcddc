// Batch normalization of packed codes; the result and the gradients of data are packed codes too.
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

// Let MXNet's operator compute, on plain FP32 arrays, the result or gradient out[0] of codes.
template <class Format>
void mxnet_batch_norm(const Format& format, const nnvm::Op* op, const NodeAttrs& attrs,
                      const OpContext& ctx, Arrays in, const Requests& req, Arrays out) {
  for (NDArray& array : in)
    if (holds_codes(array)) {
      const NDArray packed = array;
      array = fresh(packed, mshadow::kFloat32);
      unpack_plain(format, packed, array);
    }
  const NDArray codes = out[0];
  Requests requests = req;
  out[0] = fresh(codes, mshadow::kFloat32);
  requests[0] = mxnet::kWriteTo;
  call(op, attrs, ctx, in, requests, out);
  pack(format, out[0], req[0], codes);
}

Agreement forward_agreement, backward_agreement;  // of all formats: of sums before they are rounded

template <class Format>
void batch_norm(const Format& format, const NodeAttrs& attrs, const OpContext& ctx,
                const Arrays& in, const Requests& req, const Arrays& out) {
  Agreement& agreement = forward_agreement;
  const Settings settings(attrs);
  const float eps = settings.eps;
  const bool batch_statistics = ctx.is_train && !settings.use_global_stats;
  const int layout = packed_layout(in[kData].shape());
  const bool ours = in[kData].shape().ndim() == 4;
  const Shape shape = shape_of(in[kData]);
  const uint16_t* x = codes_of(in[kData]);
  std::vector<float> mean(shape.channels), variance(shape.channels), inverse(shape.channels);
  Agreement::Answer same = ours && req[kOut] != mxnet::kAddTo ? Agreement::kYes : Agreement::kNo;
  if (same == Agreement::kYes && batch_statistics) {
    same = agreement.answer(shape);
    if (same != Agreement::kNo)
      for_groups(format, shape, layout, [&](const auto& group) {
        group.statistics(x, mean.data(), variance.data());
      });
  } else {
    mean.assign(values(in[kMovingMean]), values(in[kMovingMean]) + shape.channels);
    variance.assign(values(in[kMovingVar]), values(in[kMovingVar]) + shape.channels);
  }
  for (int64_t c = 0; c < shape.channels; ++c)
    inverse[c] = inverse_deviation(variance[c], settings.eps);
  if (same != Agreement::kYes) {
    mxnet_batch_norm(format, mxnet_forward, attrs, ctx, in, req, out);
    if (same == Agreement::kUnknown)
      agreement.note(shape, same_bits(mean, out[kMean]) && same_bits(inverse, out[kInvStd]));
    return;
  }
  if (settings.fix_gamma) std::fill_n(values(in[kGamma]), shape.channels, 1.0f);
  const float *gamma = values(in[kGamma]), *beta = values(in[kBeta]);
  uint16_t* y = codes_of(out[kOut]);
  for_groups(format, shape, layout, [&](const auto& group) {
    group.normalize(x, mean.data(), variance.data(), gamma, beta, eps, y);
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
  const NDArray& data = in[kSavedData];
  const Shape shape = shape_of(data);
  const bool batch_statistics = ctx.is_train && !settings.use_global_stats;
  const bool ours = data.shape().ndim() == 4 && batch_statistics;
  const Agreement::Answer same = ours ? agreement.answer(shape) : Agreement::kNo;
  if (same == Agreement::kNo)
    return mxnet_batch_norm(format, mxnet_backward, attrs, ctx, in, req, out);
  const int layout = packed_layout(data.shape());
  const uint16_t *x = codes_of(data), *dy = codes_of(in[kOutGrad]);
  const float *mean = values(in[kSavedMean]), *inverse = values(in[kSavedInvStd]);
  std::vector<float> variance(shape.channels), dgamma(shape.channels), dbeta(shape.channels);
  std::vector<float> moving_mean(shape.channels), moving_var(shape.channels);
  const float rest = 1.0f - settings.momentum;
  for (int64_t c = 0; c < shape.channels; ++c) {
    variance[c] = variance_of(inverse[c], settings.eps);
    moving_mean[c] = values(in[kOldMean])[c] * settings.momentum + mean[c] * rest;
    moving_var[c] = values(in[kOldVar])[c] * settings.momentum + variance[c] * rest;
  }
  for_groups(format, shape, layout, [&](const auto& group) {
    group.sum_gradients(x, dy, mean, variance.data(), eps, dgamma.data(), dbeta.data());
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
  } else {
    std::copy(moving_mean.begin(), moving_mean.end(), values(in[kOldMean]));
    std::copy(moving_var.begin(), moving_var.end(), values(in[kOldVar]));
    const std::vector<float> ones(shape.channels, 1.0f);
    const float* gamma = settings.fix_gamma ? ones.data() : values(in[kSavedGamma]);
    const bool adds = req[0] == mxnet::kAddTo;
    const NDArray dx = adds ? fresh(out[0], mshadow::kFloat16) : out[0];
    if (req[0] != mxnet::kNullOp)
      for_groups(format, shape, layout, [&](const auto& group) {
        group.gradient_of_data(x, dy, mean, variance.data(), gamma, eps, dgamma.data(),
                               dbeta.data(), codes_of(dx));
      });
    if (adds)
      add_codes(format, codes_of(out[0]), codes_of(dx), dx.shape().Size(), codes_of(out[0]));
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

bool infer_types(const NodeAttrs& attrs, std::vector<int>* in, std::vector<int>* out) {
  Settings{attrs};  // a node without them is refused before it computes
  std::fill(in->begin(), in->end(), mshadow::kFloat32);
  std::fill(out->begin(), out->end(), mshadow::kFloat32);
  in->at(kData) = out->at(kOut) = mshadow::kFloat16;
  return true;
}

template <class Format>
void register_batch_norm(const Format& format, const std::string& suffix) {
  mxnet_forward = nnvm::Op::Get("BatchNorm");
  mxnet_backward = nnvm::Op::Get("_backward_BatchNorm");
  Operator backward = in_place_of(
      mxnet_backward, "_mpgluon_batch_norm_backward" + suffix,
      [format](const auto&... all) { batch_norm_backward(format, all...); });
  Operator forward = in_place_of(mxnet_forward, "_mpgluon_batch_norm" + suffix,
                                 [format](const auto&... all) { batch_norm(format, all...); });
  forward.set<nnvm::FInferType>("FInferType", old_function(infer_types))
      .set<nnvm::FGradient>("FGradient", gradient_by(mxnet_forward, &backward.op()));
}

}  // namespace batch_normalization
}  // namespace mpgluon

#endif  // MPGLUON_BATCH_NORM_OPERATOR_H_
