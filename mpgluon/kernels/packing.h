// Arrays of 16-bit codes. To MXNet they are float16, which has their size; only the native operators
// read them.
//
// They lie in memory as MXNet's arrays do ("plain"), or with their channels in blocks ("packed"), in
// the layout that follows from the shape. Which of the two is known when the graph is made.
#ifndef MPGLUON_PACKING_H_
#define MPGLUON_PACKING_H_

#include "common.h"
#include "scratch.h"

namespace mpgluon {

inline uint16_t* codes_of(const NDArray& array) {
  return static_cast<uint16_t*>(array.data().dptr_);
}

inline bool holds_codes(const NDArray& array) { return array.dtype() == mshadow::kFloat16; }

// Return FP32 values of codes, which lie in a layout, in the same layout; valid during this call.
template <class Format>
NDArray widened(const Format& format, const NDArray& codes, int layout, Slot slot) {
  const NDArray made = scratch(codes, slot);
  widen_codes(format, codes_of(codes), codes.shape().Size(), prepare(made, layout));
  return made;
}

// Call each(code, number) for the places of every 16 channels: in blocks, and with the channels of
// each pixel side by side.
template <class Each>
void for_places_channels_last(const mxnet::TShape& shape, const Each& each) {
  const int64_t pixels = shape[2] * shape[3], blocks = shape[1] / kChunk;
  in_parallel(shape[0] * pixels, [&](int64_t place) {
    const int64_t image = place / pixels, pixel = place % pixels;
    for (int64_t block = 0; block < blocks; ++block)
      each(((image * blocks + block) * pixels + pixel) * kChunk, (place * blocks + block) * kChunk);
  });
}

// The same with the channels of each pixel side by side, of codes in blocks of 16 channels.
template <class Format>
NDArray widened_channels_last(const Format& format, const NDArray& codes, Slot slot) {
  const NDArray made = scratch(codes, slot);
  const_cast<NDArray&>(made).CreateMKLDNNData(channels_last(codes.shape(), mshadow::kFloat32));
  const uint16_t* x = codes_of(codes);
  float* y = address(made);
  for_places_channels_last(codes.shape(), [&](int64_t code, int64_t number) {
    format.widen_to(y + number, x + code);
  });
  return made;
}

// Write the FP32 values of packed codes to a plain array.
template <class Format>
void unpack_plain(const Format& format, const NDArray& codes, const NDArray& out) {
  const int layout = packed_layout(codes.shape());
  const uint16_t* x = codes_of(codes);
  float* y = prepare(out, 1);
  if (layout == 1) return widen_codes(format, x, codes.shape().Size(), y);
  unblock(x, y, codes.shape(), layout, [&](uint16_t one) { return format.widen_one(one); });
}

// Return the FP32 values of packed codes in a plain array, valid during this call.
template <class Format>
NDArray unpacked(const Format& format, const NDArray& codes, Slot slot) {
  const NDArray made = scratch(codes, slot);
  unpack_plain(format, codes, made);
  return made;
}

// Add codes to others, each sum rounded.
template <class Format>
void add_codes(const Format& format, const uint16_t* x, const uint16_t* y, int64_t n, uint16_t* z) {
  for_all(n,
          [&](int64_t i) {
            float one[kChunk], other[kChunk], sums[kChunk];
            format.widen_to(one, x + i);
            format.widen_to(other, y + i);
            for (int j = 0; j < kChunk; ++j) sums[j] = one[j] + other[j];
            format.narrow_to(z + i, sums);
            flags::look_at_sums(format, sums, one, other);
          },
          [&](int64_t i) { z[i] = format.narrow_one(format.widen_one(x[i]) + format.widen_one(y[i])); });
}

// Let compute(y) write codes to an array, or to one apart that is added to it.
template <class Format, class Compute>
void write_codes(const Format& format, OpReqType req, const NDArray& out, const Compute& compute) {
  if (req == mxnet::kNullOp) return;
  if (req != mxnet::kAddTo) return compute(codes_of(out));
  const NDArray apart = fresh(out, mshadow::kFloat16);
  compute(codes_of(apart));
  add_codes(format, codes_of(out), codes_of(apart), out.shape().Size(), codes_of(out));
}

// Round FP32 values, in whatever layout they are, to codes in a layout.
template <class Format>
void narrow_array(const Format& format, const NDArray& in, OpReqType req, const NDArray& out,
                  int layout) {
  write_codes(format, req, out, [&](uint16_t* y) {
    const int given = layout_of(in);
    const bool turned = given != layout && layout != 1;
    if (turned && layout == kChunk && is_channels_last(in.shape(), given)) {
      const float* x = address(in);
      return for_places_channels_last(in.shape(), [&](int64_t code, int64_t number) {
        format.narrow_to(y + code, x + number);
      });
    }
    const NDArray x = turned || layout == 1 ? plain(in) : in;
    if (!turned) return narrow_codes(format, address(x), in.shape().Size(), y);
    block(address(x), y, in.shape(), layout, [&](float one) { return format.narrow_one(one); });
  });
}

template <class Format>
void pack(const Format& format, const NDArray& in, OpReqType req, const NDArray& out) {
  narrow_array(format, in, req, out, packed_layout(out.shape()));
}

// Copy plain codes to packed ones, or back.
template <bool kToBlocks>
void move_codes_to(const NDArray& in, uint16_t* y) {
  const int layout = packed_layout(in.shape());
  const uint16_t* x = codes_of(in);
  const auto same = [](uint16_t one) { return one; };
  if (layout == 1) std::memcpy(y, x, in.shape().Size() * sizeof *x);
  else if (kToBlocks) block(x, y, in.shape(), layout, same);
  else unblock(x, y, in.shape(), layout, same);
}

template <bool kToBlocks>
void move_codes(const NDArray& in, OpReqType req, const NDArray& out) {
  if (req == mxnet::kNullOp) return;
  CHECK_NE(req, mxnet::kAddTo);
  move_codes_to<kToBlocks>(in, codes_of(out));
}

}  // namespace mpgluon

#endif  // MPGLUON_PACKING_H_
