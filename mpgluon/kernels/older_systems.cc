// For prebuilt libraries only: symbols that newer system libraries have, so that the libraries run
// wherever MXNet's wheel does (glibc 2.17, the C++ library of GCC 4.8).
//
// Inline functions of GCC's C++ library call functions that older versions do not have. The linker
// finds them here, under the names that they have in compiled code, and does not export them. A
// compiler that needs more than these gives a wheel for newer systems; `make wheel` says for which.
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#define MPGLUON_HIDDEN __attribute__((visibility("hidden"), used))

namespace mpgluon {

using Text = std::string;
using Stream = std::ostringstream;

// Whether there is one thread only, so that references may be counted without atomic operations. No
// is always safe.
extern char single_threaded asm("__libc_single_threaded");
MPGLUON_HIDDEN char single_threaded = 0;

MPGLUON_HIDDEN void throw_bad_length() asm("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_length() { throw std::bad_alloc(); }

MPGLUON_HIDDEN void throw_out_of_range(const char*, ...) asm("_ZSt24__throw_out_of_range_fmtPKcz");
void throw_out_of_range(const char* message, ...) { throw std::out_of_range(Text(message)); }

MPGLUON_HIDDEN void sized_delete(void*, std::size_t) asm("_ZdlPvm");
void sized_delete(void* memory, std::size_t) { ::operator delete(memory); }

MPGLUON_HIDDEN void make_stream(void*) asm(
    "_ZNSt19basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_stream(void* place) { new (place) Stream(std::ios_base::out); }

MPGLUON_HIDDEN void make_substring(void*, const Text&, std::size_t, const std::allocator<char>&) asm(
    "_ZNSsC1ERKSsmRKSaIcE");
void make_substring(void* place, const Text& from, std::size_t start,
                    const std::allocator<char>& allocator) {
  new (place) Text(from, start, Text::npos, allocator);
}

}  // namespace mpgluon
