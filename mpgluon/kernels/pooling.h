// Max pooling of bfloat16 images in any layout. NaN is the largest number; of equal numbers the first one of a window
// receives its gradient, as in oneDNN. Gradients of windows that overlap are added in FP32 and rounded once.
#ifndef MPGLUON_POOLING_H_
#define MPGLUON_POOLING_H_

#include "common.h"
#include "window.h"

namespace mpgluon {
namespace pooling {

// As many numbers as there are, up to sixteen; the others are zero.
inline Lanes load_some(const uint16_t* x, int64_t count) {
  if (count >= kLanes) return load(x);
  uint16_t codes[kLanes] = {};
  std::copy_n(x, count, codes);
  return load(codes);
}

inline void store_some(uint16_t* y, const Lanes& x, int64_t count) {
  if (count >= kLanes) return store(y, x);
  uint16_t codes[kLanes];
  store(codes, x);
  std::copy_n(codes, count, y);
}

// The largest numbers of a window.
struct Largest {
  Lanes numbers = lanes_of(-INFINITY);

  void take(const Lanes& x, int64_t) { numbers = ((x > numbers) | (x != x)) ? x : numbers; }
};

// And the pixels that they are at.
struct LargestAt {
  Lanes numbers = lanes_of(-INFINITY);
  LanesOf<int32_t> pixels = LanesOf<int32_t>{} - 1;

  void take(const Lanes& x, int64_t pixel) {
    const auto larger = (x > numbers) | (x != x) | (pixels < 0);
    numbers = larger ? x : numbers;
    pixels = larger ? LanesOf<int32_t>{} + static_cast<int32_t>(pixel) : pixels;
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

  // Call each(row, column, channel, place, largest) for all windows of a plane and every sixteenth of its channels; the
  // place is that of the result.
  template <class Found, class Each>
  void for_each(const uint16_t* plane, const Each& each) const {
    for (int64_t row = 0, place = 0; row < at.rows; ++row)
      for (int64_t column = 0; column < at.columns; ++column, place += layout)
        for (int64_t channel = 0; channel < layout; channel += kLanes) {
          Found largest;
          for_pixels(row, column, [&](int64_t pixel) {
            largest.take(load_some(plane + pixel * layout + channel, layout - channel), pixel);
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

enum { kOutGrad, kOfWorkspace, kImages };  // operands of the backward pass

inline void backward(const nnvm::Op*, const NodeAttrs& attrs, const OpContext&, const Arrays& in,
                     const Requests& req, const Arrays& out) {
  if (out[0].shape().Size() == 0) return;
  const int layout = layout_for(in[kImages]);
  const NDArray images = in_layout<uint16_t>(in[kImages], layout);
  const NDArray gradient = in_layout<uint16_t>(in[kOutGrad], layout);
  const Windows windows = windows_of(attrs, images, gradient, layout);
  const uint16_t *x = elements_of<const uint16_t>(images), *dy = elements_of<const uint16_t>(gradient);
  const int64_t size = windows.size();
  write_in<uint16_t>(layout, req[0], out[0], [&](uint16_t* dx) {
    share(windows.planes(), [&](int64_t begin, int64_t end) {
      std::vector<float> sums(size + kLanes);
      for (int64_t plane = begin; plane < end; ++plane) {
        const uint16_t* from = dy + plane * windows.result_size();
        std::fill(sums.begin(), sums.end(), 0.0f);
        windows.for_each<LargestAt>(
            x + plane * size,
            [&](int64_t row, int64_t column, int64_t channel, int64_t place, const LargestAt& largest) {
              const Lanes arriving = load_some(from + place, layout - channel);
              windows.for_pixels(row, column, [&](int64_t pixel) {
                float* sum = &sums[pixel * layout + channel];
                const auto there = largest.pixels == static_cast<int32_t>(pixel);
                store(sum, load(sum) + (there ? arriving : Lanes{}));
              });
            });
        for (int64_t i = 0; i < size; ++i) dx[plane * size + i] = bfloat16_of(sums[i]);
      }
    });
  });
}

inline void register_pooling() { in_places_of("Pooling", "_mpgluon_bfloat16_", forward, backward); }

}  // namespace pooling
}  // namespace mpgluon

#endif  // MPGLUON_POOLING_H_
