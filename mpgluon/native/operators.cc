// The operators of mpgluon's native library. See precision/grid_graph.py for where they are put.
#include "batch_norm_operator.h"
#include "bfloat16.h"
#include "common.h"
#include "packing.h"
#include "products.h"

namespace mpgluon {
namespace {

const char kRound[] = "_mpgluon_round_value";

// ---- What operators of one operand and one result of the same shape have in common.

template <int kFrom, int kTo>
bool infer_type(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(0) = kFrom;
  out->at(0) = kTo;
  return true;
}

std::vector<std::pair<int, int>> in_place(const NodeAttrs&) { return {{0, 0}}; }
std::vector<bool> unchanged(const NodeAttrs&) { return {true}; }

// ---- Rounding values that stay in FP32 arrays.

void round_values(const NodeAttrs&, const OpContext&, const Arrays& in, const Requests& req,
                  const Arrays& out) {
  elementwise(in[0], req[0], out[0], round_to, round_one);
}

void pass_values(const NodeAttrs&, const OpContext&, const Arrays& in, const Requests& req,
                 const Arrays& out) {
  if (req[0] != mxnet::kAddTo && address(in[0]) == address(out[0])) return;
  elementwise(in[0], req[0], out[0],
              [](float* y, const float* x) { std::memcpy(y, x, kChunk * sizeof *x); },
              [](float x) { return x; });
}

// ---- Casts.

template <int kFrom, int kTo>
void cast(const NodeAttrs&, const OpContext&, const Blobs& in, const Requests& req,
          const Blobs& out);

template <>
void cast<mshadow::kFloat32, mshadow::kFloat16>(const NodeAttrs&, const OpContext&, const Blobs& in,
                                                const Requests& req, const Blobs& out) {
  narrow_blob(in[0], req[0], out[0]);
}

template <>
void cast<mshadow::kFloat16, mshadow::kFloat32>(const NodeAttrs&, const OpContext&, const Blobs& in,
                                                const Requests& req, const Blobs& out) {
  if (req[0] == mxnet::kNullOp) return;
  const uint16_t* x = static_cast<const uint16_t*>(in[0].dptr_);
  float* y = static_cast<float*>(out[0].dptr_);
  if (req[0] == mxnet::kAddTo) {
    for (size_t i = 0; i < in[0].Size(); ++i) y[i] += widen_one(x[i]);
    return;
  }
  for_all(in[0].Size(), [&](int64_t i) { widen_to(y + i, x + i); },
          [&](int64_t i) { y[i] = widen_one(x[i]); });
}

// ---- How many elements of a weight are not their rounded master.

bool infer_count_shape(const NodeAttrs&, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  out->at(0) = mxnet::TShape({1});
  return mxnet::shape_is_known(in->at(0)) && mxnet::shape_is_known(in->at(1));
}

bool infer_count_type(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(0) = mshadow::kFloat16;
  in->at(1) = out->at(0) = mshadow::kFloat32;
  return true;
}

void count_differences(const NodeAttrs&, const OpContext&, const Blobs& in, const Requests&,
                       const Blobs& out) {
  const uint16_t* weight = static_cast<const uint16_t*>(in[0].dptr_);
  const float* master = static_cast<const float*>(in[1].dptr_);
  const int64_t n = in[0].Size();
  std::atomic<int64_t> differences{0};
  share((n + kChunk - 1) / kChunk, [&](int64_t first, int64_t last) {
    int64_t found = 0;
    for (int64_t start = first * kChunk; start < std::min(n, last * kChunk); start += kChunk) {
      uint16_t rounded[kChunk];
      const int64_t count = std::min(kChunk, n - start);
      if (count == kChunk) narrow_to(rounded, master + start);
      else for (int64_t i = 0; i < count; ++i) rounded[i] = narrow_one(master[start + i]);
      for (int64_t i = 0; i < count; ++i) found += rounded[i] != weight[start + i];
    }
    differences += found;
  });
  *static_cast<float*>(out[0].dptr_) = static_cast<float>(differences);
}

// ---- Registration.

template <int kFrom, int kTo>
Operator unary(const char* name) {
  Operator made(name, 1, 1);
  made.inherit<mxnet::FInferShape>("FInferShape", nnvm::Op::Get("_copy"))
      .set<nnvm::FInferType>("FInferType", old_function(infer_type<kFrom, kTo>));
  return made;
}

Operator rounding(const char* name, FComputeEx compute, const char* gradient) {
  Operator made = unary<mshadow::kFloat32, mshadow::kFloat32>(name);
  made.set<FComputeEx>("FComputeEx<cpu>", compute)
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<bool>("TIsMKLDNN", true)
      .set<nnvm::FInplaceOption>("FInplaceOption", in_place)
      .set_gradient(gradient);
  return made;
}

void register_all() {
  const char *round = kRound, *pass = "_copy";
  rounding(round, round_values, pass);
  rounding("_mpgluon_round_both", round_values, round);
  rounding("_mpgluon_round_gradient", pass_values, round)
      .set<nnvm::FInplaceIdentity>("FInplaceIdentity", unchanged);
  // Without TIsMKLDNN, MXNet hands over a plain array.
  rounding("_mpgluon_plain", pass_values, "_mpgluon_plain").set<bool>("TIsMKLDNN", false);

  constexpr int kHalf = mshadow::kFloat16, kSingle = mshadow::kFloat32;
  const char *narrow = "_mpgluon_narrow", *widen = "_mpgluon_widen";
  unary<kSingle, kHalf>(narrow)
      .set<FCompute>("FCompute<cpu>", cast<kSingle, kHalf>)
      .set_gradient(widen);
  unary<kHalf, kSingle>(widen)
      .set<FCompute>("FCompute<cpu>", cast<kHalf, kSingle>)
      .set_gradient(narrow);

  unary<kSingle, kHalf>("_mpgluon_pack")
      .set<FComputeEx>("FComputeEx<cpu>", pack)
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<bool>("TIsMKLDNN", true)
      .set_gradient(pass);  // what unpacks hands back FP32

  constexpr int kBfloat = mshadow::kBfloat16;
  const char *to_bfloat = "_mpgluon_to_bfloat16", *from_bfloat = "_mpgluon_from_bfloat16";
  const auto bfloat_cast = [](Operator made, const char* gradient) {
    made.set<FComputeEx>("FComputeEx<cpu>", cast_bfloat16)
        .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
        .set<bool>("TIsMKLDNN", true)
        .set_gradient(gradient);
  };
  bfloat_cast(unary<kSingle, kBfloat>(to_bfloat), from_bfloat);
  bfloat_cast(unary<kBfloat, kSingle>(from_bfloat), to_bfloat);

  Operator count("_mpgluon_count_differences", 2, 1);
  count.set<mxnet::FInferShape>("FInferShape", old_function(infer_count_shape))
      .set<nnvm::FInferType>("FInferType", old_function(infer_count_type))
      .set<FCompute>("FCompute<cpu>", count_differences);
  count.op().add_argument("weight", "NDArray-or-Symbol", "float16.");
  count.op().add_argument("master", "NDArray-or-Symbol", "float32.");

  batch_normalization::register_batch_norm();
  products::register_products();
}

}  // namespace
}  // namespace mpgluon

// Called once, after the library has been loaded.
extern "C" void mpgluon_register() { mpgluon::register_all(); }
