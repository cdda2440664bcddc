// Rounding to a format with little range: values are multiplied by a power of two that takes the largest
// of them to the format's largest numbers, rounded, and divided by it again.
//
// That is rounding to the format's numbers divided by the scale; only blocks are multiplied really.
#ifndef MPGLUON_SCALED_H_
#define MPGLUON_SCALED_H_

#include <cfloat>

#include "packing.h"

namespace mpgluon {

// Which values share a scale: none has one, those of an array, or of a block of 32.
enum Sharing { kNoScale, kArray, kBlocks };

// The format's numbers, as kernels/__init__.py says them, divided by scales.
class ScaledFormat {
 public:
  ScaledFormat(const float* numbers, Sharing sharing)
      : significand_bits_(numbers[0]), min_exponent_(numbers[1]), largest_(numbers[2]),
        beyond_(numbers[3]), sharing_(sharing) {
    std::memcpy(&largest_bits_, &largest_, sizeof largest_);
  }

  Sharing sharing() const { return sharing_; }

  // Return the exponent of the scale for values of which the largest, a finite one, has these bits.
  int scale_for(int32_t largest) const {
    constexpr int kMost = 100;  // in either direction, so that FP32 holds the numbers
    // That of a subnormal counts as -127, and its scale is the largest one as it would be anyway.
    const int exponent = (largest_bits_ >> kFraction) - (largest >> kFraction) -
                         ((largest & kFractionMask) > (largest_bits_ & kFractionMask));
    const int within = std::min(std::max(exponent, -kMost), kMost);
    return largest == 0 ? 0 : within;
  }

  // Return the numbers divided by a scale.
  Grid divided(int scale) const {
    const float most = std::ldexp(largest_, -scale);
    return Grid(significand_bits_, min_exponent_ - scale, most, most);
  }

  // Return them for values of which this is the largest. Larger ones saturate; if it is infinite or NaN,
  // every value becomes NaN: a scale would hide it. Without a scale larger ones become what the format
  // says, so that a loss scale that is too large is seen.
  Grid grid_for(float largest) const {
    if (sharing_ == kNoScale) return Grid(significand_bits_, min_exponent_, largest_, beyond_);
    int32_t bits;
    std::memcpy(&bits, &largest, sizeof bits);
    if (largest <= FLT_MAX) return divided(scale_for(bits));
    return Grid(significand_bits_, min_exponent_, -1, NAN);
  }

 private:
  static constexpr int32_t kFraction = 23, kFractionMask = (1 << kFraction) - 1;

  int significand_bits_, min_exponent_;
  float largest_, beyond_;
  int32_t largest_bits_;
  Sharing sharing_;
};

// Rounding to a format, and then to another one's numbers divided by a scale.
template <class Format>
struct Twice {
  Format first;
  Grid second;

