// Max pooling of bfloat16 images in any layout, and its gradient of FP32 ones. NaN is the largest number; of equal
// numbers the first one of a window receives its gradient, as in oneDNN. Gradients of windows that overlap are added in
// FP32, in the order of the windows, and rounded once.
#ifndef MPGLUON_POOLING_H_
#define MPGLUON_POOLING_H_

#include "common.h"
#include "window.h"

namespace mpgluon {
namespace pooling {

// Eight numbers: blocks of AVX2 have as many channels, and GCC takes a longer vector apart there, number by number.
using Eight = float __attribute__((vector_size(8 * sizeof(float))));
template <class Vector>
using NumbersOf = decltype(Vector{} < Vector{});  // whole ones, as many
template <class Vector>
constexpr int kSizeOf = sizeof(Vector) / sizeof(float);

inline void load_to(Eight* y, const float* x) { std::memcpy(y, x, sizeof *y); }
template <class X>
void load_to(Lanes* y, const X* x) { *y = load(x); }

// Numbers of an array, and zeros behind its end.
template <class Vector, class X>
Vector load_some(const X* x, const X* end) {
  X some[kSizeOf<Vector>] = {};
  const bool all = end - x >= kSizeOf<Vector>;
  if (!all) std::copy(x, end, some);
  Vector made;
  load_to(&made, all ? x : some);
  return made;
}

// The first numbers, and zeros in place of the others.
template <class Vector>
Vector first_of(const Vector& x, int64_t count) {
  NumbersOf<Vector> places;
  for (int i = 0; i < kSizeOf<Vector>; ++i) places[i] = i;
  return places < static_cast<int32_t>(std::min<int64_t>(count, kSizeOf<Vector>)) ? x : Vector{};
}

inline void store_some(uint16_t* y, const Lanes& x, int64_t count) {
  if (count >= kLanes) return store(y, x);
  uint16_t codes[kLanes];
  store(codes, x);
  std::copy_n(codes, count, y);
}

// The largest numbers of a window.
struct Largest {
  using Vector = Lanes;
  Lanes numbers = lanes_of(-INFINITY);

  void take(const Lanes& x, int64_t) { numbers = ((x > numbers) | (x != x)) ? x : numbers; }
};

// And the pixels that they are at.
template <class Of>
struct LargestAt {
  using Vector = Of;
  Vector numbers = Vector{} - INFINITY;
  NumbersOf<Vector> pixels = NumbersOf<Vector>{} - 1;

  void take(const Vector& x, int64_t pixel) {
    const auto larger = (x > numbers) | (x != x) | (pixels < 0);
    numbers = larger ? x : numbers;
    pixels = larger ? NumbersOf<Vector>{} + static_cast<int32_t>(pixel) : pixels;
  }
};

// Windows of images in a layout, of which as many channels as lie side by side are a plane.
struct Windows {
  Window at;
  Sizes kernel;
  int64_t layout;

  int64_t planes() const { return at.images * at.channels / layout; }
  int64_t size() const { return at.height * at.width * layout; }
  int64_t result_size() const { return at.rows * at.columns * layout; }

  // Call each(pixel) for the pixels of a window.
  template <class Each>
  void for_pixels(int64_t row, int64_t column, const Each& each) const {
    const int64_t top = row * at.stride[1] - at.pad[1], left = column * at.stride[2] - at.pad[2];
    const int64_t bottom = std::min(top + kernel[1], at.height), right = std::min(left + kernel[2], at.width);
    if (top >= 0 && left >= 0 && bottom - top == 3 && right - left == 3) {  // most, in loops without a bound to ask
      for (int64_t i = 0; i < 3; ++i)
        for (int64_t j = 0; j < 3; ++j) each((top + i) * at.width + left + j);
      return;
    }
    for (int64_t i = std::max<int64_t>(top, 0); i < bottom; ++i)
      for (int64_t j = std::max<int64_t>(left, 0); j < right; ++j) each(i * at.width + j);
  }

