// A number for each channel of images, as squeeze-and-excitation has it: the average of the pixels, (N, C, 1, 1), and the
// product of the images, (N, C, H, W), with such numbers; FP32, in the layout of the images. MXNet's gradient of the
// numbers takes one element at a time, and its average too. Sums are FP32, in the order of lanes.h.
#ifndef MPGLUON_CHANNELS_H_
#define MPGLUON_CHANNELS_H_

#include "common.h"

namespace mpgluon {
namespace channels {

enum { kImages, kNumbers };              // operands, and the results of the backward pass
enum { kOutGrad, kOfImages, kOfNumbers };  // operands of the backward pass

// Whether the operator is computed here; MXNet's computes all others.
inline bool is_known(const NDArray& images, const NDArray& numbers) {
  const auto &all = images.shape(), &few = numbers.shape();
  if (images.dtype() != mshadow::kFloat32 || all.ndim() != 4 || few.ndim() != 4) return false;
  return all.Size() > 0 && few[0] == all[0] && few[1] == all[1] && few[2] == 1 && few[3] == 1;
}

// Call channel(start, at) for each channel of plain images, or block(start, at) for each block of channels: the place
// of the first pixel and that of the number, or of the first number.
template <class Channel, class Block>
void for_each(const mxnet::TShape& shape, int layout, const Channel& channel, const Block& block) {
  const int64_t pixels = shape[2] * shape[3];
  in_parallel(shape[0] * shape[1] / layout, [&](int64_t i) {
    if (layout > 1) block(i * layout * pixels, i * layout);
    else channel(i * pixels, i);
  });
}

// Write of(number, x...) for every pixel.
template <class Of, class... X>
void write_pixels(const mxnet::TShape& shape, int layout, const float* numbers, float* y, const Of& of,
                  const X*... x) {
  const int64_t pixels = shape[2] * shape[3];
  const auto write = [&](int64_t first, int64_t count, const auto& sixteen, const auto& one) {
    for_row(0, count, [&](int64_t i) { store(y + first + i, of(sixteen(i), load(x + first + i)...)); },
            [&](int64_t i) { y[first + i] = of(one(i), x[first + i]...); });
  };
  for_each(shape, layout,
           [&](int64_t start, int64_t at) {
             const Lanes sixteen = lanes_of(numbers[at]);
             write(start, pixels, [&](int64_t) { return sixteen; }, [&](int64_t) { return numbers[at]; });
           },
           [&](int64_t start, int64_t at) {
             for (int64_t pixel = 0; pixel < pixels; ++pixel)
               write(start + pixel * layout, layout, [&](int64_t i) { return load(numbers + at + i); },
                     [&](int64_t i) { return numbers[at + i]; });
           });
}

// Write, for each channel, the sum of of(x...) over its pixels.
template <class Of, class... X>
void sum_pixels(const mxnet::TShape& shape, int layout, float* sums, const Of& of, const X*... x) {
  const int64_t pixels = shape[2] * shape[3];
  for_each(shape, layout,
           [&](int64_t start, int64_t at) {
             Lanes sixteen{};
             float rest = 0;
             for_row(start, start + pixels, [&](int64_t i) { sixteen += of(load(x + i)...); },
                     [&](int64_t i) { rest += of(x[i]...); });
             sums[at] = total(sixteen) + rest;
           },
           [&](int64_t start, int64_t at) {
             const int64_t end = start + pixels * layout;
             for_row(0, layout,
                     [&](int64_t c) {
                       Lanes sixteen{};
                       for (int64_t i = start + c; i < end; i += layout) sixteen += of(load(x + i)...);
                       store(sums + at + c, sixteen);
                     },
                     [&](int64_t c) {
                       float sum = 0;
                       for (int64_t i = start + c; i < end; i += layout) sum += of(x[i]...);
                       sums[at + c] = sum;
                     });
           });
}

const auto product = [](auto x, auto y) { return x * y; };

inline void forward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                    const Arrays& in, const Requests& req, const Arrays& out) {
  if (!is_known(in[kImages], in[kNumbers])) return call(op, attrs, ctx, in, req, out);
  const int layout = std::max(1, layout_of(in[kImages]));
  const NDArray images = in_layout<float>(in[kImages], layout), numbers = plain(in[kNumbers]);
  write_in<float>(layout, req[0], out[0], [&](float* y) {
    write_pixels(images.shape(), layout, address(numbers), y, product, address(images));
  });
}

inline void backward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                     const Arrays& in, const Requests& req, const Arrays& out) {
  if (!is_known(in[kOfImages], in[kOfNumbers])) return call(op, attrs, ctx, in, req, out);
  const int layout_of_gradient = layout_of(in[kOutGrad]);
  const int layout = layout_of_gradient == layout_of(in[kOfImages]) ? std::max(1, layout_of_gradient) : 1;
  const NDArray gradient = in_layout<float>(in[kOutGrad], layout);
  const NDArray images = in_layout<float>(in[kOfImages], layout), numbers = plain(in[kOfNumbers]);
  const auto& shape = images.shape();
  // The sums first: the other result may take the place of an operand.
  write_in<float>(1, req[kNumbers], out[kNumbers], [&](float* sums) {
    sum_pixels(shape, layout, sums, product, address(gradient), address(images));
  });
  write_in<float>(layout, req[kImages], out[kImages], [&](float* dx) {
    write_pixels(shape, layout, address(numbers), dx, product, address(gradient));
  });
}

// ---- The average. The graph has such nodes only for averages of all pixels.

inline bool is_known(const NDArray& images) {
  return images.dtype() == mshadow::kFloat32 && images.shape().ndim() == 4 && images.shape().Size() > 0;
}

inline void average(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                    const Arrays& in, const Requests& req, const Arrays& out) {
  if (!is_known(in[0])) return call(op, attrs, ctx, in, req, out);
  const int layout = std::max(1, layout_of(in[0]));
  const NDArray images = in_layout<float>(in[0], layout);
  const auto& shape = images.shape();
  const float count = shape[2] * shape[3];
  write_in<float>(1, req[0], out[0], [&](float* means) {
    sum_pixels(shape, layout, means, [](auto x) { return x; }, address(images));
    for (int64_t i = 0; i < shape[0] * shape[1]; ++i) means[i] /= count;
  });
}

// The gradient has the layout of the images, as others that it is added to.
inline void average_backward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                             const Arrays& in, const Requests& req, const Arrays& out) {
  if (!is_known(in[1])) return call(op, attrs, ctx, in, req, out);
  const auto& shape = in[1].shape();
  const NDArray gradient = plain(in[0]);
  const float count = shape[2] * shape[3];
  std::vector<float> numbers(address(gradient), address(gradient) + shape[0] * shape[1]);
  for (float& number : numbers) number /= count;
  const int layout = std::max(1, layout_of(in[1]));
  write_in<float>(layout, req[0], out[0], [&](float* dx) {
    write_pixels(shape, layout, numbers.data(), dx, [](auto number) { return number; });
  });
}

inline void register_channels() {
  in_places_of("broadcast_mul", "_mpgluon_any_layout_", forward, backward);
  in_places_of("Pooling", "_mpgluon_any_layout_", average, average_backward);
}

}  // namespace channels
}  // namespace mpgluon

#endif  // MPGLUON_CHANNELS_H_
