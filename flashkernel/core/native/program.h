// A recorded call as a list of steps on slots, and the loop that runs it.
//
// Slots hold tensors: first those that the call is given, then those that it allocates. Steps allocate, launch kernels
// through the CUDA driver, run torch operations, or call Python. Only the last kind needs Python's lock (GIL).
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace flashkernel {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;

// A Python object that may be dropped by a thread without the GIL.
using Object = std::shared_ptr<PyObject>;

inline Object keep(py::handle value) {
  return Object(value.inc_ref().ptr(), [](PyObject* object) {
    if (Py_IsInitialized() == 0) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
}

inline py::object borrow(const Object& object) { return py::reinterpret_borrow<py::object>(object.get()); }

inline py::object wrap(const at::Tensor& x) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(x)); }

inline at::Tensor unwrap(py::handle value) {
  if (!THPVariable_Check(value.ptr())) throw py::type_error("expected a tensor");
  return THPVariable_Unpack(value.ptr());
}

// A strided view of a slot's tensor.
struct View {
  size_t slot;
  bool whole;  // the slot's tensor itself
  bool given;  // its tensor may begin anywhere in its storage; allocations begin at offset 0
  std::vector<int64_t> size, stride;
  int64_t offset;
  bool cast;
  at::ScalarType dtype;

  at::Tensor of(const Tensors& slots) const {
    const at::Tensor& base = slots[slot];
    if (whole) return base;
    at::Tensor view = at::as_strided(base, size, stride, given ? base.storage_offset() + offset : offset);
    return cast ? view.view(dtype) : view;
  }
};

struct Allocation {
  size_t slot;
  std::vector<int64_t> size, stride;
  at::TensorOptions options;

  void run(Tensors& slots) const { slots[slot] = at::empty_strided(size, stride, options); }
};

// A launch whose parameters lie packed in host memory (core/driver.py, PreparedLaunch): what changes are addresses.
struct Launch {
  using Function = int (*)(void* config, void* function, void* params, void* extra);
  using ReplaceAddress = int (*)(void* map, void* address);
  static constexpr int INVALID_CONTEXT = 201;

  struct Address {
    size_t slot;
    int64_t offset;  // bytes
    void* target;    // the word that takes the address, or a tensor map

    uint64_t of(const Tensors& slots) const { return reinterpret_cast<uint64_t>(slots[slot].data_ptr()) + offset; }
  };

  Function launch;
  ReplaceAddress replace_address;
  void *config, *function, *params;
  std::vector<Address> words, maps;
  Object prepared;  // owns the memory
  std::unique_ptr<std::mutex> lock = std::make_unique<std::mutex>();

  int once(const Tensors& slots) const {
    std::lock_guard<std::mutex> guard(*lock);  // threads share the packed parameters
    for (const Address& word : words) *static_cast<uint64_t*>(word.target) = word.of(slots);
    for (const Address& map : maps) {
      const int status = replace_address(map.target, reinterpret_cast<void*>(map.of(slots)));
      if (status != 0) return status;
    }
    return launch(config, function, params, nullptr);
  }

  void run(Tensors& slots) const {
    int status = once(slots);
    if (status == 0) return;
    py::gil_scoped_acquire gil;
    if (status == INVALID_CONTEXT) {  // autograd's threads may not have called the driver before
      py::module_::import("torch").attr("cuda").attr("synchronize")();
      status = once(slots);
    }
    if (status != 0) borrow(prepared).attr("check")(status);
  }
};

// Increments the version counter of an argument that a kernel has written to.
struct Write {
  View view;

  void run(Tensors& slots) const {
    const at::Tensor x = view.of(slots);
    if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
  }
};

using Argument = std::variant<View, c10::IValue>;

// A torch operation, through its boxed kernel.
struct Operation {
  c10::OperatorHandle function;
  std::vector<Argument> args;
  int64_t slot;  // of its result; -1: it writes to an argument

  void run(Tensors& slots) const {
    std::vector<c10::IValue> stack;
    stack.reserve(args.size());
    for (const Argument& argument : args) {
      const View* view = std::get_if<View>(&argument);
      stack.push_back(view != nullptr ? c10::IValue(view->of(slots)) : std::get<c10::IValue>(argument));
    }
    function.callBoxed(&stack);
    if (slot >= 0) slots[slot] = stack.front().toTensor();
  }
};

// A call of a Python function on views and constants: a look-up, or a kernel under Triton's interpreter.
struct PythonCall {
  Object function;
  std::vector<std::variant<View, Object>> args;
  std::vector<size_t> results;  // slots of the tensors in the tuple that it returns

  void run(Tensors& slots) const {
    py::gil_scoped_acquire gil;
    py::tuple given(args.size());
    for (size_t i = 0; i < args.size(); ++i) {
      const View* view = std::get_if<View>(&args[i]);
      given[i] = view != nullptr ? wrap(view->of(slots)) : borrow(std::get<Object>(args[i]));
    }
    const py::object found = borrow(function)(*given);
    for (size_t i = 0; i < results.size(); ++i) slots[results[i]] = unwrap(found[py::int_(i)]);
  }
};

struct Step {
  std::variant<Allocation, Launch, Write, Operation, PythonCall> action;
  std::vector<size_t> freed;  // slots that no later step uses: their memory can be allocated again
};

// Tables that launches read and that outlive the call: a CUDA graph that captures it must keep them alive.
struct Persistent {
  using IsCapturing = int (*)(void* stream, int* status);
  Object tables;
  IsCapturing is_capturing = nullptr;
  void* stream = nullptr;
  Object keep_alive;

  void run() const {
    if (is_capturing == nullptr) return;
    int captures = 0;
    if (is_capturing(stream, &captures) == 0 && captures == 0) return;
    py::gil_scoped_acquire gil;
    borrow(keep_alive)(borrow(tables));
  }
};

class Program {
 public:
  size_t num_given, num_slots;
  std::vector<std::pair<size_t, at::Tensor>> constants;  // slots that hold the same tensor at every run
  std::vector<Step> steps;
  std::vector<View> results;
  Persistent persistent;
  bool needs_python = false;

  // The results for these tensors, for a thread without the GIL.
  Tensors run(const Tensors& given) const {
    if (given.size() != num_given) throw std::runtime_error("flashkernel: a replay was given other tensors");
    persistent.run();
    Tensors slots(num_slots);
    std::copy(given.begin(), given.end(), slots.begin());
    for (const auto& [slot, tensor] : constants) slots[slot] = tensor;
    for (const Step& step : steps) {
      std::visit([&](const auto& action) { action.run(slots); }, step.action);
      for (const size_t slot : step.freed) slots[slot].reset();
    }
    Tensors found;
    found.reserve(results.size());
    for (const View& view : results) found.push_back(view.of(slots));
    return found;
  }

  // The same for a thread that holds the GIL.
  Tensors run_from_python(const Tensors& given) const {
    if (needs_python) return run(given);
    py::gil_scoped_release no_gil;
    return run(given);
  }
};

}  // namespace flashkernel
