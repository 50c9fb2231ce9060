// Calls of an operator that is differentiable: the forward program, and the node of autograd's graph that runs the
// backward programs.
#pragma once

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "key.h"

namespace flashkernel {

using torch::autograd::variable_list;

// All calls with one key. What Python does for a call without a backward program is `python`
// (core/native/operator_call.py, Backward).
class OperatorCall : public std::enable_shared_from_this<OperatorCall> {
 public:
  static constexpr int64_t NO_EDGE = -1;

  OperatorCall(std::string name, std::shared_ptr<Program> forward, size_t num_outputs, std::vector<int64_t> edges,
               std::vector<int64_t> returned, bool returns_tuple)
      : name(std::move(name)), forward(std::move(forward)), num_outputs(num_outputs), edges(std::move(edges)),
        returned(std::move(returned)), returns_tuple(returns_tuple) {}

  // Runs the forward program; the results are the operator's outputs, and tensors that were looked up and are saved.
  Tensors run(const Tensors& tensors) const {
    const at::NoGradGuard no_grad;
    return forward->run_from_python(tensors);
  }

  // The result of a call, with its history. `found` is what the forward program gave.
  py::object attach(const Tensors& tensors, Tensors found) const;

  // `sources` says for each saved tensor where it is: (kind, index). Kinds: see Source.
  void set_saved(const py::list& sources, Object python_backward, std::vector<bool> differentiable_outputs);

  // How many kinds of backward calls have a program.
  size_t num_backward_programs() const {
    std::lock_guard<std::mutex> guard(lock_);
    return std::count_if(backward_.begin(), backward_.end(), [](const auto& entry) { return entry.second.program != nullptr; });
  }

  struct Source {
    enum Kind : int8_t { NOTHING, TENSOR, RESULT, CONSTANT } kind;  // of the call, of the forward program, or always one
    size_t index;
    at::Tensor constant;
  };

  // A backward program and what it gives to the edges: indices of its results, or NO_EDGE.
  struct Backward {
    std::shared_ptr<Program> program;
    std::vector<int64_t> gradients;
    int64_t calls = 0;
    bool python_only = false;
  };

  variable_list pull_back(const Tensors& saved, variable_list gradients, const std::vector<bool>& wanted) const;

  const std::string name;
  const std::shared_ptr<Program> forward;
  const size_t num_outputs;
  const std::vector<int64_t> edges;     // for each tensor argument of the operator, the call's tensor or NO_EDGE
  const std::vector<int64_t> returned;  // indices of outputs
  const bool returns_tuple;
  std::vector<Source> saved;
  std::vector<bool> differentiable;  // for each returned output
  Object python;

 private:
  variable_list from_python(const Tensors& saved, const variable_list& gradients, const std::vector<bool>& wanted,
                            Backward* counted, const std::string& key) const;

  mutable std::mutex lock_;
  mutable std::unordered_map<std::string, Backward> backward_;
};

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
// torch 2.12 changed what holds a node.
using NodePointer = decltype(std::declval<torch::autograd::Edge>().function);
constexpr bool INTRUSIVE = !std::is_same_v<NodePointer, std::shared_ptr<Node>>;

template <typename Pointer>
Pointer this_pointer(Node* node) {
  if constexpr (INTRUSIVE) {
    return Pointer::reclaim_copy(node);
  } else {
    return node->getptr();
  }
}

class OperatorNode : public Node {
 public:
  explicit OperatorNode(std::shared_ptr<const OperatorCall> call) : call_(std::move(call)) {}

  std::string name() const override { return "flashkernel::" + call_->name; }

  void release_variables() override {
    std::lock_guard<std::mutex> guard(mutex_);
    saved_.clear();
    released_ = true;
  }

  variable_list apply(variable_list&& gradients) override {
    std::vector<bool> wanted(num_outputs());
    bool any_wanted = false, any_given = false;
    for (size_t i = 0; i < wanted.size(); ++i) any_wanted |= wanted[i] = task_should_compute_output(i);
    for (const at::Tensor& gradient : gradients) any_given |= gradient.defined();
    if (!any_wanted || !any_given) return variable_list(wanted.size());
    Tensors saved;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (released_) throw std::runtime_error(torch::autograd::ERR_BACKWARD_TWICE);
      const auto self = this_pointer<NodePointer>(this);
      saved.reserve(saved_.size());
      for (const SavedVariable& variable : saved_) saved.push_back(variable.unpack(self));
    }
    return call_->pull_back(saved, std::move(gradients), wanted);
  }

  void save(const at::Tensor& x, bool is_output) { saved_.emplace_back(x, is_output); }

 private:
  std::shared_ptr<const OperatorCall> call_;
  std::vector<SavedVariable> saved_;
  bool released_ = false;
};

template <typename Pointer, typename NodeType = OperatorNode>
Pointer new_node(std::shared_ptr<const OperatorCall> call) {
  if constexpr (INTRUSIVE) {
    return c10::make_intrusive<NodeType>(std::move(call));
  } else {
    return Pointer(new NodeType(std::move(call)), [](auto* node) { deleteNode(node); });
  }
}

py::object wrap_or_none(const at::Tensor& x) { return x.defined() ? wrap(x) : py::none(); }

at::Tensor unwrap_or_undefined(py::handle value) { return value.is_none() ? at::Tensor() : unwrap(value); }

}  // namespace

