"""What the table cannot say of sampling: its distribution, its random numbers, ties, wrong inputs, several passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.core import tune
from flashkernel.ops.sampling import threshold_triton
from flashkernel.ops.sampling import triton as kernels
from flashkernel.ops.sampling.configs import SAMPLE, SampleConfig
from flashkernel.ops.sampling.params import IN_PROMPT, SampleParams
from flashkernel.ops.sampling.reference import kept, philox, uniform

BACKENDS = ["reference", "torch", "triton"]
by_backend = pytest.mark.parametrize("backend", BACKENDS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _draws(logits: Tensor, count: int, backend: str, **settings: float) -> Tensor:
    """How often each token of one row of logits is drawn, with `count` seeds."""
    rows = logits.expand(count, -1)
    if logits.is_cuda:  # one kernel for all settings
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    given = {
        name: torch.full((count,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=rows.device)
        for name, value in settings.items()
    }
    seeds = torch.arange(count, device=rows.device) * 7919 + 3
    positions = torch.full_like(seeds, 11)
    tokens = fk.sample(rows, seeds, positions, backend=backend, **given)
    return torch.bincount(tokens.cpu(), minlength=logits.shape[-1])


def _expected(logits: Tensor, settings: dict[str, float]) -> Tensor:
    """Probabilities by a sort in float64: independent of `kept` but for the order of the steps."""
    order = logits.double().argsort(descending=True)
    p = torch.softmax(logits.double() / settings.get("temperature", 1.0), 0)[order]
    if settings.get("top_k"):
        p[int(settings["top_k"]) :] = 0
    p /= p.sum()
    if "top_p" in settings:
        p[p.cumsum(0) - p >= settings["top_p"]] = 0
    if "min_p" in settings:
        p[p < settings["min_p"] * p[0]] = 0
    return torch.zeros_like(p).scatter_(0, order, p / p.sum())


MIXES: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
]


def _assert_distributed(counts: Tensor, p: Tensor) -> None:
    """Chi-square: tokens of probability 0 never come; the statistic is below its 99.99% quantile (Wilson-Hilferty)."""
    total = int(counts.sum())
    assert int(counts[p == 0].sum()) == 0
    frequent = p * total >= 5
    observed = torch.cat((counts[frequent], counts[~frequent].sum()[None])).double()
    expected = torch.cat((p[frequent], p[~frequent].sum()[None])) * total
    observed, expected = observed[expected > 1e-9], expected[expected > 1e-9]
    degrees = observed.numel() - 1
    if degrees < 1:
        return
    statistic = float(((observed - expected) ** 2 / expected).sum())
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} of {degrees} degrees is above {limit:.1f}"


@pytest.mark.parametrize("settings", MIXES, ids=lambda mix: "-".join(mix))
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_tokens_have_the_distribution_of_the_definition(backend: str, settings: dict[str, float]) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    _assert_distributed(_draws(logits, 20000, backend, **settings), _expected(logits, settings))


@pytest.mark.parametrize("settings", MIXES[2:], ids=lambda mix: "-".join(mix))
def test_the_kernel_draws_the_distribution_of_the_definition(settings: dict[str, float]) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    _assert_distributed(_draws(logits, 150, "triton", **settings), _expected(logits, settings))


@pytest.mark.gpu
@pytest.mark.parametrize("settings", MIXES, ids=lambda mix: "-".join(mix))
@pytest.mark.parametrize("vocab", [50, 128256])
def test_the_kernel_draws_the_distribution_on_a_gpu(vocab: int, settings: dict[str, float]) -> None:
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2).cuda()
    _assert_distributed(_draws(logits, 2000, "triton", **settings), _expected(logits.cpu(), settings))


def test_philox_gives_the_published_words() -> None:
    zeros = torch.zeros(1, dtype=torch.int64)
    ones = -torch.ones(1, dtype=torch.int64)
    assert philox(zeros, zeros).item() == 0x6627E8D5
    values = uniform(torch.arange(4000), ones.expand(4000))
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    assert abs(float(values.mean()) - 0.5) < 0.02


@by_backend
def test_a_sample_depends_on_its_seed_and_position_alone(backend: str) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0)).expand(6, -1)
    seeds = torch.tensor([5, 5, 5, 6, 2**62, -(2**62)])
    positions = torch.tensor([0, 0, 1, 0, 2**33, 2**33])
    all_rows = fk.sample(logits, seeds, positions, backend=backend)
    assert all_rows[0] == all_rows[1]
    for row in range(6):
        alone = fk.sample(logits[row : row + 1], seeds[row : row + 1], positions[row : row + 1], backend=backend)
        assert alone[0] == all_rows[row]
    assert len(set(all_rows.tolist())) > 2


@by_backend
def test_equal_logits_are_kept_or_dropped_together(backend: str) -> None:
    """top_k=2 with three logits tied for the second place keeps all four."""
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0, -0.0]]).expand(200, -1)
    seeds, positions = torch.arange(200), torch.zeros(200, dtype=torch.int64)
    tokens = fk.sample(logits, seeds, positions, top_k=torch.full((200,), 2, dtype=torch.int32), backend=backend)
    assert set(tokens.tolist()) == {0, 1, 2, 3}
    flat = torch.zeros(60, 6)
    tokens = fk.sample(flat, seeds[:60], positions[:60], top_p=torch.full((60,), 0.01), backend=backend)
    assert set(tokens.tolist()) == set(range(6))


@by_backend
def test_rows_without_a_finite_maximum_give_minus_one(backend: str) -> None:
    nan, inf = float("nan"), float("inf")
    lowest = torch.finfo(torch.float32).min
    logits = torch.tensor(
        [[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf], [-inf, 2.0, -inf], [lowest, lowest, 0.5]]
    )
    seeds, positions = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    for temperature in (torch.zeros(5), torch.ones(5)):
        tokens = fk.sample(logits, seeds, positions, temperature=temperature, backend=backend)
        assert tokens.tolist() == [-1, -1, -1, 1, 2]
        top_k = torch.full((5,), 2, dtype=torch.int32)
        assert fk.sample(logits, seeds, positions, temperature=temperature, top_k=top_k, backend=backend)[4] == 2


@by_backend
def test_penalties_biases_and_masks_change_the_greedy_token(backend: str) -> None:
    logits = torch.tensor([[2.0, 1.9, 0.5, -1.0]])
    seeds = positions = torch.zeros(1, dtype=torch.int64)
    greedy = {"temperature": torch.zeros(1), "backend": backend}
    counts = torch.tensor([[IN_PROMPT, 0, 3, 0]], dtype=torch.int32)

    def token(**given: Tensor) -> int:
        return int(fk.sample(logits, seeds, positions, **greedy, **given))

    assert token() == 0
    repetition = torch.tensor([[1.2, 0.0, 0.0]])
    assert token(penalties=repetition, token_counts=counts) == 1  # 2 / 1.2 < 1.9
    presence = torch.tensor([[1.0, 5.0, 0.0]])
    assert token(penalties=presence, token_counts=counts) == 0  # the prompt's tokens are not in the output
    assert token(penalties=torch.tensor([[1.0, 0.0, -1.0]]), token_counts=counts) == 2  # 0.5 + 3
    ids, values = torch.tensor([[3, -1]], dtype=torch.int32), torch.tensor([[9.0, 0.0]])
    assert token(bias_ids=ids, bias_values=values) == 3
    until = torch.tensor([[0, 0]], dtype=torch.int32)
    assert token(bias_ids=ids, bias_values=values, bias_until=until) == 0  # only before position 0
    allowed = torch.tensor([[0b0110]], dtype=torch.int32)
    assert token(allowed=allowed) == 1
    assert token(allowed=allowed, restricted=torch.zeros(1, dtype=torch.int32)) == 0
    ban = torch.tensor([[-float("inf"), 0.0]])
    assert token(bias_ids=torch.tensor([[0, -1]], dtype=torch.int32), bias_values=ban) == 1
    ended = torch.tensor([[3, -1, 2]], dtype=torch.int32)
    assert token(bias_ids=ended, bias_values=torch.tensor([[9.0, 0.0, 99.0]])) == 3  # entries end at the first -1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", [1.0, 40.0, 1e-6, 1e12])
def test_the_search_takes_as_many_passes_as_it_needs(
    device: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small capacity makes the interval narrow over several passes, for logits of any scale, ties included."""
    monkeypatch.setattr(kernels, "CAPACITY", 16)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(6, 1500, generator=generator) * spread).to(device)
    logits[3] = logits[3].bfloat16().float()
    logits[4] = (logits[4] > 0) * spread
    logits[5, 700:] = torch.finfo(torch.float32).min
    seeds, positions = torch.arange(6, device=device), torch.full((6,), 5, device=device)
    top_k = torch.tensor([40, 0, 700, 300, 5, 900], dtype=torch.int32, device=device)
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.95, 0.3, 0.99], device=device)
    temperature = torch.full((6,), spread, device=device)
    with tune.override("sample", SampleConfig(512, 4, 4, 1)):
        tokens = fk.sample(
            logits, seeds, positions, temperature=temperature, top_k=top_k, top_p=top_p, backend="triton"
        )
    settings = SampleParams(seeds, positions, temperature.double(), top_k, top_p.double())
    expected = fk.sample(
        logits, seeds, positions, temperature=temperature, top_k=top_k, top_p=top_p, backend="reference"
    )
    assert tokens.tolist() == expected.tolist()
    keep = kept(torch.where(logits > -1e30, logits, -torch.inf).double(), settings)
    assert bool(keep.gather(1, tokens[:, None]).all())


