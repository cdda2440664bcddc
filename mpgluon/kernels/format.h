// Floating-point formats as values: what the operators ask of the one that they round to.
//
// A format rounds FP32 numbers to its own (to nearest even, subnormals kept) and holds them in 16-bit
// codes. Float16 has instructions of its own on most processors; Grid takes every other format from a
// few numbers.
#ifndef MPGLUON_FORMAT_H_
#define MPGLUON_FORMAT_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "float16.h"

namespace mpgluon {

struct Float16 {
  static constexpr uint16_t kInfinity = 0x7c00;  // its code
  void round_to(float* y, const float* x) const { mpgluon::round_to(y, x); }
  float round_one(float x) const { return mpgluon::round_one(x); }
  void narrow_to(uint16_t* y, const float* x) const { mpgluon::narrow_to(y, x); }
  void narrow_8_to(uint16_t* y, const float* x) const { mpgluon::narrow_8_to(y, x); }
  uint16_t narrow_one(float x) const { return mpgluon::narrow_one(x); }
  void widen_to(float* y, const uint16_t* x) const { mpgluon::widen_to(y, x); }
  void widen_8_to(float* y, const uint16_t* x) const { mpgluon::widen_8_to(y, x); }
  float widen_one(uint16_t x) const { return mpgluon::widen_one(x); }
};

// The numbers with so many significant bits from the subnormals up to a largest one, all of which FP32
// has. What is larger, infinity too, becomes `beyond`: infinity, NaN or the largest number; NaN stays
// NaN. Codes are the upper halves of FP32 numbers, which is enough for up to 8 significant bits; a
// format with more must not be asked for codes.
class Grid {
 public:
  static constexpr uint16_t kInfinity = 0x7f80;  // the code of it, whether numbers reach it or not

  Grid(int significand_bits, int min_exponent, float largest, float beyond)
      : shift_(24 - significand_bits), mask_(~((1 << shift_) - 1)),
        below_half_(shift_ == 0 ? 0 : (1 << (shift_ - 1)) - 1), odd_(shift_ == 0 ? 0 : 1),
        smallest_normal_((min_exponent + 127) << 23), largest_(bits(largest)),
        beyond_(bits(beyond)) {
    // Numbers from here on lie as far apart as the format's subnormals.
    const int spacing = min_exponent - significand_bits + 1;
    coarse_ = number((spacing + 23 + 127) << 23);
    has_subnormals_ = min_exponent > -126;
    spacing_ = has_subnormals_ ? (spacing + 127) << 23 : 0;  // else perhaps no FP32 number
    draw_ = number(spacing_) / (1 << 24);
  }

  // Whether some of its subnormals are normal numbers of FP32; others have its bits and fewer.
  bool has_subnormals() const { return has_subnormals_; }

  float round_one(float x) const {
    constexpr int32_t kInfiniteBits = 0x7f800000, kQuiet = 0x400000;
    const int32_t all = bits(x), magnitude = all & 0x7fffffff;
    const int32_t even = (magnitude >> shift_) & odd_;
    const int32_t normal = (magnitude + below_half_ + even) & mask_;
    const int32_t subnormal = bits((number(magnitude) + coarse_) - coarse_);
    int32_t rounded = choose(magnitude < smallest_normal_, subnormal, normal);
    rounded = choose(rounded > largest_, beyond_, rounded);
    rounded = choose(magnitude > kInfiniteBits, (magnitude | kQuiet) & mask_, rounded);
    return number(rounded | (all ^ magnitude));
  }
  // Cut off what the format does not hold, toward zero; or, if that is more than `draw` 2^-24ths of a
  // spacing, go on to the number behind. So a random draw makes the result right in the mean.
  template <bool kDraws, bool kHasSubnormals>
  float cut_one(float x, int32_t draw) const {
    constexpr int32_t kInfiniteBits = 0x7f800000, kQuiet = 0x400000;
    const int32_t all = bits(x), magnitude = all & 0x7fffffff;
    const int32_t cut = (magnitude & ~mask_) << (24 - shift_);
    int32_t rounded = (magnitude & mask_) + choose(kDraws && draw < cut, 1 << shift_, 0);
    if (kHasSubnormals) {  // Positive FP32 numbers compare as their bits do.
      const float near = (number(magnitude) + coarse_) - coarse_;
      const float low = near - number(choose(bits(near) > magnitude, spacing_, 0));
      const int32_t drawn = bits(static_cast<float>(draw) * draw_);
      const bool goes_on = kDraws && drawn < bits(number(magnitude) - low);
      const int32_t subnormal = bits(low + number(choose(goes_on, spacing_, 0)));
      rounded = choose(magnitude < smallest_normal_, subnormal, rounded);
    }
    const int32_t over = kDraws ? beyond_ : choose(magnitude < kInfiniteBits, largest_, beyond_);
    rounded = choose(rounded > largest_, over, rounded);
    rounded = choose(magnitude > kInfiniteBits, (magnitude | kQuiet) & mask_, rounded);
    return number(rounded | (all ^ magnitude));
  }

  uint16_t narrow_one(float x) const { return static_cast<uint32_t>(bits(round_one(x))) >> 16; }
  float widen_one(uint16_t x) const { return number(static_cast<uint32_t>(x) << 16); }

  void round_to(float* y, const float* x) const {
    const Grid format = *this;  // which no write to y changes, so that several are done at a time
    for (int i = 0; i < kChunk; ++i) y[i] = format.round_one(x[i]);
  }
  void narrow_to(uint16_t* y, const float* x) const { narrow<kChunk>(y, x); }
  void narrow_8_to(uint16_t* y, const float* x) const { narrow<8>(y, x); }
  void widen_to(float* y, const uint16_t* x) const { widen<kChunk>(y, x); }
  void widen_8_to(float* y, const uint16_t* x) const { widen<8>(y, x); }

 private:
  static int32_t bits(float x) {
    int32_t made;
    std::memcpy(&made, &x, sizeof made);
    return made;
  }
  static float number(int32_t bits) {
    float made;
    std::memcpy(&made, &bits, sizeof made);
    return made;
  }
  template <int kCount>
  void narrow(uint16_t* y, const float* x) const {
    const Grid format = *this;
    for (int i = 0; i < kCount; ++i) y[i] = format.narrow_one(x[i]);
  }
  template <int kCount>
  void widen(float* y, const uint16_t* x) const {
    for (int i = 0; i < kCount; ++i) y[i] = widen_one(x[i]);
  }

  int32_t shift_, mask_, below_half_, odd_, smallest_normal_, largest_, beyond_, spacing_;
  float coarse_, draw_;
  bool has_subnormals_;
};

inline const Grid& bfloat16_grid() {
  static const Grid format(8, -126, std::ldexp(255.0f, 120), INFINITY);
  return format;
}

// Return the format of what kernels/__init__.py says: the constructor's arguments, in that order.
inline Grid grid_of(const float* numbers) {
  return Grid(static_cast<int>(numbers[0]), static_cast<int>(numbers[1]), numbers[2], numbers[3]);
}

}  // namespace mpgluon

#endif  // MPGLUON_FORMAT_H_
