"""Weights as checkpoints of other tools store them: GPTQ, AWQ and compressed-tensors, to and from `Weight`.

A matrix W is (out, in) and a group is `columns` consecutive columns of a row. Words are int32. What is read and written
again has the same bytes. GPTQ and AWQ have scales in float16, to which others are rounded; those of compressed-tensors
are exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashkernel.blocks.integers import pack_nibbles, unpack_nibbles
from flashkernel.blocks.weight import Weight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs lies in bits 4i to 4i + 3 of a word
_SCALES = torch.float16  # GPTQ's and AWQ's


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Returns values 0 to 2^bits - 1 (..., n) as int32 words (..., n * bits / 32), the first in the lowest bits.

    Args:
        codes: The values; n is a multiple of 32 / bits.
        bits: 4 or 8.

    Example:
        >>> import torch
        >>> pack_words(torch.tensor([[1, 2, 0, 0, 0, 0, 0, 0]]), 4).tolist()
        [[33]]
    """
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (codes.long().unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Returns the values of int32 words, uint8 (..., words * 32 / bits): the inverse of `pack_words`."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2).to(torch.uint8)


def codes_of(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Returns (values 0 to 15 or 0 to 255, their zero points or None) of an "int4" or "int8" Weight."""
    if weight.format == "int4":
        return unpack_nibbles(weight.data), weight.zeros
    if weight.format == "int8":
        zeros = None if weight.zeros is None else (weight.zeros.int() + 128).to(torch.uint8)
        return (weight.data.int() + 128).to(torch.uint8), zeros
    raise ValueError(f"{weight!r} cannot be stored as integers; quantize it to int4 or int8")


def weight_of_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Weight:
    """Returns the Weight of values 0 to 2^bits - 1 (out, in), scales (out, groups) or one, and as many zero points.

    Zero points that all are the middle (8 or 128) are left out: the Weight is then symmetric.
    """
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    if bits == 4:
        if codes.shape[-1] % 2:
            raise ValueError(f"a matrix {tuple(codes.shape)} has an odd number of columns, which int4 does not pack")
        if scales.numel() == 1:  # int4 has scales for rows at least
            scales = scales.expand(codes.shape[0], 1)
            zeros = None if zeros is None else zeros.expand(codes.shape[0], 1)
        return Weight.pack(pack_nibbles(codes), scales.float(), zeros, "int4")
    signed = None if zeros is None else (zeros.int() - 128).to(torch.int8)
    return Weight.pack((codes.int() - 128).to(torch.int8), scales.float(), signed, "int8")


def read_gptq(parts: Mapping[str, Tensor], bits: int, version: int, group_size: int | None = None) -> Weight:
    """Returns the Weight of a GPTQ layer.

    qweight (in * bits / 32, out): word (r, n) has the next 32 / bits inputs of output n. qzeros (groups,
    out * bits / 32): word (g, c) has the zero points of the next 32 / bits outputs; version 1 stores them less one,
    modulo 2^bits. scales (groups, out). g_idx (in), optional: the group of each input. If groups are no consecutive
    columns of one size (act-order without static groups, or a size that does not divide a row) the Weight is "plain".

    Args:
        parts: The tensors by name.
        bits: 4 or 8.
        version: 1 or 2 (`checkpoint_format` gptq or gptq_v2).
        group_size: Inputs of a group where g_idx is missing; None: a row in equal parts.
    """
    _need(parts, ("qweight", "qzeros", "scales"))
    codes = unpack_words(parts["qweight"].T, bits)  # (out, in)
    scales = parts["scales"].T.float()  # (out, groups)
    zeros = (unpack_words(parts["qzeros"], bits).T.int() + (1 if version == 1 else 0)) % 2**bits
    out, inner = codes.shape
    groups = scales.shape[1]
    if scales.shape[0] != out or zeros.shape != scales.shape:
        raise ValueError(_mismatch(parts))
    order = parts.get("g_idx")
    if order is None and group_size is not None and groups == -(-inner // group_size):
        order = torch.arange(inner, device="cpu") // group_size
    if order is None and inner % groups:
        raise ValueError(_mismatch(parts))
    if order is not None and not _in_equal_parts(order, inner, groups):
        return _dequantized(parts, codes, zeros, scales, order)
    return weight_of_codes(codes, scales, zeros.to(torch.uint8), bits)


def _in_equal_parts(order: Tensor, inner: int, groups: int) -> bool:
    """Whether g_idx says that the groups are consecutive columns, all as many."""
    return inner % groups == 0 and torch.equal(order.long(), torch.arange(inner, device="cpu") // (inner // groups))


def _dequantized(
    parts: Mapping[str, Tensor], codes: Tensor, zeros: Tensor | int, scales: Tensor, order: Tensor
) -> Weight:
    """The plain Weight of values (out, in) whose column j has the group order[j]."""
    if order.numel() != codes.shape[1]:
        raise ValueError(_mismatch(parts))
    if int(order.min()) < 0 or int(order.max()) >= scales.shape[1]:
        wrong = int(order.min()) if int(order.min()) < 0 else int(order.max())
        raise ValueError(f"g_idx names group {wrong}, and there are {scales.shape[1]}")
    index = order.long()
    each = zeros[:, index] if isinstance(zeros, Tensor) else zeros
    return Weight((codes.float() - each) * scales[:, index])


def write_gptq(weight: Weight, version: int = 1) -> dict[str, Tensor]:
    """Returns the tensors of a GPTQ layer of an "int4" or "int8" `weight`; see `read_gptq`. Scales are float16."""
    codes, zeros = codes_of(weight)
    bits = 4 if weight.format == "int4" else 8
    out, inner = codes.shape
    scales = _row_scales(weight)
    zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.uint8) if zeros is None else zeros.expand_as(scales)
    if version == 1 and bool((zeros == 0).any()):
        raise ValueError(
            "GPTQ's version 1 stores zero points less one and has no 0; write version 2, or symmetric ones"
        )
    _need_multiple("GPTQ", out, inner, 32 // bits)
    groups = scales.shape[1]
    return {
        "qweight": pack_words(codes, bits).T.contiguous(),
        "qzeros": pack_words((zeros.int() - (1 if version == 1 else 0)).T, bits).contiguous(),
        "scales": _in_float16(scales).T.contiguous(),
        "g_idx": (torch.arange(inner, device="cpu") // (inner // groups)).to(torch.int32),
    }


def read_awq(parts: Mapping[str, Tensor]) -> Weight:
    """Returns the Weight of an AWQ layer (version "gemm", 4 bits).

    qweight (in, out / 8): word (k, c) has the outputs 8c + AWQ_ORDER[i] in bits 4i to 4i + 3. qzeros (groups, out / 8)
    likewise. scales (groups, out).

    Args:
        parts: The tensors by name.
    """
    _need(parts, ("qweight", "scales"))
    scales = parts["scales"].T.float()
    codes = _from_awq_order(parts["qweight"]).T
    zeros = None if parts.get("qzeros") is None else _from_awq_order(parts["qzeros"]).T
    if scales.shape[0] != codes.shape[0] or (zeros is not None and zeros.shape != scales.shape):
        raise ValueError(_mismatch(parts))
    return weight_of_codes(codes, scales, zeros, 4)


def write_awq(weight: Weight) -> dict[str, Tensor]:
    """Returns the tensors of an AWQ layer of an "int4" `weight`; see `read_awq`. Scales are float16."""
    if weight.format != "int4":
        raise ValueError(f"AWQ has 4 bits; {weight!r} is stored by GPTQ's or compressed-tensors' layouts")
    codes, zeros = codes_of(weight)
    scales = _row_scales(weight)
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if zeros is None else zeros.expand_as(scales)
    _need_multiple("AWQ", codes.shape[0], codes.shape[1], 8)
    return {
        "qweight": _to_awq_order(codes.T),
        "qzeros": _to_awq_order(zeros.T),
        "scales": _in_float16(scales).T.contiguous(),
    }


def read_pack_quantized(parts: Mapping[str, Tensor], bits: int) -> Weight:
    """Returns the Weight of a layer in compressed-tensors' pack-quantized format.

    weight_packed (out, in * bits / 32): word (n, c) has the next 32 / bits inputs of output n, each plus 2^(bits - 1).
    weight_scale (out, groups). weight_zero_point, if asymmetric: (out * bits / 32, groups), packed along the outputs,
    or int8 (out, groups) of older files. weight_shape: (out, in). weight_g_idx (in), of older files: the group of each
    input, or -1 for groups in order; as in `read_gptq`, the Weight may be "plain".

    Args:
        parts: The tensors by name.
        bits: 4 or 8.
    """
    _need(parts, ("weight_packed", "weight_scale"))
    shape = parts.get("weight_shape")
    codes = unpack_words(parts["weight_packed"], bits)
    if shape is not None:
        out, inner = (int(size) for size in shape)
        if out != codes.shape[0] or not 0 <= codes.shape[1] - inner < 32 // bits:
            raise ValueError(_mismatch(parts))
        codes = codes[:, :inner]
    scales, zeros = parts["weight_scale"].float(), parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpack_words(zeros.T.contiguous(), bits).T[: scales.shape[0]]
    elif zeros is not None:
        zeros = (zeros.int() + 2 ** (bits - 1)).to(torch.uint8)
    if scales.ndim == 2 and scales.shape[0] != codes.shape[0]:
        raise ValueError(_mismatch(parts))
    if zeros is not None and zeros.numel() != scales.numel():
        raise ValueError(_mismatch(parts))
    order = parts.get("weight_g_idx")
    if order is None or bool((order == -1).all()):
        return weight_of_codes(codes, scales, zeros, bits)
    if scales.ndim != 2 or order.numel() != codes.shape[1]:
        raise ValueError(_mismatch(parts))
    if _in_equal_parts(order, codes.shape[1], scales.shape[1]):
        return weight_of_codes(codes, scales, zeros, bits)
    return _dequantized(parts, codes, 2 ** (bits - 1) if zeros is None else zeros.int(), scales, order)


def write_pack_quantized(weight: Weight) -> dict[str, Tensor]:
    """Returns the tensors of a layer in compressed-tensors' pack-quantized format; see `read_pack_quantized`.

    Args:
        weight: "int4" or "int8", of sizes that fill whole words.
    """
    codes, zeros = codes_of(weight)
    bits = 4 if weight.format == "int4" else 8
    _need_multiple("compressed-tensors", codes.shape[0] if zeros is not None else 32, codes.shape[1], 32 // bits)
    found = {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": _narrowed(_row_scales(weight)).contiguous(),
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64, device="cpu"),
    }
    if zeros is not None:
        found["weight_zero_point"] = pack_words(zeros.T, bits).T.contiguous()
    return found


def _row_scales(weight: Weight) -> Tensor:
    """Scales (out, groups), one for each row at least."""
    assert weight.scales is not None
    if weight.group_shape[0] not in (1, -1):
        raise ValueError(f"{weight!r} has scales for several rows, which no checkpoint stores as integers")
    return weight.scales.expand(weight.shape[0], -1)


def _in_float16(scales: Tensor) -> Tensor:
    """Scales rounded to float16; ValueError if some are beyond its range."""
    found = scales.to(_SCALES)
    if bool((~found.isfinite() | ((found == 0) & (scales != 0))).any()):
        raise ValueError(
            f"scales from {float(scales.min()):.3g} to {float(scales.max()):.3g} are beyond the range of float16; "
            "store the model in the layout 'compressed-tensors'"
        )
    return found


def _narrowed(scales: Tensor) -> Tensor:
    """Scales in the narrowest dtype that has them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype)
    return scales


def _from_awq_order(words: Tensor) -> Tensor:
    stored = unpack_words(words, 4).unflatten(-1, (-1, 8))
    found = torch.empty_like(stored)
    found[..., list(AWQ_ORDER)] = stored
    return found.flatten(-2)


def _to_awq_order(codes: Tensor) -> Tensor:
    return pack_words(codes.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2), 4).contiguous()


def _need(parts: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in parts]
    if missing:
        raise ValueError(f"{', '.join(missing)} are missing; there are {', '.join(parts) or 'no tensors'}")


def _need_multiple(kind: str, out: int, inner: int, each: int) -> None:
    if out % each or inner % each:
        raise ValueError(
            f"{kind} stores {each} outputs and inputs in a word; a matrix ({out}, {inner}) does not fill them"
        )


def _mismatch(parts: Mapping[str, Tensor]) -> str:
    shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in parts.items())
    return f"the shapes do not fit together: {shapes}; the checkpoint is damaged, or stored in another way than it says"
