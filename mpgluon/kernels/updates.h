// SGD with momentum on FP32 masters, from float16 gradients; the float16 weights are rounded masters.
//
// MXNet's own operator computes, part by part, on FP32 copies of gradients that stay in the cache.
#ifndef MPGLUON_UPDATES_H_
#define MPGLUON_UPDATES_H_

#include "codes.h"
#include "common.h"

namespace mpgluon {
namespace updates {

enum { kMaster, kGradient, kMomentum, kWeight, kOperands };
constexpr int64_t kPart = 8192;  // elements

inline void update(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                   const Blobs& in, const Requests& req) {
  const FCompute& compute = table<FCompute>("FCompute<cpu>").data_[op->index_].first;
  const int64_t n = in[kMaster].Size();
  share((n + kPart - 1) / kPart, [&](int64_t first, int64_t last) {
    for (int64_t start = first * kPart; start < std::min(n, last * kPart); start += kPart) {
      const int64_t count = std::min(kPart, n - start);
      const auto part = [&](float* values) {
        return TBlob(values, mxnet::TShape({count}), mshadow::cpu::kDevMask);
      };
      alignas(64) float gradient[kPart];
      widen_codes(Float16(), static_cast<const uint16_t*>(in[kGradient].dptr_) + start, count, gradient);
      float* master = in[kMaster].dptr<float>() + start;
      const Blobs operands = {part(master), part(gradient),
                              part(in[kMomentum].dptr<float>() + start)};
      compute(attrs, ctx, operands, req, {operands[kMaster]});
      narrow_codes(Float16(), master, count, static_cast<uint16_t*>(in[kWeight].dptr_) + start);
    }
  });
}

inline std::vector<uint32_t> mutated(const NodeAttrs&) { return {kMomentum, kWeight}; }

inline bool infer_types(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(kMaster) = in->at(kMomentum) = out->at(0) = mshadow::kFloat32;
  in->at(kGradient) = in->at(kWeight) = mshadow::kFloat16;
  return true;
}

inline void register_updates() {
  const nnvm::Op* op = nnvm::Op::Get("sgd_mom_update");
  Operator made("_mpgluon_sgd_mom_master_update", kOperands, 1);
  made.op().attr_parser = op->attr_parser;
  made.set<mxnet::FInferShape>("FInferShape", old_function(codes::one_shape))
      .set<nnvm::FInferType>("FInferType", old_function(infer_types))
      .set<nnvm::FMutateInputs>("FMutateInputs", old_function(mutated))
      .set<FCompute>("FCompute<cpu>",
                     [op](const NodeAttrs& attrs, const OpContext& ctx, const Blobs& in,
                          const Requests& req, const Blobs&) { update(op, attrs, ctx, in, req); });
}

}  // namespace updates
}  // namespace mpgluon

#endif  // MPGLUON_UPDATES_H_
