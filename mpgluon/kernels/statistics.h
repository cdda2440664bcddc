// What a recorder keeps of an array, computed in one pass: a histogram of exponents, the largest value, the
// sum of squares, a checksum of the bits and a few of the values. kernels/statistics.py has the same in NumPy,
// and says what the numbers are. The results do not depend on the number of threads.
#ifndef MPGLUON_STATISTICS_H_
#define MPGLUON_STATISTICS_H_

#include "common.h"
#include "format.h"

namespace mpgluon {
namespace statistics {

enum Place {
  kExponents = 0,  // 256 counts
  kZeros = 256,
  kLargest,
  kSquares,
  kLowBits,
  kHighBits,
  kSize,
  kSample,
  kSamples = 16,
  kLength = kSample + kSamples
};

constexpr int64_t kPart = 4096;  // elements with a checksum of their own

#ifdef __AVX512F__
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif
constexpr int kVectors = kChunk / kWide;
typedef uint32_t Words __attribute__((vector_size(kWide * 4)));
typedef int32_t Integers __attribute__((vector_size(kWide * 4)));
typedef uint8_t Bytes __attribute__((vector_size(kWide)));
typedef float Half __attribute__((vector_size(kWide * 2)));
typedef double Doubles __attribute__((vector_size(kWide * 4)));

inline float widen_bfloat16(uint16_t code) {
  const uint32_t bits = static_cast<uint32_t>(code) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Values of an array, as FP32.
struct Floats {
  const float* x;
  float one(int64_t i) const { return x[i]; }
  void copy(int64_t first, int64_t n, float* to) const { std::memcpy(to, x + first, n * sizeof *x); }
};
struct Float16s {
  const uint16_t* x;
  float one(int64_t i) const { return widen_one(x[i]); }
  void copy(int64_t first, int64_t n, float* to) const {
    int64_t i = 0;
    for (; i + kChunk <= n; i += kChunk) widen_to(to + i, x + first + i);
    for (; i < n; ++i) to[i] = widen_one(x[first + i]);
  }
};
struct Bfloat16s {
  const uint16_t* x;
  float one(int64_t i) const { return widen_bfloat16(x[i]); }
  void copy(int64_t first, int64_t n, float* to) const {
    for (int64_t i = 0; i < n; ++i) to[i] = widen_bfloat16(x[first + i]);
  }
};

inline uint64_t mixed(uint64_t x) {  // the finalizer of SplitMix64 (Steele et al. 2014)
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

struct Totals {
  static constexpr int kTables = 8;  // so that equal exponents in turn do not wait for one another
  uint32_t counts[kTables][256] = {};
  uint64_t zeros = 0, checksum = 0;
  int32_t largest = 0;  // the bits of the number

  // Count n values, of chunks that zeros fill, and return the sum of their squares.
  double add(const float* values, int64_t n, int64_t number) {
    Words hashes[kVectors] = {};
    Integers most[kVectors] = {}, zero[kVectors] = {};
    Doubles squares[2 * kVectors] = {};
    const int64_t end = (n + kChunk - 1) / kChunk * kChunk;
    for (int64_t start = 0; start < end; start += kChunk) {
      uint8_t exponents[kChunk];
      for (int i = 0; i < kVectors; ++i) {
        Words bits;
        std::memcpy(&bits, values + start + i * kWide, sizeof bits);
        hashes[i] = (hashes[i] ^ bits) * 0x9e3779b1u;
        hashes[i] ^= hashes[i] >> 15;
        const Integers size = reinterpret_cast<Integers>(bits & 0x7fffffffu);
        const Integers finite = size & (size < 0x7f800000);
        most[i] = finite > most[i] ? finite : most[i];
        zero[i] -= size == 0;
        Half halves[2];
        std::memcpy(halves, &finite, sizeof halves);
        for (int half = 0; half < 2; ++half) {
          const Doubles x = __builtin_convertvector(halves[half], Doubles);
          squares[2 * i + half] += x * x;
        }
        const Bytes exponent = __builtin_convertvector(size >> 23, Bytes);
        std::memcpy(exponents + i * kWide, &exponent, sizeof exponent);
      }
      uint64_t words[kChunk / 8];
      std::memcpy(words, exponents, sizeof words);
      for (uint64_t word : words)
        for (int i = 0; i < kTables; ++i, word >>= 8) ++counts[i][word & 0xff];
    }
    counts[0][0] -= static_cast<uint32_t>(end - n);
    zeros -= end - n;
    uint64_t hash = mixed(static_cast<uint64_t>(number) + 1);
    for (int i = 0; i < kVectors; ++i)
      for (int lane = 0; lane < kWide; ++lane) {
        hash = mixed(hash ^ hashes[i][lane]);
        largest = std::max<int32_t>(largest, most[i][lane]);
        zeros += zero[i][lane];
      }
    checksum += hash;
    double total = 0;
    for (const Doubles& some : squares)
      for (int lane = 0; lane < kWide / 2; ++lane) total += some[lane];
    return total;
  }
};

template <class Values>
void write(const Values& values, int64_t n, double* to) {
  const int64_t parts = (n + kPart - 1) / kPart;
  std::vector<double> squares(parts);
  uint64_t counts[256] = {}, zeros = 0, checksum = 0;
  int32_t largest = 0;
  std::mutex mutex;
  share(parts, [&](int64_t first, int64_t last) {
    if (first == last) return;
    Totals mine;
    alignas(64) float part[kPart];
    for (int64_t number = first; number < last; ++number) {
      const int64_t start = number * kPart, size = std::min(kPart, n - start);
      std::fill(part + size, part + kPart, 0.0f);
      values.copy(start, size, part);
      squares[number] = mine.add(part, size, number);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    for (int i = 0; i < 256; ++i) {
      uint32_t count = 0;  // modulo 2^32, as zeros that fill chunks are subtracted from one table
      for (const auto& table : mine.counts) count += table[i];
      counts[i] += count;
    }
    zeros += mine.zeros;
    checksum += mine.checksum;
    largest = std::max(largest, mine.largest);
  });
  for (int i = 0; i < 256; ++i) to[kExponents + i] = static_cast<double>(counts[i]);
  to[kZeros] = static_cast<double>(zeros);
  float size;
  std::memcpy(&size, &largest, sizeof size);
  to[kLargest] = size;
  to[kSquares] = std::accumulate(squares.begin(), squares.end(), 0.0);
  to[kLowBits] = static_cast<double>(checksum & 0xffffffffu);
  to[kHighBits] = static_cast<double>(checksum >> 32);
  to[kSize] = static_cast<double>(n);
  for (int i = 0; i < kSamples; ++i) to[kSample + i] = n > 0 ? values.one(n * i / kSamples) : 0;
}

inline void write_statistics(const TBlob& of, double* to) {
  const auto codes = static_cast<const uint16_t*>(of.dptr_);
  const int64_t n = of.Size();
  if (of.type_flag_ == mshadow::kFloat32)
    write(Floats{static_cast<const float*>(of.dptr_)}, n, to);
  else if (of.type_flag_ == mshadow::kFloat16)
    write(Float16s{codes}, n, to);
  else
    write(Bfloat16s{codes}, n, to);
}

inline bool is_float(int type) {
  return type == mshadow::kFloat32 || type == mshadow::kFloat16 || type == mshadow::kBfloat16;
}

inline bool infer_shapes(const NodeAttrs&, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  out->at(0) = mxnet::TShape({static_cast<int64_t>(in->size()), kLength});
  return true;
}

inline bool infer_types(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  out->at(0) = mshadow::kFloat64;
  return std::all_of(in->begin(), in->end(), is_float);
}

inline void compute(const NodeAttrs&, const OpContext&, const Blobs& in, const Requests&,
                    const Blobs& out) {
  double* row = static_cast<double*>(out[0].dptr_);
  for (size_t i = 0; i < in.size(); ++i, row += kLength) write_statistics(in[i], row);
}

// ---- An array that passes unchanged, in the layout that it has: the gradient of a second operand, the probe,
// is the statistics of the gradient.

inline void pass(const NodeAttrs& attrs, const OpContext& ctx, const NDArray& in, OpReqType req,
                 const NDArray& out) {
  if (req == mxnet::kNullOp) return;
  if (in.dtype() != mshadow::kFloat32) {
    static const nnvm::Op* copy = nnvm::Op::Get("_copy");
    return call(copy, attrs, ctx, {in}, {req}, {out});
  }
  elementwise(in, req, out,
              [](float* y, const float* x) { std::memcpy(y, x, kChunk * sizeof *x); },
              [](float x) { return x; });
}

inline void forward(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                    const Requests& req, const Arrays& out) {
  pass(attrs, ctx, in[0], req[0], out[0]);
}

inline void backward(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                     const Requests& req, const Arrays& out) {
  const NDArray gradient = plain(in[0]);
  if (req[1] != mxnet::kNullOp) write_statistics(gradient.data(), out[1].data().dptr<double>());
  pass(attrs, ctx, in[0], req[0], out[0]);
}

inline bool shapes_of_pass(const NodeAttrs&, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  in->at(1) = mxnet::TShape({kLength});
  out->at(0) = in->at(0);
  return mxnet::shape_is_known(in->at(0));
}

inline bool types_of_pass(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(1) = mshadow::kFloat64;
  out->at(0) = in->at(0);
  return is_float(in->at(0));
}

inline bool shapes_back(const NodeAttrs&, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  out->at(0) = in->at(0);
  out->at(1) = mxnet::TShape({kLength});
  return mxnet::shape_is_known(in->at(0));
}

inline bool types_back(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  out->at(0) = in->at(0);
  out->at(1) = mshadow::kFloat64;
  return is_float(in->at(0));
}

inline void register_statistics() {
  const nnvm::Op* theirs = nnvm::Op::Get("multi_sum_sq");  // of as many arrays, with their number
  Operator made("_mpgluon_statistics", theirs->num_inputs, 1);
  made.op().get_num_inputs = theirs->get_num_inputs;
  made.op().attr_parser = theirs->attr_parser;
  made.set<mxnet::FInferShape>("FInferShape", old_function(infer_shapes))
      .set<nnvm::FInferType>("FInferType", old_function(infer_types))
      .set<FCompute>("FCompute<cpu>", compute);
  Operator back("_mpgluon_probed_backward", 1, 2), probed("_mpgluon_probed", 2, 1);
  back.set<mxnet::FInferShape>("FInferShape", old_function(shapes_back))
      .set<nnvm::FInferType>("FInferType", old_function(types_back))
      .set<FComputeEx>("FComputeEx<cpu>", backward);
  probed.set<mxnet::FInferShape>("FInferShape", old_function(shapes_of_pass))
      .set<nnvm::FInferType>("FInferType", old_function(types_of_pass))
      .set<FComputeEx>("FComputeEx<cpu>", forward)
      .set_gradient("_mpgluon_probed_backward");
  probed.op().add_argument("data", "NDArray-or-Symbol", "What passes.");
  probed.op().add_argument("probe", "NDArray-or-Symbol", "float64, whose gradient is statistics.");
  for (Operator* one : {&back, &probed})
    one->set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
        .set<bool>("TIsMKLDNN", true);
}

}  // namespace statistics
}  // namespace mpgluon

#endif  // MPGLUON_STATISTICS_H_
