// FP32 memory for one call, which all calls on a thread share: new memory costs more in page faults
// than most operators cost in arithmetic.
#ifndef MPGLUON_SCRATCH_H_
#define MPGLUON_SCRATCH_H_

#include <sys/mman.h>

#include <cstdlib>

#include "bridge.h"

namespace mpgluon {

using mxnet::NDArray;

// What several arrays of one call are for. A slot keeps the size of its largest array for good.
enum Slot { kDataSlot, kResultSlot, kGradientSlot, kWeightSlot, kWeightGradientSlot, kSlots };

inline float* scratch_memory(Slot slot, size_t numbers) {
  constexpr size_t kHugePage = size_t{1} << 21;
  thread_local float* kept[kSlots] = {};
  thread_local size_t sizes[kSlots] = {};
  size_t needed = numbers * sizeof(float);
  if (sizes[slot] < needed) {
    std::free(kept[slot]);
    const size_t alignment = needed < kHugePage ? 64 : kHugePage;
    needed = (needed + alignment - 1) / alignment * alignment;
    kept[slot] = static_cast<float*>(aligned_alloc(alignment, needed));
    sizes[slot] = kept[slot] == nullptr ? 0 : needed;
    CHECK(kept[slot] != nullptr) << "no memory for " << numbers << " FP32 numbers";
    if (alignment == kHugePage) madvise(kept[slot], needed, MADV_HUGEPAGE);
  }
  return kept[slot];
}

// Return a plain FP32 array with the shape of another, whose values are valid during this call.
inline NDArray scratch(const NDArray& like, Slot slot) {
  float* memory = scratch_memory(slot, like.shape().Size());
  return NDArray(mxnet::TBlob(memory, like.shape(), mshadow::cpu::kDevMask), like.ctx().dev_id);
}

}  // namespace mpgluon

#endif  // MPGLUON_SCRATCH_H_
