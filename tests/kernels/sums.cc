// Multiplies two matrices of FP32 numbers with the sums of a Tensor Core, for tests. The arguments are
// the two numbers of the sums, the lowest exponent of the operands' format, and the rows, terms and
// columns of the matrices, which are read one after the other.
#include "tensor_core.h"

#include <cstdio>
#include <cstdlib>

// One thread: the processors that this runs on may lack the library of others.
extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned, unsigned) { function(data); }
int omp_get_thread_num() { return 0; }
int omp_get_num_threads() { return 1; }
int omp_get_max_threads() { return 1; }
}

namespace {

std::vector<int64_t> counted(int64_t count, int64_t stride) {
  std::vector<int64_t> made(count);
  for (int64_t i = 0; i < count; ++i) made[i] = i * stride;
  return made;
}

std::vector<float> read(size_t count) {
  std::vector<float> made(count);
  if (std::fread(made.data(), sizeof(float), count, stdin) != count) std::exit(1);
  return made;
}

}  // namespace

int main(int, char** arguments) {
  using namespace mpgluon::tensor_core;
  const auto number = [&](int i) { return std::atoi(arguments[i]); };
  const Accumulation how{number(1), number(2), number(3)};
  const int64_t rows = number(4), terms = number(5), columns = number(6);
  const auto one = read(rows * terms), other = read(terms * columns);
  std::vector<float> result(rows * columns);
  multiply(how, {one.data(), counted(rows, terms), counted(terms, 1)},
           {other.data(), counted(columns, 1), counted(terms, columns)}, result.data(),
           counted(rows, columns), counted(columns, 1));
  std::fwrite(result.data(), sizeof(float), result.size(), stdout);
}
