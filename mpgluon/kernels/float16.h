// Rounding to float16: to nearest even, subnormals kept, overflow to infinity, NaN to a quiet one
// with the upper bits of its payload. The same bits whatever the processor.
#ifndef MPGLUON_FLOAT16_H_
#define MPGLUON_FLOAT16_H_

#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "parallel.h"

namespace mpgluon {

constexpr int64_t kChunk = 16;

// Without a branch, so that compilers choose several at a time.
inline int32_t choose(bool first, int32_t one, int32_t other) {
  const int32_t mask = -static_cast<int32_t>(first);
  return (one & mask) | (other & ~mask);
}

#if defined(__F16C__)  // x86-64-v3 and later

inline uint16_t narrow_one(float x) { return _cvtss_sh(x, 0); }
inline float widen_one(uint16_t x) { return _cvtsh_ss(x); }
inline void narrow_8_to(uint16_t* y, const float* x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm256_cvtps_ph(_mm256_loadu_ps(x), 0));
}
inline void widen_8_to(float* y, const uint16_t* x) {
  _mm256_storeu_ps(y, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

#else

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

#if defined(__aarch64__)

inline uint16_t narrow_one(float x) { return same_bits<uint16_t>(static_cast<__fp16>(x)); }
inline float widen_one(uint16_t x) { return same_bits<__fp16>(x); }

#else  // With signed comparisons, which compilers do several at a time.

inline uint16_t narrow_one(float x) {
  const int32_t bits = same_bits<int32_t>(x), size = bits & 0x7fffffff;
  // Beside 0.5 an FP32 number's last bit is float16's least subnormal: the addition rounds.
  const int32_t subnormal = same_bits<int32_t>(same_bits<float>(size) + 0.5f) - 0x3f000000;
  const int32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  const int32_t nan = 0x7e00 | (size >> 13 & 0x3ff);
  const int32_t finite = choose(size < 0x38800000, subnormal, normal);
  const int32_t special = choose(size > 0x7f800000, nan, 0x7c00);
  return static_cast<uint16_t>(choose(size < 0x47800000, finite, special) | (bits >> 16 & 0x8000));
}

inline float widen_one(uint16_t x) {
  const int32_t size = x & 0x7fff, wide = size << 13;
  // The subtraction takes the first bit, which a subnormal number does not have, away again.
  const float above = same_bits<float>(wide + 0x38800000) - 1.0f / 16384;
  const int32_t normal = wide + 0x38000000 + choose(size < 0x7c00, 0, 0x38000000);
  const int32_t quiet = choose(size > 0x7c00, 0x400000, 0);
  const int32_t sign = same_bits<int32_t>((x & 0x8000u) << 16);
  return same_bits<float>(choose(size < 0x400, same_bits<int32_t>(above), normal) | quiet | sign);
}

#endif

inline void narrow_8_to(uint16_t* y, const float* x) {
  for (int i = 0; i < 8; ++i) y[i] = narrow_one(x[i]);
}
inline void widen_8_to(float* y, const uint16_t* x) {
  for (int i = 0; i < 8; ++i) y[i] = widen_one(x[i]);
}

#endif

inline void round_8_to(float* y, const float* x) {
  uint16_t rounded[8];
  narrow_8_to(rounded, x);
  widen_8_to(y, rounded);
}
inline float round_one(float x) { return widen_one(narrow_one(x)); }

// The same for a chunk.
#ifdef __AVX512F__  // At once: a store of two halves delays whoever loads them as a whole.
// The masked forms, of all elements: GCC 12 warns of the others' own code.
inline void narrow_to(uint16_t* y, const float* x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y),
                      _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(x), 0));
}
inline void widen_to(float* y, const uint16_t* x) {
  _mm512_storeu_ps(y, _mm512_maskz_cvtph_ps(
                          0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}
#else
inline void narrow_to(uint16_t* y, const float* x) {
  narrow_8_to(y, x);
  narrow_8_to(y + 8, x + 8);
}
inline void widen_to(float* y, const uint16_t* x) {
  widen_8_to(y, x);
  widen_8_to(y + 8, x + 8);
}
#endif
inline void round_to(float* y, const float* x) {
  uint16_t rounded[kChunk];
  narrow_to(rounded, x);
  widen_to(y, rounded);
}

// Call chunk(i) for the start of every whole chunk of n elements, and one(i) for what is left.
template <class Chunk, class One>
void for_all(int64_t n, const Chunk& chunk, const One& one) {
  const int64_t chunks = n / kChunk;
  const auto several = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) chunk(i * kChunk);
  };
  if (n > 65536) share(chunks, several);
  else several(0, chunks);
  for (int64_t i = chunks * kChunk; i < n; ++i) one(i);
}

}  // namespace mpgluon

#endif  // MPGLUON_FLOAT16_H_
