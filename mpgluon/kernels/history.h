// The largest values of a product's operands in earlier steps, from which its scales follow (NVIDIA's
// "delayed scaling"): state that MXNet does not know, one for each product and device.
//
// A step ends with the first forward pass behind a backward pass. All passes of a step have one scale, so a
// backward pass rounds what its forward pass did to the same numbers.
#ifndef MPGLUON_HISTORY_H_
#define MPGLUON_HISTORY_H_

#include <array>
#include <cfloat>

#include "bridge.h"

namespace mpgluon {

enum Operand { kDataOperand, kWeightOperand, kGradientOperand, kOperandKinds };

class History {
 public:
  explicit History(int steps) : steps_(steps) {}

  void begin_forward(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    end_step(&on(device));
  }

  // Return the value to scale an operand by: the largest of earlier steps, or its own before there are
  // any, and if that is infinite or NaN. If asked to, note its own for later steps.
  float largest(int device, Operand operand, float own, bool note) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Values& values = on(device);
    if (operand == kGradientOperand) values.went_back = true;
    if (!(own <= FLT_MAX)) return own;
    if (note) values.now[operand] = std::max(values.now[operand], own);
    const auto first = values.earlier.begin() + operand * steps_;
    const float most = *std::max_element(first, first + steps_);
    return most > 0 ? most : own;
  }

  // Values of shape (operands, steps), oldest first; 0 where nothing is known.
  void read(int device, float* to) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Values& values = on(device);
    end_step(&values);
    std::copy(values.earlier.begin(), values.earlier.end(), to);
  }

  void write(int device, const float* from) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Values values(steps_);
    values.earlier.assign(from, from + kOperandKinds * steps_);
    devices_.erase(device);
    devices_.emplace(device, values);
  }

  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    devices_.clear();
  }

 private:
  struct Values {
    explicit Values(int steps) : earlier(kOperandKinds * steps) {}
    std::vector<float> earlier;
    std::array<float, kOperandKinds> now{};
    bool went_back = false;
  };

  Values& on(int device) { return devices_.emplace(device, Values(steps_)).first->second; }

  void end_step(Values* values) const {
    if (!values->went_back) return;
    for (int operand = 0; operand < kOperandKinds; ++operand) {
      const auto first = values->earlier.begin() + operand * steps_;
      std::rotate(first, first + 1, first + steps_);
      first[steps_ - 1] = values->now[operand];
    }
    values->now = {};
    values->went_back = false;
  }

  const int steps_;
  std::mutex mutex_;
  std::map<int, Values> devices_;
};

inline std::vector<std::unique_ptr<History>>& histories() {
  static std::vector<std::unique_ptr<History>> all;
  return all;
}

inline int make_history(int steps) {
  histories().emplace_back(new History(steps));
  return static_cast<int>(histories().size()) - 1;
}

// Return a history, nullptr for a negative number.
inline History* history_numbered(int number) {
  return number < 0 ? nullptr : histories()[number].get();
}

}  // namespace mpgluon

#endif  // MPGLUON_HISTORY_H_
