// The gradient of the weight of convolutions of bfloat16 arrays in groups of 1, 2, 4 or 8 channels. oneDNN computes
// many of them by a matrix product for each group: of 5 x 5 depthwise ones, of strided ones without a
// margin, of 4 channels a group. Here sixteen channels are computed at a time; the sums are FP32, in an order that
// depends on no number of threads.
#ifndef MPGLUON_GROUPED_H_
#define MPGLUON_GROUPED_H_

#include "common.h"

namespace mpgluon {
namespace grouped {

enum { kOutGrad, kData, kWeight };  // operands of the backward pass
enum { kOfData, kOfWeight };        // its results

// A convolution of (images, 16 * blocks, height, width), whose result has so many rows and columns.
struct Window {
  int64_t images, blocks, height, width, rows, columns;
  Sizes stride, pad;  // in their last two places
};

// Write the gradient of a weight (channels, kGroup, kSize, kSize), for groups of kGroup channels.
template <int kSize, int kGroup>
void weight_gradient(const Window& at, const uint16_t* x, const uint16_t* dy, float* dw) {
  const int64_t reach = (at.columns - 1) * at.stride[2] + kSize;  // of a row with its margin
  in_parallel(at.blocks * kSize, [&](int64_t job) {
    const int64_t block = job / kSize, row_of_kernel = job % kSize;
    Lanes sums[kSize][kGroup] = {};
    // Of each channel of a group, in the lanes of all channels of that group; zero in the margin.
    std::vector<float> rows(kGroup * reach * kLanes);
    for (int64_t image = 0; image < at.images; ++image)
      for (int64_t row = 0; row < at.rows; ++row) {
        const int64_t from = row * at.stride[1] - at.pad[1] + row_of_kernel;
        if (from < 0 || from >= at.height) continue;
        const uint16_t* line = x + ((image * at.blocks + block) * at.height + from) * at.width * kLanes;
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
            dy + ((image * at.blocks + block) * at.rows + row) * at.columns * kLanes;
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

// Compute the gradient of the weight; return whether it can be computed here.
inline bool of_weight(const NodeAttrs& attrs, const Arrays& in, OpReqType req, const NDArray& out) {
  const auto &data = in[kData].shape(), &result = in[kOutGrad].shape(), &weight = in[kWeight].shape();
  if (in[kData].dtype() != mshadow::kBfloat16 || data.ndim() != 4 || data.Size() == 0) return false;
  if (data[1] != result[1] || data[1] % kLanes != 0 || weight[2] != weight[3]) return false;
  const Function compute = function_for(weight[2], weight[1]);
  const Sizes dilate = sizes_of(attrs, "dilate", 2, 1);
  if (compute == nullptr || dilate[1] != 1 || dilate[2] != 1) return false;
  const NDArray x = in_layout<uint16_t>(in[kData], kLanes);
  const NDArray dy = in_layout<uint16_t>(in[kOutGrad], kLanes);
  const NDArray before = req == mxnet::kAddTo ? plain(out) : out;
  std::vector<float> made(weight.Size());
  compute({data[0], data[1] / kLanes, data[2], data[3], result[2], result[3],
           sizes_of(attrs, "stride", 2, 1), sizes_of(attrs, "pad", 2, 0)},
          elements_of<const uint16_t>(x), elements_of<const uint16_t>(dy),
          made.data());
  const uint16_t* old = elements_of<const uint16_t>(before);
  uint16_t* to = room_in<uint16_t>(out, 1);
  for (size_t i = 0; i < made.size(); ++i)
    put(to + i, req == mxnet::kAddTo ? widened(old[i]) + made[i] : made[i]);
  return true;
}

inline void backward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                     const Arrays& in, const Requests& req, const Arrays& out) {
  const bool has_bias = req.size() > kOfWeight + 1;  // MXNet makes its gradient with the weight's
  const bool wanted = !has_bias && req[kOfWeight] != mxnet::kNullOp;
  if (!wanted || !of_weight(attrs, in, req[kOfWeight], out[kOfWeight]))
    return call(op, attrs, ctx, in, req, out);
  if (req[kOfData] != mxnet::kNullOp)
    call(op, attrs, ctx, in, {req[kOfData], mxnet::kNullOp}, out);
}

inline void register_grouped() {
  in_places_of("Convolution", "_mpgluon_grouped_", call, backward);
}

}  // namespace grouped
}  // namespace mpgluon

#endif  // MPGLUON_GROUPED_H_
