// `Pad` with zeros around the images of arrays, in the layout in which they are.
#ifndef MPGLUON_PAD_H_
#define MPGLUON_PAD_H_

#include "common.h"
#include "keep_nan.h"
#include "lanes.h"
#include "packing.h"

namespace mpgluon {
namespace padding {

// Numbers above an image and left of it. The graph has such nodes only where an image is padded with zeros.
struct Margin {
  int64_t top, left;

  explicit Margin(const NodeAttrs& attrs) {
    std::vector<int64_t> widths;
    const std::string text = option(attrs, "pad_width");
    for (const char* at = text.c_str(); *at != 0;) {
      char* end;
      const int64_t width = std::strtol(at, &end, 10);
      if (end != at) widths.push_back(width);
      at = end != at ? end : at + 1;
    }
    CHECK_EQ(widths.size(), 8u) << attrs.op->name << " pads (N, C, H, W), received " << text;
    top = widths[4], left = widths[6];
  }
};

// Copy an image into a larger one with zeros around it; or out of it, as sums with 0, which make 0 of -0.
template <bool kOut, class X, class Sum>
void copy_images(const mxnet::TShape& small, const mxnet::TShape& large, int layout,
                 const Margin& margin, const Sum& sum, const X* from, X* to) {
  const int64_t short_row = small[3] * layout, long_row = large[3] * layout;
  in_parallel(small[0] * small[1] / layout, [&](int64_t map) {
    const int64_t in_small = map * small[2] * short_row, first = map * large[2] * long_row;
    const int64_t in_large = first + margin.top * long_row + margin.left * layout;
    if (!kOut) std::fill_n(to + first, large[2] * long_row, X(0));
    for (int64_t row = 0; row < small[2]; ++row) {
      const int64_t short_at = in_small + row * short_row, long_at = in_large + row * long_row;
      if (kOut)
        for (int64_t i = 0; i < short_row; ++i) to[short_at + i] = sum(X(0), from[long_at + i]);
      else std::copy_n(from + short_at, short_row, to + long_at);
    }
  });
}

template <bool kOut, class X, class Sum>
void pad_as(const Margin& margin, const NDArray& in, OpReqType req, const NDArray& out,
            const Sum& sum) {
  const bool adds = req == mxnet::kAddTo;
  const int layout = adds ? 1 : std::max(1, layout_of(in));
  const NDArray from = layout == layout_of(in) ? in : plain(in);
  const auto &small = (kOut ? out : in).shape(), &large = (kOut ? in : out).shape();
  const auto copy_to = [&](X* to) {
    const X* numbers = keep_nan::elements_of<const X>(from);
    copy_images<kOut>(small, large, layout, margin, sum, numbers, to);
  };
  if (!adds) return copy_to(keep_nan::room_in<X>(out, layout));
  const NDArray before = plain(out);
  std::vector<X> added(out.shape().Size());
  copy_to(added.data());
  const X* old = keep_nan::elements_of<const X>(before);
  X* sums = keep_nan::room_in<X>(out, 1);
  for (size_t i = 0; i < added.size(); ++i) sums[i] = sum(old[i], added[i]);
}

template <bool kOut>
void pad(const nnvm::Op*, const NodeAttrs& attrs, const OpContext&, const Arrays& in,
         const Requests& req, const Arrays& out) {
  const Margin margin(attrs);
  if (req[0] == mxnet::kNullOp) return;
  if (in[0].dtype() == mshadow::kBfloat16)  // whose sums MXNet's type would cut off
    return pad_as<kOut, uint16_t>(margin, in[0], req[0], out[0], [](uint16_t x, uint16_t y) {
      return bfloat16_of(widened(x) + widened(y));
    });
  MSHADOW_TYPE_SWITCH(in[0].dtype(), X, {
    pad_as<kOut, X>(margin, in[0], req[0], out[0], [](X x, X y) { return X(x + y); });
  });
}

// Pad codes in their packed layout; 0 is made of the code of -0 as above.
template <bool kOut, class Format>
void pad_codes(const Format& format, const NodeAttrs& attrs, const Arrays& in, const Requests& req,
               const Arrays& out) {
  const Margin margin(attrs);
  const auto &small = (kOut ? out : in)[0].shape(), &large = (kOut ? in : out)[0].shape();
  const auto without_sign_of_zero = [](uint16_t, uint16_t code) {
    return keep_nan::choose_code(code == 0x8000, 0, code);
  };
  write_codes(format, req[0], out[0], [&](uint16_t* to) {
    copy_images<kOut>(small, large, packed_layout(small), margin, without_sign_of_zero,
                      static_cast<const uint16_t*>(codes_of(in[0])), to);
  });
}

inline void register_pad() {
  in_places_of("Pad", "_mpgluon_any_layout_", pad<false>, pad<true>);
}

}  // namespace padding
}  // namespace mpgluon

#endif  // MPGLUON_PAD_H_
