// Converts what it reads with each of float16.h's functions, for tests: argv[1] says which way.
#include "float16.h"

#include <cstdio>
#include <string>
#include <vector>

namespace {

template <class T>
std::vector<T> read_all() {
  std::vector<T> numbers(1 << 20);
  numbers.resize(std::fread(numbers.data(), sizeof(T), numbers.size(), stdin));
  return numbers;
}

// Write what a function makes of all numbers, so many at a time.
template <class Y, class X, class Convert>
void write(const std::vector<X>& x, int at_once, const Convert& convert) {
  std::vector<Y> y(x.size());
  for (size_t i = 0; i < x.size(); i += at_once) convert(y.data() + i, x.data() + i);
  std::fwrite(y.data(), sizeof(Y), y.size(), stdout);
}

}  // namespace

int main(int, char** arguments) {
  using namespace mpgluon;
  const std::string way = arguments[1];
  if (way == "narrow") {
    const auto x = read_all<float>();
    write<uint16_t>(x, kChunk, narrow_to);
    write<uint16_t>(x, 1, [](uint16_t* y, const float* from) { *y = narrow_one(*from); });
  } else if (way == "widen") {
    const auto x = read_all<uint16_t>();
    write<float>(x, kChunk, widen_to);
    write<float>(x, 8, widen_8_to);
    write<float>(x, 1, [](float* y, const uint16_t* from) { *y = widen_one(*from); });
  } else {
    const auto x = read_all<float>();
    write<float>(x, kChunk, round_to);
    write<float>(x, 8, round_8_to);
    write<float>(x, 1, [](float* y, const float* from) { *y = round_one(*from); });
  }
}
