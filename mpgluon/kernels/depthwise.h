// Depthwise convolutions of plain bfloat16 arrays (images, channels, height, width), and their gradients. Where the
// channels are no multiple of sixteen, oneDNN computes a matrix product for each of them. Here sixteen columns are
// computed at a time; the sums are FP32, in an order that depends on no number of threads.
#ifndef MPGLUON_DEPTHWISE_H_
#define MPGLUON_DEPTHWISE_H_

#include "common.h"
#include "window.h"

namespace mpgluon {
namespace depthwise {

constexpr int kMostTaps = 7 * 7;  // of the largest kernel in functions_for

inline int64_t rounded_up(int64_t columns) { return (columns + kLanes - 1) / kLanes * kLanes; }

// A plane in FP32 within a margin of zeros. Of each row, the columns 0, step, 2 step, ... come first, then 1, step + 1,
// ...: those that a convolution with this stride multiplies by one number of its kernel lie side by side.
class Spread {
 public:
  Spread(int64_t rows, int64_t columns, int64_t step)
      : rows_(rows), room_(columns), step_(step), numbers_(rows * columns * step) {}

  // The place of a row and a column in memory, and how far apart two rows are.
  const float* at(int64_t row, int64_t column) const { return numbers_.data() + place(row, column); }
  int64_t row_length() const { return step_ * room_; }

  // Take over the numbers of a plane, the first of them to a place; those that do not fit are left out.
  void fill(const uint16_t* x, int64_t rows, int64_t columns, int64_t top, int64_t left) {
    for (int64_t row = 0; row < std::min(rows, rows_ - top); ++row)
      for (int64_t first = 0; first < std::min(step_, columns); ++first) {
        float* to = numbers_.data() + place(top + row, left + first);
        const int64_t fit = std::min((columns - first + step_ - 1) / step_, room_ - (left + first) / step_);
        for (int64_t i = 0; i < fit; ++i) to[i] = widened(x[row * columns + first + i * step_]);
      }
  }

 private:
  int64_t place(int64_t row, int64_t column) const {
    return row * row_length() + column % step_ * room_ + column / step_;
  }

  int64_t rows_, room_, step_;
  std::vector<float> numbers_;
};

// A place for the operand of a convolution.
template <int kSize>
Spread room_for_operand(const Window& at) {
  return Spread((at.rows - 1) * at.stride[1] + kSize, rounded_up(at.columns) + kSize, at.stride[2]);
}

// Numbers of a kernel, and for each the first of those that it is multiplied by.
struct Taps {
  int count = 0;
  float weights[kMostTaps];
  const float* numbers[kMostTaps];

  void add(uint16_t weight, const float* first) {
    weights[count] = widened(weight);
    numbers[count++] = first;
  }

