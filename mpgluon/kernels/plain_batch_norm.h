// Batch normalization of bfloat16 and FP32 arrays in layouts for which oneDNN has code that is ten to five
// hundred times slower than for blocks of 16 channels: plain arrays, as its convolutions of 24 or 40
// channels leave them, blocks of 4, and for predictions all channels of a pixel side by side. Sums are FP32, in the
// order of lanes.h.
#ifndef MPGLUON_PLAIN_BATCH_NORM_H_
#define MPGLUON_PLAIN_BATCH_NORM_H_

#include "batch_norm_operator.h"

namespace mpgluon {
namespace batch_normalization {

// Call sixteen(i) and one(i) for all places of a channel in a plain array.
template <class Sixteen, class One>
void for_places_of(const Shape& shape, int64_t channel, const Sixteen& sixteen, const One& one) {
  for (int64_t image = 0; image < shape.images; ++image) {
    const int64_t first = (image * shape.channels + channel) * shape.pixels;
    for_row(first, first + shape.pixels, sixteen, one);
  }
}

// Return the sum of of(x...) over a channel; of() takes lanes and numbers.
template <class Of, class... X>
float sum_over(const Shape& shape, int64_t channel, const Of& of, const X*... x) {
  Lanes sums{};
  float rest = 0;
  for_places_of(shape, channel, [&](int64_t i) { sums += of(load(x + i)...); },
                [&](int64_t i) { rest += of(widened(x[i])...); });
  return total(sums) + rest;
}

// Write of(x...) for every place of a channel, or add it.
template <class Y, class Of, class... X>
void write_channel(const Shape& shape, int64_t channel, const Y* before, Y* y, const Of& of,
                   const X*... x) {
  const auto write = [&](const auto& sixteen, const auto& one) {
    for_places_of(shape, channel, sixteen, one);
  };
  if (before == nullptr)
    write([&](int64_t i) { store(y + i, of(load(x + i)...)); },
          [&](int64_t i) { put(y + i, of(widened(x[i])...)); });
  else
    write([&](int64_t i) { store(y + i, load(before + i) + of(load(x + i)...)); },
          [&](int64_t i) { put(y + i, widened(before[i]) + of(widened(x[i])...)); });
}

// Normalize with known means, pixel by pixel, where so many channels of one lie side by side.
template <class X>
void normalize_pixels(const Shape& shape, int64_t layout, const float* means, const float* scales,
                      const float* shifts, const X* x, X* y) {
  const int64_t blocks = shape.channels / layout;
  in_parallel(shape.images * blocks * shape.pixels, [&](int64_t place) {
    const int64_t first = place / shape.pixels % blocks * layout, at = place * layout;
    const float *mean = means + first, *scale = scales + first, *shift = shifts + first;
    for_row(0, layout,
            [&](int64_t i) {
              store(y + at + i, (load(x + at + i) - load(mean + i)) * load(scale + i) + load(shift + i));
            },
            [&](int64_t i) { put(y + at + i, (widened(x[at + i]) - mean[i]) * scale[i] + shift[i]); });
  });
}

template <class X>
void plain_forward(const Settings& settings, bool of_batch, const Arrays& in, const Arrays& out) {
  const int layout = of_batch ? 1 : std::max(1, layout_of(in[kData]));
  const NDArray data = in_layout<X>(in[kData], layout);
  const Shape shape = shape_of(data);
  const X* x = elements_of<const X>(data);
  X* y = room_in<X>(out[kOut], layout);
  std::vector<float> scales(shape.channels);
  float *gammas = values(in[kGamma]), *betas = values(in[kBeta]);
  float *means = values(out[kMean]), *inverses = values(out[kInvStd]);
  const float *moving_mean = values(in[kMovingMean]), *moving_var = values(in[kMovingVar]);
  const float count = shape.images * shape.pixels, eps = settings.eps;
  in_parallel(shape.channels, [&](int64_t c) {
    float mean = moving_mean[c], variance = moving_var[c];
    if (of_batch) {
      mean = sum_over(shape, c, [](auto x) { return x; }, x) / count;
      variance = sum_over(shape, c, [mean](auto x) { return (x - mean) * (x - mean); }, x) / count;
    }
    if (settings.fix_gamma) gammas[c] = 1;
    const float scale = gammas[c] / std::sqrt(variance + eps), shift = betas[c];
    const X* nothing = nullptr;
    if (layout == 1)
      write_channel(shape, c, nothing, y, [=](auto x) { return (x - mean) * scale + shift; }, x);
    scales[c] = scale, means[c] = mean;
    inverses[c] = inverse_deviation(variance, settings.eps);
  });
  if (layout > 1) normalize_pixels(shape, layout, means, scales.data(), betas, x, y);
}

// Statistics are those of the batch.
template <class X>
void plain_backward(const Settings& settings, const Arrays& in, const Requests& req,
                    const Arrays& out) {
  const NDArray data = plain(in[kSavedData]), gradient = plain(in[kOutGrad]);
  const NDArray before = req[0] == mxnet::kAddTo ? plain(out[0]) : out[0];
  const Shape shape = shape_of(data);
  const X *x = elements_of<const X>(data), *dy = elements_of<const X>(gradient);
  const X* old = req[0] == mxnet::kAddTo ? elements_of<const X>(before) : nullptr;
  X* dx = req[0] == mxnet::kNullOp ? nullptr : room_in<X>(out[0], 1);
  const float *means = values(in[kSavedMean]), *inverses = values(in[kSavedInvStd]);
  const float* gammas = values(in[kSavedGamma]);
  float *moving_mean = values(in[kOldMean]), *moving_var = values(in[kOldVar]);
  float *dgammas = values(out[1]), *dbetas = values(out[2]);
  const float count = shape.images * shape.pixels, kept = settings.momentum, rest = 1.0f - kept;
  in_parallel(shape.channels, [&](int64_t c) {
    const float mean = means[c], variance = variance_of(inverses[c], settings.eps);
    const float inverse = 1.0f / std::sqrt(variance + static_cast<float>(settings.eps));
    const float dbeta = sum_over(shape, c, [](auto dy) { return dy; }, dy);
    const float dgamma =
        sum_over(shape, c, [=](auto x, auto dy) { return (x - mean) * dy; }, x, dy) * inverse;
    moving_mean[c] = moving_mean[c] * kept + mean * rest;
    moving_var[c] = moving_var[c] * kept + variance * rest;
    if (dx != nullptr) {
      const float scale = (settings.fix_gamma ? 1 : gammas[c]) * inverse;
      const float of_mean = dbeta / count, of_deviation = dgamma * inverse / count;
      write_channel(shape, c, old, dx, [=](auto x, auto dy) {
        return (dy - of_mean - (x - mean) * of_deviation) * scale;
      }, x, dy);
    }
    write_number(req[1], dgammas + c, settings.fix_gamma ? 0 : dgamma);
    write_number(req[2], dbetas + c, dbeta);
  });
}

// Return the options of MXNet's operator: graphs of few nodes lose the names of these.
inline Settings options_of(const NodeAttrs& attrs) {
  return Settings(double_option(attrs, "eps", 1e-3), double_option(attrs, "momentum", 0.9f),
                  flag_option(attrs, "fix_gamma", true),
                  flag_option(attrs, "use_global_stats", false));
}

// Whether arrays are such that oneDNN is slow, and in a type that is read here.
inline bool is_for_plain(const NDArray& data) {
  const bool known = data.dtype() == mshadow::kFloat32 || data.dtype() == mshadow::kBfloat16;
  return known && data.shape().ndim() == 4 && data.shape().Size() > 0 && layout_of(data) != kLanes;
}

inline void plain_batch_norm(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                             const Arrays& in, const Requests& req, const Arrays& out) {
  const Settings settings = options_of(attrs);
  if (!is_for_plain(in[kData]) || req[kOut] == mxnet::kAddTo || req[kOut] == mxnet::kNullOp)
    return call(op, attrs, ctx, in, req, out);
  const bool of_batch = ctx.is_train && !settings.use_global_stats;
  if (in[kData].dtype() == mshadow::kBfloat16) plain_forward<uint16_t>(settings, of_batch, in, out);
  else plain_forward<float>(settings, of_batch, in, out);
}

inline void plain_batch_norm_backward(const nnvm::Op* op, const NodeAttrs& attrs,
                                      const OpContext& ctx, const Arrays& in, const Requests& req,
                                      const Arrays& out) {
  const Settings settings = options_of(attrs);
  if (!is_for_plain(in[kSavedData]) || !ctx.is_train || settings.use_global_stats)
    return call(op, attrs, ctx, in, req, out);
  if (in[kSavedData].dtype() == mshadow::kBfloat16) plain_backward<uint16_t>(settings, in, req, out);
  else plain_backward<float>(settings, in, req, out);
}

inline void register_plain_batch_norm() {
  in_places_of("BatchNorm", "_mpgluon_any_layout_", plain_batch_norm, plain_batch_norm_backward);
}

}  // namespace batch_normalization
}  // namespace mpgluon

#endif  // MPGLUON_PLAIN_BATCH_NORM_H_
