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
enum { kOutGrad, kSavedMean, kSavedInvStd, kSavedData, kSavedGamma, kSavedBeta, kOldMean, kOldVar };

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

  Settings(double eps, float momentum, bool fix_gamma, bool use_global_stats)
      : eps(eps), momentum(momentum), fix_gamma(fix_gamma), use_global_stats(use_global_stats) {}
};

float inverse_deviation(float variance, double eps) {
  return 1.0 / std::sqrt(variance + static_cast<float>(eps));
}
float variance_of(float inverse, double eps) { return 1.0 / (inverse * inverse) - eps; }

Shape shape_of(const NDArray& array) {
  const auto& shape = array.shape();
  return {shape[0], shape[1], static_cast<int64_t>(shape.ProdShape(2, shape.ndim()))};
}

inline void write_number(OpReqType req, float* to, float value) {
  if (req == mxnet::kAddTo) *to += value;
  else if (req != mxnet::kNullOp) *to = value;
}

float* values(const NDArray& array) { return array.data().dptr<float>(); }

// Two sums for each channel: mean and variance, or the gradients of gamma and beta.
struct Sums {
  std::vector<float> one, other;

  explicit Sums(int64_t channels) : one(channels), other(channels) {}
  Sums(const NDArray& one, const NDArray& other, int64_t channels)
      : one(values(one), values(one) + channels), other(values(other), values(other) + channels) {}

  bool same_bits(const Sums& theirs, size_t channel) const {
    return std::memcmp(&one[channel], &theirs.one[channel], sizeof(float)) == 0 &&
           std::memcmp(&other[channel], &theirs.other[channel], sizeof(float)) == 0;
  }
};

// For how many of the last channels MXNet's own operator divides the images among the threads, by the
// shape of the data and the number of threads. It depends on the size of caches: so both compute
// until only one answer is left.
class Agreement {
 public:
  static constexpr int64_t kUnknown = -1, kNone = -2;  // none: it adds in yet another order

  int64_t divided(const Shape& shape) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(key(shape));
    return found == known_.end() ? kUnknown : found->second;
  }

  // Compare sums of one part and of one part for each thread with MXNet's.
  void compare(const Shape& shape, const Sums& whole, const Sums& in_parts, const Sums& theirs) {
    const int64_t threads = omp_get_max_threads();
    std::vector<int64_t> answers;
    for (int64_t divided = 0; divided <= shape.channels; ++divided) {
      if (divided >= threads && divided < shape.channels) continue;
      bool same = true;
      for (int64_t c = 0; c < shape.channels; ++c)
        same = same && (c < shape.channels - divided ? whole : in_parts).same_bits(theirs, c);
      if (same) answers.push_back(divided);
    }
    if (answers.size() > 1 && threads > 1) return;
    std::lock_guard<std::mutex> lock(mutex_);
    known_[key(shape)] = answers.empty() ? kNone : answers[0];
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, int>;
  static Key key(const Shape& shape) {
    return Key(shape.images, shape.channels, shape.pixels, omp_get_max_threads());
  }

  std::mutex mutex_;
  std::map<Key, int64_t> known_;
};

// Return sums(group, parts, one, other) of all channels, those of the last ones in parts.
template <class Format, class Function>
Sums sums_of(const Format& format, const Shape& shape, int layout, int64_t divided,
             const Function& sums) {
  Sums made(shape.channels), in_parts(shape.channels);
  if (divided < shape.channels)
    for_groups(format, shape, layout, 0,
               [&](const auto& group) { sums(group, 1, made.one.data(), made.other.data()); });
  if (divided > 0) {
    const int64_t from = shape.channels - divided;
    for_groups(format, shape, layout, from, [&](const auto& group) {
      sums(group, omp_get_max_threads(), in_parts.one.data(), in_parts.other.data());
    });
    std::copy(in_parts.one.begin() + from, in_parts.one.end(), made.one.begin() + from);
    std::copy(in_parts.other.begin() + from, in_parts.other.end(), made.other.begin() + from);
  }
  return made;
}

