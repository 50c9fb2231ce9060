"""Replaces parts of a loaded Transformers model by these kernels, and restores it.

Attention goes through Transformers' AttentionInterface and the loss through `loss_function`. Norms, MLPs, attention
layers, decoder layers and experts get a forward on the instance. Transformers itself and other models do not change.
Parameters stay where they are, so state dicts and optimizers are not affected.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from flashkernel.blocks.activation_modules import activation_of
from flashkernel.hf import families, forwards, layer
from flashkernel.hf.attention import NAME, register
from flashkernel.hf.experts import activation_name, uses_interface
from flashkernel.hf.report import PARTS, Entry, Report

LOSSES = ("fused", "logits", None)
UNKNOWN = "not in the tables; it keeps its own"
_STATE = "_fkernel_patch"  # where a patched model keeps the attention that each of its configs had
_OURS = (
    forwards.norm, forwards.attention, forwards.gpt2_attention, forwards.gated_mlp, forwards.plain_mlp,
    forwards.activation, forwards.causal_model, forwards.experts, layer.decoder_layer,
)  # fmt: skip
_PART_BY_SUFFIX = (
    ("Attention", "attention"),
    ("Norm", "norm"),
    ("MLP", "mlp"),
    ("Experts", "mlp"),
)  # by the end of the class's name


def patch(model: nn.Module, *, loss: str | None = "fused") -> Report:
    """Replaces attention, rotary embedding, norms, MLPs, decoder layers and the loss of a model, in place.

    A model that is patched already is unpatched first.

    Args:
        model: A Transformers model, or a PEFT model around one. Patch it before `torch.compile` or DDP.
        loss: "fused" computes the loss of a language model, in training mode and given labels, without the logits:
            `outputs.logits` is then None. "logits" computes it from the logits. None leaves it to Transformers.

    Returns:
        What was replaced, what was not, and why.

    Raises:
        TypeError: `model` is no Transformers model.
        ValueError: `loss` is something else.

    Example:
        >>> import flashkernel.hf, torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> report = flashkernel.hf.patch(model)
        >>> sorted({entry.part for entry in report.replaced})
        ['attention', 'layer', 'loss', 'mlp', 'norm', 'rope']
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> model(tokens, labels=tokens).loss.backward()
        >>> flashkernel.hf.unpatch(model)
    """
    target = _transformer(model)
    if loss not in LOSSES:
        raise ValueError(f"patch: loss is {loss!r}; it must be 'fused', 'logits' or None")
    unpatch(target)
    entries = [_patch_attention(target)]
    for module in target.modules():
        entries += _patch_module(module)
    entries.append(_patch_loss(target, loss))
    return Report(type(target).__name__, _merged(entries))


def unpatch(model: nn.Module) -> None:
    """Restores a patched model exactly; a model that is not patched stays as it is.

    Args:
        model: What `patch` was given.

    Example:
        >>> import flashkernel.hf, transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> _ = flashkernel.hf.patch(model)
        >>> flashkernel.hf.unpatch(model)
        >>> model.config._attn_implementation
        'sdpa'
    """
    target = _transformer(model)
    state = target.__dict__.pop(_STATE, None)
    if state is not None:
        for config, implementation in state:
            if config._attn_implementation == NAME:  # else someone chose another since
                config._attn_implementation_internal = implementation
    for module in target.modules():
        kept = module.__dict__
        if _is_ours(kept.get("forward")):
            del kept["forward"]
        if _is_ours(kept.get("_old_forward")):  # accelerate's hook calls this
            kept["_old_forward"] = type(module).forward.__get__(module)
        if _is_ours(kept.get("_original_forward")):  # accelerate's mixed precision keeps it beside its wrapper
            kept["_original_forward"] = type(module).forward.__get__(module)
    target.__dict__.pop(forwards.FUSED_LOSS, None)
    if target.__dict__.get("_loss_function") is forwards.causal_loss:
        del target.__dict__["_loss_function"]


@contextmanager
def patched(model: nn.Module, *, loss: str | None = "fused") -> Iterator[Report]:
    """A context manager: patches the model, and restores it at the end of the block.

    Args:
        model: As for `patch`.
        loss: As for `patch`.

    Returns:
        A context manager that gives the report of `patch`.

    Raises:
        ValueError: The model is patched already.

    Example:
        >>> import flashkernel.hf, transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> with flashkernel.hf.patched(model) as report:
        ...     model.config._attn_implementation
        'fkernel'
    """
    if _STATE in _transformer(model).__dict__:
        raise ValueError("patched: the model is patched already; leave the block out, or unpatch it before")
    report = patch(model, loss=loss)
    try:
        yield report
    finally:
        unpatch(model)


def _transformer(model: Any) -> PreTrainedModel:
    """The Transformers model itself, out of PEFT's."""
    inner = model
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        inner = model.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"patch: the model is a {type(model).__name__}; it must be a transformers.PreTrainedModel or a PEFT model "
            "around one; patch it before torch.compile, DDP or other wrappers"
        )
    return inner


