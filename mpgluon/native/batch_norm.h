// Batch normalization of FP32 values, bit for bit as oneDNN computes it on plain arrays.
//
// oneDNN adds the elements of a channel one after the other, image by image. So does this, for
// several channels at a time: which channels are done together changes no bit. It must be compiled
// without contraction to fused operations.
#ifndef MPGLUON_BATCH_NORM_H_
#define MPGLUON_BATCH_NORM_H_

#include <cmath>
#include <cstdint>

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
    visit([&](int64_t i, int lane) { y[i] = scale[lane] * (x[i] - average[lane]) + shift[lane]; });
  }

  void backward(const float* x, const float* dy, const float* mean, const float* variance,
                const float* gamma, float eps, float* dx, float* dgamma, float* dbeta) const {
    float average[L], inverse[L], dg[L] = {}, db[L] = {};
    for (int lane = 0; lane < L; ++lane) {
      average[lane] = mean[first + lane];
      inverse[lane] = 1.0f / std::sqrt(variance[first + lane] + eps);
    }
    visit([&](int64_t i, int lane) {
      dg[lane] += (x[i] - average[lane]) * dy[i];
      db[lane] += dy[i];
    });
    float scale[L], mean_db[L];
    for (int lane = 0; lane < L; ++lane) {
      dg[lane] *= inverse[lane];
      dgamma[first + lane] = dg[lane];
      dbeta[first + lane] = db[lane];
      mean_db[lane] = db[lane] / count();
      scale[lane] = gamma[first + lane] * inverse[lane];
    }
    const float n = count();
    visit([&](int64_t i, int lane) {
      const float mean_part =
          mean_db[lane] + (x[i] - average[lane]) * dg[lane] * inverse[lane] / n;
      dx[i] = (dy[i] - mean_part) * scale[lane];
    });
  }
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
