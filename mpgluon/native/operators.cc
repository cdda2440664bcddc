// The operators of mpgluon's native library. See graph.py for where they are put.
#include <omp.h>

#include <cstdlib>

#include "batch_norm.h"
#include "bridge.h"
#include "float16.h"
#include "layout.h"

namespace mpgluon {
namespace {

using mxnet::FCompute;
using mxnet::FComputeEx;
using mxnet::OpContext;
using mxnet::OpReqType;
using mxnet::TBlob;
using nnvm::NodeAttrs;
using Arrays = std::vector<NDArray>;
using Blobs = std::vector<TBlob>;
using Requests = std::vector<OpReqType>;

const char kRound[] = "_mpgluon_round_value";

// ---- What operators of one operand and one result of the same shape have in common.

template <int kFrom, int kTo>
bool infer_type(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(0) = kFrom;
  out->at(0) = kTo;
  return true;
}

bool dense(const NodeAttrs&, const int, mxnet::DispatchMode* mode, std::vector<int>* in,
           std::vector<int>* out) {
  for (int& type : *in) type = mxnet::kDefaultStorage;
  for (int& type : *out) type = mxnet::kDefaultStorage;
  *mode = mxnet::DispatchMode::kFComputeEx;
  return true;
}

std::vector<std::pair<int, int>> in_place(const NodeAttrs&) { return {{0, 0}}; }
std::vector<bool> unchanged(const NodeAttrs&) { return {true}; }

// ---- Rounding values that stay in FP32 arrays.

// Apply a function of chunks, in place or not, to an array in whatever layout it is.
template <class Chunk, class One>
void elementwise(const NDArray& in, OpReqType req, const NDArray& out, const Chunk& chunk,
                 const One& one) {
  if (req == mxnet::kNullOp) return;
  const int64_t n = in.shape().Size();
  if (req == mxnet::kAddTo) {
    const NDArray x = plain(in), former = plain(out);
    const float *from = address(x), *before = address(former);
    float* to = prepare(out, 1);
    for (int64_t i = 0; i < n; ++i) to[i] = before[i] + one(from[i]);
    return;
  }
  int layout = layout_of(in);
  const NDArray x = layout == 0 ? plain(in) : in;
  if (layout == 0) layout = 1;
  const float* from = address(x);
  float* to = from == address(out) ? address(out) : prepare(out, layout);
  for_all(n, [&](int64_t i) { chunk(to + i, from + i); }, [&](int64_t i) { to[i] = one(from[i]); });
}

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
  if (req[0] == mxnet::kNullOp) return;
  const float* x = static_cast<const float*>(in[0].dptr_);
  uint16_t* y = static_cast<uint16_t*>(out[0].dptr_);
  if (req[0] == mxnet::kAddTo) {
    for (size_t i = 0; i < in[0].Size(); ++i)
      y[i] = narrow_one(widen_one(y[i]) + round_one(x[i]));
    return;
  }
  for_all(in[0].Size(), [&](int64_t i) { narrow_to(y + i, x + i); },
          [&](int64_t i) { y[i] = narrow_one(x[i]); });
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
  int64_t differences = 0;
#pragma omp parallel for reduction(+ : differences) if (n > 65536)
  for (int64_t start = 0; start < n; start += kChunk) {
    uint16_t rounded[kChunk];
    const int64_t count = std::min(kChunk, n - start);
    if (count == kChunk) narrow_to(rounded, master + start);
    else for (int64_t i = 0; i < count; ++i) rounded[i] = narrow_one(master[start + i]);
    for (int64_t i = 0; i < count; ++i) differences += rounded[i] != weight[start + i];
  }
  *static_cast<float*>(out[0].dptr_) = static_cast<float>(differences);
}

// ---- Batch normalization in the layout of its data; the result and its gradient are rounded.

enum { kData, kGamma, kBeta, kMovingMean, kMovingVar };  // operands
enum { kOut, kMean, kInvStd };                           // results

const nnvm::Op *mxnet_forward, *mxnet_backward, *own_backward;
const char kForwardName[] = "_mpgluon_batch_norm";
const char kBackwardName[] = "_mpgluon_batch_norm_backward";

// The numbers of a node stand in its name, behind "|": MXNet's own record of them is out of reach.
struct Settings {
  double eps;
  float momentum;
  bool fix_gamma, use_global_stats;