def _patch_attention(model: PreTrainedModel) -> Entry:
    """Sets attn_implementation="fkernel" for the model and its submodels."""
    name = type(model).__name__
    submodels = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = list({id(module.config): module.config for module in submodels}.values())
    model.__dict__[_STATE] = [(config, config._attn_implementation) for config in configs]
    reason = _attention_reason(model, configs)
    if reason is None:
        register()
        try:
            model.set_attn_implementation(NAME)
            for module in submodels:  # Transformers passes over copies of the model's own config, as T5's stacks have
                copied = type(module.config) is type(model.config) and module.config._attn_implementation != NAME
                if copied and module._can_set_attn_implementation():
                    module.set_attn_implementation(NAME)
        except (ValueError, ImportError) as error:  # Transformers' own refusal
            reason = str(error).splitlines()[0]
    chosen = [config._attn_implementation == NAME for config in configs]
    if reason is not None or not chosen[0]:
        return Entry("attention", name, 1, None, reason or "Transformers kept its own attention for it")
    note = "" if all(chosen) else f"{chosen.count(False)} submodels keep theirs"
    return Entry("attention", name, 1, f'attention, by attn_implementation="{NAME}"', note)


def _attention_reason(model: PreTrainedModel, configs: list[Any]) -> str | None:
    if not model._can_set_attn_implementation():
        return "its attention does not go through AttentionInterface"
    if any(getattr(one, "model_type", None) in families.ADDITIVE_MASKS for one in configs):
        return "its attention extends the tensor of an additive mask, and works with eager attention alone"
    if getattr(model.config, "output_attentions", False):
        return "config.output_attentions asks for probabilities, which are never held"
    return None


def _patch_module(module: nn.Module) -> list[Entry]:
    """Replaces the module's forward if a table has its class."""
    key = families.key_of(module)
    if key in families.NORMS:
        return [_patch_norm(module, families.NORMS[key])]
    if key in families.ATTENTIONS:
        return [_set_forward("rope", module, "rope, of q and k in one", forwards.attention, families.ATTENTIONS[key])]
    if key in families.GATED_MLPS:
        glu = activation_of(module.act_fn, gated=True)
        if glu is None:
            return [_skipped("mlp", module, f"no kernel gates by {type(module.act_fn).__name__}")]
        return [_set_forward("mlp", module, f"{glu}, in its products where they are plain", forwards.gated_mlp, glu)]
    if key in families.PLAIN_MLPS:
        inner = getattr(module, families.PLAIN_MLPS[key])
        name = activation_of(inner, gated=False)
        if name is None:
            return [_skipped("mlp", module, f"no kernel for {type(inner).__name__}")]
        entry = _set_forward("mlp", module, f"{name}, in its products where they are plain", forwards.plain_mlp, name)
        alone = _set_forward("mlp", inner, name, forwards.activation, name)
        return [entry if entry.kernel else replace(alone, module=type(module).__name__)]
    if key in families.LAYERS:
        return [_set_forward("layer", module, "one function, in steps and short prompts", layer.decoder_layer)]
    if key in families.EXPERTS or uses_interface(module):
        return [_patch_experts(module, families.EXPERTS.get(key))]
    if key in families.GPT2_ATTENTIONS:  # reported with the model's attention, unless it could not be done
        entry = _set_forward("attention", module, "attention", forwards.gpt2_attention)
        return [] if entry.kernel else [entry]
    if key in families.CONTAINERS or isinstance(module, PreTrainedModel):
        return []
    part = next((part for ending, part in _PART_BY_SUFFIX if type(module).__name__.endswith(ending)), None)
    return [] if part is None else [_skipped("rope" if part == "attention" else part, module, UNKNOWN)]