VOCAB = 128256


def _vocabularies() -> Tensor:
    """Rows of a large vocabulary: flat, peaked, sorted, with ties, far from 0, mostly -inf."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(6, VOCAB, generator=generator)
    peaked, few = normal[0].clone(), torch.full((VOCAB,), -torch.inf)
    peaked[777] = 20.0
    few[:9000] = normal[1, :9000]
    zipf = -1.1 * torch.log(torch.arange(1, VOCAB + 1))
    rows = [normal[0], 3 * normal[1], normal[2].sort().values, zipf, zipf.flip(0), torch.zeros(VOCAB), peaked,
            (4 * normal[3]).round() / 4, 1e9 * normal[4] + 1e10, few]  # fmt: skip
    return torch.stack(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [{"top_p": 0.9}, {"top_k": 50}, {"top_k": 20000, "top_p": 0.5}], ids="-".join)
def test_rows_of_a_large_vocabulary(device: str, given: dict[str, float]) -> None:
    logits = _vocabularies().to(device)
    rows = logits.shape[0]
    options = {
        name: torch.full((rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=device)
        for name, value in {"temperature": 0.8, **given}.items()
    }
    seeds, positions = torch.arange(rows, device=device), torch.full((rows,), 7, device=device)
    found, expected = (
        fk.sample(logits, seeds, positions, **options, backend=backend) for backend in ("triton", "reference")
    )
    assert found.tolist() == expected.tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="passes are counted under the interpreter")
@pytest.mark.parametrize(("row", "passes"), [(0, 1), (1, 1), (2, 1), (6, 2)])
def test_a_search_takes_one_pass_where_a_sample_tells(row: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose threshold a sample of the row comes near to; a single token that has most of the mass it misses."""
    pivots, pivot = [], threshold_triton._pivot
    monkeypatch.setattr(threshold_triton, "_pivot", lambda *args: pivots.append(args) or pivot(*args))
    logits, one = _vocabularies()[row : row + 1], torch.ones(1, dtype=torch.int64)
    fk.sample(logits, one, one, top_p=torch.tensor([0.9]), backend="triton")
    assert len(pivots) == 5 * passes