  explicit Settings(const std::string& name) {
    const char* text = std::strchr(name.c_str(), '|');
    char* rest;
    eps = std::strtod(text + 1, &rest);
    momentum = std::strtof(rest + 1, &rest);
    fix_gamma = rest[1] == '1';
    use_global_stats = rest[3] == '1';
  }
};

float inverse_deviation(float variance, double eps) {
  return 1.0 / std::sqrt(variance + static_cast<float>(eps));
}
float variance_of(float inverse, double eps) { return 1.0 / (inverse * inverse) - eps; }

Shape shape_of(const NDArray& array) {
  const auto& shape = array.shape();
  return {shape[0], shape[1], static_cast<int64_t>(shape.ProdShape(2, shape.ndim()))};
}

float* values(const NDArray& array) { return array.data().dptr<float>(); }

NDArray temporary(const NDArray& like) {
  return NDArray(like.shape(), like.ctx(), false, like.dtype());
}

bool same_bits(const std::vector<float>& ours, const NDArray& theirs) {
  return std::memcmp(ours.data(), values(theirs), ours.size() * sizeof(float)) == 0;
}

// Whether MXNet's own operator gives the same bits for data of a shape, with so many threads. How
// it shares the sums of a channel among threads is its own affair, so the first time both are asked.
class Agreement {
 public:
  enum Answer { kUnknown, kYes, kNo };

  Answer answer(const Shape& shape) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(key(shape));
    return found == known_.end() ? kUnknown : found->second;
  }

