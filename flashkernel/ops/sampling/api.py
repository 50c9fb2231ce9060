"""The public sampling function: argument checks and dispatch."""

import torch
from torch import Tensor

from flashkernel.core.arguments import is_float
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.sampling import library, spec
from flashkernel.ops.sampling.params import SampleParams, States

_INTEGERS = (torch.int32, torch.int64)


@replayed
def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    penalties: Tensor | None = None,
    state_rows: Tensor | None = None,
    token_counts: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    bias_until: Tensor | None = None,
    allowed: Tensor | None = None,
    restricted: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Returns one sampled token of each row, without sorting the vocabulary.

    The order is: penalties, biases, allowed tokens, temperature, top-k, top-p, min-p, then the first token whose
    cumulative probability exceeds u times the total. u is Philox4x32-10 of the row's seed and position, so a sample
    depends on nothing else. Equal logits are kept or dropped together. There is no gradient.

    Args:
        logits: (rows, vocab), float32, float16 or bfloat16; any row stride.
        seeds: int64 (rows,).
        positions: int64 (rows,), such as the number of tokens that were generated before this one.
        temperature: float32 (rows,); 0 takes the largest logit (greedy). None: 1.
        top_k: int32 (rows,); keeps the k largest logits, 0 keeps all.
        top_p: float32 (rows,); keeps the largest logits whose probabilities reach this sum, at least the largest; 1
            keeps all.
        min_p: float32 (rows,); keeps tokens with at least this share of the largest probability; 0 keeps all.
        penalties: float32 (rows, 3): repetition (divides positive logits and multiplies negative ones of tokens in the
            prompt or output), presence (subtracted for tokens in the output), frequency (for each time). Needs
            `token_counts`.
        state_rows: int64 (rows,), the state of each row: a row of the tensors below. None: row i has state i.
        token_counts: int32 (states, vocab): how often the output has each token; plus 2^30 if the prompt has it.
        bias_ids: int32 (states, entries), tokens whose logits change; -1 for no entry. Entries end at the first -1.
        bias_values: float32 (states, entries), added to their logits.
        bias_until: int32 (states, entries); an entry applies to positions before it. None: to all.
        allowed: int32 (states, ceil(vocab / 32)); token t may be sampled if bit t % 32 of word t // 32 is set.
        restricted: int32 (states,); 0 for states that `allowed` does not apply to. None: it applies to all.
        backend: The backend to run on ("triton", "torch", ...); None picks the best one that serves the call.

    Returns:
        int64 (rows,); -1 for a row whose largest logit is NaN or infinite.

    Example:
        >>> import torch, flashkernel as fk
        >>> logits = torch.tensor([[0.0, 5.0, 1.0], [3.0, 2.9, -1.0]])
        >>> seeds, positions = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64)
        >>> fk.sample(logits, seeds, positions, temperature=torch.zeros(2))
        tensor([1, 0])
        >>> fk.sample(logits, seeds, positions, top_k=torch.tensor([1, 1], dtype=torch.int32))
        tensor([1, 0])
    """
    if logits.ndim != 2 or not is_float(logits) or logits.shape[1] == 0:
        raise ValueError(
            f"sample: logits must be a float tensor (rows, vocab) with a token to choose, not {logits.dtype} "
            f"{tuple(logits.shape)}"
        )
    rows, vocab = logits.shape
    _check("seeds", seeds, (rows,), (torch.int64,), logits)
    _check("positions", positions, (rows,), (torch.int64,), logits)
    for name, given in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        _check(name, given, (rows,), (torch.float32,), logits)
    _check("top_k", top_k, (rows,), _INTEGERS, logits)
    _check("penalties", penalties, (rows, 3), (torch.float32,), logits)
    _check("state_rows", state_rows, (rows,), (torch.int64,), logits)
    states = rows if state_rows is None else -1
    _check("token_counts", token_counts, (states, vocab), (torch.int32,), logits)
    _check("bias_ids", bias_ids, (states, -1), (torch.int32,), logits)
    _check("allowed", allowed, (states, -(-vocab // 32)), (torch.int32,), logits)
    if (penalties is None) != (token_counts is None):
        raise ValueError("sample: penalties and token_counts belong together; give both, or neither")
    if (bias_ids is None) != (bias_values is None):
        raise ValueError("sample: bias_ids and bias_values belong together; give both, or neither")
    if bias_ids is None and bias_until is not None:
        raise ValueError("sample: bias_until says how long biases apply; give bias_ids and bias_values too")
    if allowed is None and restricted is not None:
        raise ValueError("sample: restricted says where `allowed` applies; give both, or allowed alone")
    _check("restricted", restricted, (states,), (torch.int32,), logits)
    if bias_ids is not None:
        _check("bias_values", bias_values, tuple(bias_ids.shape), (torch.float32,), logits)
        _check("bias_until", bias_until, tuple(bias_ids.shape), (torch.int32,), logits)
    chosen = choose(spec.SAMPLE, backend, logits.device, logits.dtype, vocab=vocab)
    if chosen.composite:
        with torch.no_grad():
            return chosen.run(
                logits, seeds, positions, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                penalties=penalties, state_rows=state_rows, token_counts=token_counts, bias_ids=bias_ids,
                bias_values=bias_values, bias_until=bias_until, allowed=allowed, restricted=restricted,
            )  # fmt: skip
    params = SampleParams(seeds, positions, temperature, top_k, top_p, min_p, penalties)
    state = States(state_rows, token_counts, bias_ids, bias_values, bias_until, allowed, restricted)
    return library.sample(logits, params, state, chosen.target)


def _check(
    name: str, given: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], logits: Tensor
) -> None:
    """ValueError for a tensor of another shape (-1 is any size), dtype or device."""
    if given is None:
        return
    sizes = zip(shape, given.shape)
    fits = given.ndim == len(shape) and all(wanted == -1 or wanted == size for wanted, size in sizes)
    if not fits or given.dtype not in dtypes or given.device != logits.device:
        wanted = ", ".join("*" if size == -1 else str(size) for size in shape)
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"sample: {name} is {given.dtype} {tuple(given.shape)} on {given.device}; for logits of "
            f"{tuple(logits.shape)} it must be {kinds} ({wanted}) on {logits.device}"
        )
