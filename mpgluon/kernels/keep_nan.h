// ReLU and max pooling that keep NaN. MXNet's, by oneDNN, return 0 or the largest of the other numbers,
// and so hide an overflow of an earlier layer. All other numbers have the bits of MXNet's.
#ifndef MPGLUON_KEEP_NAN_H_
#define MPGLUON_KEEP_NAN_H_

#include "common.h"

namespace mpgluon {
namespace keep_nan {

// ---- ReLU of FP32 and bfloat16 arrays in any layout.

// In one expression without branches, so that compilers do several at a time.
inline float relu_of(float x) { return x <= 0 ? 0 : x; }

// Return the gradient of a number from that of its ReLU, which oneDNN multiplies by 1 or 0.
inline float gradient_of(float dy, float y) {
  const float passes = static_cast<float>(y != 0);  // a comparison, and no branch
  return dy * (flags::is_nan(y) ? y : passes);
}

inline uint16_t choose_code(bool first, uint16_t one, uint16_t other) {
  const uint16_t mask = -static_cast<uint16_t>(first);
  return (one & mask) | (other & ~mask);
}

// The same of codes. As signed numbers, NaN with either sign, 0 and what is positive come behind -inf.
template <uint16_t kInfinity>
uint16_t relu_of(uint16_t x) {
  constexpr int16_t kNegativeInfinity = static_cast<int16_t>(0x8000 | kInfinity);
  return choose_code(static_cast<int16_t>(x) > kNegativeInfinity, x, 0);
}

template <uint16_t kInfinity>
uint16_t gradient_of(uint16_t dy, uint16_t y, uint16_t nan) {
  const uint16_t product = choose_code((dy & 0x7fff) < kInfinity, dy & 0x8000, dy | nan);
  const uint16_t gradient = choose_code(y == 0, product, dy);
  return gradient | choose_code((y & 0x7fff) > kInfinity, nan, 0);
}

// Of codes of bfloat16.
inline uint16_t relu_of(uint16_t x) { return relu_of<Grid::kInfinity>(x); }
inline uint16_t gradient_of(uint16_t dy, uint16_t y) {
  return gradient_of<Grid::kInfinity>(dy, y, 0x7fc0);
}

// A chunk of numbers, which no write to other memory changes, so that several are done at a time.
template <class X>
struct Chunk {
  X at[kChunk];
  explicit Chunk(const X* x) { std::memcpy(at, x, sizeof at); }
};

// Write of(x...) for n elements, in place or not.
template <class X, class Of, class... In>
void map_chunks(int64_t n, X* y, const Of& of, const In*... x) {
  const auto chunk = [&](X* to, const auto&... from) {
    X made[kChunk];
    for (int64_t j = 0; j < kChunk; ++j) made[j] = of(from.at[j]...);
    std::memcpy(to, made, sizeof made);
  };
  for_all(n, [&](int64_t i) { chunk(y + i, Chunk<X>(x + i)...); },
          [&](int64_t i) { y[i] = of(x[i]...); });
}

// Write it for n elements, or add it.
template <class X, class Of, class... In>
void map_values(OpReqType req, int64_t n, const X* before, X* y, const Of& of, const In*... x) {
  if (req == mxnet::kAddTo) {
    const auto add = [=](int64_t i) { y[i] = sum_of(before[i], of(x[i]...)); };
    return for_all(n, [&](int64_t i) { for (int64_t j = i; j < i + kChunk; ++j) add(j); }, add);
  }
  map_chunks(n, y, of, x...);
}

// The same for arrays: all in the layout of the last of them that is not plain, in which more operators are fast.
template <class X, class Of, class... In>
void map(OpReqType req, const NDArray& out, const Of& of, const In&... in) {
  int layout = 1;
  if (req != mxnet::kAddTo)
    for (int other : {layout_of(in)...}) layout = other > 1 ? other : layout;
  const auto write = [&](const auto&... same) {
    const NDArray former = req == mxnet::kAddTo ? plain(out) : out;
    const bool in_place = req != mxnet::kAddTo && std::max({address(same) == address(out)...});
    X* y = in_place ? elements_of<X>(out) : room_in<X>(out, layout);
    map_values(req, out.shape().Size(), elements_of<const X>(former), y, of,
               elements_of<const X>(same)...);
  };
  write(in_layout<X>(in, layout)...);
}

template <class Of, class... In>
void map_elements(OpReqType req, const NDArray& out, const Of& of, const In&... in) {
  if (req == mxnet::kNullOp) return;
  if (out.dtype() == mshadow::kBfloat16) map<uint16_t>(req, out, of, in...);
  else map<float>(req, out, of, in...);
}

// Whether oneDNN has ReLU of such arrays; MXNet's own of all others keeps NaN.
inline bool is_of_onednn(const NDArray& array) {
  return array.dtype() == mshadow::kFloat32 || array.dtype() == mshadow::kBfloat16;
}

inline void relu(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                 const Arrays& in, const Requests& req, const Arrays& out) {
  if (!is_of_onednn(in[0])) return call(op, attrs, ctx, in, req, out);
  map_elements(req[0], out[0], [](auto x) { return relu_of(x); }, in[0]);
}

inline void relu_backward(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                          const Arrays& in, const Requests& req, const Arrays& out) {
  if (!is_of_onednn(in[0])) return call(op, attrs, ctx, in, req, out);
  map_elements(req[0], out[0], [](auto dy, auto y) { return gradient_of(dy, y); }, in[0], in[1]);
}

// ---- Max pooling.

inline bool is_max_pooling(const NodeAttrs& attrs) {
  const std::string type = option(attrs, "pool_type");
  return type.empty() || type == "max";
}

// Whether an array has a NaN.
template <class X>
bool has_nan(const X* x, int64_t n) {
  std::atomic<bool> found{false};
  share(n, [&](int64_t first, int64_t last) {
    int count = 0;  // without a way out of the loop, several are compared at a time
    for (int64_t i = first; i < last; ++i) count |= x[i] != x[i];
    if (count != 0) found = true;
  });
  return found;
}

// Make the results of max pooling NaN whose window has one. They may be in any layout before, and are
// plain then.
template <class X = float>
void keep_in_pooling(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                     const NDArray& data, const Arrays& out) {
  const NDArray x = layout_of(data) == 0 ? plain(data) : data;
  const int64_t n = x.shape().Size();
  const X* any = elements_of<const X>(x);
  if (!has_nan(any, n)) return;
  const NDArray numbers = plain(x), where = fresh(x, mshadow::kFloat32);
  std::transform(elements_of<const X>(numbers), elements_of<const X>(numbers) + n, address(where),
                 [](X number) { return number != number; });
  Arrays results;
  for (const NDArray& array : out) results.push_back(fresh(array, mshadow::kFloat32));
  call(op, attrs, ctx, {where}, Requests(out.size(), mxnet::kWriteTo), results);
  const NDArray found = plain(results[0]), made = plain(out[0]);
  const float* windows = address(found);
  const X* before = elements_of<const X>(made);
  const int64_t size = out[0].shape().Size();
  std::vector<X> kept(before, before + size);
  for (int64_t i = 0; i < size; ++i)
    if (windows[i] > 0) kept[i] = X(NAN);
  std::copy(kept.begin(), kept.end(), room_in<X>(out[0], 1));
}

inline void pooling(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                    const Arrays& in, const Requests& req, const Arrays& out) {
  call(op, attrs, ctx, in, req, out);
  if (req[0] == mxnet::kNullOp || !is_max_pooling(attrs)) return;
  const int dtype = in[0].dtype();
  if (dtype == mshadow::kFloat32) keep_in_pooling<float>(op, attrs, ctx, in[0], out);
  if (dtype == mshadow::kFloat64) keep_in_pooling<double>(op, attrs, ctx, in[0], out);
  if (dtype == mshadow::kFloat16) keep_in_pooling<mshadow::half::half_t>(op, attrs, ctx, in[0], out);
}

inline void register_keep_nan() {
  in_places_of("Activation", "_mpgluon_keep_nan_", relu, relu_backward);
  in_places_of("Pooling", "_mpgluon_keep_nan_", pooling, call);
}

}  // namespace keep_nan
}  // namespace mpgluon

#endif  // MPGLUON_KEEP_NAN_H_