def test_wrong_inputs_are_refused() -> None:
    logits, seeds = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    counts = torch.zeros(2, 5, dtype=torch.int32)
    for given, message in (
        ({"temperature": torch.zeros(3)}, "temperature"),
        ({"top_k": torch.zeros(2)}, "top_k"),
        ({"token_counts": counts}, "belong together"),
        ({"penalties": torch.zeros(2, 3)}, "belong together"),
        ({"bias_ids": counts}, "belong together"),
        ({"bias_until": counts}, "bias_until"),
        ({"allowed": torch.zeros(2, 2, dtype=torch.int32)}, "allowed"),
        ({"restricted": torch.zeros(2, dtype=torch.int32)}, "restricted"),
    ):
        with pytest.raises(ValueError, match=message):
            fk.sample(logits, seeds, seeds, **given)
    with pytest.raises(ValueError, match="a token to choose"):
        fk.sample(torch.zeros(2, 0), seeds, seeds)
    with pytest.raises(ValueError, match="seeds"):
        fk.sample(logits, seeds.int(), seeds)


def test_a_row_has_a_limited_number_of_chunks() -> None:
    assert SAMPLE.valid(SampleConfig(16, 1, 1, 1), None, {"vocab": 128256}) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("setting", [{"top_p": 0.0}, {"top_p": -1.0}, {"min_p": 1.0}, {"min_p": 2.0}])
def test_the_largest_logit_is_always_kept(backend: str, setting: dict[str, float]) -> None:
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(0))
    settings = {name: torch.full((4,), value) for name, value in setting.items()}
    found = fk.sample(logits, torch.arange(4), torch.zeros(4, dtype=torch.int64), **settings, backend=backend)
    assert torch.equal(found, logits.argmax(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", range(4))
def test_neighboring_floats_are_told_apart(device: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More logits than are bisected in registers have two values with no float between them; top-k keeps the larger."""
    monkeypatch.setattr(kernels, "CAPACITY", 16)
    bits = torch.tensor(1.0).view(torch.int32) + steps + torch.arange(1500, dtype=torch.int32) % 2
    logits, seeds = bits.view(torch.float32).expand(20, -1).to(device), torch.arange(20, device=device)
    top_k = torch.full((20,), 5, dtype=torch.int32, device=device)
    with tune.override("sample", SampleConfig(512, 4, 4, 1)):
        tokens = fk.sample(logits, seeds, torch.zeros_like(seeds), top_k=top_k, backend="triton")
    assert bool((tokens % 2 == 1).all())
