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

// ---- Batch normalization in the layout of its data.

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

std::vector<float> gamma_of(const NDArray& gamma, const Settings& settings) {
  const float* g = values(gamma);
  return settings.fix_gamma ? std::vector<float>(gamma.shape().Size(), 1.0f)
                            : std::vector<float>(g, g + gamma.shape().Size());
}

NDArray temporary(const NDArray& like) {
  return NDArray(like.shape(), like.ctx(), false, like.dtype());
}

NDArray copy_of(const NDArray& array) {
  NDArray copy = temporary(array);
  std::memcpy(address(copy), address(array), array.shape().Size() * sizeof(float));
  return copy;
}

bool equal(const NDArray& ours, const NDArray& theirs) {
  const NDArray a = plain(ours), b = plain(theirs);
  return std::memcmp(address(a), address(b), a.shape().Size() * sizeof(float)) == 0;
}

void forward_in(int layout, const Settings& settings, bool batch_statistics, const Arrays& in,
                const Arrays& out) {
  const Shape shape = shape_of(in[kData]);
  const std::vector<float> gamma = gamma_of(in[kGamma], settings);
  const float *x = address(in[kData]), *beta = values(in[kBeta]);
  const float eps = settings.eps;
  float *mean = values(out[kMean]), *inverse = values(out[kInvStd]);
  std::vector<float> variance(shape.channels);
  if (!batch_statistics) {
    std::memcpy(mean, values(in[kMovingMean]), shape.channels * sizeof(float));
    std::memcpy(variance.data(), values(in[kMovingVar]), shape.channels * sizeof(float));
  }
  float* y = prepare(out[kOut], layout);
  for_groups(shape, layout, [&](const auto& group) {
    if (batch_statistics) group.statistics(x, mean, variance.data());
    group.normalize(x, mean, variance.data(), gamma.data(), beta, eps, y);
  });
  for (int64_t c = 0; c < shape.channels; ++c)
    inverse[c] = inverse_deviation(variance[c], settings.eps);
}

enum { kOutGrad, kSavedMean, kSavedInvStd, kSavedData, kSavedGamma, kSavedBeta, kMean2, kVar2 };

void backward_in(int layout, const Settings& settings, const Arrays& in, const NDArray& dy,
                 const NDArray& x, const Arrays& out, const Requests& req) {
  const Shape shape = shape_of(x);
  const std::vector<float> gamma = gamma_of(in[kSavedGamma], settings);
  const float *mean = values(in[kSavedMean]), *inverse = values(in[kSavedInvStd]);
  float *moving_mean = values(in[kMean2]), *moving_var = values(in[kVar2]);
  std::vector<float> variance(shape.channels), dgamma(shape.channels), dbeta(shape.channels);
  const float rest = 1.0f - settings.momentum;
  for (int64_t c = 0; c < shape.channels; ++c) {
    variance[c] = variance_of(inverse[c], settings.eps);
    moving_mean[c] = moving_mean[c] * settings.momentum + mean[c] * rest;
    moving_var[c] = moving_var[c] * settings.momentum + variance[c] * rest;
  }
  const float *from = address(x), *grad = address(dy);
  float* dx = address(out[0]) == grad ? address(out[0]) : prepare(out[0], layout);
  for_groups(shape, layout, [&](const auto& group) {
    group.backward(from, grad, mean, variance.data(), gamma.data(),
                   static_cast<float>(settings.eps), dx, dgamma.data(), dbeta.data());
  });
  auto write = [&](int which, const std::vector<float>& grads, bool zero) {
    float* to = values(out[which]);
    for (int64_t c = 0; c < shape.channels; ++c) {
      if (zero) to[c] = 0;
      else if (req[which] == mxnet::kAddTo) to[c] += grads[c];
      else if (req[which] != mxnet::kNullOp) to[c] = grads[c];
    }
  };
  write(1, dgamma, settings.fix_gamma);
  write(2, dbeta, false);
}

