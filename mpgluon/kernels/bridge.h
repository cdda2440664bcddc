// Registering operators with MXNet's wheel from a library that another compiler built.
//
// The wheel for x86-64 was built with GCC 4.8, before two changes of the C++ ABI. Strings and lists:
// compile with -D_GLIBCXX_USE_CXX11_ABI=0. std::function: since GCC 5 it hands its arguments on by
// reference; where MXNet calls one with an argument by value, old_function() makes it. GCC 10 built
// the wheel for aarch64 (its .comment says so), with old strings and today's functions. The hash
// maps inside nnvm::Node differ too, so nothing here looks behind the first two members of
// nnvm::NodeAttrs, but for the list of options that begins at the same place in each of them
// (accumulated.h); and nodes are made by MXNet's own functions only.
#ifndef MPGLUON_BRIDGE_H_
#define MPGLUON_BRIDGE_H_

// To move a shape MXNet swaps all that it holds, set or not; GCC says so where std::swap is inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <future>
#include <iostream>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// An operator's place in the attribute tables, and the tables themselves, are private.
#define private public
#include <nnvm/op.h>
#undef private

#include <mxnet/ndarray.h>
#include <mxnet/op_attr_types.h>
#include <nnvm/node.h>
#include <nnvm/op_attr_types.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace mpgluon {

#ifdef __aarch64__

template <class Result, class... Args>
std::function<Result(Args...)> old_function(Result (*function)(Args...)) {
  return function;
}

#else

// What std::function is made of, in old libraries and new ones: room for the callee, a manager and
// an invoker.
struct FunctionParts {
  std::_Any_data callee;
  bool (*manager)(std::_Any_data&, const std::_Any_data&, std::_Manager_operation);
  void* invoker;
};

inline bool CopyPointer(std::_Any_data& to, const std::_Any_data& from,
                        std::_Manager_operation operation) {
  if (operation == std::__clone_functor) to = from;
  return false;
}

template <class Result, class... Args>
Result InvokePointer(const std::_Any_data& callee, Args... args) {
  Result (*function)(Args...);
  std::memcpy(&function, &callee, sizeof function);
  return function(args...);
}

// Return a std::function that GCC 4.8's code can call.
template <class Result, class... Args>
std::function<Result(Args...)> old_function(Result (*function)(Args...)) {
  static_assert(sizeof(FunctionParts) == sizeof(std::function<Result(Args...)>), "another ABI");
  FunctionParts parts{};
  std::memcpy(&parts.callee, &function, sizeof function);
  parts.manager = CopyPointer;
  parts.invoker = reinterpret_cast<void*>(&InvokePointer<Result, Args...>);
  std::function<Result(Args...)> made;
  std::memcpy(static_cast<void*>(&made), &parts, sizeof parts);
  return made;
}

#endif

template <class T>
nnvm::OpMap<T>& table(const char* key) {
  auto* any = const_cast<dmlc::any*>(nnvm::Op::GetAttrMap(key));
  return const_cast<nnvm::OpMap<T>&>(nnvm::get<nnvm::OpMap<T>>(*any));
}

// Return a function that makes a node with an operator of this name, of the gradient of a result.
inline nnvm::FGradient node_of_gradient(const std::string& name) {
  // MXNet's functor for "negative" makes such a node; its one member is the operator's name.
  nnvm::FGradient functor =
      table<nnvm::FGradient>("FGradient").data_[nnvm::Op::Get("negative")->index_].first;
  const char** member;
  std::memcpy(&member, static_cast<void*>(&functor), sizeof member);
  // The name is looked up whenever a gradient is made, so it stays for good.
  *member = (new std::string(name))->c_str();
  return functor;
}

// An operator while it is registered.
class Operator {
 public:
  Operator(const std::string& name, uint32_t inputs, uint32_t outputs)
      : op_(dmlc::Registry<nnvm::Op>::Get()->__REGISTER_OR_GET__(name)) {
    op_.num_inputs = inputs;
    op_.num_outputs = outputs;
    if (inputs == 1) op_.add_argument("data", "NDArray-or-Symbol", "The operand.");
  }

  template <class T>
  Operator& set(const char* key, const T& value) {
    auto& rows = table<T>(key).data_;
    if (rows.size() <= op_.index_) rows.resize(op_.index_ + 1, std::make_pair(T(), 0));
    rows[op_.index_] = std::make_pair(value, 10);
    return *this;
  }

  // Take an attribute over from one of MXNet's operators, if that has it.
  template <class T>
  Operator& inherit(const char* key, const nnvm::Op* from) {
    const auto& rows = table<T>(key).data_;
    if (from->index_ < rows.size() && rows[from->index_].second != 0) {
      const T value = rows[from->index_].first;
      set<T>(key, value);
    }
    return *this;
  }

  Operator& set_gradient(const std::string& name) {
    return set<nnvm::FGradient>("FGradient", node_of_gradient(name));
  }

  nnvm::Op& op() { return op_; }

 private:
  nnvm::Op& op_;
};

}  // namespace mpgluon

#endif  // MPGLUON_BRIDGE_H_
