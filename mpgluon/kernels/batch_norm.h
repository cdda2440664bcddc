// Batch normalization of 16-bit values, bit for bit as oneDNN computes it on plain FP32 arrays.
//
// oneDNN adds the elements of a channel one after the other, image by image, or divides the images
// among the threads and adds up their parts. So does this, for several channels at a time: which
// channels are done together changes no bit. It must be compiled
// without contraction to fused operations. Data, results and gradients are codes of the format.
#ifndef MPGLUON_BATCH_NORM_H_
#define MPGLUON_BATCH_NORM_H_

#include <cmath>
#include <cstdint>

#include "format.h"

namespace mpgluon {

struct Shape {
  int64_t images, channels, pixels;
};

// L neighbouring channels: in a block of L, or L planes beside each other.
template <class Format, int L, bool kBlocked>
struct Group {
  Format format;
  Shape shape;
  int64_t first;

  int64_t start(int64_t image) const { return (image * shape.channels + first) * shape.pixels; }

  // Add each(part, lane, x...), a number or two for each element, in the order of memory, in as many
  // parts as there are ranges of images.
  template <int kSums, class Each, class... Codes>
  void add_up(int parts, float (&sums)[kSums][L], const Each& each, const Codes*... x) const {
    for (int part = 0; part < parts; ++part) {
      float some[kSums][L] = {};
      for (int64_t image = beginning(part, parts); image < beginning(part + 1, parts); ++image)
        for (int64_t pixel = 0; pixel < shape.pixels; ++pixel) {
          const int64_t from = start(image) + (kBlocked ? pixel * L : pixel);
          visit_lanes([&](int lane, auto... values) { each(some, lane, values...); },
                      lanes_at(x + from)...);
        }
      for (int i = 0; i < kSums; ++i)
        for (int lane = 0; lane < L; ++lane) sums[i][lane] += some[i][lane];
    }
  }

  // The first image of a part; the first parts have one more where they cannot be equal.
  int64_t beginning(int part, int parts) const {
    const int64_t more = shape.images % parts;
    return part * (shape.images / parts) + (part < more ? part : more);
  }

  // Write result(lane, x...), rounded, for every element.
  template <class Result, class... Codes>
  void write(uint16_t* y, const Result& result, const Codes*... x) const {
    constexpr int kAtOnce = kBlocked ? L : 16;
    for (int lane = 0; lane < (kBlocked ? 1 : L); ++lane)
      for (int64_t image = 0; image < shape.images; ++image) {
        const int64_t from = start(image) + (kBlocked ? 0 : lane * shape.pixels);
        const int64_t end = from + (kBlocked ? L : 1) * shape.pixels;
        int64_t i = from;
        for (; i + kAtOnce <= end; i += kAtOnce)
          write_some<kAtOnce>(y + i, lane, result, neighbours<kAtOnce>(x + i)...);
        for (; i < end; ++i) y[i] = format.narrow_one(result(lane, format.widen_one(x[i])...));
      }
  }

  float count() const { return static_cast<float>(shape.images * shape.pixels); }

  void statistics(const uint16_t* x, int parts, float* mean, float* variance) const {
    float sum[1][L] = {}, squares[1][L] = {}, average[L];
    add_up(parts, sum, [](auto& some, int lane, float value) { some[0][lane] += value; }, x);
    for (int lane = 0; lane < L; ++lane) average[lane] = mean[first + lane] = sum[0][lane] / count();
    add_up(
        parts, squares,
        [&](auto& some, int lane, float value) {
          const float m = value - average[lane];
          some[0][lane] += m * m;
        },
        x);
    for (int lane = 0; lane < L; ++lane) variance[first + lane] = squares[0][lane] / count();
  }

