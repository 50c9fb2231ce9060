"""Which operator computes an activation module or function of torch or Transformers."""

from __future__ import annotations

from torch.nn import functional

# By class name: the operator alone, and as the activation of a gate.
_ACTIVATIONS: dict[str, tuple[str, str | None]] = {
    "SiLUActivation": ("silu", "swiglu"), "SiLU": ("silu", "swiglu"), "ReLU": ("relu", "reglu"),
    "GELUTanh": ("gelu_tanh", "geglu"), "NewGELUActivation": ("gelu_tanh", "geglu"),
    "FastGELUActivation": ("gelu_tanh", "geglu"), "GELUActivation": ("gelu", "geglu_exact"),
    "ReLUSquaredActivation": ("squared_relu", None),
}  # fmt: skip
_FUNCTIONS = {functional.silu: "SiLU", functional.relu: "ReLU", functional.gelu: "GELUActivation"}


def activation_of(module: object, gated: bool) -> str | None:
    """The operator that computes an activation module or function, alone or gated; None if there is none."""
    kind = type(module)
    function = next((name for known, name in _FUNCTIONS.items() if known is module), None)
    if function is not None:
        return _ACTIVATIONS[function][gated]
    if not kind.__module__.startswith(("transformers.activations", "torch.nn")):
        return None
    if kind.__name__ == "GELU":
        tanh = getattr(module, "approximate", "none") == "tanh"
        return ("geglu" if tanh else "geglu_exact") if gated else ("gelu_tanh" if tanh else "gelu")
    found = _ACTIVATIONS.get(kind.__name__)
    return None if found is None else found[gated]
