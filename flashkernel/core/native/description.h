// Programs from their description in Python (core/native/describe.py).
#pragma once

#include "program.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>

namespace flashkernel {
namespace {

std::vector<int64_t> integers(py::handle values) {
  std::vector<int64_t> found;
  for (const py::handle value : values) found.push_back(value.cast<int64_t>());
  return found;
}

std::vector<size_t> slots_of(py::handle values) {
  std::vector<size_t> found;
  for (const py::handle value : values) found.push_back(value.cast<size_t>());
  return found;
}

at::ScalarType dtype_of(py::handle value) {
  if (!THPDtype_Check(value.ptr())) throw py::type_error("expected a torch.dtype");
  return reinterpret_cast<THPDtype*>(value.ptr())->scalar_type;
}

template <typename Pointer>
Pointer pointer_of(py::handle value) {
  return reinterpret_cast<Pointer>(value.cast<uintptr_t>());
}

bool is_view(py::handle value) { return py::isinstance<py::dict>(value); }

View view_of(py::handle value) {
  return View{value["slot"].cast<size_t>(), value["whole"].cast<bool>(),     value["given"].cast<bool>(),
              integers(value["size"]),      integers(value["stride"]),       value["offset"].cast<int64_t>(),
              value["cast"].cast<bool>(),   dtype_of(value["dtype"])};
}

// A constant argument of a torch operation. type_error: of a type that is not converted.
c10::IValue constant_of(py::handle value, const c10::TypePtr& type) {
  if (value.is_none()) return {};
  if (const auto optional = type->cast<c10::OptionalType>()) return constant_of(value, optional->getElementType());
  PyObject* object = value.ptr();
  switch (type->kind()) {
    case c10::TypeKind::BoolType:
      return value.cast<bool>();
    case c10::TypeKind::FloatType:
      return value.cast<double>();
    case c10::TypeKind::NumberType:
      if (PyBool_Check(object)) return value.cast<bool>();
      if (PyLong_Check(object)) return value.cast<int64_t>();
      return value.cast<double>();
    case c10::TypeKind::DeviceObjType:
      if (THPDevice_Check(object)) return reinterpret_cast<THPDevice*>(object)->device;
      break;
    case c10::TypeKind::ListType:
      if (type->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::IntType) return integers(value);
      break;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      if (THPDtype_Check(object)) return static_cast<int64_t>(dtype_of(value));
      if (THPLayout_Check(object)) return static_cast<int64_t>(reinterpret_cast<THPLayout*>(object)->layout);
      if (THPMemoryFormat_Check(object)) {
        return static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(object)->memory_format);
      }
      if (PyLong_Check(object)) return value.cast<int64_t>();
      break;
    default:
      break;
  }
  throw py::type_error("an argument of type " + type->str());
}

Allocation allocation_of(py::handle step) {
  const auto device = reinterpret_cast<THPDevice*>(py::object(step["device"]).ptr())->device;
  const auto options = at::TensorOptions().dtype(dtype_of(step["dtype"])).device(device);
  return Allocation{step["slot"].cast<size_t>(), integers(step["size"]), integers(step["stride"]), options};
}

Launch launch_of(py::handle step) {
  const auto addresses = [](py::handle listed) {
    std::vector<Launch::Address> found;
    for (const py::handle entry : listed) {
      found.push_back({entry[py::int_(0)].cast<size_t>(), entry[py::int_(1)].cast<int64_t>(),
                       pointer_of<void*>(entry[py::int_(2)])});
    }
    return found;
  };
  Launch launch;
  launch.launch = pointer_of<Launch::Function>(step["launch"]);
  launch.replace_address = pointer_of<Launch::ReplaceAddress>(step["replace_address"]);
  launch.config = pointer_of<void*>(step["config"]);
  launch.function = pointer_of<void*>(step["function"]);
  launch.params = pointer_of<void*>(step["params"]);
  launch.words = addresses(step["words"]);
  launch.maps = addresses(step["maps"]);
  launch.prepared = keep(py::object(step["prepared"]));
  return launch;
}

Operation operation_of(py::handle step) {
  const auto function = c10::Dispatcher::singleton().findSchemaOrThrow(
      step["name"].cast<std::string>().c_str(), step["overload"].cast<std::string>().c_str());
  const auto& arguments = function.schema().arguments();
  std::vector<Argument> args;
  for (const py::handle value : step["args"]) {
    const auto& type = arguments.at(args.size()).real_type();
    if (is_view(value)) {
      args.emplace_back(view_of(value));
    } else {
      args.emplace_back(constant_of(value, type));
    }
  }
  if (args.size() != arguments.size()) throw py::type_error("an operation without all its arguments");
  return Operation{function, std::move(args), step["slot"].cast<int64_t>()};
}

PythonCall call_of(py::handle step) {
  PythonCall call{keep(py::object(step["function"])), {}, slots_of(step["results"])};
  for (const py::handle value : step["args"]) {
    if (is_view(value)) {
      call.args.emplace_back(view_of(value));
    } else {
      call.args.emplace_back(keep(value));
    }
  }
  return call;
}

Step step_of(py::handle step) {
  const auto kind = step["kind"].cast<std::string>();
  const auto freed = slots_of(step["freed"]);
  if (kind == "allocate") return Step{allocation_of(step), freed};
  if (kind == "launch") return Step{launch_of(step), freed};
  if (kind == "write") return Step{Write{view_of(step["view"])}, freed};
  if (kind == "operation") return Step{operation_of(step), freed};
  if (kind == "call") return Step{call_of(step), freed};
  throw py::type_error("a step of kind " + kind);
}

}  // namespace

inline std::shared_ptr<Program> make_program(const py::dict& description) {
  auto program = std::make_shared<Program>();
  program->num_given = description["num_given"].cast<size_t>();
  program->num_slots = description["num_slots"].cast<size_t>();
  for (const py::handle entry : description["constants"]) {
    program->constants.emplace_back(entry[py::int_(0)].cast<size_t>(), unwrap(py::object(entry[py::int_(1)])));
  }
  for (const py::handle step : description["steps"]) {
    program->steps.push_back(step_of(step));
    program->needs_python |= std::holds_alternative<PythonCall>(program->steps.back().action);
  }
  for (const py::handle view : description["results"]) program->results.push_back(view_of(view));
  const py::object tables = description["persistent"];
  if (!tables.is_none()) {
    program->persistent = {keep(py::object(tables["tables"])),
                           pointer_of<Persistent::IsCapturing>(tables["is_capturing"]),
                           pointer_of<void*>(tables["stream"]), keep(py::object(tables["keep_alive"]))};
  }
  return program;
}

}  // namespace flashkernel
