// How an array lies in memory: as NCHW, in oneDNN's blocks of 8 or 16 channels, or with all channels of a pixel
// side by side.
#ifndef MPGLUON_LAYOUT_H_
#define MPGLUON_LAYOUT_H_

#include <mkldnn.hpp>

#include "bridge.h"
#include "parallel.h"

namespace mpgluon {

using mxnet::NDArray;

inline float* address(const NDArray& array) {
  return reinterpret_cast<float*>(static_cast<char*>(array.storage_handle().dptr) +
                                  array.byte_offset());
}

// oneDNN's description of (N, C, H, W) in blocks of channels, FP32 or bfloat16; the block size
// divides C.
inline mkldnn::memory::desc blocked(const mxnet::TShape& shape, int block, int dtype) {
  mkldnn::memory::desc desc;
  std::memset(static_cast<void*>(&desc.data), 0, sizeof desc.data);
  auto& d = desc.data;
  d.ndims = 4;
  d.data_type = dtype == mshadow::kBfloat16 ? dnnl_bf16 : dnnl_f32;
  d.format_kind = dnnl_blocked;
  for (int i = 0; i < 4; ++i) d.dims[i] = d.padded_dims[i] = shape[i];
  auto& blocking = d.format_desc.blocking;
  blocking.inner_nblks = 1;
  blocking.inner_blks[0] = block;
  blocking.inner_idxs[0] = 1;
  blocking.strides[3] = block;
  blocking.strides[2] = block * shape[3];
  blocking.strides[1] = block * shape[3] * shape[2];
  blocking.strides[0] = shape[1] * shape[3] * shape[2];
  return desc;
}

// The same with the channels of each pixel side by side, as in one block of all of them.
inline mkldnn::memory::desc channels_last(const mxnet::TShape& shape, int dtype) {
  mkldnn::memory::desc desc = blocked(shape, shape[1], dtype);
  desc.data.format_desc.blocking.inner_nblks = 0;
  desc.data.format_desc.blocking.inner_blks[0] = desc.data.format_desc.blocking.inner_idxs[0] = 0;
  desc.data.format_desc.blocking.strides[1] = 1;
  return desc;
}

// Whether a layout is one of blocks that may be smaller than all channels.
inline bool is_of_blocks(int layout) { return layout == 16 || layout == 8; }

// Return how many channels of a pixel lie side by side: 1 in NCHW and every other plain array, 8 or 16 in
// blocks, all in channels last; 0 for other layouts.
inline int layout_of(const NDArray& array) {
  if (!array.IsMKLDNNData()) return 1;
  const int dtype = array.dtype();
  if (dtype != mshadow::kFloat32 && dtype != mshadow::kBfloat16) return 0;
  if (array.IsView() || array.shape().ndim() != 4) return 0;
  for (int block : {16, 8})
    if (array.shape()[1] % block == 0 && array.GetMKLDNNData(blocked(array.shape(), block, dtype)))
      return block;
  return array.GetMKLDNNData(channels_last(array.shape(), dtype)) ? array.shape()[1] : 0;
}

// Whether all channels of a pixel lie side by side, in an array of this shape and layout.
inline bool is_channels_last(const mxnet::TShape& shape, int layout) {
  return layout > 1 && layout == shape[1];
}

// Return a plain array: the array itself, or a copy of one in another layout.
inline NDArray plain(const NDArray& array) {
  return array.IsMKLDNNData() ? array.Reorder2Default() : array;
}

// Return where to write a result in a layout.
inline float* prepare(const NDArray& result, int layout) {
  NDArray& array = const_cast<NDArray&>(result);
  if (layout == 1) {
    array.InvalidateMKLDNNData();
    return array.data().dptr<float>();
  }
  const auto& shape = array.shape();
  array.CreateMKLDNNData(is_of_blocks(layout) ? blocked(shape, layout, array.dtype())
                                              : channels_last(shape, array.dtype()));
  return address(array);
}

// The layout of 16-bit codes that only the native operators read: it follows from the shape. It is that
// of oneDNN's convolutions, to which it reorders blocks of another size slowly, and plain arrays fast.
inline int packed_layout(const mxnet::TShape& shape) {
#ifdef __AVX512F__
  constexpr int kBlock = 16;
#else
  constexpr int kBlock = 8;
#endif
  return shape.ndim() == 4 && shape[1] % kBlock == 0 ? kBlock : 1;
}

inline NDArray fresh(const NDArray& like, int dtype) {
  return NDArray(like.shape(), like.ctx(), false, dtype);
}

// Call each(plain, blocked) for the two places of every element of an array in blocks of channels.
// Tiles of as many pixels as channels stay in the cache while they are turned.
template <class Each>
void for_places(const mxnet::TShape& shape, int channels, const Each& each) {
  const int64_t pixels = shape[2] * shape[3], blocks = shape[0] * shape[1] / channels;
  in_parallel(blocks, [&](int64_t number) {
    const int64_t start = number * channels * pixels;
    for (int64_t first = 0; first < pixels; first += channels) {
      const int64_t last = std::min<int64_t>(first + channels, pixels);
      for (int64_t lane = 0; lane < channels; ++lane)
        for (int64_t pixel = first; pixel < last; ++pixel)
          each(start + lane * pixels + pixel, start + pixel * channels + lane);
    }
  });
}

// Copy plain numbers into blocks of channels.
template <class X, class Y, class Convert>
void block(const X* x, Y* y, const mxnet::TShape& shape, int channels, const Convert& convert) {
  for_places(shape, channels, [&](int64_t plain, int64_t blocked) { y[blocked] = convert(x[plain]); });
}

// Copy numbers in blocks of channels to their plain places.
template <class X, class Y, class Convert>
void unblock(const X* x, Y* y, const mxnet::TShape& shape, int channels, const Convert& convert) {
  for_places(shape, channels, [&](int64_t plain, int64_t blocked) { y[plain] = convert(x[blocked]); });
}

}  // namespace mpgluon

#endif  // MPGLUON_LAYOUT_H_
