// `Pad` with zeros around the images of arrays, in the layout in which they are.
#ifndef MPGLUON_PAD_H_
#define MPGLUON_PAD_H_

#include "common.h"
#include "keep_nan.h"
#include "packing.h"

namespace mpgluon {
namespace padding {

// Numbers above an image and left of it. The graph has such nodes only where an image is padded with zeros.
struct Margin {
  int64_t top, left;

  explicit Margin(const NodeAttrs& attrs) {
    const std::vector<int64_t> widths = numbers_of(attrs, "pad_width");
    CHECK_EQ(widths.size(), 8u) << attrs.op->name << " pads (N, C, H, W), received "
                                << option(attrs, "pad_width");
    top = widths[4], left = widths[6];
  }
};

// Copy an image into a larger one with zeros around it; or out of it, as taken(x), which makes 0 of -0.
template <bool kOut, class X, class Taken>
void copy_images(const mxnet::TShape& small, const mxnet::TShape& large, int layout,
                 const Margin& margin, const Taken& taken, const X* from, X* to) {
  const int64_t short_row = small[3] * layout, long_row = large[3] * layout;
  in_parallel(small[0] * small[1] / layout, [&](int64_t map) {
    const int64_t in_small = map * small[2] * short_row, first = map * large[2] * long_row;
    const int64_t in_large = first + margin.top * long_row + margin.left * layout;
    if (!kOut) std::fill_n(to + first, large[2] * long_row, X(0));
    for (int64_t row = 0; row < small[2]; ++row) {
      const int64_t short_at = in_small + row * short_row, long_at = in_large + row * long_row;
      if (kOut)
        for (int64_t i = 0; i < short_row; ++i) to[short_at + i] = taken(from[long_at + i]);
      else std::copy_n(from + short_at, short_row, to + long_at);
    }
  });
}

template <bool kOut, class X>
void pad_as(const Margin& margin, const NDArray& in, OpReqType req, const NDArray& out) {
  const int layout = std::max(1, layout_of(in));
  const NDArray from = in_layout<X>(in, layout);
  const auto &small = (kOut ? out : in).shape(), &large = (kOut ? in : out).shape();
  write_in<X>(layout, req, out, [&](X* to) {
    copy_images<kOut>(small, large, layout, margin, [](X x) { return sum_of(X(0), x); },
                      elements_of<const X>(from), to);
  });
}

template <bool kOut>
void pad(const nnvm::Op*, const NodeAttrs& attrs, const OpContext&, const Arrays& in,
         const Requests& req, const Arrays& out) {
  const Margin margin(attrs);
  if (in[0].dtype() == mshadow::kBfloat16)
    return pad_as<kOut, uint16_t>(margin, in[0], req[0], out[0]);
  MSHADOW_TYPE_SWITCH(in[0].dtype(), X, { pad_as<kOut, X>(margin, in[0], req[0], out[0]); });
}

// Pad codes in their packed layout.
template <bool kOut, class Format>
void pad_codes(const Format& format, const NodeAttrs& attrs, const Arrays& in, const Requests& req,
               const Arrays& out) {
  const Margin margin(attrs);
  const auto &small = (kOut ? out : in)[0].shape(), &large = (kOut ? in : out)[0].shape();
  const auto taken = [](uint16_t code) { return keep_nan::choose_code(code == 0x8000, 0, code); };
  write_codes(format, req[0], out[0], [&](uint16_t* to) {
    copy_images<kOut>(small, large, packed_layout(small), margin, taken,
                      static_cast<const uint16_t*>(codes_of(in[0])), to);
  });
}

inline void register_pad() {
  in_places_of("Pad", "_mpgluon_any_layout_", pad<false>, pad<true>);
}

}  // namespace padding
}  // namespace mpgluon

#endif  // MPGLUON_PAD_H_