NDArray copy_of(const NDArray& array) {
  const NDArray made = fresh(array, mshadow::kFloat32);
  std::copy_n(values(array), array.shape().Size(), values(made));
  return made;
}

// Let MXNet's operator compute, on plain FP32 arrays, out[0], which is codes.
template <class Format>
void mxnet_batch_norm(const Format& format, const nnvm::Op* op, const NodeAttrs& attrs,
                      const OpContext& ctx, Arrays in, const Requests& req, Arrays out) {
  const bool twice = holds_codes(in[0]) && in.size() > kSavedData && holds_codes(in[kSavedData]) &&
                     codes_of(in[0]) == codes_of(in[kSavedData]);
  Slot slot = kDataSlot;
  for (NDArray& array : in)
    if (holds_codes(array)) {
      const NDArray packed = array;
      array = scratch(packed, slot);
      unpack_plain(format, packed, array);
      if (!twice) slot = kGradientSlot;
    }
  const NDArray codes = out[0];
  Requests requests = req;
  out[0] = scratch(codes, kResultSlot);
  requests[0] = mxnet::kWriteTo;
  call(op, attrs, ctx, in, requests, out);
  pack(format, out[0], req[0], codes);
}

Agreement forward_agreement, backward_agreement;  // of all formats: of sums before they are rounded

template <class Format>
void batch_norm(const Format& format, const NodeAttrs& attrs, const OpContext& ctx,
                const Arrays& in, const Requests& req, const Arrays& out) {
  const Settings settings(attrs);
  const float eps = settings.eps;
  const int layout = packed_layout(in[kData].shape());
  const Shape shape = shape_of(in[kData]);
  const uint16_t* x = codes_of(in[kData]);
  const auto statistics = [&](const auto& group, int parts, float* mean, float* variance) {
    group.statistics(x, parts, mean, variance);
  };
  const auto inverses = [&](std::vector<float> variance) {
    for (float& one : variance) one = inverse_deviation(one, settings.eps);
    return variance;
  };
  const auto mxnets = [&] {
    mxnet_batch_norm(format, mxnet_forward, attrs, ctx, in, req, out);
  };
  if (in[kData].shape().ndim() != 4 || req[kOut] == mxnet::kAddTo) return mxnets();
  Sums found(in[kMovingMean], in[kMovingVar], shape.channels);
  if (ctx.is_train && !settings.use_global_stats) {
    const int64_t divided = forward_agreement.divided(shape);
    if (divided == Agreement::kNone) return mxnets();
    if (divided == Agreement::kUnknown) {
      Sums whole = sums_of(format, shape, layout, 0, statistics);
      Sums in_parts = sums_of(format, shape, layout, shape.channels, statistics);
      for (Sums* sums : {&whole, &in_parts}) sums->other = inverses(sums->other);
      mxnets();
      return forward_agreement.compare(shape, whole, in_parts,
                                       Sums(out[kMean], out[kInvStd], shape.channels));
    }
    found = sums_of(format, shape, layout, divided, statistics);
  }
  if (settings.fix_gamma) std::fill_n(values(in[kGamma]), shape.channels, 1.0f);
  const float *gamma = values(in[kGamma]), *beta = values(in[kBeta]);
  uint16_t* y = codes_of(out[kOut]);
  for_groups(format, shape, layout, 0, [&](const auto& group) {
    group.normalize(x, found.one.data(), found.other.data(), gamma, beta, eps, y);
  });
  std::copy(found.one.begin(), found.one.end(), values(out[kMean]));
  const std::vector<float> inverse = inverses(found.other);
  std::copy(inverse.begin(), inverse.end(), values(out[kInvStd]));
}