  void note(const Shape& shape, bool yes) {
    std::lock_guard<std::mutex> lock(mutex_);
    known_[key(shape)] = yes ? kYes : kNo;
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, int>;
  static Key key(const Shape& shape) {
    return Key(shape.images, shape.channels, shape.pixels, omp_get_max_threads());
  }

  std::mutex mutex_;
  std::map<Key, Answer> known_;
};

void mxnet_batch_norm(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx, Arrays in,
                      const Requests& req, const Arrays& out) {
  for (NDArray& array : in) array = plain(array);
  static const auto& functions = table<FComputeEx>("FComputeEx<cpu>");
  functions.data_[op->index_].first(attrs, ctx, in, req, out);
}

void round_in_place(const NDArray& array) {
  elementwise(array, mxnet::kWriteInplace, array, round_to, round_one);
}

// Let compute(requests, results) write the gradient of the data apart, and then do with it, rounded,
// what was asked for.
template <class Compute>
void separately(const Requests& req, const Arrays& out, const Compute& compute) {
  Arrays separate = out;
  Requests requests = req;
  separate[0] = temporary(out[0]);
  requests[0] = mxnet::kWriteTo;
  compute(requests, separate);
  elementwise(separate[0], req[0], out[0], round_to, round_one);
}

void batch_norm(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in, const Requests& req,
                const Arrays& out) {
  static Agreement agreement;
  const Settings settings(attrs.name);
  const float eps = settings.eps;
  const bool batch_statistics = ctx.is_train && !settings.use_global_stats;
  const int layout = in[kData].shape().ndim() == 4 ? layout_of(in[kData]) : 0;
  const Shape shape = shape_of(in[kData]);
  std::vector<float> mean(shape.channels), variance(shape.channels), inverse(shape.channels);
  Agreement::Answer same = layout == 0 ? Agreement::kNo : Agreement::kYes;
  if (layout != 0 && batch_statistics) {
    same = agreement.answer(shape);
    const float* x = address(in[kData]);
    if (same != Agreement::kNo)
      for_groups(shape, layout, [&](const auto& group) {
        group.statistics(x, mean.data(), variance.data());
      });
  } else {
    mean.assign(values(in[kMovingMean]), values(in[kMovingMean]) + shape.channels);
    variance.assign(values(in[kMovingVar]), values(in[kMovingVar]) + shape.channels);
  }
  for (int64_t c = 0; c < shape.channels; ++c)
    inverse[c] = inverse_deviation(variance[c], settings.eps);
  if (same != Agreement::kYes) {
    for (const NDArray& array : out) const_cast<NDArray&>(array).InvalidateMKLDNNData();
    mxnet_batch_norm(mxnet_forward, attrs, ctx, in, req, out);
    if (same == Agreement::kUnknown)
      agreement.note(shape, same_bits(mean, out[kMean]) && same_bits(inverse, out[kInvStd]));
    return round_in_place(out[kOut]);
  }
  if (settings.fix_gamma) std::fill_n(values(in[kGamma]), shape.channels, 1.0f);
  const float *x = address(in[kData]), *gamma = values(in[kGamma]), *beta = values(in[kBeta]);
  float* y = prepare(out[kOut], layout);
  for_groups(shape, layout, [&](const auto& group) {
    group.normalize(x, mean.data(), variance.data(), gamma, beta, eps, y);
  });
  std::copy(mean.begin(), mean.end(), values(out[kMean]));
  std::copy(inverse.begin(), inverse.end(), values(out[kInvStd]));
}

enum { kOutGrad, kSavedMean, kSavedInvStd, kSavedData, kSavedGamma, kSavedBeta, kOldMean, kOldVar };

void batch_norm_backward(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                         const Requests& req, const Arrays& out) {
  static Agreement agreement;
  const Settings settings(attrs.name);
  const float eps = settings.eps;
  if (req[0] == mxnet::kAddTo || req[0] == mxnet::kNullOp)
    return separately(req, out, [&](const Requests& requests, const Arrays& results) {
      batch_norm_backward(attrs, ctx, in, requests, results);
    });
  NDArray dy = in[kOutGrad], x = in[kSavedData];
  const Shape shape = shape_of(x);
  const bool batch_statistics = ctx.is_train && !settings.use_global_stats;
  const bool ours = x.shape().ndim() == 4 && batch_statistics;
  const Agreement::Answer same = ours ? agreement.answer(shape) : Agreement::kNo;
  if (same == Agreement::kNo) {
    mxnet_batch_norm(mxnet_backward, attrs, ctx, in, req, out);
    return round_in_place(out[0]);
  }
  int layout = layout_of(x);
  if (layout == 0 || layout_of(dy) != layout) dy = plain(dy), x = plain(x), layout = 1;

  const float *mean = values(in[kSavedMean]), *inverse = values(in[kSavedInvStd]);
  std::vector<float> variance(shape.channels), dgamma(shape.channels), dbeta(shape.channels);
  std::vector<float> moving_mean(shape.channels), moving_var(shape.channels);
  const float rest = 1.0f - settings.momentum;
  for (int64_t c = 0; c < shape.channels; ++c) {
    variance[c] = variance_of(inverse[c], settings.eps);
    moving_mean[c] = values(in[kOldMean])[c] * settings.momentum + mean[c] * rest;
    moving_var[c] = values(in[kOldVar])[c] * settings.momentum + variance[c] * rest;
  }
  const float *data = address(x), *grad = address(dy);
  for_groups(shape, layout, [&](const auto& group) {
    group.sum_gradients(data, grad, mean, variance.data(), eps, dgamma.data(), dbeta.data());
  });
  if (same == Agreement::kUnknown) {
    const Arrays grads = {out[0], temporary(out[1]), temporary(out[2])};
    const Requests write = {req[0], mxnet::kWriteTo, mxnet::kWriteTo};
    mxnet_batch_norm(mxnet_backward, attrs, ctx, in, write, grads);
    agreement.note(shape, (settings.fix_gamma || same_bits(dgamma, grads[1])) &&
                              same_bits(dbeta, grads[2]) && same_bits(moving_mean, in[kOldMean]) &&
                              same_bits(moving_var, in[kOldVar]));
    dgamma.assign(values(grads[1]), values(grads[1]) + shape.channels);
    dbeta.assign(values(grads[2]), values(grads[2]) + shape.channels);
    round_in_place(out[0]);
  } else {
    std::copy(moving_mean.begin(), moving_mean.end(), values(in[kOldMean]));
    std::copy(moving_var.begin(), moving_var.end(), values(in[kOldVar]));
    const std::vector<float> ones(shape.channels, 1.0f);
    const float* gamma = settings.fix_gamma ? ones.data() : values(in[kSavedGamma]);
    float* dx = address(out[0]) == grad ? address(out[0]) : prepare(out[0], layout);
    for_groups(shape, layout, [&](const auto& group) {
      group.gradient_of_data(data, grad, mean, variance.data(), gamma, eps, dgamma.data(),
                             dbeta.data(), dx);
    });
    if (settings.fix_gamma) std::fill(dgamma.begin(), dgamma.end(), 0.0f);
  }
  for (int which : {1, 2}) {
    const std::vector<float>& grads = which == 1 ? dgamma : dbeta;
    float* to = values(out[which]);
    for (int64_t c = 0; c < shape.channels; ++c)
      if (req[which] == mxnet::kAddTo) to[c] += grads[c];
      else if (req[which] != mxnet::kNullOp) to[c] = grads[c];
  }
}

std::vector<nnvm::NodeEntry> batch_norm_gradient(const nnvm::ObjectPtr& node,
                                                 const std::vector<nnvm::NodeEntry>& grads) {
  static const auto& gradients = table<nnvm::FGradient>("FGradient");
  auto entries = gradients.data_[mxnet_forward->index_].first(node, grads);
  entries[0].node->attrs.op = own_backward;  // the first member of a node's first member
  return entries;
}

// ---- A convolution whose data gets a rounded gradient.

const nnvm::Op *mxnet_convolution, *mxnet_convolution_backward, *own_convolution_backward;

void convolution_backward(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                          const Requests& req, const Arrays& out) {
  static const auto& functions = table<FComputeEx>("FComputeEx<cpu>");
  const auto& compute = functions.data_[mxnet_convolution_backward->index_].first;
  if (req[0] == mxnet::kAddTo)
    return separately(req, out, [&](const Requests& requests, const Arrays& results) {
      compute(attrs, ctx, in, requests, results);
    });
  compute(attrs, ctx, in, req, out);
  if (req[0] != mxnet::kNullOp) round_in_place(out[0]);
}

std::vector<nnvm::NodeEntry> convolution_gradient(const nnvm::ObjectPtr& node,
                                                  const std::vector<nnvm::NodeEntry>& grads) {
  static const auto& gradients = table<nnvm::FGradient>("FGradient");
  auto entries = gradients.data_[mxnet_convolution->index_].first(node, grads);
  entries[0].node->attrs.op = own_convolution_backward;  // as above
  return entries;
}

void inherit_all(Operator* made, const nnvm::Op* from) {
  made->op().attr_parser = from->attr_parser;
  made->inherit<nnvm::FNumVisibleOutputs>("FNumVisibleOutputs", from)
      .inherit<nnvm::FListInputNames>("FListInputNames", from)
      .inherit<nnvm::FListOutputNames>("FListOutputNames", from)
      .inherit<nnvm::FMutateInputs>("FMutateInputs", from)
      .inherit<mxnet::FInferShape>("FInferShape", from)
      .inherit<nnvm::FInferType>("FInferType", from)
      .inherit<mxnet::FResourceRequest>("FResourceRequest", from)
      .inherit<nnvm::TIsBackward>("TIsBackward", from)
      .inherit<nnvm::FInplaceOption>("FInplaceOption", from)
      .inherit<mxnet::FInferStorageType>("FInferStorageType", from)
      .inherit<FCompute>("FCompute<cpu>", from)
      .inherit<FComputeEx>("FComputeEx<cpu>", from)
      .inherit<bool>("TIsMKLDNN", from);
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

  Operator count("_mpgluon_count_differences", 2, 1);
  count.set<mxnet::FInferShape>("FInferShape", old_function(infer_count_shape))
      .set<nnvm::FInferType>("FInferType", old_function(infer_count_type))
      .set<FCompute>("FCompute<cpu>", count_differences);
  count.op().add_argument("weight", "NDArray-or-Symbol", "float16.");
  count.op().add_argument("master", "NDArray-or-Symbol", "float32.");

  mxnet_forward = nnvm::Op::Get("BatchNorm");
  mxnet_backward = nnvm::Op::Get("_backward_BatchNorm");
  Operator backward(kBackwardName, mxnet_backward->num_inputs, mxnet_backward->num_outputs);
  inherit_all(&backward, mxnet_backward);
  backward.set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<FComputeEx>("FComputeEx<cpu>", batch_norm_backward);
  own_backward = &backward.op();
  Operator forward(kForwardName, mxnet_forward->num_inputs, mxnet_forward->num_outputs);
  inherit_all(&forward, mxnet_forward);
  forward.set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<FComputeEx>("FComputeEx<cpu>", batch_norm)
      .set<nnvm::FGradient>("FGradient", batch_norm_gradient);

  mxnet_convolution = nnvm::Op::Get("Convolution");
  mxnet_convolution_backward = nnvm::Op::Get("_backward_Convolution");
  Operator made_backward("_mpgluon_convolution_backward", mxnet_convolution_backward->num_inputs,
                         mxnet_convolution_backward->num_outputs);
  made_backward.op().get_num_outputs = mxnet_convolution_backward->get_num_outputs;
  inherit_all(&made_backward, mxnet_convolution_backward);
  made_backward.set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<FComputeEx>("FComputeEx<cpu>", convolution_backward);
  own_convolution_backward = &made_backward.op();
  Operator convolution("_mpgluon_convolution", mxnet_convolution->num_inputs,
                       mxnet_convolution->num_outputs);
  convolution.op().get_num_inputs = mxnet_convolution->get_num_inputs;
  inherit_all(&convolution, mxnet_convolution);
  convolution.set<nnvm::FGradient>("FGradient", convolution_gradient);
}

}  // namespace
}  // namespace mpgluon

// Called once, after the library has been loaded.
extern "C" void mpgluon_register() { mpgluon::register_all(); }
