// The geometry of convolutions and poolings of images.
#ifndef MPGLUON_WINDOW_H_
#define MPGLUON_WINDOW_H_

#include "common.h"

namespace mpgluon {

// A convolution or pooling of (images, channels, height, width), whose result has so many rows and columns.
struct Window {
  int64_t images, channels, height, width, rows, columns;
  Sizes stride, pad;  // in their last two places
};

inline Window window_of(const NodeAttrs& attrs, const NDArray& data, const NDArray& result) {
  const auto &from = data.shape(), &to = result.shape();
  return {from[0], from[1], from[2], from[3], to[2], to[3],
          sizes_of(attrs, "stride", 2, 1), sizes_of(attrs, "pad", 2, 0)};
}

}  // namespace mpgluon

#endif  // MPGLUON_WINDOW_H_
