// The gradients of the weight and bias of dense layers of bfloat16 arrays, for a few rows at a time. oneDNN's matrix
// product takes two and a half times as long for them as in FP32. Sums are FP32, row by row.
#ifndef MPGLUON_DENSE_H_
#define MPGLUON_DENSE_H_

#include "common.h"

namespace mpgluon {
namespace dense_layer {

enum { kOutGrad, kData, kWeight };    // operands of the backward pass
enum { kOfData, kOfWeight, kOfBias };  // its results

constexpr int64_t kMostRows = 64;  // above, the matrix product is as fast
constexpr int kOutputs = 4;        // that are computed together

// Write sums[output][lane] of the products of gradients and data, for kOutputs outputs and kLanes inputs.
inline void sum_rows(int64_t rows, int64_t inputs, int64_t outputs, const float* x, const float* dy,
                     Lanes (&sums)[kOutputs]) {
  for (Lanes& sum : sums) sum = Lanes{};
  for (int64_t row = 0; row < rows; ++row) {
    const Lanes numbers = load(x + row * inputs);
    for (int i = 0; i < kOutputs; ++i) sums[i] += numbers * dy[row * outputs + i];
  }
}

// Write the gradient of a weight (outputs, inputs).
inline void weight_gradient(int64_t rows, int64_t inputs, int64_t outputs, const float* x,
                            const float* dy, OpReqType req, uint16_t* dw) {
  const auto write = [=](int64_t place, float sum) {
    put(dw + place, req == mxnet::kAddTo ? widened(dw[place]) + sum : sum);
  };
  const auto one = [=](int64_t output, int64_t input) {
    float sum = 0;
    for (int64_t row = 0; row < rows; ++row) sum += x[row * inputs + input] * dy[row * outputs + output];
    write(output * inputs + input, sum);
  };
  in_parallel((outputs + kOutputs - 1) / kOutputs, [&](int64_t group) {
    const int64_t first = group * kOutputs, end = std::min(outputs, first + kOutputs);
    for_row(0, inputs,
            [&](int64_t input) {
              if (end - first < kOutputs)
                for (int64_t output = first; output < end; ++output)
                  for (int i = 0; i < kLanes; ++i) one(output, input + i);
              else {
                Lanes sums[kOutputs];
                sum_rows(rows, inputs, outputs, x + input, dy + first, sums);
                for (int i = 0; i < kOutputs; ++i) {
                  uint16_t* to = dw + (first + i) * inputs + input;
                  store(to, req == mxnet::kAddTo ? load(to) + sums[i] : sums[i]);
                }
              }
            },
            [&](int64_t input) {
              for (int64_t output = first; output < end; ++output) one(output, input);
            });
  });
}

inline std::vector<float> numbers_in(const NDArray& array) {
  const NDArray from = plain(array);
  std::vector<float> made(array.shape().Size());
  widen_codes(bfloat16_grid(), elements_of<const uint16_t>(from), made.size(), made.data());
  return made;
}

inline void bias_gradient(int64_t rows, int64_t outputs, const float* dy, OpReqType req, uint16_t* db) {
  for (int64_t output = 0; output < outputs; ++output) {
    float sum = req == mxnet::kAddTo ? widened(db[output]) : 0;
    for (int64_t row = 0; row < rows; ++row) sum += dy[row * outputs + output];
    put(db + output, sum);
  }
}

inline void backward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                     const Arrays& in, const Requests& req, const Arrays& out) {
  const int64_t outputs = in[kWeight].shape()[0], inputs = in[kWeight].shape()[1];
  const int64_t rows = inputs == 0 ? 0 : in[kData].shape().Size() / inputs;
  if (in[kData].dtype() != mshadow::kBfloat16 || rows == 0 || rows > kMostRows)
    return call(op, attrs, ctx, in, req, out);
  // Copies: the gradient of the data may take the place of an operand.
  const std::vector<float> x = numbers_in(in[kData]), dy = numbers_in(in[kOutGrad]);
  if (req[kOfData] != mxnet::kNullOp) {
    Requests alone(req.size(), mxnet::kNullOp);
    alone[kOfData] = req[kOfData];
    call(op, attrs, ctx, in, alone, out);
  }
  if (req[kOfWeight] != mxnet::kNullOp)
    weight_gradient(rows, inputs, outputs, x.data(), dy.data(), req[kOfWeight],
                    static_cast<uint16_t*>(plain_result(req[kOfWeight], out[kOfWeight]).dptr_));
  if (req.size() > kOfBias && req[kOfBias] != mxnet::kNullOp)
    bias_gradient(rows, outputs, dy.data(), req[kOfBias],
                  static_cast<uint16_t*>(plain_result(req[kOfBias], out[kOfBias]).dptr_));
}

inline void register_dense() {
  in_places_of("FullyConnected", "_mpgluon_bfloat16_", call, backward);
}

}  // namespace dense_layer
}  // namespace mpgluon

#endif  // MPGLUON_DENSE_H_
