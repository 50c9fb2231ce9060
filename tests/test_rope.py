"""What the matrix cannot say about the rotary embedding: formulas, scaling rules, writing in place, errors."""

from __future__ import annotations

import math

import pytest
import torch
from compiled import compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from in_turn import on_machines

from flashkernel.blocks.rope import Rotation
from flashkernel.core import device as devices
from flashkernel.core.launch import collect_launches
from flashkernel.core.op import Case
from flashkernel.ops.rope import Frequencies, library, reference, rope, spec

KERNELS = "flashkernel.ops.rope.triton"
BACKENDS = ("reference", "torch", "triton")


def _heads(batch: int = 2, seq: int = 3, heads: int = 4, dim: int = 16) -> torch.Tensor:
    return torch.randn(batch, seq, heads, dim, generator=torch.Generator().manual_seed(batch + 10 * heads))


@pytest.mark.parametrize("backend", BACKENDS)
def test_interleaved_is_complex_multiplication(backend: str) -> None:
    q, positions = _heads(), torch.tensor([[0, 7, 100], [3, 3, 12345]])
    frequencies = Frequencies.plain(16, 10000.0)
    angle = positions.double()[..., None, None] * torch.tensor(frequencies.values, dtype=torch.float64)
    turned = torch.view_as_complex(q.double().unflatten(-1, (8, 2))) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.view_as_real(turned).flatten(-2).float()
    got = rope(q, positions=positions, frequencies=frequencies, interleaved=True, backend=backend)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_split_is_the_rotate_half_formula(backend: str) -> None:
    """x cos + rotate_half(x) sin with full-width tables, as Transformers writes it."""
    q, k = _heads(), _heads(heads=2)
    cos, sin = Frequencies.plain(16).table(3)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def formula(x: torch.Tensor) -> torch.Tensor:
        rotated = torch.cat((-x[..., 8:], x[..., :8]), -1)
        return x * cos[None, :, None] + rotated * sin[None, :, None]

    for got, x in zip(rope(q, k, cos[None], sin[None], backend=backend), (q, k)):
        torch.testing.assert_close(got, formula(x), rtol=1e-5, atol=1e-6)


