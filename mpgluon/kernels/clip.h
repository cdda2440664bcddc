// `clip` of 16-bit codes, which have the order of their numbers, so that none has to be widened. NaN stays
// NaN, as in MXNet's.
#ifndef MPGLUON_CLIP_H_
#define MPGLUON_CLIP_H_

#include "common.h"
#include "keep_nan.h"
#include "packing.h"

namespace mpgluon {
namespace clipping {

// Return the place of a code in the order of numbers: -0 is before 0, and NaN is at the ends.
inline int16_t place_of(uint16_t code) {
  return static_cast<int16_t>(code ^ ((static_cast<int16_t>(code) >> 15) & 0x7fff));
}

// Return how many places, from that of -infinity on, hold numbers for which `holds` is true; it is for
// none behind the first one for which it is false.
template <class Format, class Holds>
int places(const Format& format, const Holds& holds) {
  int first = place_of(0x8000 | Format::kInfinity), end = Format::kInfinity + 1;
  const int start = first;
  while (first < end) {
    const int16_t middle = static_cast<int16_t>((first + end) >> 1);
    const uint16_t code = place_of(static_cast<uint16_t>(middle));  // it is its own inverse
    if (holds(format.widen_one(code))) first = middle + 1;
    else end = middle;
  }
  return first - start;
}

// The bounds of `clip`, as codes and as the places of the first and last codes within them.
template <class Format>
class Bounds {
 public:
  Bounds(const Format& format, const NodeAttrs& attrs) {
    const float least = number_option(attrs, "a_min");
    const float most = number_option(attrs, "a_max");
    fit_ = fits(format, least) && fits(format, most);
    least_ = format.narrow_one(least);
    most_ = format.narrow_one(most);
    const int start = place_of(0x8000 | Format::kInfinity);
    first_ = start + places(format, [=](float x) { return x < least; });
    last_ = start + places(format, [=](float x) { return x <= most; }) - 1;
  }

  // Whether no bound overflows or becomes zero, which the layer would have to report.
  bool fit() const { return fit_; }

  uint16_t clip(uint16_t x) const {
    const int16_t place = place_of(x);
    const uint16_t at_least = keep_nan::choose_code(place < first_, least_, x);
    const uint16_t clipped = keep_nan::choose_code(place > last_, most_, at_least);
    return keep_nan::choose_code((x & 0x7fff) > Format::kInfinity, x, clipped);
  }

  uint16_t gradient(uint16_t dy, uint16_t x) const {
    const int16_t place = place_of(x);
    const uint16_t within =
        keep_nan::choose_code(place < first_, 0, keep_nan::choose_code(place > last_, 0, dy));
    return keep_nan::choose_code((x & 0x7fff) > Format::kInfinity, dy, within);
  }

 private:
  static bool fits(const Format& format, float bound) {
    const float rounded = format.widen_one(format.narrow_one(bound));
    return std::isinf(bound) || (std::isfinite(rounded) && (rounded == 0) == (bound == 0));
  }

  bool fit_;
  uint16_t least_, most_;
  int16_t first_, last_;
};

// Clip codes in either layout, or the gradient of that.
template <class Format, class OfBounds>
void clip(const Format& format, const OfBounds& bounds, const Arrays& in, const Requests& req,
          const Arrays& out) {
  const int64_t n = out[0].shape().Size();
  write_codes(format, req[0], out[0], [&](uint16_t* y) {
    if (in.size() == 1)
      keep_nan::map_chunks(n, y, [=](uint16_t x) { return bounds.clip(x); }, codes_of(in[0]));
    else
      keep_nan::map_chunks(n, y, [=](uint16_t dy, uint16_t x) { return bounds.gradient(dy, x); },
                           codes_of(in[0]), codes_of(in[1]));
  });
}

// ---- Of FP32 and bfloat16 arrays in any layout; MXNet's own is for plain ones, an element at a time.

struct FloatBounds {
  float least, most;

  float clip(float x) const { return x > most ? most : x < least ? least : x; }
  // Without branches: | computes both comparisons.
  float gradient(float dy, float x) const { return ((x > most) | (x < least)) ? 0.0f : dy; }
};

// Clip an array, or the gradient of that.
template <class X, class OfBounds>
void clip_array(const OfBounds& bounds, const Arrays& in, OpReqType req, const NDArray& out) {
  if (in.size() == 1)
    keep_nan::map<X>(req, out, [=](X x) { return bounds.clip(x); }, in[0]);
  else
    keep_nan::map<X>(req, out, [=](X dy, X x) { return bounds.gradient(dy, x); }, in[0], in[1]);
}

inline void clip_arrays(const nnvm::Op* op, const NodeAttrs& attrs, const OpContext& ctx,
                        const Arrays& in, const Requests& req, const Arrays& out) {
  if (!keep_nan::is_of_onednn(in[0])) return call(op, attrs, ctx, in, req, out);
  if (req[0] == mxnet::kNullOp) return;
  if (in[0].dtype() == mshadow::kBfloat16)
    return clip_array<uint16_t>(Bounds<Grid>(bfloat16_grid(), attrs), in, req[0], out[0]);
  const FloatBounds bounds{number_option(attrs, "a_min"), number_option(attrs, "a_max")};
  clip_array<float>(bounds, in, req[0], out[0]);
}

inline void register_clip() {
  in_places_of("clip", "_mpgluon_any_layout_", clip_arrays, clip_arrays);
}

}  // namespace clipping
}  // namespace mpgluon

#endif  // MPGLUON_CLIP_H_