inline void OperatorCall::set_saved(const py::list& sources, Object python_backward, std::vector<bool> differentiable_outputs) {
  saved.clear();
  for (const py::handle source : sources) {
    const auto kind = static_cast<Source::Kind>(source[py::int_(0)].cast<int>());
    const py::object value = source[py::int_(1)];
    if (kind == Source::CONSTANT) {
      saved.push_back({kind, 0, unwrap(value)});
    } else {
      saved.push_back({kind, value.is_none() ? 0 : value.cast<size_t>(), {}});
    }
  }
  differentiable = std::move(differentiable_outputs);
  python = std::move(python_backward);
}

inline py::object OperatorCall::attach(const Tensors& tensors, Tensors found) const {
  // Autograd lets nobody write in place to a view that was made inside a function.
  for (size_t i = 0; i < num_outputs; ++i) {
    if (found[i].is_view()) found[i] = found[i].detach();
  }
  NodePointer node = new_node<NodePointer>(shared_from_this());
  torch::autograd::edge_list next;
  next.reserve(edges.size());
  for (const int64_t index : edges) {
    next.push_back(index == NO_EDGE ? torch::autograd::Edge() : torch::autograd::impl::gradient_edge(tensors[index]));
  }
  node->set_next_edges(std::move(next));
  std::vector<bool> has_history(found.size());
  for (size_t i = 0; i < returned.size(); ++i) {
    at::Tensor& output = found[returned[i]];
    if (differentiable[i]) {
      torch::autograd::set_history(output, node);
      has_history[returned[i]] = true;
    } else {
      node->add_input_metadata(Node::undefined_input{});
    }
  }
  auto* typed = static_cast<OperatorNode*>(node.get());
  for (const Source& source : saved) {
    switch (source.kind) {
      case Source::NOTHING: typed->save({}, false); break;
      case Source::TENSOR: typed->save(tensors[source.index], false); break;
      case Source::RESULT: typed->save(found[source.index], has_history[source.index]); break;
      case Source::CONSTANT: typed->save(source.constant, false); break;
    }
  }
  if (!returns_tuple) return wrap(found[returned[0]]);
  py::tuple result(returned.size());
  for (size_t i = 0; i < returned.size(); ++i) result[i] = wrap(found[returned[i]]);
  return std::move(result);
}

inline variable_list OperatorCall::pull_back(const Tensors& saved, variable_list gradients,
                                      const std::vector<bool>& wanted) const {
  Key key;
  bool plain = !c10::GradMode::is_enabled() && !intercepted();
  Tensors given;
  given.reserve(saved.size() + gradients.size());
  c10::Device device = c10::kCPU;
  for (const auto* tensors : {&saved, static_cast<const Tensors*>(&gradients)}) {
    for (const at::Tensor& x : *tensors) {
      key.add(x.defined());
      if (!x.defined()) continue;
      plain = plain && key.add_tensor(x);
      device = x.device();
      given.push_back(x);
    }
  }
  for (const bool want : wanted) key.add(want);
  key.add(torch::autograd::get_current_graph_task_keep_graph());
  plain = plain && key.add_state(device);
  if (!plain) return from_python(saved, gradients, wanted, nullptr, {});
  std::shared_ptr<Program> program;
  std::vector<int64_t> order;
  Backward* counted = nullptr;
  {
    std::lock_guard<std::mutex> guard(lock_);
    Backward& backward = backward_[key.bytes];
    program = backward.program;
    order = backward.gradients;
    counted = backward.python_only ? nullptr : &backward;
  }
  if (program == nullptr) return from_python(saved, gradients, wanted, counted, key.bytes);
  gradients.clear();
  const Tensors found = program->run(given);
  variable_list results(wanted.size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (order[i] != NO_EDGE) results[i] = found[order[i]];
  }
  return results;
}

inline variable_list OperatorCall::from_python(const Tensors& saved, const variable_list& gradients,
                                        const std::vector<bool>& wanted, Backward* counted,
                                        const std::string& key) const {
  py::gil_scoped_acquire gil;
  py::tuple saved_tuple(saved.size()), given(gradients.size()), flags(wanted.size());
  for (size_t i = 0; i < saved.size(); ++i) saved_tuple[i] = wrap_or_none(saved[i]);
  for (size_t i = 0; i < gradients.size(); ++i) given[i] = wrap_or_none(gradients[i]);
  for (size_t i = 0; i < wanted.size(); ++i) flags[i] = py::bool_(wanted[i]);
  const int64_t calls = counted == nullptr ? -1 : counted->calls++;
  // (the gradients for the edges, None or (program or None, its results for the edges))
  const py::tuple answer = borrow(python)(saved_tuple, given, flags, calls);
  if (counted != nullptr && !answer[1].is_none()) {
    const py::tuple recorded = answer[1];
    std::lock_guard<std::mutex> guard(lock_);
    Backward& backward = backward_[key];
    backward.python_only = recorded[0].is_none();
    if (!backward.python_only) {
      backward.gradients = recorded[1].cast<std::vector<int64_t>>();
      backward.program = recorded[0].cast<std::shared_ptr<Program>>();
    }
  }
  variable_list results;
  for (const py::handle value : py::tuple(answer[0])) results.push_back(unwrap_or_undefined(value));
  return results;
}

}  // namespace flashkernel
