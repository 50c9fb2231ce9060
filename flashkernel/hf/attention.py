"""Transformers' attention and mask interfaces, computed by `flashkernel.attention`.

Transformers describes a mask as a function of (batch, head, query, key) indices. It is called here once, with indices
that record the operations on them (symbolic tracing), which gives a Mask: causal, sliding, chunked, padded and packed
masks, caches and their offsets, and most functions that a model adds. A function that cannot be traced becomes a dense
boolean mask, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import is_tracing

from flashkernel.blocks import expression as ex
from flashkernel.blocks import mask as masks
from flashkernel.blocks.expression import Table
from flashkernel.blocks.mask import Mask
from flashkernel.blocks.packed import packed_mask
from flashkernel.hf.mask_tracing import Untraceable, trace, traced_indices
from flashkernel.ops.attention import attention, attention_varlen

NAME = "fkernel"  # Transformers rewrites names that contain "flash" for some models


def register() -> None:
    """Registers attn_implementation="fkernel" with Transformers. Importing `flashkernel.hf` does it too.

    Example:
        >>> import flashkernel.hf
        >>> from transformers import AttentionInterface
        >>> flashkernel.hf.register()
        >>> flashkernel.hf.NAME in AttentionInterface().valid_keys()
        True
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, layer_mask)


@dataclass(frozen=True, eq=False)
class LayerMask:
    """A Mask in the form that Transformers passes to the layers: an object with the shape of a mask tensor.

    A layer may read it as the bool tensor that it stands for (True is visible), as layers that select keys by an
    indexer do: indexing, operators, methods and torch's functions take `dense()`.

    Args:
        mask: The mask.
        shape: (batch, 1, seqlen_q, seqlen_k).
        shared: Values that the layers of one pass compute once, such as rotary tables.
        device: Of the tensor that `dense` makes.

    Example:
        >>> from flashkernel.hf import layer_mask
        >>> mask = layer_mask(batch_size=1, q_length=4, kv_length=4)
        >>> mask.shape, mask.ndim
        ((1, 1, 4, 4), 4)
        >>> mask[0, 0, 1]
        tensor([ True,  True, False, False])
    """

    mask: Mask
    shape: tuple[int, int, int, int]
    shared: dict[str, Any] = field(default_factory=dict, repr=False)
    device: torch.device | str = "cpu"
    ndim = 4
    dtype = torch.bool

    def dim(self) -> int:
        """Number of dims, as of a tensor."""
        return self.ndim

    def to(self, device: Any, **_: Any) -> Any:
        """The mask with its tables on another device, for models on several devices.

        Args:
            device: Where the tables go; a dtype gives `dense()` in it.
        """
        if isinstance(device, torch.dtype):
            return self.dense().to(device)
        tables = ex.tables(self.mask.expression)
        moved = ex.bind(self.mask.expression, tables, [table.to(device) for table in tables])
        return LayerMask(Mask(moved, self.mask.name, self.mask.requires), self.shape, device=device)

    def dense(self) -> Tensor:
        """The bool tensor (batch, 1, seqlen_q, seqlen_k); the layers of one pass share it."""
        if "dense" not in self.shared:
            visible = self.mask.visible(self.shape[0], 1, *self.shape[2:], device=self.device)
            self.shared["dense"] = visible.expand(self.shape)
        return self.shared["dense"]  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, LayerMask) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _operator_of_the_tensor(name: str) -> Callable[..., Any]:
    def call(self: LayerMask, *others: Any) -> Any:
        return getattr(self.dense(), name)(*(x.dense() if isinstance(x, LayerMask) else x for x in others))

    return call


