// Concatenation of the channels of bfloat16 images, in blocks of 16 channels if all parts are, channels last if one is,
// or plain. MXNet's own turns every part around.
#ifndef MPGLUON_CONCAT_H_
#define MPGLUON_CONCAT_H_

#include "common.h"

namespace mpgluon {
namespace concatenation {

inline bool divides_into_blocks(const Arrays& parts) {
  return std::all_of(parts.begin(), parts.end(),
                     [](const NDArray& part) { return part.shape()[1] % kLanes == 0; });
}

// Return the layout of the whole: blocks of 16 where all parts are, channels last where one is, or plain.
inline int layout_for(const Arrays& parts, const NDArray& whole) {
  bool in_blocks = divides_into_blocks(parts), last = false;
  for (const NDArray& part : parts) {
    const int layout = layout_of(part);
    in_blocks = in_blocks && layout == kLanes;
    last = last || is_channels_last(part.shape(), layout);
  }
  return in_blocks ? kLanes : last ? whole.shape()[1] : 1;
}

inline void forward(const nnvm::Op*, const NodeAttrs&, const OpContext&, const Arrays& in,
                    const Requests& req, const Arrays& out) {
  CHECK_EQ(in[0].dtype(), static_cast<int>(mshadow::kBfloat16));
  const auto& shape = out[0].shape();
  if (shape.Size() == 0) return;
  const int layout = layout_for(in, out[0]);
  const bool last = is_channels_last(shape, layout);
  Arrays parts;
  for (const NDArray& part : in)
    parts.push_back(in_layout<uint16_t>(part, last ? part.shape()[1] : layout));
  // Numbers that follow each other are those of an image, or of a pixel.
  const int64_t rows = last ? shape[0] * shape[2] * shape[3] : shape[0], all = shape.Size() / rows;
  write_in<uint16_t>(layout, req[0], out[0], [&](uint16_t* y) {
    in_parallel(rows, [&](int64_t row) {
      uint16_t* to = y + row * all;
      for (const NDArray& part : parts) {
        const int64_t count = part.shape().Size() / rows;
        to = std::copy_n(elements_of<const uint16_t>(part) + row * count, count, to);
      }
    });
  });
}

inline void backward(const nnvm::Op*, const NodeAttrs&, const OpContext&, const Arrays& in,
                     const Requests& req, const Arrays& out) {
  const auto& shape = in[0].shape();
  if (shape.Size() == 0) return;
  const bool in_blocks = layout_of(in[0]) == kLanes && divides_into_blocks(out);
  const NDArray gradient = in_blocks ? in[0] : plain(in[0]);
  const uint16_t* dy = elements_of<const uint16_t>(gradient);
  const int64_t all = shape.Size() / shape[0];
  int64_t first = 0;
  for (size_t part = 0; part < out.size(); ++part) {
    const int64_t count = out[part].shape().Size() / shape[0];
    write_in<uint16_t>(in_blocks ? kLanes : 1, req[part], out[part], [&](uint16_t* dx) {
      in_parallel(shape[0], [&](int64_t image) {
        std::copy_n(dy + image * all + first, count, dx + image * count);
      });
    });
    first += count;
  }
}

inline void register_concat() { in_places_of("Concat", "_mpgluon_bfloat16_", forward, backward); }

}  // namespace concatenation
}  // namespace mpgluon

#endif  // MPGLUON_CONCAT_H_
