// Rounding to float16: to nearest even, subnormals kept, overflow to infinity.
#ifndef MPGLUON_FLOAT16_H_
#define MPGLUON_FLOAT16_H_

#include <immintrin.h>

#include <cstdint>

namespace mpgluon {

constexpr int64_t kChunk = 16;

#ifdef __AVX512F__
inline __m256i narrow(const float* x) { return _mm512_cvtps_ph(_mm512_loadu_ps(x), 0); }
inline void narrow_to(uint16_t* y, const float* x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), narrow(x));
}
inline void widen_to(float* y, const uint16_t* x) {
  _mm512_storeu_ps(y, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}
inline void round_to(float* y, const float* x) { _mm512_storeu_ps(y, _mm512_cvtph_ps(narrow(x))); }
#else
inline void narrow_to(uint16_t* y, const float* x) {
  for (int half : {0, 8})
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + half),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + half), 0));
}
inline void widen_to(float* y, const uint16_t* x) {
  for (int half : {0, 8})
    _mm256_storeu_ps(
        y + half,
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + half))));
}
inline void round_to(float* y, const float* x) {
  for (int half : {0, 8})
    _mm256_storeu_ps(y + half, _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_loadu_ps(x + half), 0)));
}
#endif

inline void round_8_to(float* y, const float* x) {
  _mm256_storeu_ps(y, _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_loadu_ps(x), 0)));
}

inline void widen_8_to(float* y, const uint16_t* x) {
  _mm256_storeu_ps(y, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

inline uint16_t narrow_one(float x) { return _cvtss_sh(x, 0); }
inline float widen_one(uint16_t x) { return _cvtsh_ss(x); }
inline float round_one(float x) { return widen_one(narrow_one(x)); }

// Call chunk(i) for the start of every whole chunk of n elements, and one(i) for what is left.
template <class Chunk, class One>
void for_all(int64_t n, const Chunk& chunk, const One& one) {
  const int64_t chunks = n / kChunk;
#pragma omp parallel for if (n > 65536)
  for (int64_t i = 0; i < chunks; ++i) chunk(i * kChunk);
  for (int64_t i = chunks * kChunk; i < n; ++i) one(i);
}

}  // namespace mpgluon

#endif  // MPGLUON_FLOAT16_H_