for _name in ("invert", "and", "rand", "or", "ror", "xor", "add", "radd", "mul", "rmul"):
    setattr(LayerMask, f"__{_name}__", _operator_of_the_tensor(f"__{_name}__"))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    deterministic: bool | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as Transformers' AttentionInterface calls it.

    A given mask is complete, as for eager attention: `is_causal` and `sliding_window` apply only without one. Sequences
    packed by `cu_seq_lens_q` never see each other.

    Args:
        module: The attention layer.
        query: (batch, heads, seqlen_q, head_dim).
        key: (batch, kv_heads, seqlen_k, head_dim).
        value: (batch, kv_heads, seqlen_k, value_dim).
        attention_mask: A `LayerMask`, a bool tensor (True is visible), or a float tensor that is added to the scores;
            tensors are (batch, heads or 1, seqlen_q, seqlen_k).
        dropout: Probability.
        scaling: Softmax scale; None: 1 / sqrt(head_dim).
        sliding_window: Tokens that a token sees, itself included.
        softcap: Scores become softcap * tanh(scores / softcap).
        s_aux: Learned sinks, one logit for each head.
        position_bias: Added to the scores, (batch or 1, heads or 1, seqlen_q, seqlen_k).
        is_causal: None: as the module says.
        cu_seq_lens_q: int32, where packed sequences begin, and the end of the last.
        cu_seq_lens_k: The same for keys; None: as for queries.
        deterministic: The backward pass is deterministic.
        indices: (batch, seqlen_q, n) keys that an indexer selected for each query (DeepSeek-V3.2, GLM-5); a query sees
            those of them that the mask lets it see.
        **kwargs: Others that Transformers passes; ignored.

    Returns:
        (batch, seqlen_q, heads, value_dim), contiguous, and None in place of the probabilities.

    Raises:
        NotImplementedError: The layer asks for something that changes the result and is not supported.
        ValueError: Mask and layer do not fit.

    Example:
        >>> import torch
        >>> from flashkernel.hf import attention_forward
        >>> q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
        >>> out, probabilities = attention_forward(torch.nn.Module(), q, k, v, None, is_causal=True)
        >>> out.shape, probabilities
        (torch.Size([1, 4, 2, 8]), None)
    """
    _refuse(module, kwargs)
    sizes = (query.shape[0], query.shape[2], key.shape[2])
    options: dict[str, Any] = {
        "scale": scaling, "softcap": softcap or 0.0, "dropout": dropout, "deterministic": bool(deterministic),
    }  # fmt: skip
    plain = attention_mask is None and position_bias is None and indices is None
    if cu_seq_lens_q is not None and plain:  # as flash-attn aligns them
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        window = _implied_window(causal, sliding_window)
        return _packed(query, key, value, (cu_seq_lens_q, cu_seq_lens_k), window, s_aux, options), None  # type: ignore
    bias = None if position_bias is None else position_bias[..., : sizes[2]]
    if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
        added = _checked_pairs(attention_mask, sizes)
        bias = added if bias is None else bias + added
        mask: Mask | None = None
    elif attention_mask is not None:
        free = cu_seq_lens_q is None and sees_all(attention_mask, sizes[2])
        mask = None if free else _given_mask(attention_mask, sizes, query.device)
    else:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _implied_mask(bool(is_causal), sliding_window, sizes)
    if indices is not None:
        selected = _selected(indices, sizes)
        mask = selected if mask is None else mask & selected
    if cu_seq_lens_q is not None:
        form = None if mask is None or bias is not None else mask.packed_form
        if form is not None and sizes[1] == sizes[2]:
            lengths = (cu_seq_lens_q, cu_seq_lens_k)
            if form.ids is not None:  # position_ids say it as well
                options["mask"] = mask
            window = form.left, form.right
            return _packed(query, key, value, lengths, window, s_aux, options), None  # type: ignore[return-value]
        packed = _packed_mask(cu_seq_lens_q, cu_seq_lens_k, sizes, masked=mask is not None or bias is not None)
        mask = packed if mask is None else mask & packed
    out = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias=bias, sinks=s_aux, mask=mask, **options
    )
    return out.contiguous(), None  # type: ignore[union-attr]  # some models take a view of it


def _packed(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[Tensor, Tensor | None],
    window: tuple[int | None, int | None] | None, sinks: Tensor | None, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attention of packed sequences, (1, tokens, heads, value_dim)."""
    _check_one_batch(query.shape[0])
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    found: Any = attention_varlen(q, k, v, lengths[0], lengths[1], sinks, window=window, **options)
    return found.contiguous().unsqueeze(0)


