// Convolution, dense layer, dot and batch_dot with the sums of a Tensor Core, on FP32 arrays whose
// values are numbers of a 16-bit format; the gradients are computed in the same way.
//
// Each number is one sum of products, with its terms in this order (the last dimension fastest):
//   a convolution's result   input channel, kernel row, kernel column
//   the gradient of its data   output channel, kernel row, kernel column
//   the gradient of its weight   image, row, column of the result
// A place where a kernel lies beyond the edge, or between the strides of a result, is a term that is
// zero. A bias is added to the finished sum, and its gradient is a plain sum.
#ifndef MPGLUON_ACCUMULATED_H_
#define MPGLUON_ACCUMULATED_H_

#include "common.h"
#include "tensor_core.h"

namespace mpgluon {
namespace accumulated {

using tensor_core::Accumulation;
using tensor_core::Matrix;
using tensor_core::multiply;
using Places = std::vector<int64_t>;

enum { kData, kWeight, kBias };                     // operands, and the results of backward
enum { kOutGrad, kBackwardData, kBackwardWeight };  // operands of backward

// ---- Indices.

// Return first, first + stride, and so on: count numbers.
inline Places counted(int64_t count, int64_t stride) {
  Places made(count);
  for (int64_t i = 0; i < count; ++i) made[i] = i * stride;
  return made;
}

// Return the sums of all pairs, the second one fastest.
inline Places pairs(const Places& slow, const Places& fast) {
  Places made;
  made.reserve(slow.size() * fast.size());
  for (const int64_t one : slow)
    for (const int64_t other : fast) made.push_back(one + other);
  return made;
}

inline int64_t volume(const Sizes& sizes) { return sizes[0] * sizes[1] * sizes[2]; }

// Return the places of a grid of points in an image, the last dimension fastest.
inline Places grid(const Sizes& count, const Sizes& stride, const Sizes& image) {
  return pairs(pairs(counted(count[0], stride[0] * image[1] * image[2]),
                     counted(count[1], stride[1] * image[2])),
               counted(count[2], stride[2]));
}

inline bool inside(int64_t at, int64_t size) { return at >= 0 && at < size; }

// Return copies of images with their points stride apart, in others of zeros, where they begin at the
// margin; points outside are left out.
inline std::vector<float> spread(const float* from, int64_t count, const Sizes& image,
                                 const Sizes& stride, const Sizes& margin, const Sizes& frame) {
  std::vector<float> made(count * volume(frame));
  in_parallel(count, [&](int64_t number) {
    float* to = &made[number * volume(frame)];
    const float* x = from + number * volume(image);
    for (int64_t i = 0; i < image[0]; ++i)
      for (int64_t j = 0; j < image[1]; ++j)
        for (int64_t k = 0; k < image[2]; ++k, ++x) {
          const int64_t at[] = {i * stride[0] + margin[0], j * stride[1] + margin[1],
                                k * stride[2] + margin[2]};
          if (inside(at[0], frame[0]) && inside(at[1], frame[1]) && inside(at[2], frame[2]))
            to[(at[0] * frame[1] + at[1]) * frame[2] + at[2]] = *x;
        }
  });
  return made;
}

// ---- What all operators share.

// Return one row's sums over what is at inner + outer, rounded once.
inline float plain_sum(const float* values, const Places& outer, int64_t inner) {
  double sum = 0;
  for (const int64_t start : outer)
    for (int64_t i = 0; i < inner; ++i) sum += values[start + i];
  return static_cast<float>(sum);
}

// ---- Convolution.

struct Convolution {
  Convolution(const NodeAttrs& attrs, const mxnet::TShape& data, const mxnet::TShape& weight,
              const mxnet::TShape& result) {
    const std::string layout = option(attrs, "layout");
    CHECK(layout.empty() || layout == "None" || layout.substr(0, 2) == "NC")
        << "the sums of a Tensor Core are computed in the layouts NCW, NCHW and NCDHW, received "
        << layout;
    const int dimensions = data.ndim() - 2;
    for (Sizes* sizes : {&image, &kernel, &places}) sizes->fill(1);
    for (int i = 0; i < dimensions; ++i) {
      const int to = 3 - dimensions + i;
      image[to] = data[2 + i], kernel[to] = weight[2 + i], places[to] = result[2 + i];
    }
    stride = sizes_of(attrs, "stride", dimensions, 1);
    dilate = sizes_of(attrs, "dilate", dimensions, 1);
    pad = sizes_of(attrs, "pad", dimensions, 0);
    images = data[0], channels = weight[1], groups = data[1] / channels;
    filters = weight[0] / groups;
    for (int i = 0; i < 3; ++i) {
      reach[i] = (kernel[i] - 1) * dilate[i];
      frame[i] = (places[i] - 1) * stride[i] + reach[i] + 1;
      around[i] = image[i] + reach[i];
      shift[i] = reach[i] - pad[i];
      backwards[i] = -dilate[i];
    }
  }

