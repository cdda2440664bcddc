// The operators of mpgluon's native library. See graph/grid.py for their use.
//
// An operator that rounds exists once for each format, and its name ends in the format's numbers:
// _mpgluon_plain_both_8_8 rounds to 8 significant bits and 8 exponent bits (bfloat16). Where it adds as
// a Tensor Core does, the number of terms and of fraction bits follow (_16_25: Hopper).
#include "accumulated.h"
#include "batch_norm_operator.h"
#include "bfloat16.h"
#include "channels.h"
#include "clip.h"
#include "codes.h"
#include "common.h"
#include "concat.h"
#include "dense.h"
#include "elementwise.h"
#include "grouped.h"
#include "modes.h"
#include "packing.h"
#include "pad.h"
#include "plain_batch_norm.h"
#include "pooling.h"
#include "products.h"
#include "scaled_products.h"
#include "statistics.h"
#include "sums.h"
#include "updates.h"

namespace mpgluon {
namespace {

// ---- What operators of one operand and one result of the same shape have in common.

template <int kFrom, int kTo>
bool infer_type(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(0) = kFrom;
  out->at(0) = kTo;
  return true;
}

// ---- Values that pass unchanged.

void pass_values(const NDArray& in, OpReqType req, const NDArray& out) {
  if (req != mxnet::kAddTo && address(in) == address(out)) return;
  elementwise(in, req, out,
              [](float* y, const float* x) { std::memcpy(y, x, kChunk * sizeof *x); },
              [](float x) { return x; });
}

// ---- Between FP32 and plain codes.

template <class Format>
void narrow_blob(const Format& format, const TBlob& in, OpReqType req, const TBlob& out) {
  if (req == mxnet::kNullOp) return;
  const float* x = static_cast<const float*>(in.dptr_);
  uint16_t* y = static_cast<uint16_t*>(out.dptr_);
  if (req == mxnet::kAddTo) {
    for (size_t i = 0; i < in.Size(); ++i)
      y[i] = format.narrow_one(format.widen_one(y[i]) + format.round_one(x[i]));
    return;
  }
  narrow_codes(format, x, in.Size(), y);
}

template <class Format>
void widen_blob(const Format& format, const TBlob& in, OpReqType req, const TBlob& out) {
  if (req == mxnet::kNullOp) return;
  const uint16_t* x = static_cast<const uint16_t*>(in.dptr_);
  float* y = static_cast<float*>(out.dptr_);
  const int64_t n = in.Size();
  if (req != mxnet::kAddTo) return widen_codes(format, x, n, y);
  for (int64_t i = 0; i < n; ++i) y[i] += format.widen_one(x[i]);
}

// Widen packed codes to a plain array.
template <class Format>
void unpack(const Format& format, const NDArray& in, OpReqType req, const NDArray& out) {
  if (req == mxnet::kNullOp) return;
  if (req != mxnet::kAddTo) return unpack_plain(format, in, out);
  const NDArray apart = fresh(out, mshadow::kFloat32);
  unpack_plain(format, in, apart);
  const NDArray former = plain(out);
  const float *x = address(apart), *y = address(former);
  float* sum = prepare(out, 1);
  for (size_t i = 0; i < out.shape().Size(); ++i) sum[i] = y[i] + x[i];
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

// Return what MXNet calls, from function(format, in, req, out) of one operand and one result.
template <class Format, class Function>
FComputeEx on_arrays(const Format& format, const Function& function) {
  return watched(format, [function](const auto& format, const NodeAttrs&, const OpContext&,
                                    const Arrays& in, const Requests& req, const Arrays& out) {
    function(format, in[0], req[0], out[0]);
  });
}

template <class Format, class Function>
FCompute on_blobs(const Format& format, const Function& function) {
  return [format, function](const NodeAttrs& attrs, const OpContext& ctx, const Blobs& in,
                            const Requests& req, const Blobs& out) {
    flags::Call call(attrs, ctx, Format::kInfinity);
    function(flags::Watched<Format>(format, &call), in[0], req[0], out[0]);
  };
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

// An operator on FP32 arrays; without TIsMKLDNN it receives plain ones.
void plain_operator(const std::string& name, const FComputeEx& compute,
                    const std::string& gradient) {
  on_any_layout(unary<mshadow::kFloat32, mshadow::kFloat32>(name), compute)
      .set<nnvm::FInplaceOption>("FInplaceOption", in_place)
      .set<bool>("TIsMKLDNN", false)
      .set_gradient(gradient);
}

template <class Format>
void register_format(const Format& format, const std::string& suffix) {
  const FComputeEx round_values =
      on_arrays(format, [](const auto&... all) { round_array(all...); });
  const FComputeEx pass = on_arrays(format, [](const auto&, const auto&... all) { pass_values(all...); });
  // On plain arrays, for imperative runs.
  const std::string value = "_mpgluon_plain_value" + suffix;
  plain_operator(value, round_values, "_copy");
  plain_operator("_mpgluon_plain_both" + suffix, round_values, value);
  plain_operator("_mpgluon_plain_gradient" + suffix, pass, value);

  constexpr int kHalf = mshadow::kFloat16, kSingle = mshadow::kFloat32;
  const std::string narrow = "_mpgluon_narrow" + suffix, widen = "_mpgluon_widen" + suffix;
  const FCompute to_codes = on_blobs(format, [](const auto&... all) { narrow_blob(all...); });
  const FCompute from_codes = on_blobs(format, [](const auto&... all) { widen_blob(all...); });
  unary<kSingle, kHalf>(narrow).set<FCompute>("FCompute<cpu>", to_codes).set_gradient(widen);
  unary<kHalf, kSingle>(widen).set<FCompute>("FCompute<cpu>", from_codes).set_gradient(narrow);
  const std::string to_packed = "_mpgluon_pack" + suffix, from_packed = "_mpgluon_unpack" + suffix;
  on_any_layout(unary<kSingle, kHalf>(to_packed),
                on_arrays(format, [](const auto&... all) { pack(all...); }))
      .set_gradient(from_packed);
  on_any_layout(unary<kHalf, kSingle>(from_packed),
                on_arrays(format, [](const auto&... all) { unpack(all...); }))
      .set_gradient(to_packed);

  batch_normalization::register_batch_norm(format, suffix);
  products::register_products(format, suffix);
  codes::register_codes(format, suffix);
}

void register_common() {
  for (const bool to_blocks : {true, false}) {
    const char* name = to_blocks ? "_mpgluon_block" : "_mpgluon_unblock";
    on_any_layout(unary<mshadow::kFloat16, mshadow::kFloat16>(name),
                  codes::computing([=](const Arrays& in, const Requests& req, const Arrays& out) {
                    (to_blocks ? move_codes<true> : move_codes<false>)(in[0], req[0], out[0]);
                  }))
        .set_gradient(to_blocks ? "_mpgluon_unblock" : "_mpgluon_block");
  }

  constexpr int kSingle = mshadow::kFloat32;
  constexpr int kBfloat = mshadow::kBfloat16;
  const auto casts = [](const std::string& suffix, const FComputeEx& cast) {
    const std::string to = "_mpgluon_to_bfloat16" + suffix, from = "_mpgluon_from_bfloat16" + suffix;
    on_any_layout(unary<kSingle, kBfloat>(to), cast).set_gradient(from);
    on_any_layout(unary<kBfloat, kSingle>(from), cast).set_gradient(to);
  };
  casts("", bfloat16::cast<false>);
  casts("_in_blocks", bfloat16::cast<true>);
  keep_nan::register_keep_nan();
  channels::register_channels();
  concatenation::register_concat();
  pooling::register_pooling();
  clipping::register_clip();
  dense_layer::register_dense();
  elementwise_operators::register_elementwise();
  padding::register_pad();
  grouped::register_grouped();
  batch_normalization::register_plain_batch_norm();
  statistics::register_statistics();
  sums::register_sums();
  updates::register_updates();

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

// Called once for each format, while no operator runs. The numbers are those that Grid takes.
extern "C" void mpgluon_register_format(const char* suffix, const float* numbers) {
  const mpgluon::Grid grid = mpgluon::grid_of(numbers);
  if (std::strcmp(suffix, "_11_5") == 0) mpgluon::register_format(mpgluon::Float16(), suffix);
  else mpgluon::register_format(grid, suffix);
  mpgluon::modes::register_modes(grid, suffix);
}

// Called once for each recipe, format between products and history, while no operator runs.
extern "C" void mpgluon_register_scaled(const char* suffix, const float* between, const float* value,
                                        const float* gradient, int sharing, int history) {
  using namespace mpgluon;
  const auto how = static_cast<Sharing>(sharing);
  const products::Recipe recipe{ScaledFormat(value, how), ScaledFormat(gradient, how),
                                history_numbered(history)};
  if (between[0] == 11 && between[1] == -14) products::register_scaled(Float16(), recipe, suffix);
  else products::register_scaled(grid_of(between), recipe, suffix);
}

// Return the number of a new history. It stays for good, as the operators that know it do.
extern "C" int mpgluon_make_history(int steps) { return mpgluon::make_history(steps); }

// Write and clear the flags of layers on a device, and their counts of results that became zero.
extern "C" void mpgluon_take_flags(const int* slots, int count, int device, uint8_t* raised, int64_t* lost) {
  mpgluon::flags::take(slots, count, device, raised, lost);
}

// Return the bits of the largest number of layers on a device, and clear it.
extern "C" int32_t mpgluon_take_largest(const int* slots, int count, int device) {
  return mpgluon::flags::take_largest(slots, count, device);
}

extern "C" void mpgluon_count_lost(int slot, int counts) {
  mpgluon::flags::slot(slot).counts = counts != 0;
}

extern "C" void mpgluon_measure_largest(int slot, int measures) {
  mpgluon::flags::slot(slot).measures = measures != 0;
}

extern "C" void mpgluon_clear_history(int number) { mpgluon::history_numbered(number)->clear(); }

extern "C" void mpgluon_read_history(int number, int device, float* to) {
  mpgluon::history_numbered(number)->read(device, to);
}

extern "C" void mpgluon_write_history(int number, int device, const float* from) {
  mpgluon::history_numbered(number)->write(device, from);
}

// Called once for each 16-bit format of operands and each kind of sum, while no operator runs.
extern "C" void mpgluon_register_accumulation(const float* format, int significand_bits,
                                              int exponent_bits, int terms, int fraction_bits) {
  using namespace mpgluon;
  std::string suffix;
  for (const int number : {significand_bits, exponent_bits, terms, fraction_bits})
    suffix += "_" + std::to_string(number);
  accumulated::register_accumulation({terms, fraction_bits, 2 - (1 << (exponent_bits - 1))}, suffix);
  const std::string before = accumulated::kPrefix;
  if (significand_bits == 11) products::register_products(Float16(), suffix, before, suffix);
  else products::register_products(grid_of(format), suffix, before, suffix);
}