// Whether MXNet's own operator gives the same bits for data of a shape, with so many threads. It
// is asked once: how it shares a channel among threads is its own affair.
class Agreement {
 public:
  template <class Compare>
  bool holds(const NDArray& data, bool batch_statistics, const Compare& compare) {
    const Shape shape = shape_of(data);
    const auto key = std::make_tuple(shape.images, shape.channels, shape.pixels,
                                     omp_get_max_threads(), batch_statistics);
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = known_.find(key);
    if (found == known_.end()) found = known_.emplace(key, compare()).first;
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<int64_t, int64_t, int64_t, int, bool>, bool> known_;
};

void mxnet_batch_norm(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx, Arrays in,
                      const Requests& req, const Arrays& out) {
  for (NDArray& array : in) array = plain(array);
  static const auto& functions = table<FComputeEx>("FComputeEx<cpu>");
  functions.data_[op->index_].first(attrs, ctx, in, req, out);
}

void batch_norm(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in, const Requests& req,
                const Arrays& out) {
  static Agreement agreement;
  const Settings settings(attrs.name);
  const bool batch_statistics = ctx.is_train && !settings.use_global_stats;
  const int layout = in[kData].shape().ndim() == 4 ? layout_of(in[kData]) : 0;
  const bool ours = layout != 0 && agreement.holds(in[kData], batch_statistics, [&] {
    const Arrays one = {temporary(out[0]), temporary(out[1]), temporary(out[2])};
    const Arrays other = {temporary(out[0]), temporary(out[1]), temporary(out[2])};
    Arrays operands = in;
    for (int i : {kGamma, kBeta, kMovingMean, kMovingVar}) operands[i] = copy_of(in[i]);
    forward_in(layout, settings, batch_statistics, operands, one);
    mxnet_batch_norm(mxnet_forward, attrs, ctx, operands, Requests(3, mxnet::kWriteTo), other);
    return equal(one[0], other[0]) && equal(one[1], other[1]) && equal(one[2], other[2]);
  });
  if (!ours) {
    for (const NDArray& array : out) const_cast<NDArray&>(array).InvalidateMKLDNNData();
    mxnet_batch_norm(mxnet_forward, attrs, ctx, in, req, out);
    return;
  }
  if (settings.fix_gamma) std::fill_n(values(in[kGamma]), in[kGamma].shape().Size(), 1.0f);
  forward_in(layout, settings, batch_statistics, in, out);
}

void batch_norm_backward(const NodeAttrs& attrs, const OpContext& ctx, const Arrays& in,
                         const Requests& req, const Arrays& out) {
  static Agreement agreement;
  const Settings settings(attrs.name);
  NDArray dy = in[kOutGrad], x = in[kSavedData];
  bool ours = x.shape().ndim() == 4 && ctx.is_train && !settings.use_global_stats &&
              req[0] != mxnet::kAddTo && req[0] != mxnet::kNullOp;
  int layout = ours ? layout_of(x) : 0;
  if (ours && (layout == 0 || layout_of(dy) != layout)) {
    dy = plain(dy), x = plain(x), layout = 1;
  }
  ours = ours && agreement.holds(x, true, [&] {
    const Arrays one = {temporary(out[0]), temporary(out[1]), temporary(out[2])};
    const Arrays other = {temporary(out[0]), temporary(out[1]), temporary(out[2])};
    const Requests write(3, mxnet::kWriteTo);
    Arrays mine = in, theirs = in;
    for (int i : {kMean2, kVar2}) mine[i] = copy_of(in[i]), theirs[i] = copy_of(in[i]);
    backward_in(layout, settings, mine, dy, x, one, write);
    mxnet_batch_norm(mxnet_backward, attrs, ctx, theirs, write, other);
    return equal(one[0], other[0]) && equal(one[1], other[1]) && equal(one[2], other[2]) &&
           equal(mine[kMean2], theirs[kMean2]) && equal(mine[kVar2], theirs[kVar2]);
  });
  if (!ours) return mxnet_batch_norm(mxnet_backward, attrs, ctx, in, req, out);
  backward_in(layout, settings, in, dy, x, out, req);
}

std::vector<nnvm::NodeEntry> batch_norm_gradient(const nnvm::ObjectPtr& node,
                                                 const std::vector<nnvm::NodeEntry>& grads) {
  static const auto& gradients = table<nnvm::FGradient>("FGradient");
  auto entries = gradients.data_[mxnet_forward->index_].first(node, grads);
  entries[0].node->attrs.op = own_backward;  // the first member of the first member of a node
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
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<bool>("TIsMKLDNN", true);
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
  const char *round = "_mpgluon_round_value", *pass = "_copy";
  rounding(round, round_values, pass);
  rounding("_mpgluon_round_both", round_values, round);
  rounding("_mpgluon_round_gradient", pass_values, round)
      .set<nnvm::FInplaceIdentity>("FInplaceIdentity", unchanged);
  // Without TIsMKLDNN, MXNet hands over a plain array.
  rounding("_mpgluon_plain", pass_values, pass).set<bool>("TIsMKLDNN", false);

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
  backward.set<FComputeEx>("FComputeEx<cpu>", batch_norm_backward);
  own_backward = &backward.op();
  Operator forward(kForwardName, mxnet_forward->num_inputs, mxnet_forward->num_outputs);
  inherit_all(&forward, mxnet_forward);
  forward.set<FComputeEx>("FComputeEx<cpu>", batch_norm)
      .set<nnvm::FGradient>("FGradient", batch_norm_gradient);
}

}  // namespace
}  // namespace mpgluon

// Called once, after the library has been loaded.
extern "C" void mpgluon_register() { mpgluon::register_all(); }
