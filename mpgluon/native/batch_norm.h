// Batch normalization of 16-bit values, bit for bit as oneDNN computes it on plain FP32 arrays.
//
// oneDNN adds the elements of a channel one after the other, image by image. So does this, for
// several channels at a time: which channels are done together changes no bit. It must be compiled
// without contraction to fused operations. Results and gradients are then rounded to the format.
#ifndef MPGLUON_BATCH_NORM_H_
#define MPGLUON_BATCH_NORM_H_

#include <cmath>
#include <cstdint>

#include "format.h"

namespace mpgluon {

struct Shape {
  int64_t images, channels, pixels;
};

// L neighbouring channels: in a block of L, or L planes beside each other. X is float, or uint16_t
// for codes of the format.
template <class Format, int L, bool kBlocked>
struct Group {
  Format format;
  Shape shape;
  int64_t first;

  int64_t start(int64_t image) const { return (image * shape.channels + first) * shape.pixels; }

  // Call each(offset, lane, x) for every element x, each channel's in the order of memory.
  template <class X, class Each>
  void visit(const X* x, const Each& each) const {
    for (int64_t image = 0; image < shape.images; ++image)
      for (int64_t pixel = 0; pixel < shape.pixels; ++pixel) {
        float values[L];
        if (kBlocked) load<L>(values, x + start(image) + pixel * L);
        for (int lane = 0; lane < L; ++lane) {
          const int64_t i = start(image) + (kBlocked ? pixel * L + lane : lane * shape.pixels + pixel);
          each(i, lane, kBlocked ? values[lane] : value_at(x, i));
        }
      }
  }

  // Write result(offset, lane, x), rounded, for every element x.
  template <class X, class Result>
  void write(float* y, const X* x, const Result& result) const {
    constexpr int kAtOnce = kBlocked ? L : 16;
    for (int lane = 0; lane < (kBlocked ? 1 : L); ++lane)
      for (int64_t image = 0; image < shape.images; ++image) {
        const int64_t from = start(image) + (kBlocked ? 0 : lane * shape.pixels);
        const int64_t end = from + (kBlocked ? L : 1) * shape.pixels;
        float values[kAtOnce];
        int64_t i = from;
        for (; i + kAtOnce <= end; i += kAtOnce) {
          load<kAtOnce>(values, x + i);
          for (int j = 0; j < kAtOnce; ++j)
            values[j] = result(i + j, kBlocked ? j : lane, values[j]);
          if (kAtOnce == 16) format.round_to(y + i, values);
          else format.round_8_to(y + i, values);
        }
        for (; i < end; ++i) y[i] = format.round_one(result(i, lane, value_at(x, i)));
      }
  }

  float count() const { return static_cast<float>(shape.images * shape.pixels); }

  template <class X>
  void statistics(const X* x, float* mean, float* variance) const {
    float sum[L] = {}, average[L];
    visit(x, [&](int64_t, int lane, float value) { sum[lane] += value; });
    for (int lane = 0; lane < L; ++lane) average[lane] = mean[first + lane] = sum[lane] / count();
    float squares[L] = {};
    visit(x, [&](int64_t, int lane, float value) {
      const float m = value - average[lane];
      squares[lane] += m * m;
    });
    for (int lane = 0; lane < L; ++lane) variance[first + lane] = squares[lane] / count();
  }

  template <class X>
  void normalize(const X* x, const float* mean, const float* variance, const float* gamma,
                 const float* beta, float eps, float* y) const {
    float average[L], scale[L], shift[L];
    for (int lane = 0; lane < L; ++lane) {
      average[lane] = mean[first + lane];
      scale[lane] = gamma[first + lane] / std::sqrt(variance[first + lane] + eps);
      shift[lane] = beta[first + lane];
    }
    write(y, x, [&](int64_t, int lane, float value) {
      return scale[lane] * (value - average[lane]) + shift[lane];
    });
  }

  template <class X>
  void sum_gradients(const X* x, const float* dy, const float* mean, const float* variance,
                     float eps, float* dgamma, float* dbeta) const {
    float average[L], dg[L] = {}, db[L] = {};
    for (int lane = 0; lane < L; ++lane) average[lane] = mean[first + lane];
    visit(x, [&](int64_t i, int lane, float value) {
      dg[lane] += (value - average[lane]) * dy[i];
      db[lane] += dy[i];
    });
    for (int lane = 0; lane < L; ++lane) {
      dgamma[first + lane] = dg[lane] * inverse(variance[first + lane], eps);
      dbeta[first + lane] = db[lane];
    }
  }

  template <class X>
  void gradient_of_data(const X* x, const float* dy, const float* mean, const float* variance,
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
    write(dx, x, [&](int64_t i, int lane, float value) {
      const float mean_part =
          mean_db[lane] + (value - average[lane]) * dg[lane] * inverses[lane] / n;
      return (dy[i] - mean_part) * scale[lane];
    });
  }

  static float inverse(float variance, float eps) { return 1.0f / std::sqrt(variance + eps); }

 private:
  // Load neighbours of FP32 numbers or codes as FP32.
  template <int kCount>
  void load(float* values, const float* x) const {
    for (int j = 0; j < kCount; ++j) values[j] = x[j];
  }
  template <int kCount>
  void load(float* values, const uint16_t* x) const {
    if (kCount == 16) format.widen_to(values, x);
    else if (kCount == 8) format.widen_8_to(values, x);
    else for (int j = 0; j < kCount; ++j) values[j] = format.widen_one(x[j]);
  }

  float value_at(const float* x, int64_t i) const { return x[i]; }
  float value_at(const uint16_t* x, int64_t i) const { return format.widen_one(x[i]); }
};

// Call each(group) for groups that cover all channels of arrays in a layout, in parallel.
template <class Format, class Each>
void for_groups(const Format& format, const Shape& shape, int layout, const Each& each) {
  const int64_t lanes = layout == 1 ? 8 : layout;
  const int64_t groups = (shape.channels + lanes - 1) / lanes;
  in_parallel(groups, [&](int64_t number) {
    const int64_t first = number * lanes;
    if (layout == 16) {
      each(Group<Format, 16, true>{format, shape, first});
    } else if (layout == 8) {
      each(Group<Format, 8, true>{format, shape, first});
    } else if (first + lanes <= shape.channels) {
      each(Group<Format, 8, false>{format, shape, first});
    } else {
      for (int64_t c = first; c < shape.channels; ++c) each(Group<Format, 1, false>{format, shape, c});
    }
  });
}

}  // namespace mpgluon

#endif  // MPGLUON_BATCH_NORM_H_
