// Sums of squares of FP32 arrays: the same bits whatever the number of threads.
#ifndef MPGLUON_SUMS_H_
#define MPGLUON_SUMS_H_

#include <numeric>

#include "common.h"

namespace mpgluon {
namespace sums {

constexpr int64_t kPart = 4096;  // elements that are added in FP32, in as many sums as there are lanes
typedef float Lanes __attribute__((vector_size(kChunk * sizeof(float))));

inline double part_of_squares(const float* x, int64_t n) {
  Lanes sums = {};
  int64_t i = 0;
  for (; i + kChunk <= n; i += kChunk) {
    Lanes values;
    std::memcpy(&values, x + i, sizeof values);
    sums += values * values;
  }
  double total = 0;
  for (; i < n; ++i) total += x[i] * x[i];
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
      const float* x = static_cast<const float*>(in[a].dptr_);
      parts[part] = part_of_squares(x + start, std::min(kPart, size - start));
    }
  });
  for (size_t a = 0; a < in.size(); ++a)
    static_cast<float*>(out[0].dptr_)[a] = static_cast<float>(
        std::accumulate(parts.begin() + first[a], parts.begin() + first[a + 1], 0.0));
}

inline bool infer_types(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  for (int& type : *in) type = mshadow::kFloat32;
  out->at(0) = mshadow::kFloat32;
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
