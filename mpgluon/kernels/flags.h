// IEEE 754's status flags for the layers of a network: overflow, a finite FP32 number that rounding made
// infinite (or NaN, in a format without infinities), and invalid, a NaN out of operands without NaN.
//
// A node says in an option to which layer it belongs: the number of a slot. A flag stays until it is
// taken, and is kept apart by device and pass. The pass is in the node's name, to which MXNet appends
// "_backward" for a gradient. Passes outside of training raise nothing. Where it is asked for, the largest
// number that a backward pass rounds to float16 is kept too: how far from an overflow it was, or beyond.
#ifndef MPGLUON_FLAGS_H_
#define MPGLUON_FLAGS_H_

#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "format.h"
#include "layout.h"
#include "settings.h"

namespace mpgluon {
namespace flags {

enum Flag : uint8_t { kOverflow = 1, kInvalid = 2 };
enum Pass { kForward, kBackward, kPasses };

constexpr int kSlots = 1 << 15, kDevices = 16;  // devices from the last one on share its flags
constexpr const char* kOption = "__mpgluon_layer__";

struct Slot {
  std::atomic<uint8_t> raised[kDevices][kPasses];
  std::atomic<int64_t> lost[kDevices][kPasses];  // results that became zero, where they are counted
  std::atomic<int32_t> largest[kDevices];  // bits of a magnitude, where it is measured
  std::atomic<bool> counts, measures;
};

inline Slot& slot(int number) {
  static Slot all[kSlots];  // zeros, which take no memory until they are used
  return all[number];
}

// Write the flags and counts of some slots on a device, (slots, passes), and clear them.
inline void take(const int* numbers, int count, int device, uint8_t* raised, int64_t* lost) {
  device = std::min(device, kDevices - 1);
  for (int i = 0; i < count; ++i) {
    for (int pass = 0; pass < kPasses; ++pass) {
      raised[i * kPasses + pass] = slot(numbers[i]).raised[device][pass].exchange(0);
      lost[i * kPasses + pass] = slot(numbers[i]).lost[device][pass].exchange(0);
    }
  }
}

// Return the bits of the largest number of some slots on a device, and clear it.
inline int32_t take_largest(const int* numbers, int count, int device) {
  device = std::min(device, kDevices - 1);
  int32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, slot(numbers[i]).largest[device].exchange(0));
  return largest;
}

inline bool is_nan(float x) { return x != x; }

inline bool holds_nan(const float* x, int64_t n) {
  return std::any_of(x, x + n, is_nan);
}

inline bool holds_nan(const uint16_t* x, int64_t n, uint16_t infinity) {
  return std::any_of(x, x + n, [=](uint16_t code) { return (code & 0x7fff) > infinity; });
}

// The bits of a magnitude, which compare as positive FP32 numbers do.
inline int32_t magnitude(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}

// Whether one of some numbers has a larger magnitude than these bits.
template <int kCount>
bool any_above(const float* x, int32_t bits) {
#ifdef __AVX2__
  if (kCount % 8 == 0) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff), limit = _mm256_set1_epi32(bits);
    __m256i above = _mm256_setzero_si256();
    for (int i = 0; i < kCount; i += 8) {
      const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      above = _mm256_or_si256(above, _mm256_cmpgt_epi32(_mm256_and_si256(some, size), limit));
    }
    return _mm256_movemask_epi8(above) != 0;
  }
#endif
  int above = 0;
  for (int i = 0; i < kCount; ++i) above |= magnitude(x[i]) > bits;
  return above != 0;
}

// One call of an operator, which threads share.
class Call {
 public:
  Call(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& ctx, uint16_t infinity)
      : infinity_(infinity) {
    const std::string number = ctx.is_train ? option(attrs, kOption) : std::string();
    if (number.empty()) return;
    slot_ = &slot(std::atoi(number.c_str()));
    device_ = std::min<int>(ctx.run_ctx.ctx.dev_id, kDevices - 1);
    constexpr size_t kLength = 9;
    const std::string& name = attrs.name;
    const bool back = name.size() >= kLength &&
                      name.compare(name.size() - kLength, kLength, "_backward") == 0;
    pass_ = back ? kBackward : kForward;
    counts_ = slot_->counts;
    measures_ = back && slot_->measures;
  }

