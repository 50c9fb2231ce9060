// The launch cache (core/replay.py) in C++: looks a call up by its key and runs what was recorded of it.
#include <unordered_map>

#include "autograd.h"
#include "description.h"

namespace flashkernel {
namespace {

// An entry is a program, an operator with its gradient, or a Python function of the list of the call's tensors.
struct Entry {
  std::shared_ptr<Program> program;
  bool returns_tuple = false, returns_nothing = false;
  std::shared_ptr<OperatorCall> operator_call;
  Object function;
};

py::object result_of(const Entry& entry, const Tensors& tensors) {
  if (entry.operator_call != nullptr) {
    return entry.operator_call->attach(tensors, entry.operator_call->run(tensors));
  }
  if (entry.program == nullptr) {
    py::list given(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) given[i] = wrap(tensors[i]);
    return borrow(entry.function)(given);
  }
  const Tensors found = entry.program->run_from_python(tensors);
  if (entry.returns_nothing) return py::none();
  if (!entry.returns_tuple) return wrap(found[0]);
  py::tuple result(found.size());
  for (size_t i = 0; i < found.size(); ++i) result[i] = wrap(found[i]);
  return std::move(result);
}

class LaunchCache {
 public:
  LaunchCache(bool is_public, py::tuple written, py::object missing)
      : is_public_(is_public), written_(std::move(written)), missing_(std::move(missing)) {}

  // The result of a call, or `missing` where it has no entry or is not replayed.
  py::object call(const py::tuple& args, const py::dict& kwargs) {
    if (entries_.empty() || intercepted()) return missing_;
    Tensors tensors;
    Key key;
    if (!make_key(args, kwargs, tensors, key)) return missing_;
    const auto found = entries_.find(key);
    if (found == entries_.end() || hooked()) return missing_;
    const std::shared_ptr<Entry> entry = found->second;  // another thread may clear the entries
    return result_of(*entry, tensors);
  }

  // False if the call has no key.
  bool insert(const py::tuple& args, const py::dict& kwargs, Entry entry) {
    Tensors tensors;
    Key key;
    if (!make_key(args, kwargs, tensors, key)) return false;
    entries_.insert_or_assign(std::move(key), std::make_shared<Entry>(std::move(entry)));
    return true;
  }

  void clear() { entries_.clear(); }
  size_t size() const { return entries_.size(); }

 private:
  struct Hash {
    size_t operator()(const Key& key) const { return key.hash(); }
  };

  bool make_key(const py::tuple& args, const py::dict& kwargs, Tensors& tensors, Key& key) const {
    key.bytes.reserve(256);
    if (!key.add_arguments(args, tensors)) return false;
    for (const auto& [name, value] : kwargs) {
      key.objects.push_back(py::reinterpret_borrow<py::object>(name));
      // Where a result and an operand share memory, the function itself says whether it may be.
      if (!value.is_none() && PySequence_Contains(written_.ptr(), name.ptr()) != 0) return false;
      if (!key.add_arguments(py::make_tuple(value), tensors)) return false;
    }
    if (tensors.empty() || !key.add_state(tensors[0].device())) return false;
    if (is_public_) {
      const bool gradients = c10::GradMode::is_enabled();
      key.add(gradients);
      if (gradients) {
        for (const at::Tensor& x : tensors) key.add(x.requires_grad());
      }
    }
    return true;
  }

  const bool is_public_;
  const py::tuple written_;
  const py::object missing_;
  std::unordered_map<Key, std::shared_ptr<Entry>, Hash> entries_;
};

Tensors unwrap_all(const py::sequence& values) {
  Tensors found;
  for (const py::handle value : values) found.push_back(unwrap(value));
  return found;
}

py::list wrap_all(const Tensors& tensors) {
  py::list found;
  for (const at::Tensor& x : tensors) found.append(wrap(x));
  return found;
}

}  // namespace
}  // namespace flashkernel

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace flashkernel;
  py::class_<Program, std::shared_ptr<Program>>(module, "Program")
      .def(py::init(&make_program), py::arg("description"))
      .def_readonly("needs_python", &Program::needs_python)
      .def("run", [](const Program& program, const py::sequence& tensors) {
        return wrap_all(program.run_from_python(unwrap_all(tensors)));
      });
  py::class_<OperatorCall, std::shared_ptr<OperatorCall>>(module, "OperatorCall")
      .def(py::init<std::string, std::shared_ptr<Program>, size_t, std::vector<int64_t>, std::vector<int64_t>, bool>(),
           py::arg("name"), py::arg("forward"), py::arg("num_outputs"), py::arg("edges"), py::arg("returned"),
           py::arg("returns_tuple"))
      .def_property_readonly("num_backward_programs", &OperatorCall::num_backward_programs)
      .def("run", [](const OperatorCall& call, const py::sequence& tensors) {
        return wrap_all(call.run(unwrap_all(tensors)));
      })
      .def("set_saved", [](OperatorCall& call, const py::list& sources, const py::object& python,
                           const std::vector<bool>& differentiable) {
        call.set_saved(sources, keep(python), differentiable);
      })
      .def("attach", [](const OperatorCall& call, const py::sequence& tensors, const py::sequence& found) {
        return call.attach(unwrap_all(tensors), unwrap_all(found));
      });
  py::class_<LaunchCache>(module, "LaunchCache")
      .def(py::init<bool, py::tuple, py::object>(), py::arg("is_public"), py::arg("written"), py::arg("missing"))
      .def("__call__", &LaunchCache::call)
      .def("insert_program",
           [](LaunchCache& cache, const py::tuple& args, const py::dict& kwargs, std::shared_ptr<Program> program,
              bool returns_tuple, bool returns_nothing) {
             return cache.insert(args, kwargs, Entry{std::move(program), returns_tuple, returns_nothing, {}, {}});
           })
      .def("insert_operator",
           [](LaunchCache& cache, const py::tuple& args, const py::dict& kwargs, std::shared_ptr<OperatorCall> call) {
             return cache.insert(args, kwargs, Entry{{}, false, false, std::move(call), {}});
           })
      .def("insert_function",
           [](LaunchCache& cache, const py::tuple& args, const py::dict& kwargs, const py::object& function) {
             return cache.insert(args, kwargs, Entry{{}, false, false, {}, keep(function)});
           })
      .def("clear", &LaunchCache::clear)
      .def("__len__", &LaunchCache::size);
  module.def(
      "configure",
      [](uintptr_t suspensions, uintptr_t generation, bool takes_cpu, const py::object& parameter,
         const py::object& knobs) {
        auto& settings = Settings::get();
        settings.suspensions = reinterpret_cast<const int64_t*>(suspensions);
        settings.generation = reinterpret_cast<const int64_t*>(generation);
        settings.takes_cpu = takes_cpu;
        settings.parameter = parameter.inc_ref().ptr();
        settings.knobs = knobs.inc_ref().ptr();
      },
      py::arg("suspensions"), py::arg("generation"), py::arg("takes_cpu"), py::arg("parameter"), py::arg("knobs"));
}
