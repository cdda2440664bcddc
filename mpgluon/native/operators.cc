// The operators of mpgluon's native library. See graph/grid.py for their use.
//
// An operator that rounds exists once for each format, and its name ends in the format's widths:
// _mpgluon_round_both_8_8 rounds to 8 significant bits and 8 exponent bits (bfloat16).
#include "batch_norm_operator.h"
#include "bfloat16.h"
#include "common.h"
#include "packing.h"
#include "products.h"
#include "sums.h"

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

// ---- Values that pass unchanged.

void pass_values(const NDArray& in, OpReqType req, const NDArray& out) {
  if (req != mxnet::kAddTo && address(in) == address(out)) return;
  elementwise(in, req, out,
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

// Return what MXNet calls, from a function of one operand and one result.
template <class Function>
FComputeEx on_arrays(const Function& function) {
  return [function](const NodeAttrs&, const OpContext&, const Arrays& in, const Requests& req,
                    const Arrays& out) { function(in[0], req[0], out[0]); };
}

template <class Function>
FCompute on_blobs(const Function& function) {
  return [function](const NodeAttrs&, const OpContext&, const Blobs& in, const Requests& req,
                    const Blobs& out) { function(in[0], req[0], out[0]); };
}

// Let an operator compute on arrays in any layout.
Operator on_any_layout(Operator made, const FComputeEx& compute) {
  made.set<FComputeEx>("FComputeEx<cpu>", compute)
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<bool>("TIsMKLDNN", true);
  return made;
}

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
  return on_any_layout(unary<mshadow::kFloat32, mshadow::kFloat32>(name), compute)
      .set<nnvm::FInplaceOption>("FInplaceOption", in_place)
      .set_gradient(gradient);
}

// The same, but without TIsMKLDNN the operator receives plain arrays.
void plain_operator(const std::string& name, const FComputeEx& compute,
                    const std::string& gradient) {
  elementwise_operator(name, compute, gradient).set<bool>("TIsMKLDNN", false);
}

template <class Format>
void register_format(const Format& format, const std::string& suffix) {
  const FComputeEx round_values =
      on_arrays([format](const auto&... all) { round_array(format, all...); });
  const std::string round = "_mpgluon_round_value" + suffix;
  elementwise_operator(round, round_values, "_copy");
  elementwise_operator("_mpgluon_round_both" + suffix, round_values, round);
  elementwise_operator("_mpgluon_round_gradient" + suffix, on_arrays(pass_values), round)
      .set<nnvm::FInplaceIdentity>("FInplaceIdentity", unchanged);

  // The same on plain arrays, for imperative runs.
  const std::string plain = "_mpgluon_plain_value" + suffix;
  plain_operator(plain, round_values, "_copy");
  plain_operator("_mpgluon_plain_both" + suffix, round_values, plain);
  plain_operator("_mpgluon_plain_gradient" + suffix, on_arrays(pass_values), plain);

  constexpr int kHalf = mshadow::kFloat16, kSingle = mshadow::kFloat32;
  const std::string narrow = "_mpgluon_narrow" + suffix, widen = "_mpgluon_widen" + suffix;
  const FCompute to_codes = on_blobs([format](const auto&... all) { narrow_blob(format, all...); });
  const FCompute from_codes = on_blobs([format](const auto&... all) { widen_blob(format, all...); });
  unary<kSingle, kHalf>(narrow).set<FCompute>("FCompute<cpu>", to_codes).set_gradient(widen);
  unary<kHalf, kSingle>(widen).set<FCompute>("FCompute<cpu>", from_codes).set_gradient(narrow);
  on_any_layout(unary<kSingle, kHalf>("_mpgluon_pack" + suffix),
                on_arrays([format](const auto&... all) { pack(format, all...); }))
      .set_gradient("_copy");  // what unpacks returns an FP32 gradient

  batch_normalization::register_batch_norm(format, suffix);
  products::register_products(format, suffix);
}

void register_common() {
  plain_operator("_mpgluon_plain", on_arrays(pass_values), "_mpgluon_plain");

  constexpr int kSingle = mshadow::kFloat32;
  constexpr int kBfloat = mshadow::kBfloat16;
  const auto casts = [](const std::string& suffix, const FComputeEx& cast) {
    const std::string to = "_mpgluon_to_bfloat16" + suffix, from = "_mpgluon_from_bfloat16" + suffix;
    on_any_layout(unary<kSingle, kBfloat>(to), cast).set_gradient(from);
    on_any_layout(unary<kBfloat, kSingle>(from), cast).set_gradient(to);
  };
  casts("", bfloat16::cast<false>);
  casts("_in_blocks", bfloat16::cast<true>);
  sums::register_sums();

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