  bool counts() const { return counts_; }
  bool measures() const { return measures_; }
  bool made_nan() const { return made_nan_; }

  // Note what became of n numbers that were rounded to codes, or to FP32 numbers of a format.
  __attribute__((noinline, cold)) void note(const float* x, const uint16_t* y, int n) {
    for (int i = 0; i < n; ++i)
      if ((y[i] & infinity_) == infinity_) note_one(x[i]);
  }
  __attribute__((noinline, cold)) void note(const float* x, const float* y, int n) {
    for (int i = 0; i < n; ++i)
      if (!std::isfinite(y[i])) note_one(x[i]);
  }

  template <class Y>
  __attribute__((noinline, cold)) void count(const float* x, const Y* y, int n) {
    int64_t found = 0;
    for (int i = 0; i < n; ++i) found += x[i] != 0 && is_zero(y[i]);
    if (found != 0) slot_->lost[device_][pass_].fetch_add(found, std::memory_order_relaxed);
  }

  // Keep the largest finite magnitude, and note what became of the numbers.
  int32_t largest() const { return slot_->largest[device_].load(std::memory_order_relaxed); }
  template <class Y>
  __attribute__((noinline, cold)) void measure(const float* x, const Y* y, int n) {
    note(x, y, n);
    std::atomic<int32_t>& kept = slot_->largest[device_];
    int32_t before = kept.load(std::memory_order_relaxed);
    for (int i = 0; i < n; ++i) {
      const int32_t size = magnitude(x[i]);
      while (std::isfinite(x[i]) && size > before && !kept.compare_exchange_weak(before, size)) {}
    }
  }

  void raise(Flag flag) {
    if (slot_ != nullptr) slot_->raised[device_][pass_].fetch_or(flag, std::memory_order_relaxed);
  }

  // Raise invalid if results have a NaN and no operand has: neither codes nor FP32 numbers. Where a result
  // has an operand's place this cannot be known any more.
  void finish(const std::vector<NDArray>& in, const std::vector<NDArray>& out) {
    if (slot_ == nullptr || !made_nan_) return;
    if (slot_->raised[device_][pass_] & kInvalid) return;
    for (const NDArray& array : in) {
      for (const NDArray& result : out)
        if (array.storage_handle().dptr == result.storage_handle().dptr) return;
      if (holds_nan_in(array)) return;
    }
    raise(kInvalid);
  }

 private:
  static bool is_zero(uint16_t code) { return (code & 0x7fff) == 0; }
  static bool is_zero(float number) { return number == 0; }

  void note_one(float before) {
    if (is_nan(before)) made_nan_ = true;
    else if (std::isfinite(before)) raise(kOverflow);
  }

  bool holds_nan_in(const NDArray& array) const {
    const int64_t n = array.shape().Size();
    if (array.dtype() == mshadow::kFloat16)
      return holds_nan(reinterpret_cast<const uint16_t*>(address(array)), n, infinity_);
    if (array.dtype() != mshadow::kFloat32) return false;
    const NDArray numbers = layout_of(array) == 0 ? plain(array) : array;
    return holds_nan(address(numbers), n);
  }

  const uint16_t infinity_;
  Slot* slot_ = nullptr;
  int device_ = 0;
  Pass pass_ = kForward;
  bool counts_ = false, measures_ = false;
  std::atomic<bool> made_nan_{false};
};

// Whether one of some codes is infinite or NaN.
template <int kCount, uint16_t kInfinity>
bool any_special(const uint16_t* y) {
#ifdef __AVX2__
  if (kCount == 16) {
    const __m256i exponent = _mm256_set1_epi16(kInfinity);
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y));
    return _mm256_movemask_epi8(
               _mm256_cmpeq_epi16(_mm256_and_si256(codes, exponent), exponent)) != 0;
  }
