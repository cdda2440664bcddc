// Sixteen FP32 numbers at a time, from arrays of FP32 or bfloat16 and to them. A sum over a row is that of its
// sixteen lanes, added up in their order: the same bits on every processor, and with any number of threads.
#ifndef MPGLUON_LANES_H_
#define MPGLUON_LANES_H_

#include <cmath>
#include <cstdint>
#include <cstring>

namespace mpgluon {

constexpr int kLanes = 16;

// GCC and clang make of it what the processor has: one register of AVX-512, two of AVX2, four of NEON.
template <class X>
using LanesOf __attribute__((vector_size(kLanes * sizeof(X)))) = X;
using Lanes = LanesOf<float>;

inline float widened(float x) { return x; }
inline float widened(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float made;
  std::memcpy(&made, &bits, sizeof made);
  return made;
}

// Round to bfloat16, to nearest even; NaN stays NaN, and infinite is what rounds beyond the largest number.
inline uint16_t bfloat16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
  const uint32_t is_nan = -static_cast<uint32_t>((bits & 0x7fffffff) > 0x7f800000);
  return ((quiet & is_nan) | (rounded & ~is_nan)) >> 16;
}

inline void put(float* y, float x) { *y = x; }
inline void put(uint16_t* y, float x) { *y = bfloat16_of(x); }

inline Lanes lanes_of(float x) { return Lanes{} + x; }

inline Lanes load(const float* x) {
  Lanes made;
  std::memcpy(&made, x, sizeof made);
  return made;
}
inline Lanes load(const uint16_t* x) {
  LanesOf<uint16_t> codes;
  std::memcpy(&codes, x, sizeof codes);
  return (Lanes)(__builtin_convertvector(codes, LanesOf<uint32_t>) << 16);
}

inline void store(float* y, const Lanes& x) { std::memcpy(y, &x, sizeof x); }
inline void store(uint16_t* y, const Lanes& x) {
  const auto bits = (LanesOf<uint32_t>)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
  const auto is_nan = (LanesOf<uint32_t>)((bits & 0x7fffffff) > 0x7f800000);
  const auto made = (((bits | 0x400000) & is_nan) | (rounded & ~is_nan)) >> 16;
  const auto codes = __builtin_convertvector(made, LanesOf<uint16_t>);
  std::memcpy(y, &codes, sizeof codes);
}

// Call sixteen(i) for every sixteen places from the first one on, and one(i) for those that are left.
template <class Sixteen, class One>
void for_row(int64_t first, int64_t end, const Sixteen& sixteen, const One& one) {
  int64_t i = first;
  for (; i + kLanes <= end; i += kLanes) sixteen(i);
  for (; i < end; ++i) one(i);
}

inline float total(const Lanes& x) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

}  // namespace mpgluon

#endif  // MPGLUON_LANES_H_
