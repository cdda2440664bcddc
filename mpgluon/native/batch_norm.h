// Batch normalization of FP32 values, bit for bit as oneDNN computes it on plain arrays.
//
// oneDNN adds the elements of a channel one after the other, image by image. So does this, for
// several channels at a time: which channels are done together changes no bit. It must be compiled
// without contraction to fused operations. Results and gradients are then rounded to float16.
#ifndef MPGLUON_BATCH_NORM_H_
#define MPGLUON_BATCH_NORM_H_

#include <cmath>
#include <cstdint>

#include "float16.h"

namespace mpgluon {

// Where the elements of some neighbouring channels are.
struct Shape {
  int64_t images, channels, pixels;
};

// L channels: in a block of L, or L planes beside each other.
template <int L, bool kBlocked>
struct Group {
  Shape shape;
  int64_t first;

  int64_t start(int64_t image) const { return (image * shape.channels + first) * shape.pixels; }
  int64_t at(int64_t pixel, int lane) const {
    return kBlocked ? pixel * L + lane : lane * shape.pixels + pixel;
  }

  // Call each(offset, lane) for every element, each channel's in the order of memory.
  template <class Each>
  void visit(const Each& each) const {
    for (int64_t image = 0; image < shape.images; ++image)
      for (int64_t pixel = 0; pixel < shape.pixels; ++pixel)
        for (int lane = 0; lane < L; ++lane) each(start(image) + at(pixel, lane), lane);
  }

  // Write value(offset, lane), rounded, for every element.
  template <class Value>
  void write(float* y, const Value& value) const {
    constexpr int kAtOnce = kBlocked ? L : 16;
    for (int lane = 0; lane < (kBlocked ? 1 : L); ++lane)
      for (int64_t image = 0; image < shape.images; ++image) {
        const int64_t from = start(image) + at(0, lane);
        const int64_t end = from + (kBlocked ? L : 1) * shape.pixels;
        float found[kAtOnce];
        int64_t i = from;
        for (; i + kAtOnce <= end; i += kAtOnce) {
          for (int j = 0; j < kAtOnce; ++j) found[j] = value(i + j, kBlocked ? j : lane);
          if (kAtOnce == 16) round_to(y + i, found);
          else round_8_to(y + i, found);
        }
        for (; i < end; ++i) y[i] = round_one(value(i, lane));
      }
  }

  float count() const { return static_cast<float>(shape.images * shape.pixels); }

  void statistics(const float* x, float* mean, float* variance) const {
    float sum[L] = {}, average[L];
    visit([&](int64_t i, int lane) { sum[lane] += x[i]; });
    for (int lane = 0; lane < L; ++lane) average[lane] = mean[first + lane] = sum[lane] / count();
    float squares[L] = {};
    visit([&](int64_t i, int lane) {
      const float m = x[i] - average[lane];
      squares[lane] += m * m;
    });
    for (int lane = 0; lane < L; ++lane) variance[first + lane] = squares[lane] / count();
  }

  void normalize(const float* x, const float* mean, const float* variance, const float* gamma,
                 const float* beta, float eps, float* y) const {
    float average[L], scale[L], shift[L];
    for (int lane = 0; lane < L; ++lane) {
      average[lane] = mean[first + lane];
      scale[lane] = gamma[first + lane] / std::sqrt(variance[first + lane] + eps);
      shift[lane] = beta[first + lane];
    }
    write(y, [&](int64_t i, int lane) {
      return scale[lane] * (x[i] - average[lane]) + shift[lane];
    });
  }

  void sum_gradients(const float* x, const float* dy, const float* mean, const float* variance,
                     float eps, float* dgamma, float* dbeta) const {
    float average[L], dg[L] = {}, db[L] = {};
    for (int lane = 0; lane < L; ++lane) average[lane] = mean[first + lane];
    visit([&](int64_t i, int lane) {
      dg[lane] += (x[i] - average[lane]) * dy[i];
      db[lane] += dy[i];
    });
    for (int lane = 0; lane < L; ++lane) {
      dgamma[first + lane] = dg[lane] * inverse(variance[first + lane], eps);
      dbeta[first + lane] = db[lane];
    }
  }

  void gradient_of_data(const float* x, const float* dy, const float* mean, const float* variance,
                        const float* gamma, float eps, const float* dgamma, const float* dbeta,
                        float* dx) const {
    float average[L], inverses[L], scale[L], dg[L], mean_db[L];
    const float n = count();
    for (int lane = 0; lane < L; ++lane) {
      average[lane] = mean[first + lane];
      inverses[lane] = inverse(variance[first + lane], eps);
      scale[lane] = gamma[first + lane] * inverses[lane];
      dg[lane] = dgamma[first + lane];
      mean_db[lane] = dbeta[first + lane] / n;
    }
    write(dx, [&](int64_t i, int lane) {
      const float mean_part =
          mean_db[lane] + (x[i] - average[lane]) * dg[lane] * inverses[lane] / n;
      return (dy[i] - mean_part) * scale[lane];
    });
  }

  static float inverse(float variance, float eps) { return 1.0f / std::sqrt(variance + eps); }
};

// Call each(group) for groups that cover all channels of arrays in a layout, in parallel.
template <class Each>
void for_groups(const Shape& shape, int layout, const Each& each) {
  const int64_t lanes = layout == 1 ? 8 : layout;
  const int64_t groups = (shape.channels + lanes - 1) / lanes;
#pragma omp parallel for
  for (int64_t number = 0; number < groups; ++number) {
    const int64_t first = number * lanes;
    if (layout == 16) {
      each(Group<16, true>{shape, first});
    } else if (layout == 8) {
      each(Group<8, true>{shape, first});
    } else if (first + lanes <= shape.channels) {
      each(Group<8, false>{shape, first});
    } else {
      for (int64_t c = first; c < shape.channels; ++c) each(Group<1, false>{shape, c});
    }
  }
}

}  // namespace mpgluon

#endif  // MPGLUON_BATCH_NORM_H_