def _check_one_batch(batch: int) -> None:
    if batch != 1:
        raise ValueError(f"{NAME}: cu_seq_lens_q is given with a batch of {batch}; packed sequences are one batch")


def _implied_window(causal: bool, sliding_window: int | None) -> tuple[int | None, int | None]:
    """(left, right) of a layer that gives no mask."""
    if not causal and sliding_window is not None:
        _implied_mask(causal, sliding_window, (1, 1, 1))  # which says why there is none
    return None if sliding_window is None else sliding_window - 1, 0 if causal else None


def _refuse(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises for arguments that change the result and are not supported; the others carry no further information."""
    advice = {
        "cache": "continuous batching keeps its keys in pages; use attn_implementation='paged|sdpa'",
        "block_indices": "sparse attention by block indices needs the model's own kernels; use another implementation",
        "head_mask": "heads cannot be masked one by one; use attn_implementation='eager'",
    }
    for name, what in advice.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{NAME}: {type(module).__name__} gave {name}: {what}")
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            f"{NAME}: output_attentions asks for probabilities, which are never held; use attn_implementation='eager'"
        )


def _given_mask(given: LayerMask | Tensor, sizes: tuple[int, int, int], device: torch.device) -> Mask:
    if isinstance(given, LayerMask):
        if given.shape[0] not in (1, sizes[0]) or given.shape[2:] != sizes[1:]:
            raise ValueError(
                f"{NAME}: the mask was made for (batch, queries, keys) = {(given.shape[0], *given.shape[2:])} but the "
                f"layer has {sizes}; the cache that the mask was made with must be the one the layer uses"
            )
        tables = given.mask.tables
        return given.mask if all(table.device == device for table in tables) else given.to(device).mask
    if not isinstance(given, Tensor) or given.dtype != torch.bool:
        raise ValueError(
            f"{NAME}: the mask is {getattr(given, 'dtype', type(given).__name__)}; it must come from Transformers' "
            f"mask functions, or be bool (True is visible) or float (added to the scores) with 4 dims"
        )
    return masks.tensor_mask(_checked_pairs(given, sizes).to(device))


def _selected(indices: Tensor, sizes: tuple[int, int, int]) -> Mask:
    """The mask of the keys that an indexer selected, (batch, queries, n)."""
    seen = indices.new_zeros((sizes[0], 1, *sizes[1:]), dtype=torch.bool)
    return masks.tensor_mask(seen.scatter_(-1, indices.long().unsqueeze(1), True))


def sees_all(mask: Any, keys: int) -> bool:
    """Whether this is the causal mask of one query at the last key: a decoding step without padding."""
    return isinstance(mask, LayerMask) and mask.shape[2:] == (1, keys) and is_causal(mask)


def is_causal(mask: LayerMask) -> bool:
    """Whether the mask is causal, with the last query at the last key."""
    return mask.mask is _CAUSAL or mask.mask.text == _CAUSAL.text


def _checked_pairs(mask: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    if mask.ndim != 4 or mask.shape[-1] < sizes[2] or mask.shape[-2] not in (1, sizes[1]):
        raise ValueError(
            f"{NAME}: the mask has shape {tuple(mask.shape)}; for (batch, queries, keys) = {sizes} it must be "
            f"(batch, heads or 1, queries, keys)"
        )
    return mask[..., : sizes[2]]


def _implied_mask(causal: bool, sliding_window: int | None, sizes: tuple[int, int, int]) -> Mask | None:
    """The mask of a layer that gives none."""
    if not causal:
        if sliding_window is not None:
            raise NotImplementedError(
                f"{NAME}: sliding_window={sliding_window} without a mask in a layer that is not causal; make the mask "
                f"with transformers.masking_utils.create_bidirectional_sliding_window_mask"
            )
        return None
    if sizes[1] not in (1, sizes[2]):
        raise ValueError(
            f"{NAME}: a causal layer of {sizes[1]} queries and {sizes[2]} keys gave no mask, so where the queries "
            f"stand among the keys is unknown; make the mask with transformers.masking_utils.create_causal_mask"
        )
    return masks.causal() if sliding_window is None else masks.causal() & masks.window(sliding_window)


def _packed_mask(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, sizes: tuple[int, int, int], masked: bool
) -> Mask:
    """The mask of packed sequences; with another mask, queries and keys must be packed alike."""
    _check_one_batch(sizes[0])
    if masked and sizes[1] != sizes[2]:
        raise NotImplementedError(
            f"{NAME}: cu_seq_lens_q is given with {sizes[1]} queries, {sizes[2]} keys and a mask that does not know "
            f"how both are cut; packed sequences cannot be continued from a cache"
        )
    return packed_mask(cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k, sizes[1])[0]


def layer_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | LayerMask | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> LayerMask | None:
    """The mask of a layer, as Transformers' AttentionMaskInterface calls it.

    Args:
        batch_size: Batch.
        q_length: Queries.
        kv_length: Keys.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: Transformers' mask function of (batch, head, query, key).
        attention_mask: Padding (batch, keys): True for real tokens.
        local_size: Size of a local window or chunk; only its presence matters.
        allow_is_bidirectional_skip: Returns None if a layer sees everything.
        use_vmap: For mask functions that cannot be traced.
        device: Of the mask's tables.
        **kwargs: Others that Transformers passes; ignored.

    Returns:
        A `LayerMask`; None if the layer sees everything and `allow_is_bidirectional_skip` is set. A causal mask is
        never None.

    Example:
        >>> import torch
        >>> from flashkernel.hf import layer_mask
        >>> layer_mask(batch_size=2, q_length=1, kv_length=8, q_offset=7).shape
        (2, 1, 1, 8)
    """
    if isinstance(attention_mask, LayerMask):  # made ahead by generate() for a static cache
        return attention_mask
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)  # type: ignore[arg-type]
    # Steps of a static cache, whose offset is a tensor, share a compiled graph, the step that fills it included.
    counted = isinstance(q_offset, Tensor)
    if padding is not None and not counted and not is_tracing(padding) and bool(padding.all()):
        padding = None  # as Transformers' masks do: one look at the padding saves a load for every score
    if allow_is_bidirectional_skip and padding is None and local_size is None:
        return None
    shape = (batch_size, 1, q_length, kv_length)
    if _plainly_causal(mask_function, padding, (q_length, kv_length), (q_offset, kv_offset)):
        return LayerMask(_CAUSAL, shape, device=device)
    indices = traced_indices(batch_size, (q_length, kv_length), (q_offset, kv_offset), device)
    try:
        seen = trace(mask_function, indices)
        if padding is not None:
            seen = seen & (Table(padding.to(torch.int8))[indices[0].expression, indices[3].expression] == 1)
        mask = Mask(seen, "transformers")
    except Untraceable as reason:
        warnings.warn(
            f"{NAME}: a mask function cannot be traced ({reason}); {q_length} x {kv_length} pairs are kept in memory "
            f"for each batch instead",
            stacklevel=2,
        )
        visible = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        mask = masks.tensor_mask(visible)
    return LayerMask(mask, shape, device=device)


def _plainly_causal(
    mask_function: Callable[..., Any],
    padding: Tensor | None,
    lengths: tuple[int, int],
    offsets: tuple[int | Tensor, int | Tensor],
) -> bool:
    """Whether the mask is plain causal, as in most passes; a compiled graph traces its own."""
    q_offset, kv_offset = offsets
    return (
        mask_function is causal_mask_function
        and padding is None
        and isinstance(q_offset, int)
        and isinstance(kv_offset, int)
        and not torch.compiler.is_compiling()
        and kv_offset == 0
        and q_offset + lengths[0] == lengths[1]
    )


_CAUSAL = Mask(trace(causal_mask_function, traced_indices(1, (1, 2), (1, 0), "cpu")), "transformers")
