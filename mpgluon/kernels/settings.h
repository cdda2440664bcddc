// Settings of a node, read from its name, and its options.
//
// kernels/__init__.py writes each behind a "|", as the bits of a double in 16 hexadecimal digits. So
// neither the locale nor a "|" in a layer's own name changes what is read here. MXNet writes numbers
// among the options as text; they are read as in the locale "C", whatever that of the process is.
#ifndef MPGLUON_SETTINGS_H_
#define MPGLUON_SETTINGS_H_

#include <array>
#include <clocale>
#ifdef __APPLE__
#include <xlocale.h>
#endif

#include "bridge.h"

namespace mpgluon {

// Return the last kCount settings of a node, or refuse it.
template <int kCount>
std::array<double, kCount> settings_of(const nnvm::NodeAttrs& attrs) {
  std::array<double, kCount> made;
  const std::string& name = attrs.name;
  size_t end = name.size();
  for (int i = kCount - 1; i >= 0; --i) {
    const size_t bar = end == 0 ? std::string::npos : name.rfind('|', end - 1);
    uint64_t bits = 0;
    for (size_t digit = 1; digit <= 16; ++digit) {
      const char c = bar == std::string::npos ? 0 : name.c_str()[bar + digit];
      const bool decimal = c >= '0' && c <= '9', letter = c >= 'a' && c <= 'f';
      CHECK(decimal || letter) << attrs.op->name << " needs " << kCount
                               << " settings in the name of its node, received \"" << name
                               << "\"; nodes of this operator are made by mpgluon.graph only";
      bits = bits << 4 | (decimal ? c - '0' : c - 'a' + 10);
    }
    std::memcpy(&made[i], &bits, sizeof bits);
    end = bar;
  }
  return made;
}

// Return an option of a node as text, empty if it has none. Options are read from the list that the
// dictionary of a node is, which has kept its place and form in every C++ library that MXNet was built
// with; its table has not (bridge.h).
inline std::string option(const nnvm::NodeAttrs& attrs, const char* name) {
  for (const auto& entry : attrs.dict)
    if (entry.first == name) return entry.second;
  return "";
}

inline locale_t locale_of_options() {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", nullptr);
  return c;
}

// Return an option of a node as a number; 0 if it has none.
inline float number_option(const nnvm::NodeAttrs& attrs, const char* name) {
  return strtof_l(option(attrs, name).c_str(), nullptr, locale_of_options());
}

// The same as a double.
inline double double_option(const nnvm::NodeAttrs& attrs, const char* name, double otherwise) {
  const std::string text = option(attrs, name);
  return text.empty() ? otherwise : strtod_l(text.c_str(), nullptr, locale_of_options());
}

// Return an option of a node that is true or false.
inline bool flag_option(const nnvm::NodeAttrs& attrs, const char* name, bool otherwise = false) {
  const std::string text = option(attrs, name);
  return text.empty() ? otherwise : text == "True" || text == "true" || text == "1";
}

// Return the whole numbers of an option such as "(2, 2)".
inline std::vector<int64_t> numbers_of(const nnvm::NodeAttrs& attrs, const char* name) {
  std::vector<int64_t> made;
  const std::string text = option(attrs, name);
  for (const char* at = text.c_str(); *at != 0;) {
    char* end;
    const int64_t number = std::strtol(at, &end, 10);
    if (end != at) made.push_back(number);
    at = end != at ? end : at + 1;
  }
  return made;
}

using Sizes = std::array<int64_t, 3>;  // of the dimensions of an image, 1 where it has fewer

// Return the numbers of an option for the last dimensions of an image.
inline Sizes sizes_of(const nnvm::NodeAttrs& attrs, const char* name, int dimensions,
                      int64_t otherwise) {
  Sizes made;
  made.fill(otherwise);
  int next = 3 - dimensions;
  for (const int64_t number : numbers_of(attrs, name))
    if (next < 3) made[next++] = number;
  return made;
}

}  // namespace mpgluon

#endif  // MPGLUON_SETTINGS_H_