def _patch_norm(module: nn.Module, kind: families.Norm) -> Entry:
    if not kind.rms and (len(module.normalized_shape) != 1 or module.weight is None):  # type: ignore[arg-type]
        return _skipped("norm", module, "it normalizes several dims, or has no weight")
    return _set_forward("norm", module, "rms_norm" if kind.rms else "layer_norm", forwards.norm, kind)


def _patch_experts(module: Any, glu: str | None) -> Entry:
    glu = glu or activation_name(module)
    if glu is None:
        known = hasattr(module, "act_fn")
        reason = f"no kernel gates by {type(module.act_fn).__name__}" if known else "it has a gate of its own"
        return _skipped("mlp", module, reason)
    return _set_forward("mlp", module, f"moe_experts with {glu}", forwards.experts, glu)


class ModelForward(partial):  # type: ignore[type-arg]
    """The forward on a model, which may be taken apart like a bound method.

    accelerate's mixed precision wraps the function of a model's forward, and binds the wrapper to the model.
    """

    @property
    def __func__(self) -> partial[Any]:
        settings = self.args[1:]
        function = partial(forwards.bound_causal_model, *settings)
        arguments = self.__signature__.parameters.values()  # type: ignore[attr-defined]
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        function.__signature__ = inspect.Signature([first, *arguments])  # type: ignore[attr-defined]
        return function


def _patch_loss(model: PreTrainedModel, loss: str | None) -> Entry:
    name = type(model).__name__
    if loss is None:
        return Entry("loss", name, 1, None, "loss=None")
    kind = families.HEADS.get(families.key_of(model))
    if kind is None:
        return Entry("loss", name, 1, None, UNKNOWN)
    if hasattr(model, "_loss_function") or getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        return Entry("loss", name, 1, None, "it has a loss function of its own")
    if loss == "logits":
        model.loss_function = forwards.causal_loss
        return Entry("loss", name, 1, "cross_entropy")
    parameters = inspect.signature(type(model).forward).parameters
    names = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD][1:]
    kernel = "linear_cross_entropy in training"
    if not _wraps_ours(model.__dict__.get(_forward_attribute(model))):
        entry = _set_forward("loss", model, kernel, forwards.causal_model, kind, tuple(names))
        if entry.kernel is None:
            return entry
        # generate() and Trainer read the forward's arguments; annotations would have to be pickled with it.
        kept = [one.replace(annotation=one.empty) for one in parameters.values()]
        replaced = ModelForward(forwards.causal_model, model, kind, tuple(names))
        replaced.__signature__ = inspect.Signature(kept[1:])  # type: ignore[attr-defined]
        model.__dict__[_forward_attribute(model)] = replaced
    model.__dict__[forwards.FUSED_LOSS] = True
    model.loss_function = forwards.causal_loss
    plain = forwards._is_plain_linear(model.lm_head)
    return Entry(
        "loss", name, 1, kernel if plain else "cross_entropy",
        "training with labels gives no logits" if plain else "lm_head is more than a linear layer: logits are made",
    )  # fmt: skip


def _set_forward(part: str, module: nn.Module, kernel: str, forward: Any, *settings: Any) -> Entry:
    attribute = _forward_attribute(module)
    if attribute == "forward" and "forward" in module.__dict__:
        return _skipped(part, module, "something else has replaced its forward")
    module.__dict__[attribute] = partial(forward, module, *settings)
    return Entry(part, type(module).__name__, 1, kernel)


def _forward_attribute(module: nn.Module) -> str:
    """The attribute that holds a module's forward: accelerate's hook keeps it in another one."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func in _OURS


def _wraps_ours(forward: Any) -> bool:
    """Whether this is a wrapper of the forward that `patch` put on a model, such as accelerate's mixed precision."""
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    forward = getattr(forward, "__func__", forward)
    return isinstance(forward, partial) and forward.func is forwards.bound_causal_model


def _skipped(part: str, module: nn.Module, reason: str) -> Entry:
    return Entry(part, type(module).__name__, 1, None, reason)


def _merged(entries: list[Entry]) -> tuple[Entry, ...]:
    """Equal entries counted as one, in the order of PARTS."""
    counts: dict[Entry, int] = {}
    for entry in entries:
        counts[entry] = counts.get(entry, 0) + entry.count
    merged = [replace(entry, count=count) for entry, count in counts.items()]
    return tuple(sorted(merged, key=lambda entry: PARTS.index(entry.part)))
