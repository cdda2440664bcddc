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
typedef uint32_t Lanes __attribute__((vector_size(kChunk * sizeof(uint32_t))));

// A part's values as FP32, with zeros behind the last one.
struct Part {
  alignas(64) float values[kPart];
  int64_t size;
};

inline void load(const float* from, Part* part) {
  std::memcpy(part->values, from, part->size * sizeof *from);
}

template <class Widen>
void widen_part(const uint16_t* from, Part* part, const Widen& widen) {
  for (int64_t i = 0; i < part->size; ++i) part->values[i] = widen(from[i]);
}

inline float widen_bfloat16(uint16_t code) {
  const uint32_t bits = static_cast<uint32_t>(code) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint64_t mixed(uint64_t x) {  // the finalizer of SplitMix64 (Steele et al. 2014)
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

struct Totals {
  uint64_t counts[4][256] = {};  // several, so that equal exponents in turn do not wait for one another
  uint64_t zeros = 0, checksum = 0;
  float largest = 0;

  // Count the values of a part, and return the sum of their squares.
  double add(const Part& part, int64_t number) {
    constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kFactor = 0x9e3779b1u;
    Lanes lanes = {};
    double squares[kChunk] = {};
    for (int64_t start = 0; start < kPart; start += kChunk) {
      if (start >= part.size) break;
      uint32_t bits[kChunk];
      Lanes chunk;
      std::memcpy(bits, part.values + start, sizeof bits);
      std::memcpy(&chunk, bits, sizeof chunk);
      lanes = (lanes ^ chunk) * kFactor;
      lanes ^= lanes >> 15;
      const int count = static_cast<int>(std::min<int64_t>(kChunk, part.size - start));
      for (int i = 0; i < kChunk; ++i) {
        const uint32_t size = bits[i] & ~kSign;
        const float x = size < kInfinity ? part.values[start + i] : 0.0f;
        squares[i] += static_cast<double>(x) * x;
        largest = std::max(largest, std::fabs(x));
      }
      for (int i = 0; i < count; ++i) {
        ++counts[i & 3][bits[i] >> 23 & 0xff];
        zeros += (bits[i] & ~kSign) == 0;
      }
    }
    uint64_t sum = mixed(static_cast<uint64_t>(number) + 1);
    for (int i = 0; i < kChunk; ++i) sum = mixed(sum ^ lanes[i]);
    checksum += sum;
    double total = 0;
    for (double one : squares) total += one;
    return total;
  }

  void add(const Totals& other) {
    for (int table = 0; table < 4; ++table)
      for (int i = 0; i < 256; ++i) counts[table][i] += other.counts[table][i];
    zeros += other.zeros;
    checksum += other.checksum;
    largest = std::max(largest, other.largest);
  }
};

// Write the statistics of n values; load(first, part) writes those from the first one on into a part.
template <class Load>
void write(int64_t n, const Load& load, double* to) {
  const int64_t parts = (n + kPart - 1) / kPart;
  std::vector<double> squares(parts);
  Totals all;
  std::mutex mutex;
  share(parts, [&](int64_t first, int64_t last) {
    if (first == last) return;
    Totals mine;
    Part part;
    for (int64_t number = first; number < last; ++number) {
      part.size = std::min(kPart, n - number * kPart);
      std::fill(part.values + part.size, part.values + kPart, 0.0f);
      load(number * kPart, &part);
      squares[number] = mine.add(part, number);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    all.add(mine);
  });
  for (int i = 0; i < 256; ++i) {
    uint64_t count = 0;
    for (const auto& table : all.counts) count += table[i];
    to[kExponents + i] = static_cast<double>(count);
  }
  to[kZeros] = static_cast<double>(all.zeros);
  to[kLargest] = all.largest;
  to[kSquares] = std::accumulate(squares.begin(), squares.end(), 0.0);
  to[kLowBits] = static_cast<double>(all.checksum & 0xffffffffu);
  to[kHighBits] = static_cast<double>(all.checksum >> 32);
  to[kSize] = static_cast<double>(n);
  Part part;
  part.size = 1;
  for (int i = 0; i < kSamples; ++i) {
    part.values[0] = 0;
    if (n > 0) load(n * i / kSamples, &part);
    to[kSample + i] = part.values[0];
  }
}

inline void write_statistics(const TBlob& of, double* to) {
  const auto codes = static_cast<const uint16_t*>(of.dptr_);
  const auto numbers = static_cast<const float*>(of.dptr_);
  const int64_t n = of.Size();
  if (of.type_flag_ == mshadow::kFloat32)
    write(n, [=](int64_t first, Part* part) { load(numbers + first, part); }, to);
  else if (of.type_flag_ == mshadow::kFloat16)
    write(n, [=](int64_t first, Part* part) { widen_part(codes + first, part, widen_one); }, to);
  else
    write(n, [=](int64_t first, Part* part) { widen_part(codes + first, part, widen_bfloat16); }, to);
}

inline bool is_float(int type) {
  return type == mshadow::kFloat32 || type == mshadow::kFloat16 || type == mshadow::kBfloat16;
}

inline bool infer_shapes(const NodeAttrs&, mxnet::ShapeVector*, mxnet::ShapeVector* out) {
  out->at(0) = mxnet::TShape({kLength});
  return true;
}

inline bool infer_types(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  out->at(0) = mshadow::kFloat64;
  return is_float(in->at(0));
}

inline void compute(const NodeAttrs&, const OpContext&, const Blobs& in, const Requests&,
                    const Blobs& out) {
  write_statistics(in[0], static_cast<double*>(out[0].dptr_));
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
  Operator made("_mpgluon_statistics", 1, 1);
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