  void normalize(const uint16_t* x, const float* mean, const float* variance, const float* gamma,
                 const float* beta, float eps, uint16_t* y) const {
    float average[L], scale[L], shift[L];
    for (int lane = 0; lane < L; ++lane) {
      average[lane] = mean[first + lane];
      scale[lane] = gamma[first + lane] / std::sqrt(variance[first + lane] + eps);
      shift[lane] = beta[first + lane];
    }
    write(
        y,
        [&](int lane, float value) { return scale[lane] * (value - average[lane]) + shift[lane]; },
        x);
  }

  void sum_gradients(const uint16_t* x, const uint16_t* dy, int parts, const float* mean,
                     const float* variance, float eps, float* dgamma, float* dbeta) const {
    float average[L], sums[2][L] = {};
    for (int lane = 0; lane < L; ++lane) average[lane] = mean[first + lane];
    add_up(
        parts, sums,
        [&](auto& some, int lane, float value, float gradient) {
          some[0][lane] += (value - average[lane]) * gradient;
          some[1][lane] += gradient;
        },
        x, dy);
    for (int lane = 0; lane < L; ++lane) {
      dgamma[first + lane] = sums[0][lane] * inverse(variance[first + lane], eps);
      dbeta[first + lane] = sums[1][lane];
    }
  }

  void gradient_of_data(const uint16_t* x, const uint16_t* dy, const float* mean, const float* variance,
                        const float* gamma, float eps, const float* dgamma, const float* dbeta,
                        uint16_t* dx) const {
    float average[L], inverses[L], scale[L], dg[L], mean_db[L];
    const float n = count();
    for (int lane = 0; lane < L; ++lane) {
      average[lane] = mean[first + lane];
      inverses[lane] = inverse(variance[first + lane], eps);
      scale[lane] = gamma[first + lane] * inverses[lane];
      dg[lane] = dgamma[first + lane];
      mean_db[lane] = dbeta[first + lane] / n;
    }
    write(
        dx,
        [&](int lane, float value, float gradient) {
          const float mean_part =
              mean_db[lane] + (value - average[lane]) * dg[lane] * inverses[lane] / n;
          return (gradient - mean_part) * scale[lane];
        },
        x, dy);
  }

  static float inverse(float variance, float eps) { return 1.0f / std::sqrt(variance + eps); }

 private:
  template <int kCount>
  struct Values {
    float at[kCount];
  };

  // Return neighbours as FP32.
  template <int kCount>
  Values<kCount> neighbours(const uint16_t* x) const {
    Values<kCount> made;
    if (kCount == 16) format.widen_to(made.at, x);
    else if (kCount == 8) format.widen_8_to(made.at, x);
    else for (int j = 0; j < kCount; ++j) made.at[j] = format.widen_one(x[j]);
    return made;
  }

  // Return the elements of all lanes at a pixel.
  Values<L> lanes_at(const uint16_t* x) const {
    if (kBlocked) return neighbours<L>(x);
    Values<L> made;
    for (int lane = 0; lane < L; ++lane) made.at[lane] = format.widen_one(x[lane * shape.pixels]);
    return made;
  }

  template <class Each, class... Arrays>
  static void visit_lanes(const Each& each, const Arrays&... x) {
    for (int lane = 0; lane < L; ++lane) each(lane, x.at[lane]...);
  }

  template <int kCount, class Result, class... Arrays>
  void write_some(uint16_t* y, int lane, const Result& result, const Arrays&... x) const {
    float values[kCount];
    for (int j = 0; j < kCount; ++j) values[j] = result(kBlocked ? j : lane, x.at[j]...);
    if (kCount == 16) format.narrow_to(y, values);
    else format.narrow_8_to(y, values);
  }
};

// Call each(group) for groups that cover all channels from one on of arrays in a layout, in parallel.
template <class Format, class Each>
void for_groups(const Format& format, const Shape& shape, int layout, int64_t from,
                const Each& each) {
  const int64_t lanes = layout == 1 ? 8 : layout, before = from / lanes;
  const int64_t groups = (shape.channels + lanes - 1) / lanes - before;
  in_parallel(groups, [&](int64_t number) {
    const int64_t first = (before + number) * lanes;
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
