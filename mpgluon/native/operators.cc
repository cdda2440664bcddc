// The operators of mpgluon's native library. See graph/grid.py for where they are put.
//
// What rounds is there once for each format, which its name ends in: _mpgluon_round_both_8_8 rounds to
// numbers with 8 significant bits and 8 exponent bits (bfloat16).
#include "batch_norm_operator.h"
#include "bfloat16.h"
#include "common.h"
#include "packing.h"
#include "products.h"

namespace mpgluon {
namespace {

// ---- What operators of one operand and one result of the same shape have in common.

template <int kFrom, int kTo>
bool infer_type(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(0) = kFrom;
  out->at(0) = kTo;
  return true;
}

std::vector<std::pair<int, int>> in_place(const NodeAttrs&) { return {{0, 0}}; }
std::vector<bool> unchanged(const NodeAttrs&) { return {true}; }

// ---- Values that pass as they are.

void pass_values(const NodeAttrs&, const OpContext&, const Arrays& in, const Requests& req,
                 const Arrays& out) {
  if (req[0] != mxnet::kAddTo && address(in[0]) == address(out[0])) return;
  elementwise(in[0], req[0], out[0],
              [](float* y, const float* x) { std::memcpy(y, x, kChunk * sizeof *x); },
              [](float x) { return x; });
}

// ---- From codes to FP32.

template <class Format>
void widen_blob(const Format& format, const TBlob& in, OpReqType req, const TBlob& out) {
  if (req == mxnet::kNullOp) return;
  const uint16_t* x = static_cast<const uint16_t*>(in.dptr_);
  float* y = static_cast<float*>(out.dptr_);
  const int64_t n = in.Size();
  if (req != mxnet::kAddTo) return widen_codes(format, x, n, y);
  for (int64_t i = 0; i < n; ++i) y[i] += format.widen_one(x[i]);
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
Operator unary(const std::string& name) {
  Operator made(name, 1, 1);
  made.inherit<mxnet::FInferShape>("FInferShape", nnvm::Op::Get("_copy"))
      .set<nnvm::FInferType>("FInferType", old_function(infer_type<kFrom, kTo>));
  return made;
}

// An operator on FP32 arrays in any layout.
Operator elementwise_operator(const std::string& name, const FComputeEx& compute,
                              const std::string& gradient) {
  Operator made = unary<mshadow::kFloat32, mshadow::kFloat32>(name);
  made.set<FComputeEx>("FComputeEx<cpu>", compute)
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<bool>("TIsMKLDNN", true)
      .set<nnvm::FInplaceOption>("FInplaceOption", in_place)
      .set_gradient(gradient);
  return made;
}

// The same, but without TIsMKLDNN MXNet hands over plain arrays.
void plain_operator(const std::string& name, const FComputeEx& compute,
                    const std::string& gradient) {
  elementwise_operator(name, compute, gradient).set<bool>("TIsMKLDNN", false);
}

template <class Format>
void register_format(const Format& format, const std::string& suffix) {
  const FComputeEx round_values = [format](const NodeAttrs&, const OpContext&, const Arrays& in,
                                           const Requests& req, const Arrays& out) {
    round_array(format, in[0], req[0], out[0]);
  };
  const std::string round = "_mpgluon_round_value" + suffix;
  elementwise_operator(round, round_values, "_copy");
  elementwise_operator("_mpgluon_round_both" + suffix, round_values, round);
  elementwise_operator("_mpgluon_round_gradient" + suffix, pass_values, round)
      .set<nnvm::FInplaceIdentity>("FInplaceIdentity", unchanged);

  // The same on plain arrays, for imperative runs.
  const std::string plain = "_mpgluon_plain_value" + suffix;
  plain_operator(plain, round_values, "_copy");
  plain_operator("_mpgluon_plain_both" + suffix, round_values, plain);
  plain_operator("_mpgluon_plain_gradient" + suffix, pass_values, plain);

  constexpr int kHalf = mshadow::kFloat16, kSingle = mshadow::kFloat32;
  const std::string narrow = "_mpgluon_narrow" + suffix, widen = "_mpgluon_widen" + suffix;
  const FCompute compute_narrow = [format](const NodeAttrs&, const OpContext&, const Blobs& in,
                                           const Requests& req, const Blobs& out) {
    narrow_blob(format, in[0], req[0], out[0]);
  };
  const FCompute compute_widen = [format](const NodeAttrs&, const OpContext&, const Blobs& in,
                                          const Requests& req, const Blobs& out) {
    widen_blob(format, in[0], req[0], out[0]);
  };
  unary<kSingle, kHalf>(narrow).set<FCompute>("FCompute<cpu>", compute_narrow).set_gradient(widen);
  unary<kHalf, kSingle>(widen).set<FCompute>("FCompute<cpu>", compute_widen).set_gradient(narrow);

  const FComputeEx compute_pack = [format](const NodeAttrs&, const OpContext&, const Arrays& in,
                                           const Requests& req, const Arrays& out) {
    pack(format, in[0], req[0], out[0]);
  };
  unary<kSingle, kHalf>("_mpgluon_pack" + suffix)
      .set<FComputeEx>("FComputeEx<cpu>", compute_pack)
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<bool>("TIsMKLDNN", true)
      .set_gradient("_copy");  // what unpacks hands back FP32

  batch_normalization::register_batch_norm(format, suffix);
  products::register_products(format, suffix);
}

void register_common() {
  plain_operator("_mpgluon_plain", pass_values, "_mpgluon_plain");

  constexpr int kSingle = mshadow::kFloat32;
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
}

}  // namespace
}  // namespace mpgluon

// Called once, after the library has been loaded.
extern "C" void mpgluon_register() { mpgluon::register_common(); }

// Called once for each format, while no operator runs.
extern "C" void mpgluon_register_format(int significand_bits, int exponent_bits) {
  const std::string suffix =
      "_" + std::to_string(significand_bits) + "_" + std::to_string(exponent_bits);
  if (significand_bits == 11 && exponent_bits == 5)
    mpgluon::register_format(mpgluon::Float16(), suffix);
  else
    mpgluon::register_format(mpgluon::Grid(significand_bits, exponent_bits), suffix);
}