  int64_t images, groups, channels, filters;  // of a group
  Sizes image, kernel, places, stride, dilate, pad;
  Sizes reach;   // from a kernel's first point to its last one
  Sizes frame;   // of the data that the kernel meets, with its margin
  Sizes around;  // of the result's gradient, spread and with the margin that the data needs
  Sizes shift, backwards;
};

constexpr Sizes kDense{1, 1, 1};  // points side by side

// Multiply the matrices of each group; the steps are from one group's numbers to the next one's.
inline void multiply_groups(const Accumulation& how, int64_t groups, Matrix left, int64_t left_step,
                            Matrix right, int64_t right_step, float* to, int64_t step,
                            const Places& rows, const Places& columns) {
  for (int64_t group = 0; group < groups; ++group) {
    multiply(how, left, right, to + group * step, rows, columns);
    left.values += left_step;
    right.values += right_step;
  }
}

// Return the data with the margin that the kernel meets.
inline std::vector<float> framed_data(const Convolution& c, const float* data) {
  return spread(data, c.images * c.groups * c.channels, c.image, kDense, c.pad, c.frame);
}

inline void convolve(const Accumulation& how, const Convolution& c, const float* data,
                     const float* weight, const float* bias, float* result) {
  const int64_t one = volume(c.frame), points = volume(c.kernel), pixels = volume(c.places);
  const auto framed = framed_data(c, data);
  const int64_t window = c.channels * points;
  Matrix left{weight, counted(c.filters, window), counted(window, 1)};
  Matrix right{framed.data(),
               pairs(counted(c.images, c.groups * c.channels * one), grid(c.places, c.stride, c.frame)),
               pairs(counted(c.channels, one), grid(c.kernel, c.dilate, c.frame))};
  const Places rows = counted(c.filters, pixels);
  const Places columns =
      pairs(counted(c.images, c.groups * c.filters * pixels), counted(pixels, 1));
  multiply_groups(how, c.groups, std::move(left), c.filters * window, std::move(right), c.channels * one,
                  result, c.filters * pixels, rows, columns);
  if (bias == nullptr) return;
  in_parallel(c.images * c.groups * c.filters, [&](int64_t i) {
    for (int64_t j = 0; j < pixels; ++j) result[i * pixels + j] += bias[i % (c.groups * c.filters)];
  });
}

inline void convolve_back_to_weight(const Accumulation& how, const Convolution& c,
                                    const float* gradient, const float* data, float* result) {
  const int64_t one = volume(c.frame), points = volume(c.kernel), pixels = volume(c.places);
  const auto framed = framed_data(c, data);
  Matrix left{gradient, counted(c.filters, pixels),
              pairs(counted(c.images, c.groups * c.filters * pixels), counted(pixels, 1))};
  Matrix right{framed.data(), pairs(counted(c.channels, one), grid(c.kernel, c.dilate, c.frame)),
               pairs(counted(c.images, c.groups * c.channels * one),
                     grid(c.places, c.stride, c.frame))};
  const int64_t window = c.channels * points;
  const Places rows = counted(c.filters, window), columns = counted(window, 1);
  multiply_groups(how, c.groups, std::move(left), c.filters * pixels, std::move(right), c.channels * one,
                  result, c.filters * window, rows, columns);
}

inline void convolve_back_to_data(const Accumulation& how, const Convolution& c,
                                  const float* gradient, const float* weight, float* result) {
  const int64_t one = volume(c.around), points = volume(c.kernel), pixels = volume(c.image);
  const auto framed =
      spread(gradient, c.images * c.groups * c.filters, c.places, c.stride, c.shift, c.around);
  const int64_t last = (c.reach[0] * c.around[1] + c.reach[1]) * c.around[2] + c.reach[2];
  const int64_t window = c.channels * points;
  Matrix left{weight, counted(c.channels, points),
              pairs(counted(c.filters, window), counted(points, 1))};
  Matrix right{framed.data() + last,
               pairs(counted(c.images, c.groups * c.filters * one), grid(c.image, kDense, c.around)),
               pairs(counted(c.filters, one), grid(c.kernel, c.backwards, c.around))};
  const Places rows = counted(c.channels, pixels);
  const Places columns =
      pairs(counted(c.images, c.groups * c.channels * pixels), counted(pixels, 1));
  multiply_groups(how, c.groups, std::move(left), c.filters * window, std::move(right), c.filters * one,
                  result, c.channels * pixels, rows, columns);
}

void convolution(const Accumulation& how, const NodeAttrs& attrs, const Arrays& in,
                 const Requests& req, const Arrays& out) {
  const Convolution c(attrs, in[kData].shape(), in[kWeight].shape(), out[0].shape());
  const NDArray data = plain(in[kData]), weight = plain(in[kWeight]);
  const NDArray bias = in.size() > kBias ? plain(in[kBias]) : NDArray();
  write_in<float>(1, req[0], out[0], [&](float* to) {
    convolve(how, c, address(data), address(weight), in.size() > kBias ? address(bias) : nullptr, to);
  });
}

void convolution_backward(const Accumulation& how, const NodeAttrs& attrs, const Arrays& in,
                          const Requests& req, const Arrays& out) {
  const NDArray gradient = plain(in[kOutGrad]), data = plain(in[kBackwardData]);
  const NDArray weight = plain(in[kBackwardWeight]);
  const Convolution c(attrs, data.shape(), weight.shape(), gradient.shape());
  write_in<float>(1, req[kWeight], out[kWeight], [&](float* to) {
    convolve_back_to_weight(how, c, address(gradient), address(data), to);
  });
  if (req.size() > kBias) {
    const int64_t pixels = volume(c.places), filters = c.groups * c.filters;
    const Places images = counted(c.images, filters * pixels);
    write_in<float>(1, req[kBias], out[kBias], [&](float* to) {
      in_parallel(filters, [&](int64_t i) {
        to[i] = plain_sum(address(gradient) + i * pixels, images, pixels);
      });
    });
  }
  write_in<float>(1, req[kData], out[kData], [&](float* to) {
    convolve_back_to_data(how, c, address(gradient), address(weight), to);
  });
}

// ---- Matrices.

struct View {
  const float* values;
  int64_t rows, columns, row_stride, column_stride;

