// Multiplies two matrices on an NVIDIA GPU's Tensor Cores, 16 terms at a time and in their order, for
// tests; see gpu_side.py. The arguments are the format of the operands, and the rows, terms and columns
// of the matrices, multiples of 16, whose codes are read one after the other.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using namespace nvcuda;
constexpr int kSide = 16;

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "error: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

// One warp for each tile of the result.
template <class Number>
__global__ void multiply(const Number* one, const Number* other, float* result, int terms, int columns) {
  wmma::fragment<wmma::matrix_a, kSide, kSide, kSide, Number, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, kSide, kSide, kSide, Number, wmma::row_major> b;
  wmma::fragment<wmma::accumulator, kSide, kSide, kSide, float> sum;
  const int row = blockIdx.y * kSide, column = blockIdx.x * kSide;
  wmma::fill_fragment(sum, 0.0f);
  for (int term = 0; term < terms; term += kSide) {
    wmma::load_matrix_sync(a, one + row * terms + term, terms);
    wmma::load_matrix_sync(b, other + term * columns + column, columns);
    wmma::mma_sync(sum, a, b, sum);
  }
  wmma::store_matrix_sync(result + row * columns + column, sum, columns, wmma::mem_row_major);
}

template <class Number>
Number* read(size_t count) {
  std::vector<uint16_t> codes(count);
  if (std::fread(codes.data(), sizeof(uint16_t), count, stdin) != count) std::exit(1);
  Number* made;
  check(cudaMalloc(&made, count * sizeof(uint16_t)));
  check(cudaMemcpy(made, codes.data(), count * sizeof(uint16_t), cudaMemcpyHostToDevice));
  return made;
}

template <class Number>
void run(int rows, int terms, int columns) {
  const Number* one = read<Number>(static_cast<size_t>(rows) * terms);
  const Number* other = read<Number>(static_cast<size_t>(terms) * columns);
  std::vector<float> result(static_cast<size_t>(rows) * columns);
  float* sums;
  check(cudaMalloc(&sums, result.size() * sizeof(float)));
  multiply<<<dim3(columns / kSide, rows / kSide), 32>>>(one, other, sums, terms, columns);
  check(cudaGetLastError());
  check(cudaMemcpy(result.data(), sums, result.size() * sizeof(float), cudaMemcpyDeviceToHost));
  std::fwrite(result.data(), sizeof(float), result.size(), stdout);
}

}  // namespace

int main(int, char** arguments) {
  const auto number = [&](int i) { return std::atoi(arguments[i]); };
  const bool half = std::strcmp(arguments[1], "float16") == 0;
  (half ? run<__half> : run<__nv_bfloat16>)(number(2), number(3), number(4));
}
