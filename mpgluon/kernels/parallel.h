// Sharing a loop among the threads that MXNet computes with.
//
// They are those of GCC's OpenMP runtime, which MXNet's wheel has loaded. With a compiler's own
// OpenMP, clang would bring a second runtime, whose threads compete with the first one's.
#ifndef MPGLUON_PARALLEL_H_
#define MPGLUON_PARALLEL_H_

#include <cstdint>

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
int omp_get_max_threads();
}

namespace mpgluon {

// Call body(first, last) for ranges that cover 0 to n, one on each thread.
template <class Body>
void share(int64_t n, const Body& body) {
  struct Work {
    int64_t n;
    const Body& body;
  } work{n, body};
  const auto one_share = [](void* data) {
    const Work& all = *static_cast<Work*>(data);
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    all.body(all.n * thread / threads, all.n * (thread + 1) / threads);
  };
  GOMP_parallel(one_share, &work, 0, 0);
}

// Call each(i) for every i from 0 to n.
template <class Each>
void in_parallel(int64_t n, const Each& each) {
  share(n, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) each(i);
  });
}

}  // namespace mpgluon

#endif  // MPGLUON_PARALLEL_H_