  View transposed() const { return {values, columns, rows, column_stride, row_stride}; }
};

inline View view(const float* values, int64_t rows, int64_t columns, bool transposed) {
  if (transposed) return View{values, columns, rows, rows, 1}.transposed();
  return {values, rows, columns, columns, 1};
}

// Write the product of two matrices as the rows of another one, or as its columns.
inline void multiply_views(const Accumulation& how, const View& left, const View& right, float* to,
                           bool transposed = false) {
  const Matrix one{left.values, counted(left.rows, left.row_stride),
                   counted(left.columns, left.column_stride)};
  const Matrix other{right.values, counted(right.columns, right.column_stride),
                     counted(right.rows, right.row_stride)};
  multiply(how, one, other, to, counted(left.rows, transposed ? 1 : right.columns),
           counted(right.columns, transposed ? left.rows : 1));
}

void fully_connected(const Accumulation& how, const NodeAttrs&, const Arrays& in,
                     const Requests& req, const Arrays& out) {
  const NDArray data = plain(in[kData]), weight = plain(in[kWeight]);
  const int64_t units = weight.shape()[0], inputs = weight.shape()[1];
  const int64_t rows = data.shape().Size() / inputs;
  write_in<float>(1, req[0], out[0], [&](float* to) {
    multiply_views(how, view(address(data), rows, inputs, false),
                   view(address(weight), inputs, units, true), to);
    if (in.size() <= kBias) return;
    const NDArray bias = plain(in[kBias]);
    for (int64_t i = 0; i < rows * units; ++i) to[i] += address(bias)[i % units];
  });
}

void fully_connected_backward(const Accumulation& how, const NodeAttrs&, const Arrays& in,
                              const Requests& req, const Arrays& out) {
  const NDArray gradient = plain(in[kOutGrad]), data = plain(in[kBackwardData]);
  const NDArray weight = plain(in[kBackwardWeight]);
  const int64_t units = weight.shape()[0], inputs = weight.shape()[1];
  const int64_t rows = data.shape().Size() / inputs;
  const View of_result = view(address(gradient), rows, units, false);
  write_in<float>(1, req[kWeight], out[kWeight], [&](float* to) {
    multiply_views(how, of_result.transposed(), view(address(data), rows, inputs, false), to);
  });
  if (req.size() > kBias) {
    const Places all = counted(rows, units);
    write_in<float>(1, req[kBias], out[kBias], [&](float* to) {
      for (int64_t i = 0; i < units; ++i) to[i] = plain_sum(address(gradient) + i, all, 1);
    });
  }
  // MXNet may let it take the place of the data.
  write_in<float>(1, req[kData], out[kData], [&](float* to) {
    multiply_views(how, of_result, view(address(weight), units, inputs, false), to);
  });
}

// The operands of dot or batch_dot as matrices; the terms of the result are along their inner sides.
struct Operands {
  Operands(const NodeAttrs& attrs, const NDArray& a, const NDArray& b, int batch_dimensions)
      : left_transposed(flag_option(attrs, "transpose_a")),
        right_transposed(flag_option(attrs, "transpose_b")) {
    const mxnet::TShape &x = a.shape(), &y = b.shape();
    for (int i = 0; i < batch_dimensions; ++i) batch *= x[i];
    terms = left_transposed ? x[batch_dimensions] : x[x.ndim() - 1];
    const bool empty = batch * terms == 0;
    rows = empty ? 0 : x.Size() / batch / terms;
    columns = empty ? 0 : y.Size() / batch / terms;
    one = address(a), other = address(b);
  }
  View left(int64_t i) const { return view(one + i * rows * terms, rows, terms, left_transposed); }
  View right(int64_t i) const {
    return view(other + i * columns * terms, terms, columns, right_transposed);
  }