template <class Format>
void batch_norm_backward(const Format& format, const NodeAttrs& attrs, const OpContext& ctx,
                         const Arrays& in, const Requests& req, const Arrays& out) {
  const Settings settings(attrs);
  const float eps = settings.eps;
  const NDArray& data = in[kSavedData];
  const Shape shape = shape_of(data);
  const bool batch_statistics = ctx.is_train && !settings.use_global_stats;
  int64_t divided = data.shape().ndim() == 4 && batch_statistics
                        ? backward_agreement.divided(shape)
                        : Agreement::kNone;
  if (divided == Agreement::kNone)
    return mxnet_batch_norm(format, mxnet_backward, attrs, ctx, in, req, out);
  const int layout = packed_layout(data.shape());
  const uint16_t *x = codes_of(data), *dy = codes_of(in[kOutGrad]);
  const float *mean = values(in[kSavedMean]), *inverse = values(in[kSavedInvStd]);
  std::vector<float> variance(shape.channels);
  for (int64_t c = 0; c < shape.channels; ++c)
    variance[c] = variance_of(inverse[c], settings.eps);
  const auto gradients_of = [&](const uint16_t* dy) {
    return [&, dy](const auto& group, int parts, float* dgamma, float* dbeta) {
      group.sum_gradients(x, dy, parts, mean, variance.data(), eps, dgamma, dbeta);
    };
  };
  if (divided == Agreement::kUnknown) {
    // Of data as its own gradient: real ones may be the same in any order.
    Sums whole = sums_of(format, shape, layout, 0, gradients_of(x));
    Sums in_parts = sums_of(format, shape, layout, shape.channels, gradients_of(x));
    Arrays operands = in, results = out;
    operands[kOutGrad] = data;
    for (int i : {kOldMean, kOldVar}) operands[i] = copy_of(in[i]);
    for (int i : {1, 2}) results[i] = fresh(out[i], mshadow::kFloat32);
    const Requests requests = {mxnet::kNullOp, mxnet::kWriteTo, mxnet::kWriteTo};
    mxnet_batch_norm(format, mxnet_backward, attrs, ctx, operands, requests, results);
    const Sums theirs(results[1], results[2], shape.channels);
    if (settings.fix_gamma) whole.one = in_parts.one = theirs.one;  // MXNet makes none
    backward_agreement.compare(shape, whole, in_parts, theirs);
    divided = backward_agreement.divided(shape);
  }
  if (divided < 0) return mxnet_batch_norm(format, mxnet_backward, attrs, ctx, in, req, out);
  Sums found = sums_of(format, shape, layout, divided, gradients_of(dy));
  const float rest = 1.0f - settings.momentum;
  for (int64_t c = 0; c < shape.channels; ++c) {
    float &moving_mean = values(in[kOldMean])[c], &moving_var = values(in[kOldVar])[c];
    moving_mean = moving_mean * settings.momentum + mean[c] * rest;
    moving_var = moving_var * settings.momentum + variance[c] * rest;
  }
  const std::vector<float> ones(shape.channels, 1.0f);
  const float* gamma = settings.fix_gamma ? ones.data() : values(in[kSavedGamma]);
  write_codes(format, req[0], out[0], [&](uint16_t* dx) {
    for_groups(format, shape, layout, 0, [&](const auto& group) {
      group.gradient_of_data(x, dy, mean, variance.data(), gamma, eps, found.one.data(),
                             found.other.data(), dx);
    });
  });
  if (settings.fix_gamma) std::fill(found.one.begin(), found.one.end(), 0.0f);
  for (int which : {1, 2}) {
    const std::vector<float>& grads = which == 1 ? found.one : found.other;
    float* to = values(out[which]);
    for (int64_t c = 0; c < shape.channels; ++c) write_number(req[which], to + c, grads[c]);
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
      watched(format, [](const auto&... all) { batch_norm_backward(all...); }));
  Operator forward =
      in_place_of(mxnet_forward, "_mpgluon_batch_norm" + suffix,
                  watched(format, [](const auto&... all) { batch_norm(all...); }));
  forward.set<nnvm::FInferType>("FInferType", old_function(infer_types))
      .set<nnvm::FGradient>("FGradient", gradient_by(mxnet_forward, &backward.op()));
}

}  // namespace batch_normalization
}  // namespace mpgluon

#endif  // MPGLUON_BATCH_NORM_OPERATOR_H_
