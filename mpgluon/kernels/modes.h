// Rounding toward zero, and stochastic rounding with random bits that are a function of a key and of an
// element's number: so they do not depend on threads. formats/float_format.py has the same functions.
#ifndef MPGLUON_MODES_H_
#define MPGLUON_MODES_H_

#include "common.h"
#include "format.h"

namespace mpgluon {
namespace modes {

// SplitMix64's last steps (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// So many elements share a word from its 64 bits, and differ by a short hash, of which several are
// computed at a time.
constexpr int64_t kRow = 4 * kChunk;
constexpr uint32_t kStep = 0x9e3779b9;

inline int32_t draw(uint32_t low, uint32_t high) {
  uint32_t x = low * 0x7feb352d;
  x = ((x ^ x >> 15) + high) * 0x846ca68b;
  return static_cast<int32_t>(x >> 8);
}

template <bool kDraws, bool kHasSubnormals>
void cut_values(const Grid& grid, uint64_t key, const float* x, int64_t n, float* y) {
  share((n + kRow - 1) / kRow, [&](int64_t first, int64_t last) {
    const Grid format = grid;  // which no write to y changes, so that several are done at a time
    for (int64_t row = first; row < last; ++row) {
      const uint64_t word = mixed(key + row * 0x9e3779b97f4a7c15);
      const uint32_t high = word >> 32, low = word;
      const float* from = x + row * kRow;
      float* to = y + row * kRow;
      const auto cut = [&](uint32_t i) {
        const int32_t drawn = kDraws ? draw(low + i * kStep, high) : 0;
        to[i] = format.cut_one<kDraws, kHasSubnormals>(from[i], drawn);
      };
      const uint32_t count = std::min(kRow, n - row * kRow);
      if (count == kRow) for (uint32_t i = 0; i < kRow; ++i) cut(i);
      else for (uint32_t i = 0; i < count; ++i) cut(i);
    }
  });
}

// Round an array, in place or not.
template <bool kDraws>
void cut_array(const Grid& grid, uint64_t key, const NDArray& in, OpReqType req,
               const NDArray& out) {
  if (req == mxnet::kNullOp) return;
  CHECK(req != mxnet::kAddTo) << "these operators have no gradient, and add to nothing";
  const NDArray x = plain(in);
  float* y = address(x) == address(out) ? address(out) : prepare(out, 1);
  const int64_t n = in.shape().Size();
  if (grid.has_subnormals()) cut_values<kDraws, true>(grid, key, address(x), n, y);
  else cut_values<kDraws, false>(grid, key, address(x), n, y);
}

inline bool infer_shapes(const NodeAttrs&, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  if (in->size() > 1) in->at(1) = mxnet::TShape({2});
  out->at(0) = in->at(0);
  return mxnet::shape_is_known(in->at(0));
}

inline bool infer_types(const NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  in->at(0) = out->at(0) = mshadow::kFloat32;
  if (in->size() > 1) in->at(1) = mshadow::kInt32;
  return true;
}

inline Operator made(const std::string& name, int operands, const FComputeEx& compute) {
  Operator op(name, operands, 1);
  op.set<mxnet::FInferShape>("FInferShape", old_function(infer_shapes))
      .set<nnvm::FInferType>("FInferType", old_function(infer_types))
      .set<nnvm::FInplaceOption>("FInplaceOption", in_place)
      .set<mxnet::FInferStorageType>("FInferStorageType", old_function(dense))
      .set<FComputeEx>("FComputeEx<cpu>", compute);
  return op;
}

inline void register_modes(const Grid& grid, const std::string& suffix) {
  made("_mpgluon_toward_zero" + suffix, 1,
       [grid](const NodeAttrs&, const OpContext&, const Arrays& in, const Requests& req,
              const Arrays& out) { cut_array<false>(grid, 0, in[0], req[0], out[0]); });
  Operator draws = made(
      "_mpgluon_stochastic" + suffix, 2,
      [grid](const NodeAttrs&, const OpContext&, const Arrays& in, const Requests& req,
             const Arrays& out) {
        uint64_t key;
        std::memcpy(&key, in[1].data().dptr_, sizeof key);
        cut_array<true>(grid, key, in[0], req[0], out[0]);
      });
  draws.op().add_argument("data", "NDArray-or-Symbol", "float32.");
  draws.op().add_argument("key", "NDArray-or-Symbol", "int32, two words.");
}

}  // namespace modes
}  // namespace mpgluon

#endif  // MPGLUON_MODES_H_