  float round_one(float x) const { return second.round_one(first.round_one(x)); }
  float widen_one(uint16_t x) const { return second.round_one(first.widen_one(x)); }
  void round_to(float* y, const float* x) const {
    float once[kChunk];
    first.round_to(once, x);
    second.round_to(y, once);
  }
  void widen_to(float* y, const uint16_t* x) const {
    float wide[kChunk];
    first.widen_to(wide, x);
    second.round_to(y, wide);
  }
};

// Return the largest of n codes or bit patterns without the sign: magnitudes have their order.
template <class Bits>
Bits largest_bits(const Bits* bits, int64_t n, Bits magnitude) {
  std::atomic<Bits> largest{0};
  share(n, [&](int64_t first, int64_t last) {
    Bits found = 0;
    for (int64_t i = first; i < last; ++i)
      found = std::max<Bits>(found, static_cast<Bits>(bits[i] & magnitude));
    Bits before = largest;
    while (before < found && !largest.compare_exchange_weak(before, found)) {}
  });
  return largest;
}

// Return the largest absolute value of codes, or of FP32 numbers that are rounded to the format.
template <class Format>
float largest_of(const Format& format, const NDArray& array) {
  const int64_t n = array.shape().Size();
  if (holds_codes(array))
    return format.widen_one(largest_bits<uint16_t>(codes_of(array), n, 0x7fff));
  const int32_t* from = reinterpret_cast<const int32_t*>(address(array));
  const int32_t bits = largest_bits<int32_t>(from, n, 0x7fffffff);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return format.round_one(value);
}

// An array as (outer, length, inner); blocks of 32 lie along the length, and the last may be shorter.
struct View {
  int64_t outer, length, inner;
};

// A scale and its inverse, or NaN, from the bits of the largest magnitude.
struct Scale {
  Scale(const ScaledFormat& scaled, int32_t largest) {
    constexpr int32_t kInfiniteBits = 0x7f800000, kNan = 0x7fc00000;
    const bool finite = largest < kInfiniteBits;
    const int32_t exponent = finite ? scaled.scale_for(largest) : 0;
    const int32_t bits = finite ? (127 + exponent) << 23 : kNan, inverse = (127 - exponent) << 23;
    std::memcpy(&up, &bits, sizeof up);
    std::memcpy(&down, &inverse, sizeof down);
  }
  float up, down;
};

inline void round_blocks(const ScaledFormat& scaled, const View& view, float* all) {
  constexpr int64_t kBlock = 32;
  constexpr int32_t kMagnitude = 0x7fffffff;
  const int64_t blocks = (view.length + kBlock - 1) / kBlock, lanes = view.inner;
  share(view.outer * blocks, [&](int64_t first, int64_t last) {
    const ScaledFormat values = scaled;  // which no write changes, so that several are done at a time
    const Grid format = values.divided(0);
    std::vector<int32_t> largest(lanes);
    std::vector<float> scale(lanes), inverse(lanes);
    int32_t* most = largest.data();
    float *up = scale.data(), *down = inverse.data();
    for (int64_t number = first; number < last; ++number) {
      const int64_t start = number % blocks * kBlock;
      const int64_t count = std::min(kBlock, view.length - start);
      float* x = all + (number / blocks * view.length + start) * lanes;
      const int32_t* bits = reinterpret_cast<const int32_t*>(x);
      // A product that is too small for FP32's normal numbers is nothing to the format either.
      if (lanes == 1) {
        int32_t found = 0;
        for (int64_t i = 0; i < count; ++i) found = std::max(found, bits[i] & kMagnitude);
        const Scale one(values, found);
        for (int64_t i = 0; i < count; ++i) x[i] = format.round_one(x[i] * one.up) * one.down;
        continue;
      }
      std::fill(largest.begin(), largest.end(), 0);
      for (int64_t i = 0; i < count; ++i, bits += lanes)
        for (int64_t lane = 0; lane < lanes; ++lane)
          most[lane] = std::max(most[lane], bits[lane] & kMagnitude);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const Scale one(values, most[lane]);
        up[lane] = one.up;
        down[lane] = one.down;
      }
      for (int64_t i = 0; i < count; ++i, x += lanes)
        for (int64_t lane = 0; lane < lanes; ++lane)
          x[lane] = format.round_one(x[lane] * up[lane]) * down[lane];
    }
  });
}

// Write the values of an operand, codes that lie in a layout or FP32 numbers, to an FP32 array.
template <class Format>
void fill(const Format& format, const NDArray& in, int layout, const NDArray& made) {
  const int64_t n = in.shape().Size();
  if (holds_codes(in)) return widen_codes(format, codes_of(in), n, prepare(made, layout));
  const NDArray from = plain(in);  // inference leaves weights in oneDNN's layouts
  const float* x = address(from);
  float* to = made.data().dptr<float>();
  for_all(n, [&](int64_t i) { format.round_to(to + i, x + i); },
          [&](int64_t i) { to[i] = format.round_one(x[i]); });
}

// The same, rounded to the scaled format. to_scale_by() takes the largest absolute value of an array.
template <class Format, class ToScaleBy>
NDArray fill_scaled(const Format& format, const ScaledFormat& scaled, const View& view,
                    const NDArray& in, int layout, const NDArray& made,
                    const ToScaleBy& to_scale_by) {
  if (scaled.sharing() != kBlocks) {
    const NDArray from = holds_codes(in) ? in : plain(in);
    const bool has_scale = scaled.sharing() != kNoScale;
    const Grid grid = scaled.grid_for(has_scale ? to_scale_by(largest_of(format, from)) : 0);
    fill(Twice<Format>{format, grid}, from, layout, made);
    return made;
  }
  if (layout == 1) fill(format, in, 1, made);
  else unpack_plain(format, in, made);
  round_blocks(scaled, view, address(made));
  return made;
}

}  // namespace mpgluon

#endif  // MPGLUON_SCALED_H_