  bool left_transposed, right_transposed;
  int64_t batch = 1, rows, terms, columns;
  const float *one, *other;
};

template <bool kBatch>
void dot(const Accumulation& how, const NodeAttrs& attrs, const Arrays& in, const Requests& req,
         const Arrays& out) {
  const NDArray a = plain(in[0]), b = plain(in[1]);
  const Operands operands(attrs, a, b, kBatch ? a.shape().ndim() - 2 : 0);
  write_in<float>(1, req[0], out[0], [&](float* to) {
    for (int64_t i = 0; i < operands.batch; ++i)
      multiply_views(how, operands.left(i), operands.right(i),
                     to + i * operands.rows * operands.columns);
  });
}

void dot_backward(const Accumulation& how, const NodeAttrs& attrs, const Arrays& in,
                  const Requests& req, const Arrays& out) {
  const NDArray gradient = plain(in[0]), a = plain(in[1]), b = plain(in[2]);
  const Operands operands(attrs, a, b, 0);
  const View head = view(address(gradient), operands.rows, operands.columns, false);
  write_in<float>(1, req[0], out[0], [&](float* to) {
    multiply_views(how, head, operands.right(0).transposed(), to, operands.left_transposed);
  });
  write_in<float>(1, req[1], out[1], [&](float* to) {
    multiply_views(how, operands.left(0).transposed(), head, to, operands.right_transposed);
  });
}

// ---- Registration.

using Function = void (*)(const Accumulation&, const NodeAttrs&, const Arrays&, const Requests&,
                          const Arrays&);

constexpr const char* kPrefix = "_mpgluon_on_values_";

inline Operator in_its_place(const std::string& mxnet_name, const std::string& suffix,
                             const Accumulation& how, Function function) {
  return in_place_of(nnvm::Op::Get(mxnet_name), kPrefix + mxnet_name + suffix,
                     [how, function](const NodeAttrs& attrs, const OpContext&, const Arrays& in,
                                     const Requests& req, const Arrays& out) {
                       function(how, attrs, in, req, out);
                     })
      .set<bool>("TIsMKLDNN", true);
}

inline void with_backward(const std::string& mxnet_name, const std::string& suffix,
                          const Accumulation& how, Function forward, Function backward) {
  Operator made_backward = in_its_place("_backward_" + mxnet_name, suffix, how, backward);
  in_its_place(mxnet_name, suffix, how, forward)
      .set<nnvm::FGradient>("FGradient",
                            gradient_by(nnvm::Op::Get(mxnet_name), &made_backward.op()));
}

void register_accumulation(const Accumulation& how, const std::string& suffix) {
  with_backward("Convolution", suffix, how, convolution, convolution_backward);
  with_backward("FullyConnected", suffix, how, fully_connected, fully_connected_backward);
  with_backward("dot", suffix, how, dot<false>, dot_backward);
  // Its gradients are two more of it.
  Operator batch = in_its_place("batch_dot", suffix, how, dot<true>);
  const nnvm::Op *theirs = nnvm::Op::Get("batch_dot"), *own = &batch.op();
  batch.set<nnvm::FGradient>("FGradient", [theirs, own](const nnvm::ObjectPtr& node,
                                                        const std::vector<nnvm::NodeEntry>& grads) {
    static const auto& gradients = table<nnvm::FGradient>("FGradient");
    auto entries = gradients.data_[theirs->index_].first(node, grads);
    for (auto& entry : entries) entry.node->attrs.op = own;
    return entries;
  });
}

}  // namespace accumulated
}  // namespace mpgluon

#endif  // MPGLUON_ACCUMULATED_H_
