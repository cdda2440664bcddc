// How an array lies in memory: as NCHW, or in oneDNN's blocks of 8 or 16 channels.
#ifndef MPGLUON_LAYOUT_H_
#define MPGLUON_LAYOUT_H_

#include <mkldnn.hpp>

#include "bridge.h"

namespace mpgluon {

using mxnet::NDArray;

inline float* address(const NDArray& array) {
  return reinterpret_cast<float*>(static_cast<char*>(array.storage_handle().dptr) +
                                  array.byte_offset());
}

// oneDNN's description of (N, C, H, W) in blocks of so many channels, which divide C.
inline mkldnn::memory::desc blocked(const mxnet::TShape& shape, int block) {
  mkldnn::memory::desc desc;
  std::memset(static_cast<void*>(&desc.data), 0, sizeof desc.data);
  auto& d = desc.data;
  d.ndims = 4;
  d.data_type = dnnl_f32;
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

// Return 1 for NCHW and every other plain array, 8 or 16 for blocks, 0 for other layouts.
inline int layout_of(const NDArray& array) {
  if (!array.IsMKLDNNData()) return 1;
  if (array.IsView() || array.shape().ndim() != 4 || array.dtype() != mshadow::kFloat32) return 0;
  for (int block : {16, 8})
    if (array.shape()[1] % block == 0 && array.GetMKLDNNData(blocked(array.shape(), block)))
      return block;
  return 0;
}

// Return the array itself, or a plain copy of one in a layout that is not wanted.
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
  array.CreateMKLDNNData(blocked(array.shape(), layout));
  return address(array);
}

}  // namespace mpgluon

#endif  // MPGLUON_LAYOUT_H_
