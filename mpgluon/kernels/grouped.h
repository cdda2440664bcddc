// Convolutions of bfloat16 arrays in groups: depthwise ones, and of others with 2, 4 or 8 channels a group the
// gradient of the weight. oneDNN computes many by a matrix product for each group: the gradients of 5 x 5 depthwise
// ones, of strided ones without a margin, of 4 channels a group; and all of depthwise.h. Here sixteen channels are
// computed at a time; the sums are FP32, in an order that depends on no number of threads.
#ifndef MPGLUON_GROUPED_H_
#define MPGLUON_GROUPED_H_

#include "common.h"
#include "depthwise.h"

namespace mpgluon {
namespace grouped {

enum { kOutGrad, kData, kWeight };  // operands of the backward pass
enum { kOfData, kOfWeight };        // its results

// Write the gradient of a weight (channels, kGroup, kSize, kSize), for groups of kGroup channels.
template <int kSize, int kGroup>
void weight_gradient(const Window& at, const uint16_t* x, const uint16_t* dy, float* dw) {
  const int64_t blocks = at.channels / kLanes;
  const int64_t reach = (at.columns - 1) * at.stride[2] + kSize;  // of a row with its margin
  in_parallel(blocks * kSize, [&](int64_t job) {
    const int64_t block = job / kSize, row_of_kernel = job % kSize;
    Lanes sums[kSize][kGroup] = {};
    // Of each channel of a group, in the lanes of all channels of that group; zero in the margin.
    std::vector<float> rows(kGroup * reach * kLanes);
    for (int64_t image = 0; image < at.images; ++image)
      for (int64_t row = 0; row < at.rows; ++row) {
        const int64_t from = row * at.stride[1] - at.pad[1] + row_of_kernel;
        if (from < 0 || from >= at.height) continue;
        const uint16_t* line = x + ((image * blocks + block) * at.height + from) * at.width * kLanes;
        const int64_t last = std::min(at.width, reach - at.pad[2]);
        for (int64_t i = 0; i < last; ++i) {
          float numbers[kLanes];
          store(numbers, load(line + i * kLanes));
          for (int j = 0; j < kGroup; ++j) {
            float spread[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) spread[lane] = numbers[lane / kGroup * kGroup + j];
            std::memcpy(&rows[(j * reach + at.pad[2] + i) * kLanes], spread, sizeof spread);
          }
        }
        const uint16_t* gradients =
            dy + ((image * blocks + block) * at.rows + row) * at.columns * kLanes;
        for (int64_t column = 0; column < at.columns; ++column) {
          const Lanes gradient = load(gradients + column * kLanes);
          const float* first = &rows[column * at.stride[2] * kLanes];
          for (int k = 0; k < kSize; ++k)
            for (int j = 0; j < kGroup; ++j)
              sums[k][j] += gradient * load(first + (j * reach + k) * kLanes);
        }
      }
    for (int lane = 0; lane < kLanes; ++lane)
      for (int j = 0; j < kGroup; ++j)
        for (int k = 0; k < kSize; ++k) {
          const int64_t filter = (block * kLanes + lane) * kGroup + j;
          dw[(filter * kSize + row_of_kernel) * kSize + k] = sums[k][j][lane];
        }
  });
}

using Function = void (*)(const Window&, const uint16_t*, const uint16_t*, float*);

inline Function function_for(int64_t size, int64_t group) {
  const auto is = [=](int64_t one, int64_t other) { return size == one && group == other; };
  if (is(3, 1)) return weight_gradient<3, 1>;
  if (is(5, 1)) return weight_gradient<5, 1>;
  if (is(7, 1)) return weight_gradient<7, 1>;
  if (is(3, 2)) return weight_gradient<3, 2>;
  if (is(3, 4)) return weight_gradient<3, 4>;
  if (is(3, 8)) return weight_gradient<3, 8>;
  return nullptr;
}

// Write FP32 numbers to a plain array of bfloat16, or add them to it.
inline void write_rounded(const std::vector<float>& made, OpReqType req, const NDArray& out) {
  const NDArray before = req == mxnet::kAddTo ? plain(out) : out;
  const uint16_t* old = elements_of<const uint16_t>(before);
  uint16_t* to = room_in<uint16_t>(out, 1);
  for (size_t i = 0; i < made.size(); ++i)
    put(to + i, req == mxnet::kAddTo ? widened(old[i]) + made[i] : made[i]);
}

// Whether a convolution is of bfloat16 images, has as many channels as they have, and a square kernel without gaps.
inline bool is_known(const NodeAttrs& attrs, const NDArray& x, const NDArray& weight, const NDArray& y) {
  const auto &data = x.shape(), &kernel = weight.shape();
  if (x.dtype() != mshadow::kBfloat16 || data.ndim() != 4 || data.Size() == 0) return false;
  const Sizes dilate = sizes_of(attrs, "dilate", 2, 1);
  return data[1] == y.shape()[1] && kernel[2] == kernel[3] && dilate[1] == 1 && dilate[2] == 1;
}

// Compute the gradient of the weight; return whether it can be computed here.
inline bool of_weight(const NodeAttrs& attrs, const Arrays& in, OpReqType req, const NDArray& out) {
  if (!is_known(attrs, in[kData], in[kWeight], in[kOutGrad])) return false;
  const auto& weight = in[kWeight].shape();
  const Function compute = function_for(weight[2], weight[1]);
  if (compute == nullptr || in[kData].shape()[1] % kLanes != 0) return false;
  const NDArray x = in_layout<uint16_t>(in[kData], kLanes);
  const NDArray dy = in_layout<uint16_t>(in[kOutGrad], kLanes);
  std::vector<float> made(weight.Size());
  compute(window_of(attrs, x, dy), elements_of<const uint16_t>(x), elements_of<const uint16_t>(dy),
          made.data());
  write_rounded(made, req, out);
  return true;
}

// ---- Depthwise convolutions whose channels are no multiple of sixteen.

// The functions for a convolution, or none where MXNet computes it.
inline depthwise::Functions functions_of(const NodeAttrs& attrs, const NDArray& x,
                                         const NDArray& weight, const NDArray& y) {
  if (!is_known(attrs, x, weight, y) || x.shape()[1] % kLanes == 0 || weight.shape()[1] != 1) return {};
  return depthwise::functions_for(weight.shape()[2]);
}

inline void forward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                    const Arrays& in, const Requests& req, const Arrays& out) {
  const auto functions = functions_of(attrs, in[0], in[1], out[0]);
  if (functions.convolve == nullptr || in.size() > 2) return call(op, attrs, ctx, in, req, out);
  const NDArray x = plain(in[0]), weight = plain(in[1]);
  write_in<uint16_t>(1, req[0], out[0], [&](uint16_t* y) {
    functions.convolve(window_of(attrs, x, out[0]), elements_of<const uint16_t>(x),
                       elements_of<const uint16_t>(weight), y);
  });
}

// Compute both gradients; return whether they can be computed here.
inline bool both_gradients(const NodeAttrs& attrs, const Arrays& in, const Requests& req,
                           const Arrays& out) {
  const auto functions = functions_of(attrs, in[kData], in[kWeight], in[kOutGrad]);
  if (functions.convolve == nullptr) return false;
  const NDArray x = plain(in[kData]), weight = plain(in[kWeight]), gradient = plain(in[kOutGrad]);
  const Window window = window_of(attrs, x, gradient);
  const uint16_t* dy = elements_of<const uint16_t>(gradient);
  if (req[kOfWeight] != mxnet::kNullOp) {
    std::vector<float> made(weight.shape().Size());
    functions.weight_gradient(window, elements_of<const uint16_t>(x), dy, made.data());
    write_rounded(made, req[kOfWeight], out[kOfWeight]);
  }
  write_in<uint16_t>(1, req[kOfData], out[kOfData], [&](uint16_t* dx) {
    functions.data_gradient(window, dy, elements_of<const uint16_t>(weight), dx);
  });
  return true;
}

inline void backward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                     const Arrays& in, const Requests& req, const Arrays& out) {
  const bool has_bias = req.size() > kOfWeight + 1;  // MXNet makes its gradient with the weight's
  if (has_bias) return call(op, attrs, ctx, in, req, out);
  if (both_gradients(attrs, in, req, out)) return;
  const bool wanted = req[kOfWeight] != mxnet::kNullOp;
  if (!wanted || !of_weight(attrs, in, req[kOfWeight], out[kOfWeight]))
    return call(op, attrs, ctx, in, req, out);
  if (req[kOfData] != mxnet::kNullOp)
    call(op, attrs, ctx, in, {req[kOfData], mxnet::kNullOp}, out);
}

inline void register_grouped() {
  in_places_of("Convolution", "_mpgluon_grouped_", forward, backward);
}

}  // namespace grouped
}  // namespace mpgluon

#endif  // MPGLUON_GROUPED_H_