  // Write a row of sums of products, and more up to a multiple of sixteen, of numbers from a place on.
  void sum(int64_t start, int64_t columns, float* y) const {
    int64_t i = 0;
    for (; i + kLanes < columns; i += 2 * kLanes) {
      Lanes left{}, right{};
      for (int tap = 0; tap < count; ++tap) {
        left += weights[tap] * load(numbers[tap] + start + i);
        right += weights[tap] * load(numbers[tap] + start + i + kLanes);
      }
      store(y + i, left);
      store(y + i + kLanes, right);
    }
    if (i >= columns) return;
    Lanes last{};
    for (int tap = 0; tap < count; ++tap) last += weights[tap] * load(numbers[tap] + start + i);
    store(y + i, last);
  }
};

template <int kSize>
void convolve(const Window& at, const uint16_t* x, const uint16_t* w, uint16_t* y) {
  share(at.images * at.channels, [&](int64_t begin, int64_t end) {
    Spread plane = room_for_operand<kSize>(at);
    std::vector<float> sums(rounded_up(at.columns));
    for (int64_t number = begin; number < end; ++number) {
      plane.fill(x + number * at.height * at.width, at.height, at.width, at.pad[1], at.pad[2]);
      const uint16_t* weight = w + number % at.channels * kSize * kSize;
      Taps taps;
      for (int i = 0; i < kSize * kSize; ++i) taps.add(weight[i], plane.at(i / kSize, i % kSize));
      for (int64_t row = 0; row < at.rows; ++row) {
        taps.sum(row * at.stride[1] * plane.row_length(), at.columns, sums.data());
        uint16_t* to = y + (number * at.rows + row) * at.columns;
        for (int64_t i = 0; i < at.columns; ++i) to[i] = bfloat16_of(sums[i]);
      }
    }
  });
}

// The first place of an axis with a margin, from 0 on, that a stride divides but for this remainder.
inline int64_t first_of(int64_t remainder, int64_t stride, int64_t pad) {
  return (remainder + stride - pad % stride) % stride;
}

// Write the gradient of the operand. Its rows and columns are of as many kinds as the strides are long; each kind has
// numbers of the kernel of its own.
template <int kSize>
void data_gradient(const Window& at, const uint16_t* dy, const uint16_t* w, uint16_t* dx) {
  const int64_t down = at.stride[1], across = at.stride[2];
  const int64_t top = (kSize - 1) / down, left = (kSize - 1) / across;
  const int64_t rows = (at.height - 1 + at.pad[1]) / down + 1, columns = (at.width - 1 + at.pad[2]) / across + 1;
  share(at.images * at.channels, [&](int64_t begin, int64_t end) {
    Spread plane(top + rows, left + rounded_up(columns), 1);
    std::vector<float> sums(rounded_up(columns));
    for (int64_t number = begin; number < end; ++number) {
      plane.fill(dy + number * at.rows * at.columns, at.rows, at.columns, top, left);
      const uint16_t* weight = w + number % at.channels * kSize * kSize;
      for (int64_t kind = 0; kind < down * across; ++kind) {
        Taps taps;
        for (int64_t i = kind / across; i < kSize; i += down)
          for (int64_t j = kind % across; j < kSize; j += across)
            taps.add(weight[i * kSize + j], plane.at(top - i / down, left - j / across));
        const int64_t first = first_of(kind % across, across, at.pad[2]);
        const float* wanted = sums.data() + (first + at.pad[2]) / across;
        for (int64_t row = first_of(kind / across, down, at.pad[1]); row < at.height; row += down) {
          taps.sum((row + at.pad[1]) / down * plane.row_length(), columns, sums.data());
          uint16_t* to = dx + (number * at.height + row) * at.width;
          for (int64_t i = first, j = 0; i < at.width; i += across) to[i] = bfloat16_of(wanted[j++]);
        }
      }
    }
  });
}

// Write the gradient of the weight (channels, 1, kSize, kSize).
template <int kSize>
void weight_gradient(const Window& at, const uint16_t* x, const uint16_t* dy, float* dw) {
  using Bits = LanesOf<int32_t>;
  const int64_t room = rounded_up(at.columns);
  Bits last{};  // of the last sixteen columns, those that there are: beyond them operands may be infinite
  for (int i = 0; i < kLanes; ++i) last[i] = i < at.columns - (room - kLanes) ? -1 : 0;
  share(at.channels, [&](int64_t begin, int64_t end) {
    Spread plane = room_for_operand<kSize>(at), gradients(at.rows, room, 1);
    for (int64_t channel = begin; channel < end; ++channel) {
      Lanes sums[kSize][kSize] = {};
      for (int64_t image = 0; image < at.images; ++image) {
        const int64_t number = image * at.channels + channel;
        plane.fill(x + number * at.height * at.width, at.height, at.width, at.pad[1], at.pad[2]);
        gradients.fill(dy + number * at.rows * at.columns, at.rows, at.columns, 0, 0);
        for (int64_t row = 0; row < at.rows; ++row)
          for (int i = 0; i < kSize; ++i) {
            const float* numbers[kSize];
            for (int j = 0; j < kSize; ++j) numbers[j] = plane.at(row * at.stride[1] + i, j);
            for (int64_t column = 0; column < room; column += kLanes) {
              const Lanes gradient = load(gradients.at(row, column));
              const Bits there = column + kLanes < room ? ~Bits{} : last;
              for (int j = 0; j < kSize; ++j)
                sums[i][j] += gradient * (Lanes)((Bits)load(numbers[j] + column) & there);
            }
          }
      }
      for (int i = 0; i < kSize * kSize; ++i)
        dw[channel * kSize * kSize + i] = total(sums[i / kSize][i % kSize]);
    }
  });
}

// The three of a size of the kernel; none of other sizes.
struct Functions {
  void (*convolve)(const Window&, const uint16_t*, const uint16_t*, uint16_t*);
  void (*data_gradient)(const Window&, const uint16_t*, const uint16_t*, uint16_t*);
  void (*weight_gradient)(const Window&, const uint16_t*, const uint16_t*, float*);
};

template <int kSize>
Functions functions() { return {convolve<kSize>, data_gradient<kSize>, weight_gradient<kSize>}; }

inline Functions functions_for(int64_t size) {
  return size == 3 ? functions<3>() : size == 5 ? functions<5>() : size == 7 ? functions<7>() : Functions{};
}

}  // namespace depthwise
}  // namespace mpgluon

#endif  // MPGLUON_DEPTHWISE_H_