  // Call each(row, column, channel, place, largest) for all windows of a plane and the first of its channels in each
  // vector; the place is that of the result. Channels of `largest` behind the last one are of other pixels.
  template <class Found, class X, class Each>
  void for_each(const X* plane, const Each& each) const {
    const X* end = plane + size();
    for (int64_t row = 0, place = 0; row < at.rows; ++row)
      for (int64_t column = 0; column < at.columns; ++column, place += layout)
        for (int64_t channel = 0; channel < layout; channel += kSizeOf<typename Found::Vector>) {
          Found largest;
          for_pixels(row, column, [&](int64_t pixel) {
            largest.take(load_some<typename Found::Vector>(plane + pixel * layout + channel, end), pixel);
          });
          each(row, column, channel, place + channel, largest);
        }
  }
};

// Sixteen channels at a time, wherever their number allows.
inline int layout_for(const NDArray& images) {
  const int layout = layout_of(images);
  return layout > 1 ? layout : images.shape()[1] % kLanes == 0 ? kLanes : 1;
}

inline Windows windows_of(const NodeAttrs& attrs, const NDArray& images, const NDArray& result, int layout) {
  return {window_of(attrs, images, result), sizes_of(attrs, "kernel", 2, 1), layout};
}

inline void forward(const nnvm::Op*, const NodeAttrs& attrs, const OpContext&, const Arrays& in,
                    const Requests& req, const Arrays& out) {
  CHECK_EQ(in[0].dtype(), static_cast<int>(mshadow::kBfloat16));
  if (out[0].shape().Size() == 0) return;
  const int layout = layout_for(in[0]);
  const NDArray images = in_layout<uint16_t>(in[0], layout);
  const Windows windows = windows_of(attrs, images, out[0], layout);
  const uint16_t* x = elements_of<const uint16_t>(images);
  write_in<uint16_t>(layout, req[0], out[0], [&](uint16_t* y) {
    in_parallel(windows.planes(), [&](int64_t plane) {
      uint16_t* to = y + plane * windows.result_size();
      windows.for_each<Largest>(
          x + plane * windows.size(),
          [=](int64_t, int64_t, int64_t channel, int64_t place, const Largest& largest) {
            store_some(to + place, largest.numbers, layout - channel);
          });
    });
  });
}

// Write the gradient of images from that of the result, all in the same layout.
template <class Vector, class X>
void write_gradient(const Windows& windows, const X* x, const X* dy, X* dx) {
  using Found = LargestAt<Vector>;
  const int64_t size = windows.size(), layout = windows.layout;
  share(windows.planes(), [&](int64_t begin, int64_t end) {
    std::vector<float> sums(size + kSizeOf<Vector>);
    for (int64_t plane = begin; plane < end; ++plane) {
      const X *from = dy + plane * windows.result_size(), *from_end = from + windows.result_size();
      std::fill(sums.begin(), sums.end(), 0.0f);
      windows.for_each<Found>(
          x + plane * size, [&](int64_t row, int64_t column, int64_t channel, int64_t place, const Found& largest) {
            const Vector arriving = first_of(load_some<Vector>(from + place, from_end), layout - channel);
            windows.for_pixels(row, column, [&](int64_t pixel) {
              float* at = &sums[pixel * layout + channel];
              Vector sum;
              std::memcpy(&sum, at, sizeof sum);
              sum += largest.pixels == static_cast<int32_t>(pixel) ? arriving : Vector{};
              std::memcpy(at, &sum, sizeof sum);
            });
          });
      for (int64_t i = 0; i < size; ++i) put(&dx[plane * size + i], sums[i]);
    }
  });
}

// Places of operands of the backward pass; a gradient of the workspace is between them if there is one.
constexpr size_t kOutGrad = 0;
inline size_t place_of_images(const Arrays& in) { return in.size() > 3 ? 2 : 1; }

inline void backward(const nnvm::Op*, const NodeAttrs& attrs, const OpContext&, const Arrays& in,
                     const Requests& req, const Arrays& out) {
  if (out[0].shape().Size() == 0) return;
  const NDArray& data = in[place_of_images(in)];
  const int layout = layout_for(data);
  const NDArray images = in_layout<uint16_t>(data, layout);
  const NDArray gradient = in_layout<uint16_t>(in[kOutGrad], layout);
  write_in<uint16_t>(layout, req[0], out[0], [&](uint16_t* dx) {
    write_gradient<Lanes>(windows_of(attrs, images, gradient, layout), elements_of<const uint16_t>(images),
                          elements_of<const uint16_t>(gradient), dx);
  });
}

// The same of FP32 images in blocks of channels.
inline void write_gradient_in_blocks(const NodeAttrs& attrs, const Arrays& in, const NDArray& out) {
  const NDArray &images = in[place_of_images(in)], &gradient = in[kOutGrad];
  const int layout = layout_of(images);
  write_gradient<Eight>(windows_of(attrs, images, gradient, layout), elements_of<const float>(images),
                        elements_of<const float>(gradient), prepare(out, layout));
}

inline void register_pooling() { in_places_of("Pooling", "_mpgluon_bfloat16_", forward, backward); }

}  // namespace pooling
}  // namespace mpgluon

#endif  // MPGLUON_POOLING_H_
