// What the launches of a call depend on, as bytes and Python objects (core/replay.py, LaunchCache.key).
#pragma once

#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "program.h"

namespace flashkernel {

// What Python changes and every call reads; the numbers lie in an array that Python writes to.
struct Settings {
  const int64_t* suspensions = nullptr;  // replay_switch.py: contexts in which nothing is replayed
  const int64_t* generation = nullptr;   // tune.py: changes when another launch config may be picked
  bool takes_cpu = false;                // Triton's interpreter runs
  PyObject* parameter = nullptr;         // torch.nn.Parameter
  PyObject* knobs = nullptr;             // triton.knobs.runtime, whose hooks a profiler sets

  static Settings& get() {
    static Settings settings;
    return settings;
  }
};

// True if a call is not plain eager execution: something suspends replay, or intercepts or transforms operators.
inline bool intercepted() {
  return *Settings::get().suspensions != 0 || c10::impl::TorchDispatchModeTLS::stack_len() > 0 ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

// True if a profiler has set hooks on Triton's launches: a replay would not call them.
inline bool hooked() {
  static PyObject* const names[] = {PyUnicode_InternFromString("launch_enter_hook"),
                                    PyUnicode_InternFromString("launch_exit_hook")};
  static PyObject* const calls = PyUnicode_InternFromString("calls");
  for (PyObject* name : names) {
    const auto hook = py::reinterpret_steal<py::object>(PyObject_GetAttr(Settings::get().knobs, name));
    if (!hook) throw py::error_already_set();
    if (hook.is_none()) continue;
    const auto chain = py::reinterpret_steal<py::object>(PyObject_GetAttr(hook.ptr(), calls));
    if (!chain) {  // a plain function was assigned instead of a chain of hooks
      PyErr_Clear();
      return true;
    }
    if (PyObject_IsTrue(chain.ptr()) != 0) return true;
  }
  return false;
}

class Key {
 public:
  std::string bytes;
  std::vector<py::object> objects;  // compared by ==

  template <typename Value>
  void add(const Value& value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(Value));
  }

  // False for a tensor whose memory alone does not say what it holds: a view with another sign, a wrapper.
  bool add_tensor(const at::Tensor& x) {
    const c10::Device device = x.device();
    if (x.layout() != at::kStrided || !plain_keys(device.type()).has_all(x.key_set())) return false;
    add(x.scalar_type());
    add(static_cast<int8_t>(device.type()));
    add(device.index());
    add(static_cast<int8_t>(x.dim()));
    for (const int64_t size : x.sizes()) add(size);
    // Contiguous tensors may differ in the strides of dims of size 1, which no kernel uses.
    const bool contiguous = x.is_contiguous();
    const bool aligned = (reinterpret_cast<uintptr_t>(x.const_data_ptr()) & 15) == 0;
    add(static_cast<int8_t>(contiguous | aligned << 1));
    if (!contiguous) {
      for (const int64_t stride : x.strides()) add(stride);
    }
    return true;
  }

  // The state that a call reads beside its arguments. False where nothing is replayed on this device.
  bool add_state(c10::Device device) {
    add(*Settings::get().generation);
    add(at::globalContext().allowTF32CuBLAS());
    const bool casts = at::autocast::is_autocast_enabled(device.type());
    add(casts);
    if (casts) add(at::autocast::get_autocast_dtype(device.type()));
    if (device.is_cpu()) return Settings::get().takes_cpu;
    if (!device.is_cuda()) return false;
    const c10::impl::VirtualGuardImpl guard(device.type());
    if (guard.getDevice() != device) return false;
    add(guard.getStream(device).id());  // a recording launches on one stream
    return true;
  }

  // False for an argument that has no key. Appends the tensors among the arguments.
  bool add_arguments(py::handle values, Tensors& tensors) {
    for (const py::handle value : values) {
      if (!add_argument(value, tensors)) return false;
    }
    return true;
  }

  size_t hash() const {
    size_t found = std::hash<std::string_view>()(bytes);
    for (const py::object& object : objects) found = found * 31 + static_cast<size_t>(py::hash(object));
    return found;
  }

  bool operator==(const Key& other) const {
    if (bytes != other.bytes || objects.size() != other.objects.size()) return false;
    for (size_t i = 0; i < objects.size(); ++i) {
      if (!objects[i].is(other.objects[i]) && !objects[i].equal(other.objects[i])) return false;
    }
    return true;
  }

 private:
  enum Kind : int8_t { TENSOR, INTEGER, FLOAT, BOOL, TEXT, NONE, DTYPE, SEQUENCE, OBJECT };

  static c10::DispatchKeySet plain_keys(c10::DeviceType type) {
    const bool cuda = type == c10::DeviceType::CUDA;
    const auto backend = cuda ? c10::BackendComponent::CUDABit : c10::BackendComponent::CPUBit;
    return c10::DispatchKeySet(cuda ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU) |
           c10::getAutogradRelatedKeySetFromBackend(backend) | c10::getAutocastRelatedKeySetFromBackend(backend) |
           c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  }

  void add_object(py::object object) {
    add(OBJECT);
    objects.push_back(std::move(object));
  }

  bool add_argument(py::handle value, Tensors& tensors) {
    static PyObject* const cache_key = PyUnicode_InternFromString("cache_key");
    static PyObject* const cache_parts = PyUnicode_InternFromString("cache_parts");
    PyObject* object = value.ptr();
    if (Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
        Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(Settings::get().parameter)) {
      add(TENSOR);
      tensors.push_back(THPVariable_Unpack(object));
      return add_tensor(tensors.back());
    }
    if (value.is_none()) {
      add(NONE);
    } else if (PyBool_Check(object)) {
      add(BOOL);
      add(object == Py_True);
    } else if (PyLong_CheckExact(object)) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
      if (overflow != 0) return false;
      add(INTEGER);
      add(number);
    } else if (PyFloat_CheckExact(object)) {
      add(FLOAT);
      add(PyFloat_AS_DOUBLE(object));
    } else if (PyUnicode_CheckExact(object)) {
      add(TEXT);
      add_object(py::reinterpret_borrow<py::object>(value));
    } else if (THPDtype_Check(object)) {
      add(DTYPE);
      add(reinterpret_cast<THPDtype*>(object)->scalar_type);
    } else if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
      add(SEQUENCE);
      add(static_cast<int32_t>(Py_SIZE(object)));
      return add_arguments(value, tensors);
    } else {
      const auto type = py::type::of(value);
      if (auto found = attribute(object, cache_key); found && !found.is_none()) {
        add_object(std::move(found));
      } else if (auto inside = attribute(object, cache_parts); inside && !inside.is_none()) {
        add_object(type);
        return add_arguments(inside, tensors);
      } else {
        return false;
      }
    }
    return true;
  }

  static py::object attribute(PyObject* object, PyObject* name) {
    PyObject* found = PyObject_GetAttr(object, name);
    if (found == nullptr) {
      if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
      PyErr_Clear();
    }
    return py::reinterpret_steal<py::object>(found);
  }
};

}  // namespace flashkernel
