// The package's own rounding and sums for the figures of the site: compiled to WebAssembly by `make docs`.
//
// Numbers are exchanged in one buffer. No function allocates, and the module imports nothing.
#include <cstdint>

// A page has one thread: parallel.h is not needed.
#define MPGLUON_PARALLEL_H_
namespace mpgluon {
template <class Body>
void share(int64_t n, const Body& body) {
  body(0, n);
}
template <class Each>
void in_parallel(int64_t n, const Each& each) {
  for (int64_t i = 0; i < n; ++i) each(i);
}
}  // namespace mpgluon

#include "format.h"
#include "tensor_core.h"

namespace {

constexpr int kNumbers = 1 << 16;
float numbers[kNumbers];

// Round stochastically, by a draw in 2^-24ths.
float cut(const mpgluon::Grid& format, float x, float draw) {
  const int32_t bits = static_cast<int32_t>(draw);
  return format.has_subnormals() ? format.cut_one<true, true>(x, bits)
                                 : format.cut_one<true, false>(x, bits);
}

float rounded_to_half(float x) { return mpgluon::Float16().round_one(x); }

}  // namespace

#define EXPORT(name) extern "C" __attribute__((export_name(#name)))

EXPORT(buffer) float* buffer() { return numbers; }

EXPORT(round_float16) void round_float16(int n) {
  for (int i = 0; i < n; ++i) numbers[i] = rounded_to_half(numbers[i]);
}

// Round to the format that Grid's arguments describe.
EXPORT(round_grid) void round_grid(int n, int significand_bits, int min_exponent, float largest,
                                   float beyond) {
  const mpgluon::Grid format(significand_bits, min_exponent, largest, beyond);
  for (int i = 0; i < n; ++i) numbers[i] = format.round_one(numbers[i]);
}

// Round one number n times stochastically; the buffer holds draws, in 2^-24ths, and then the results.
EXPORT(round_stochastically) void round_stochastically(float x, int n, int significand_bits,
                                                       int min_exponent, float largest,
                                                       float beyond) {
  const mpgluon::Grid format(significand_bits, min_exponent, largest, beyond);
  for (int i = 0; i < n; ++i) numbers[i] = cut(format, x, numbers[i]);
}

// Add n products of the buffer's pairs as a Tensor Core does, so many at a time; return the FP32 sum.
EXPORT(sum_as_tensor_core) float sum_as_tensor_core(int n, int terms, int fraction_bits,
                                                    int lowest_exponent) {
  using namespace mpgluon::tensor_core;
  const Accumulation how{terms, fraction_bits, lowest_exponent};
  constexpr int kMost = 16;
  float a[kMost], b[kMost * kLanes], sum = 0;
  for (int first = 0; first < n; first += terms) {
    for (int i = 0; i < terms; ++i) {
      const bool known = first + i < n;
      a[i] = known ? numbers[2 * (first + i)] : 0;
      b[i * kLanes] = known ? numbers[2 * (first + i) + 1] : 0;
    }
    sum = add_by_definition(how, a, b, sum);
  }
  return sum;
}

// Write the sums so far of n products, in FP32 or rounded to FP16 after each addition.
EXPORT(running_sums) void running_sums(int n, int in_float16) {
  float sum = 0;
  for (int i = 0; i < n; ++i) {
    sum += numbers[2 * i] * numbers[2 * i + 1];
    if (in_float16) sum = rounded_to_half(sum);
    numbers[i] = sum;
  }
}

// Round n numbers stochastically, each with a draw of its own, in 2^-24ths, that lies n numbers behind it.
EXPORT(round_each_stochastically) void round_each_stochastically(int n, int significand_bits,
                                                                 int min_exponent, float largest,
                                                                 float beyond) {
  const mpgluon::Grid format(significand_bits, min_exponent, largest, beyond);
  for (int i = 0; i < n; ++i) numbers[i] = cut(format, numbers[i], numbers[n + i]);
}

// Multiply the matrices (rows, inner) and (inner, columns) at the buffer's beginning; the product follows
// them. Each of its numbers is a sum in FP32, from zero on and in order.
EXPORT(product) void product(int rows, int inner, int columns) {
  const float* a = numbers;
  const float* b = a + rows * inner;
  float* sums = numbers + rows * inner + inner * columns;
  for (int row = 0; row < rows; ++row, sums += columns) {
    for (int column = 0; column < columns; ++column) sums[column] = 0;
    for (int place = 0; place < inner; ++place) {
      const float factor = a[row * inner + place];
      for (int column = 0; column < columns; ++column)
        sums[column] += factor * b[place * columns + column];
    }
  }
}
