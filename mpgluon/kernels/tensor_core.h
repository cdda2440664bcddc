// The sums of a Tensor Core, as MMA-Sim models them, bit for bit.
//
// A few products and the sum so far are added at once. The products of 16-bit numbers are exact; each
// summand is shifted to the largest exponent among them and cut off after so many fraction bits; the
// integers that are left are added, and their sum is cut off to an FP32 number, to which the next
// products are added. The exponent of a product is the sum of its operands' exponents, which may be
// one less than that of its value.
//
// Xie, Wang, Yang, Yang, "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores",
// arXiv 2511.10909, and its package mmasim.
#ifndef MPGLUON_TENSOR_CORE_H_
#define MPGLUON_TENSOR_CORE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace mpgluon {
namespace tensor_core {

struct Accumulation {
  int terms;            // products that are added at once
  int fraction_bits;    // of a summand, beside the largest exponent
  int lowest_exponent;  // of the operands' format: subnormal numbers have it too
};

// Sums that are computed at a time.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kDepth = 256;   // terms that are prepared at a time, a multiple of every Accumulation's
constexpr int kRowsOnce = 64;  // rows that share what was prepared

// What zero, and infinity or NaN, have for an exponent. The sum of two exponents then tells whether an
// operand was special, whatever the other one was, or else whether one was zero.
constexpr int32_t kOfZero = -1000, kOfSpecial = 5000, kAllZero = -500;
// With a largest exponent between these no FP32 number below overflows, and none is subnormal but
// those that are cut off anyway.
constexpr int32_t kSmallest = -90, kLargest = 125;

inline int32_t bits_of(float x) {
  int32_t made;
  std::memcpy(&made, &x, sizeof made);
  return made;
}
inline float number_of(uint32_t bits) {
  float made;
  std::memcpy(&made, &bits, sizeof made);
  return made;
}

// Without branches, so that compilers do several at a time.
inline int32_t exponent_of(float x, int32_t lowest) {
  const int32_t size = bits_of(x) & 0x7fffffff;
  const int32_t finite = std::max((size >> 23) - 127, lowest);
  const int32_t nonzero = size >= 0x7f800000 ? kOfSpecial : finite;
  return size == 0 ? kOfZero : nonzero;
}

// Cut off a number to FP32. What is beyond FP32's largest power of two becomes infinite.
inline float cut_off(double x) {
  if (std::isnan(x)) return number_of(0x7fffffff);
  float made = static_cast<float>(x);
  if (std::fabs(made) > std::fabs(x) && std::fabs(x) < 0x1p128) made = std::nextafter(made, 0.0f);
  return made + 0.0f;  // never -0
}

// Add the products of terms to a sum, for any operands: the definition, one number at a time.
inline float add_by_definition(const Accumulation& how, const float* a, const float* b, float sum) {
  const int32_t zero = -108 - how.fraction_bits;  // the exponent of a product or sum that is zero
  const auto exponent = [&](float x, float y) {
    const int32_t lowest = how.lowest_exponent;
    return x * static_cast<double>(y) == 0 ? zero : exponent_of(x, lowest) + exponent_of(y, lowest);
  };
  int32_t largest = sum == 0 ? zero : exponent_of(sum, -126);
  for (int k = 0; k < how.terms; ++k)
    largest = std::max(largest, exponent(a[k], b[k * kLanes]));
  const auto cut = [&](double x) { return std::trunc(std::ldexp(x, how.fraction_bits - largest)); };
  double total = cut(sum);
  for (int k = 0; k < how.terms; ++k) total += cut(static_cast<double>(a[k]) * b[k * kLanes]);
  return cut_off(std::ldexp(total, largest - how.fraction_bits));
}

// As many numbers as one instruction computes with, on which operators work one by one.
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Naturals __attribute__((vector_size(kLanes * 4)));

template <class Vector>
inline Vector loaded(const void* from) {
  Vector made;
  std::memcpy(&made, from, sizeof made);
  return made;
}
inline Ints larger(Ints x, Ints y) { return x > y ? x : y; }
inline Floats power_of_two(Ints exponent) { return (Floats)((exponent + 127) << 23); }
inline Ints whole(Floats x) { return __builtin_convertvector(x, Ints); }

// Add the products of a row's terms and those of kLanes columns to as many sums.
inline void add_products(const Accumulation& how, const float* a, const int32_t* a_exponents,
                         const float* b, const int32_t* b_exponents, float* sums) {
  const Floats before = loaded<Floats>(sums);
  const Ints before_size = (Ints)before & 0x7fffffff;
  Ints largest = before_size == 0 ? Ints{} + kOfZero : (before_size >> 23) - 127;
  for (int k = 0; k < how.terms; ++k)
    largest = larger(largest, a_exponents[k] + loaded<Ints>(b_exponents + k * kLanes));
  const Ints usual = larger(largest, Ints{} + kSmallest);
  const Floats scale = power_of_two(how.fraction_bits - usual);
  Ints total{};  // less than 2**31: 16 products of less than 2**27 (1 - 2**-10)
  for (int k = 0; k < how.terms; ++k)
    total += whole(a[k] * loaded<Floats>(b + k * kLanes) * scale);
  // With the former sum it may need 33 bits; the sign is that of both, or else that of their sum.
  const Ints former = whole(before * scale), wrapped = (Ints)((Naturals)total + (Naturals)former);
  const Ints sign = ((total & former) | ((total | former) & wrapped)) >> 31;
  const Naturals size = (Naturals)((wrapped ^ sign) - sign);
  // As an FP32 number, cut off: rounded, and one number less where that is too large.
  const Floats upper = __builtin_convertvector((Ints)(size >> 16), Floats) * 65536.0f;
  const Floats lower = __builtin_convertvector((Ints)(size & 0xffff), Floats);
  const Floats rounded = upper + lower;
  const Floats cut = (Floats)((Ints)rounded + (rounded - upper > lower));  // true is -1
  const Floats made = cut * power_of_two(usual - how.fraction_bits);
  const Ints result = (Ints)made | (Ints)((Naturals)sign << 31);
  std::memcpy(sums, &result, sizeof result);
  const Ints unusual = (largest > kLargest) | ((largest < kSmallest) & (largest > kAllZero));
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= unusual[i];
  if (any == 0) return;
  for (int i = 0; i < kLanes; ++i)
    if (unusual[i]) sums[i] = add_by_definition(how, a, b + i, before[i]);
}

// A matrix whose element (i, k) is values[at[i] + step[k]].
struct Matrix {
  const float* values;
  std::vector<int64_t> at, step;
};

// Write the products of two matrices' rows, whose elements are numbers of the format, to
// result[a_place[i] + b_place[j]]. The terms of each sum are added in their order; the last ones are
// filled up with zeros, which change nothing.
inline void multiply(const Accumulation& how, const Matrix& a, const Matrix& b, float* result,
                     const std::vector<int64_t>& a_place, const std::vector<int64_t>& b_place) {
  if (a.at.size() > b.at.size()) return multiply(how, b, a, result, b_place, a_place);
  const int64_t rows = a.at.size(), columns = b.at.size(), terms = a.step.size();
  const int64_t padded = (terms + how.terms - 1) / how.terms * how.terms;
  std::vector<float> left(rows * padded);
  std::vector<int32_t> exponents(rows * padded);
  in_parallel(rows, [&](int64_t i) {
    float* row = &left[i * padded];
    for (int64_t k = 0; k < terms; ++k) row[k] = a.values[a.at[i] + a.step[k]];
    for (int64_t k = 0; k < padded; ++k)
      exponents[i * padded + k] = exponent_of(row[k], how.lowest_exponent);
  });
  const int64_t panels = (columns + kLanes - 1) / kLanes, parts = (rows + kRowsOnce - 1) / kRowsOnce;
  share(panels * parts, [&](int64_t first, int64_t last) {
    std::vector<float> right(kDepth * kLanes), sums(kRowsOnce * kLanes);
    std::vector<int32_t> right_exponents(kDepth * kLanes);
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t column = unit / parts * kLanes, row = unit % parts * kRowsOnce;
      const int64_t height = std::min<int64_t>(kRowsOnce, rows - row);
      const int64_t width = std::min<int64_t>(kLanes, columns - column);
      int64_t at[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) at[j] = b.at[column + std::min(j, width - 1)];
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t start = 0; start < padded; start += kDepth) {
        const int64_t depth = std::min<int64_t>(kDepth, padded - start);
        const int64_t known = std::min<int64_t>(depth, terms - start);
        for (int64_t k = 0; k < known; ++k)
          for (int64_t j = 0; j < kLanes; ++j)
            right[k * kLanes + j] = b.values[at[j] + b.step[start + k]];
        std::fill(right.begin() + known * kLanes, right.begin() + depth * kLanes, 0.0f);
        for (int64_t k = 0; k < depth * kLanes; ++k)
          right_exponents[k] = exponent_of(right[k], how.lowest_exponent);
        // Rows inside: their sums do not wait for one another.
        for (int64_t k = 0; k < depth; k += how.terms)
          for (int64_t i = 0; i < height; ++i)
            add_products(how, &left[(row + i) * padded + start + k],
                         &exponents[(row + i) * padded + start + k], &right[k * kLanes],
                         &right_exponents[k * kLanes], &sums[i * kLanes]);
      }
      for (int64_t i = 0; i < height; ++i)
        for (int64_t j = 0; j < width; ++j)
          result[a_place[row + i] + b_place[column + j]] = sums[i * kLanes + j];
    }
  });
}

}  // namespace tensor_core
}  // namespace mpgluon

#endif  // MPGLUON_TENSOR_CORE_H_