#endif
  int special = 0;
  for (int i = 0; i < kCount; ++i) special |= (y[i] & kInfinity) == kInfinity;
  return special != 0;
}

// Whether one of a chunk of FP32 numbers is.
inline bool any_special(const float* y) {
  constexpr int32_t kExponent = 0x7f800000;
  int32_t bits[kChunk];
  std::memcpy(bits, y, sizeof bits);
#ifdef __AVX2__
  const __m256i exponent = _mm256_set1_epi32(kExponent);
  const auto special = [&](int from) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + from));
    return _mm256_cmpeq_epi32(_mm256_and_si256(some, exponent), exponent);
  };
  return _mm256_movemask_epi8(_mm256_or_si256(special(0), special(8))) != 0;
#else
  int special = 0;
  for (int i = 0; i < kChunk; ++i) special |= (bits[i] & kExponent) == kExponent;
  return special != 0;
#endif
}

// A format whose roundings raise the flags of the layer at work.
template <class Format>
class Watched : public Format {
 public:
  Watched(const Format& format, Call* call) : Format(format), call_(call) {}

  void round_to(float* y, const float* x) const {
    float made[kChunk];
    Format::round_to(made, x);
    look<kChunk>(x, made, [&] { return any_special(made); });
    std::memcpy(y, made, sizeof made);
  }
  float round_one(float x) const {
    const float y = Format::round_one(x);
    look<1>(&x, &y, [&] { return !std::isfinite(y); });
    return y;
  }
  void narrow_to(uint16_t* y, const float* x) const { narrow<kChunk>(y, x); }
  void narrow_8_to(uint16_t* y, const float* x) const { narrow<8>(y, x); }
  uint16_t narrow_one(float x) const {
    const uint16_t y = Format::narrow_one(x);
    look<1>(&x, &y, [&] { return any_special<1, Format::kInfinity>(&y); });
    return y;
  }

  // Raise invalid for a NaN among sums of a chunk of numbers without NaN.
  void look_at_sums(const float* sums, const float* x, const float* y) const {
    if (!call_->made_nan()) return;
    for (int i = 0; i < kChunk; ++i)
      if (is_nan(sums[i]) && !is_nan(x[i]) && !is_nan(y[i])) call_->raise(kInvalid);
  }

 private:
  template <int kCount>
  void narrow(uint16_t* y, const float* x) const {
    if (kCount == 8) Format::narrow_8_to(y, x);
    else Format::narrow_to(y, x);
    look<kCount>(x, y, [=] { return any_special<kCount, Format::kInfinity>(y); });
  }

  // A number that becomes infinite is above all that were measured, or one of its layer has been before.
  template <int kCount, class Y, class Special>
  void look(const float* x, const Y* y, const Special& special) const {
    const bool measures = std::is_same<Format, Float16>::value && call_->measures();
    if (measures) {
      if (__builtin_expect(any_above<kCount>(x, call_->largest()), false)) call_->measure(x, y, kCount);
    } else if (__builtin_expect(special(), false)) {
      call_->note(x, y, kCount);
    }
    if (__builtin_expect(call_->counts(), false)) call_->count(x, y, kCount);
  }

  Call* call_;
};

// The format itself, for operands that a backward pass rounds once more.
template <class Format>
const Format& unwatched(const Format& format) { return format; }
template <class Format>
const Format& unwatched(const Watched<Format>& format) { return format; }

template <class Format>
void look_at_sums(const Format&, const float*, const float*, const float*) {}

template <class Format>
void look_at_sums(const Watched<Format>& format, const float* sums, const float* x, const float* y) {
  format.look_at_sums(sums, x, y);
}

}  // namespace flags
}  // namespace mpgluon

#endif  // MPGLUON_FLAGS_H_
