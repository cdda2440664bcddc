// Sums of squares of FP32 and float16 arrays: the same bits whatever the number of threads.
#ifndef MPGLUON_SUMS_H_
#define MPGLUON_SUMS_H_

#include <numeric>

#include "common.h"
#include "format.h"

namespace mpgluon {
namespace sums {

constexpr int64_t kPart = 4096;  // elements that are added in FP32, in as many sums as there are lanes
typedef float Lanes __attribute__((vector_size(kChunk * sizeof(float))));

inline void load(float* values, const float* x) { std::memcpy(values, x, kChunk * sizeof *x); }
inline void load(float* values, const uint16_t* x) { widen_to(values, x); }
inline float load_one(float x) { return x; }
inline float load_one(uint16_t x) { return widen_one(x); }

template <class X>
double part_of_squares(const X* x, int64_t n) {
  Lanes sums = {};
  int64_t i = 0;
  for (; i + kChunk <= n; i += kChunk) {
    Lanes values;
    load(reinterpret_cast<float*>(&values), x + i);
    sums += values * values;
  }
  double total = 0;
  for (; i < n; ++i) total += load_one(x[i]) * load_one(x[i]);
  for (int lane = 0; lane < kChunk; ++lane) total += sums[lane];
  return total;
}

inline void sums_of_squares(const NodeAttrs&, const OpContext&, const Blobs& in, const Requests&,
                            const Blobs& out) {
  std::vector<int64_t> first = {0};  // the number of each array's first part
  for (const TBlob& array : in) first.push_back(first.back() + (array.Size() + kPart - 1) / kPart);
  std::vector<double> parts(first.back());
  share(first.back(), [&](int64_t from, int64_t to) {
    size_t a = std::upper_bound(first.begin(), first.end(), from) - first.begin() - 1;
    for (int64_t part = from; part < to; ++part) {
      while (part >= first[a + 1]) ++a;
      const int64_t start = (part - first[a]) * kPart, size = in[a].Size();
      const auto sum = [&](const auto* x) {
        return part_of_squares(x + start, std::min(kPart, size - start));
      };
      parts[part] = in[a].type_flag_ == mshadow::kFloat16
                        ? sum(static_cast<const uint16_t*>(in[a].dptr_))
                        : sum(static_cast<const float*>(in[a].dptr_));
    }
  });
  for (size_t a = 0; a < in.size(); ++a)
    static_cast<float*>(out[0].dptr_)[a] = static_cast<float>(
        std::accumulate(parts.begin() + first[a], parts.begin() + first[a + 1], 0.0));
}

inline bool infer_types(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  out->at(0) = mshadow::kFloat32;
  for (int type : *in)
    if (type != mshadow::kFloat32 && type != mshadow::kFloat16) return false;
  return true;
}

inline void register_sums() {
  const nnvm::Op* theirs = nnvm::Op::Get("multi_sum_sq");
  Operator made("_mpgluon_sums_of_squares", theirs->num_inputs, theirs->num_outputs);
  made.op().get_num_inputs = theirs->get_num_inputs;
  made.op().attr_parser = theirs->attr_parser;
  made.inherit<mxnet::FInferShape>("FInferShape", theirs)
      .set<nnvm::FInferType>("FInferType", old_function(infer_types))
      .set<FCompute>("FCompute<cpu>", sums_of_squares);
}

}  // namespace sums
}  // namespace mpgluon

#endif  // MPGLUON_SUMS_H_
