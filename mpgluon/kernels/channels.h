// The product of images with a number for each of their channels, as squeeze-and-excitation has it: (N, C, H, W)
// times (N, C, 1, 1), FP32, in the layout of the images. MXNet's gradient of the numbers takes one element
// at a time. Sums are FP32, in the order of lanes.h.
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

// Call channel(start, numbers) for each channel of plain images, or block(start, numbers) for each block of 16: the
// place of the first pixel and that of the number, or of the 16 numbers.
template <class Channel, class Block>
void for_each(const mxnet::TShape& shape, int layout, const Channel& channel, const Block& block) {
  const int64_t pixels = shape[2] * shape[3];
  in_parallel(shape[0] * shape[1] / layout, [&](int64_t i) {
    if (layout == kLanes) block(i * kLanes * pixels, i * kLanes);
    else channel(i * pixels, i);
  });
}

// Write the images times the numbers.
inline void multiply(const NDArray& images, const float* numbers, int layout, float* y) {
  const float* x = address(images);
  const int64_t pixels = images.shape()[2] * images.shape()[3];
  for_each(images.shape(), layout,
           [=](int64_t start, int64_t at) {
             const float number = numbers[at];
             for (int64_t i = start; i < start + pixels; ++i) y[i] = x[i] * number;
           },
           [=](int64_t start, int64_t at) {
             const Lanes sixteen = load(numbers + at);
             for (int64_t i = start; i < start + pixels * kLanes; i += kLanes)
               store(y + i, load(x + i) * sixteen);
           });
}

// Write, for each channel, the sum of the products of two arrays of images.
inline void sum_products(const NDArray& images, const NDArray& others, int layout, float* sums) {
  const float *x = address(images), *y = address(others);
  const int64_t pixels = images.shape()[2] * images.shape()[3];
  for_each(images.shape(), layout,
           [=](int64_t start, int64_t at) {
             Lanes sixteen{};
             float rest = 0;
             for_row(start, start + pixels, [&](int64_t i) { sixteen += load(x + i) * load(y + i); },
                     [&](int64_t i) { rest += x[i] * y[i]; });
             sums[at] = total(sixteen) + rest;
           },
           [=](int64_t start, int64_t at) {
             Lanes sixteen{};
             for (int64_t i = start; i < start + pixels * kLanes; i += kLanes)
               sixteen += load(x + i) * load(y + i);
             store(sums + at, sixteen);
           });
}

inline void forward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                    const Arrays& in, const Requests& req, const Arrays& out) {
  if (!is_known(in[kImages], in[kNumbers])) return call(op, attrs, ctx, in, req, out);
  const int layout = layout_of(in[kImages]) == kLanes ? kLanes : 1;
  const NDArray images = layout == kLanes ? in[kImages] : plain(in[kImages]);
  const NDArray numbers = plain(in[kNumbers]);
  write_in<float>(layout, req[0], out[0],
                            [&](float* y) { multiply(images, address(numbers), layout, y); });
}

inline void backward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                     const Arrays& in, const Requests& req, const Arrays& out) {
  if (!is_known(in[kOfImages], in[kOfNumbers])) return call(op, attrs, ctx, in, req, out);
  const bool in_blocks = layout_of(in[kOutGrad]) == kLanes && layout_of(in[kOfImages]) == kLanes;
  const int layout = in_blocks ? kLanes : 1;
  const NDArray gradient = in_blocks ? in[kOutGrad] : plain(in[kOutGrad]);
  const NDArray images = in_blocks ? in[kOfImages] : plain(in[kOfImages]);
  const NDArray numbers = plain(in[kOfNumbers]);
  // The sums first: the other result may take the place of an operand.
  write_in<float>(1, req[kNumbers], out[kNumbers],
                            [&](float* sums) { sum_products(gradient, images, layout, sums); });
  write_in<float>(layout, req[kImages], out[kImages],
                            [&](float* dx) { multiply(gradient, address(numbers), layout, dx); });
}

inline void register_channels() {
  in_places_of("broadcast_mul", "_mpgluon_any_layout_", forward, backward);
}

}  // namespace channels
}  // namespace mpgluon

#endif  // MPGLUON_CHANNELS_H_