def test_the_two_layouts_are_permutations_of_each_other() -> None:
    q, frequencies = _heads(), Frequencies.plain(16)
    split = rope(q, frequencies=frequencies, backend="triton")
    mixed = q.unflatten(-1, (2, 8)).transpose(-1, -2).flatten(-2)  # pair i from (i, i + 8) to (2i, 2i + 1)
    turned = rope(mixed, frequencies=frequencies, interleaved=True, backend="triton")
    torch.testing.assert_close(turned.unflatten(-1, (8, 2)).transpose(-1, -2).flatten(-2), split)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k, frequencies = _heads(1, 1, 1), _heads(1, 1, 1).flip(-1), Frequencies.plain(16)

    def score(m: int, n: int) -> float:
        turned_q = rope(q, positions=torch.tensor([m]), frequencies=frequencies, backend="triton")
        turned_k = rope(k, positions=torch.tensor([n]), frequencies=frequencies, backend="triton")
        return float((turned_q * turned_k).sum())

    assert score(5, 2) == pytest.approx(score(100_005, 100_002), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_computed_angles_do_not_lose_precision_far_out() -> None:
    """The phase is exact modulo a turn, so position 2^31 is as good as position 2; negative positions turn back."""
    frequencies = Frequencies.plain(8, 10000.0)
    positions = torch.tensor([2, 131_071, 10**6 + 1, 2**31 + 12345, -7])
    one = torch.zeros(1, 5, 1, 8)
    one[..., :4] = 1.0  # (1, 0) becomes (cos, sin)
    got = rope(one, positions=positions, frequencies=frequencies, backend="triton")[0, :, 0]
    for row, position in zip(got, positions.tolist()):
        for pair, value in enumerate(frequencies.values):
            angle = math.fmod(position * value, 2 * math.pi)
            assert float(row[pair]) == pytest.approx(math.cos(angle), abs=1e-6)
            assert float(row[pair + 4]) == pytest.approx(math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_position_outside_the_table_is_nan_and_reads_nothing(backend: str) -> None:
    q, k = _heads(1, 4, 2, 12), _heads(1, 4, 1, 12)
    cos, sin = Frequencies.plain(8).table(6)
    positions = torch.tensor([5, 6, -1, 2**40])
    for got, x in zip(rope(q, k, cos, sin, positions, backend=backend), (q, k)):
        assert bool(got[0, 1:, :, :8].isnan().all())
        assert torch.equal(got[..., 8:], x[..., 8:])
        assert not bool(got[0, 0].isnan().any())
    first = rope(q[:, :1], None, cos, sin, positions[:1], backend="reference")
    torch.testing.assert_close(rope(q, None, cos, sin, positions, backend=backend)[:, :1], first)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_may_say_each_value_twice(backend: str, interleaved: bool) -> None:
    q = _heads(dim=20)
    cos, sin = Frequencies.plain(12).table(3)
    expected = rope(q, None, cos, sin, interleaved=interleaved, backend=backend)
    repeat = (lambda x: x.repeat_interleave(2, -1)) if interleaved else (lambda x: torch.cat((x, x), -1))
    for shape in ((3, 12), (1, 3, 12), (2, 3, 12)):
        wide_cos, wide_sin = repeat(cos).expand(shape), repeat(sin).expand(shape)
        got = rope(q, None, wide_cos, wide_sin, rotary_dim=12, interleaved=interleaved, backend=backend)
        torch.testing.assert_close(got, expected)


def test_scaling_is_in_tables_and_in_computed_angles() -> None:
    q, frequencies = _heads(), Frequencies.yarn(16, 10000.0, 4.0, 64)
    assert frequencies.scaling == pytest.approx(0.1 * math.log(4) + 1)
    computed = rope(q, frequencies=frequencies, backend="triton")
    torch.testing.assert_close(computed, rope(q, None, *frequencies.table(3), backend="triton"))
    plain = rope(q, frequencies=Frequencies(frequencies.values), backend="triton")
    torch.testing.assert_close(computed, plain * frequencies.scaling)


def test_heads_first_memory_is_read_without_a_copy() -> None:
    memory = torch.randn(2, 4, 3, 16)  # (batch, heads, seq, head_dim)
    q = memory.transpose(1, 2)
    with collect_launches() as launches:
        rope(q, frequencies=Frequencies.plain(16), backend="triton")
    assert len(launches) == 1
    assert launches[0].args[0].q.data_ptr() == memory.data_ptr()
    got = rope(q, frequencies=Frequencies.plain(16), backend="triton")
    torch.testing.assert_close(got, rope(q.contiguous(), frequencies=Frequencies.plain(16), backend="torch"))


def test_q_and_k_are_one_launch_each_way() -> None:
    q, k = _heads().requires_grad_(), _heads(heads=2).requires_grad_()
    turned = rope(q, k, frequencies=Frequencies.plain(16), backend="triton")
    with collect_launches() as launches:
        rope(q, k, frequencies=Frequencies.plain(16), backend="triton")
        torch.autograd.grad([turned[0].sum(), turned[1].sum()], [q, k])
    assert [launch.name for launch in launches] == ["rope_rotate", "rope_rotate"]
    assert [launch.constants["INVERSE"] for launch in launches] == [False, True]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_strides(data: st.DataObject) -> None:
    """Slices, steps and permutations of larger tensors, positions as views too."""
    sizes = [data.draw(st.integers(1, 3)) for _ in range(3)]
    dim = 2 * data.draw(st.integers(1, 6))
    interleaved = data.draw(st.booleans())

    def view(*shape: int) -> torch.Tensor:
        order = data.draw(st.permutations(range(len(shape))))
        steps = [data.draw(st.integers(1, 2)) for _ in shape]
        storage = torch.randn([shape[axis] * steps[axis] + 1 for axis in order])
        strided = storage.permute([order.index(axis) for axis in range(len(shape))])
        return strided[tuple(slice(1, 1 + size * step, step) for size, step in zip(shape, steps))]

    q, k = view(*sizes, dim), view(sizes[0], sizes[1], data.draw(st.integers(1, 3)), dim)
    rotary = 2 * data.draw(st.integers(1, dim // 2))
    cos, sin = view(9, rotary // 2), view(9, rotary // 2)
    positions = torch.randint(0, 9, (sizes[1], sizes[0])).t() if data.draw(st.booleans()) else None
    got = rope(q, k, cos, sin, positions, interleaved=interleaved, backend="triton")
    expected = rope(q, k, cos, sin, positions, interleaved=interleaved, backend="reference")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", ["q", "k"])
def test_gradient_of_one_output_only(wanted: str) -> None:
    q, k = _heads().requires_grad_(), _heads(heads=2).requires_grad_()
    gradients = []
    for backend in ("triton", "reference"):
        turned = rope(q, k, frequencies=Frequencies.plain(16), backend=backend)["qk".index(wanted)]
        gradients.append(torch.autograd.grad(turned.square().sum() + turned.sum(), [q, k], allow_unused=True))
    for got, expected in zip(*gradients):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_reference_gradcheck(interleaved: bool) -> None:
    q, k = (_heads(1, 2, heads, 6).double().requires_grad_() for heads in (2, 1))
    cos, sin = (table.double() for table in Frequencies.plain(4).table(9))
    positions = torch.tensor([8, 3])
    assert torch.autograd.gradcheck(
        lambda q, k: reference.rope(q, k, cos, sin, positions, interleaved=interleaved), (q, k)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(backend: str, interleaved: bool) -> None:
    """q and k themselves change, behind their strides; what is beside them does not."""
    fused = torch.randn(2, 3, 6 * 20)  # q, k and something else side by side
    before = fused.clone()
    q, k = fused[..., :80].unflatten(-1, (4, 20)), fused[..., 80:100].unflatten(-1, (1, 20))
    cos, sin = Frequencies.plain(12).table(3)
    expected = rope(q.clone(), k.clone(), cos, sin, interleaved=interleaved, backend="reference")
    got = rope(q, k, cos, sin, interleaved=interleaved, in_place=True, backend=backend)
    assert got[0] is q
    assert got[1] is k
    torch.testing.assert_close(got, expected)
    assert torch.equal(fused[..., 100:], before[..., 100:])
    alone = q.clone()
    assert rope(alone, None, cos, sin, in_place=True, backend=backend) is alone
    torch.testing.assert_close(alone, rope(q, None, cos, sin, backend="reference"))


def test_in_place_under_autograd() -> None:
    cos, sin = Frequencies.plain(16).table(3)
    leaf = _heads().requires_grad_()
    with pytest.raises(ValueError, match="q needs a gradient, so it cannot be overwritten; use in_place=False"):
        rope(leaf, None, cos, sin, in_place=True, backend="triton")
    with pytest.raises(ValueError, match="k needs a gradient"):
        rope(_heads(), leaf, cos, sin, in_place=True, backend="triton")
    hidden = leaf * 1.0
    product = hidden.square()  # keeps `hidden` for its backward
    with torch.no_grad():
        rope(hidden, None, cos, sin, in_place=True, backend="triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        rope(torch.randn(1, 3, 1, 16), None, cos, sin, in_place=True, backend="triton")


@pytest.mark.parametrize("in_place", [False, True])
def test_opcheck(in_place: bool) -> None:
    frequencies, positions = Frequencies.plain(16), torch.tensor([3, 1, 7])
    q, k = _heads(), _heads(heads=2)
    angles = [(*frequencies.table(8), None, positions), (None, None, frequencies.rates(), None)]
    for keys, tables in zip((k, None), angles):
        if in_place:
            arguments = (q.clone(), None if keys is None else keys.clone(), *tables, 1.0, 16, False, KERNELS)
            torch.library.opcheck(library.rope_in_place.registered, arguments)
        else:
            leaves = (q.clone().requires_grad_(), None if keys is None else keys.clone().requires_grad_())
            torch.library.opcheck(library.rope.registered, (*leaves, *tables, 1.0, 16, True, False, KERNELS))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiles_without_graph_breaks(backend: str) -> None:
    q, k, positions = _heads().requires_grad_(), _heads(heads=2).requires_grad_(), torch.tensor([3, 1, 7])
    frequencies = Frequencies.plain(16)

    def computed(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope(q, k, positions=positions, frequencies=frequencies, backend=backend)

    def overwritten(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope(q * 1, k * 1, *frequencies.table(3), in_place=True, backend=backend)

    got = torch.compile(computed, fullgraph=True, backend="aot_eager")(q, k)
    expected = computed(q, k)
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(pair[0].sum() + pair[1].sum(), [q, k]) for pair in (got, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])
    with torch.no_grad():
        got = torch.compile(overwritten, fullgraph=True, backend="aot_eager")(q, k)
        torch.testing.assert_close(got, overwritten(q, k))


F16 = Frequencies.plain(16)
TABLE = F16.table(8)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((_heads()[0], None, *TABLE), {}, r"q must be a float tensor \(batch, seq, heads, head_dim\)"),
        ((_heads().int(), None, *TABLE), {}, "not torch.int32"),
        ((_heads(), _heads(seq=2), *TABLE), {}, r"k has shape \(2, 2, 4, 16\); beside q"),
        ((_heads(), _heads().half(), *TABLE), {}, "k is torch.float16 on cpu; it must match q"),
        ((_heads(),), {}, "not both and not neither"),
        ((_heads(), None, *TABLE), {"frequencies": F16}, "not both and not neither"),
        ((_heads(), None, TABLE[0]), {}, "sin is missing"),
        ((_heads(), None, TABLE[0], TABLE[1][1:]), {}, "both must be float"),
        ((_heads(seq=9), None, *TABLE), {}, "the table has 8 positions but q has 9"),
        ((_heads(), None, *Frequencies.plain(32).table(8)), {}, "cannot rotate 32 of 16 dims"),
        ((_heads(),), {"frequencies": Frequencies.plain(18)}, "cannot rotate 18 of 16 dims"),
        ((_heads(),), {"frequencies": F16, "rotary_dim": 8}, "rotary_dim is 8 but the frequencies rotate 16"),
        ((_heads(), None, *TABLE), {"rotary_dim": 12}, "cos has 8 columns; rotary_dim=12 needs 6"),
        ((_heads(), None, TABLE[0][None, :3], TABLE[1][None, :3]), {}, "say rotary_dim=8 if .*, rotary_dim=16 if"),
        ((_heads(), None, TABLE[0][None], TABLE[1][None]), {}, r"must be \(2 or 1, 3, columns\)"),
        ((_heads(), None, *TABLE, torch.zeros(3)), {}, "positions are torch.float32"),
        ((_heads(), None, *TABLE, torch.zeros(3, 2).long()), {}, r"positions have shape \(3, 2\)"),
        ((_heads(), None, torch.ones(1, 3, 16), torch.ones(1, 3, 16), torch.arange(3)), {}, "no use for positions"),
        ((_heads(), None, *(table.to("meta") for table in TABLE)), {}, "cos is on meta"),
        ((_heads()[:, :, :1].expand(2, 3, 4, 16), None, *TABLE), {"in_place": True}, "no element seen twice"),
        ((_heads().transpose(2, 3).contiguous().transpose(2, 3), None, *TABLE), {"in_place": True}, "unit stride"),
    ],
)  # fmt: skip
def test_wrong_input(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope(*arguments, **options, backend="triton")


@pytest.mark.gpu
@pytest.mark.alone
def test_more_than_2_31_elements() -> None:
    """Offsets beyond int32: the last head of heads-first memory starts past 2^31 elements."""
    batch, seq, heads, dim = 1, 131072, 136, 128
    q = torch.zeros(batch, heads, seq, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    q[0, -1, -1] = 1.0
    frequencies = Frequencies.plain(dim)
    got = rope(q, frequencies=frequencies, backend="triton")
    alone = rope(q[:, -1:, -1:], positions=torch.tensor([seq - 1], device="cuda"), frequencies=frequencies)
    assert torch.equal(got[:, -1:, -1:], alone)
    assert int(got.count_nonzero()) == int(alone.count_nonzero())


def _launch(case: Case, dtype: torch.dtype, gpu: str):
    from flashkernel.ops.rope import triton as kernels

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    axes, dim = case.axes, case.axes["dim"]
    q, k = (meta(axes["batch"], axes["seq"], axes[name], dim, dtype=dtype) for name in ("heads", "kv_heads"))
    tables = [meta(*axes["table"]) if name in case.present else None for name in ("cos", "sin")]
    rates = None if "cos" in case.present else meta(dim // 2, dtype=torch.int64)
    positions = meta(*axes["tokens"], dtype=torch.int64) if "positions" in case.present else None
    interleaved = case.options.get("interleaved", False)
    with devices.pretend(devices.KNOWN[gpu]), collect_launches() as launches:
        kernels.forward(q, k, Rotation(*tables, rates, positions, 1.0, dim, interleaved), inverse=False)
    return launches[0]


@pytest.mark.compile
@pytest.mark.parametrize("case, gpu, dtype", on_machines(spec.ROPE.benches))
def test_machine_code(case: Case, gpu: str, dtype: torch.dtype) -> None:
    """Nothing spilled; away from decode, heads go through 16-byte accesses."""
    machine = compiled(_launch(case, dtype, gpu), devices.KNOWN[gpu].arch)
    assert machine.stack == 0
    if case.gradients:
        assert machine.sass.count("LDG.E.128") >= 8
        assert machine.sass.count("STG.E.128") >= 8
