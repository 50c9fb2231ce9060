"""A decoding step on a CPU: attention split among threads, the most likely token, rows of an embedding, the program."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import flashkernel as fk
from flashkernel import Frequencies, Weight
from flashkernel.blocks import decode_cpp, linear_cpp
from flashkernel.blocks.rope import token_tables
from flashkernel.core import cpp
from flashkernel.engine import LLM, SamplingParams
from flashkernel.engine.cpu_decode import RotaryTable

attention: Any = fk.decode_attention
pytestmark = pytest.mark.skipif(cpp.can_compile() is not None, reason=str(cpp.can_compile()))


@pytest.fixture(name="threads", params=[1, 2, 3])
def threads_fixture(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft": {"new": 3},
    "window": {"window": 37},
    "window and first tokens": {"window": 20, "sink_tokens": 5, "new": 2},
    "learned sinks": {"sinks": True, "softcap": 5.0},
    "other widths": {"dim": 72, "value_dim": 40, "heads": 5},
    "one head each": {"heads": 1},
}
LENGTHS = [150, 1, 83, 0]


def _check_attention(new: int = 1, dim: int = 64, value_dim: int = 64, heads: int = 3, **options: Any) -> None:
    """Against float64, with NaN wherever nothing is stored."""
    torch.manual_seed(0)
    kv_heads, page, batch = 3, 16, len(LENGTHS)
    capacity = -(-max(LENGTHS) // page) * page
    q = torch.randn(batch, new, kv_heads * heads, dim)
    k, v = torch.randn(batch, capacity, kv_heads, dim), torch.randn(batch, capacity, kv_heads, value_dim)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(kv_heads * heads)
    exact = {**options, "sinks": options["sinks"].double()} if "sinks" in options else options
    wanted, wanted_lse = attention(
        q.double(), k.double(), v.double(), lengths, return_lse=True, backend="reference", **exact
    )
    for b, length in enumerate(LENGTHS):
        k[b, length:], v[b, length:] = math.nan, math.nan
    table = torch.randperm(batch * capacity // page).view(batch, -1).int()
    pages = [torch.empty(batch * capacity // page, page, *x.shape[2:]) for x in (k, v)]
    for to, x in zip(pages, (k, v)):
        to[table.flatten().long()] = x.view(to.shape)
    for given in ((k, v, lengths), (*pages, lengths, table)):
        found, lse = attention(q, *given, return_lse=True, backend="cpp", **options)
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
        assert torch.allclose(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, threads: int) -> None:
    _check_attention(**CASES[name])


def test_other_instruction_sets(older_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = decode_cpp._kernels.__wrapped__()
    monkeypatch.setattr(decode_cpp, "_kernels", lambda: compiled)
    for case in CASES.values():
        _check_attention(**case)
    _check_greedy()


def test_a_nan_that_is_seen_stays_one(threads: int) -> None:
    q, lengths = torch.randn(2, 1, 6, 64), torch.tensor([130, 130], dtype=torch.int32)
    for which in range(2):
        cache = [torch.randn(2, 130, 3, 64) for _ in range(2)]
        cache[which][1, 70, 2, 5] = math.nan
        found = attention(q, *cache, lengths, backend="cpp")
        assert found[0].isfinite().all()
        assert found[1, 0, :4].isfinite().all()
        assert found[1, 0, 4:].isnan().any(-1).all()


def _check_greedy() -> None:
    for columns in (1, 5, 16, 100, 4099):
        logits = torch.randn(9, columns)
        logits[1, columns // 2] = math.nan
        logits[2] = -math.inf
        logits[3, -1] = math.inf
        logits[4] = 1.0
        logits[5, columns // 2 :] = 7.0
        logits[6, :-1] = -math.inf
        wanted = logits.argmax(-1)
        wanted[4], wanted[5] = 0, columns // 2
        wanted[1:4] = -1
        assert decode_cpp.greedy(logits, -1e30).tolist() == wanted.tolist()
        wide = torch.cat([logits, torch.full((9, 3), 99.0)], 1)
        assert decode_cpp.greedy(wide[:, :columns], -1e30).tolist() == wanted.tolist()


def test_greedy() -> None:
    _check_greedy()


def test_rows_of_an_embedding() -> None:
    weight = Weight.quantize(torch.randn(30, 96), "int8")
    rows, out = torch.tensor([29, 0, 7]), torch.empty(3, 96)
    reader = linear_cpp.RowReader(weight)
    reader(rows, out)
    assert torch.equal(out, weight.take(rows).dequantize(torch.float32))
    for wrong in (-1, 30):
        with pytest.raises(IndexError, match="of 30 rows"):
            reader(torch.tensor([1, wrong]), out)


def test_rotary_table() -> None:
    frequencies = Frequencies.plain(16)
    table = RotaryTable(frequencies)
    for positions in ([3, 0], [511, 512], [5000, 1]):
        given = torch.tensor(positions, dtype=torch.int32)
        wanted = token_tables(given[None], None, None, given, frequencies, 16, interleaved=False)
        found = [torch.empty(2, 8) for _ in range(2)]
        table.copy(given.numpy(), *(one.numpy() for one in found))
        for one, other in zip(found, wanted):
            assert torch.allclose(one, other[0, :, 0].float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_1", {"blk": "Q8_0", "": "F32"}], ids=["all quantized", "plain embedding"])
def test_program_of_any_number_of_threads(kind: Any, threads: int, tmp_path: Path) -> None:
    """The tokens are those of the public operators, for one sequence and several, greedy and sampled."""
    tiny_models.save_gguf(tiny_models.build("llama", intermediate_size=96), tmp_path / "model.gguf", kind)
    llm = LLM(tmp_path / "model.gguf", device="cpu", kv_cache_tokens=512)
    prompts = tiny_models.prompts((5, 40, 23))
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    sampled = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3)
    for given, params in ((prompts[:1], [greedy]), (prompts, [greedy, sampled, greedy])):
        found = [one.outputs[0].token_ids for one in llm.generate(given, params)]
        with fk.use_backend(linear="reference"):
            assert [one.outputs[0].token_ids for one in llm.generate(given, params)] == found
    programs = [key for key in llm.model.linear_calls if key[0] == "program"]
    assert {(key[1], key[3]) for key in programs} >= {(1, threads), (3, threads)}
    assert all(llm.model.linear_calls[key] is not None for key in programs)


def test_programs_go_with_the_cache(tmp_path: Path) -> None:
    """A model that is served by one engine after another keeps nobody's pages."""
    tiny_models.save_gguf(tiny_models.build("llama", intermediate_size=96), tmp_path / "model.gguf", "Q4_1")
    model = LLM(tmp_path / "model.gguf", device="cpu", kv_cache_tokens=64).model
    for _ in range(2):
        llm = LLM(model, kv_cache_tokens=64)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        programs = [call for key, call in model.linear_calls.items() if key[0] == "program"]
        assert len(programs) == 1
        assert programs[0] is not None
        pages = weakref.ref(llm.engine.runner.storage.layers[0].k_pages)
        del llm
        gc.collect()
        assert pages() is None
    assert not [key for key in model.linear_calls if key[0] == "program"]
