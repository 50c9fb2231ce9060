"""Decoding steps and short prompts of patched models: what a pass that is bound by the host leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.17")

import test_hf  # noqa: E402
from patched_models import _as_on_a_gpu, _one_thread, by_family, model, pair  # noqa: E402, F401

import flashkernel.hf as hf  # noqa: E402
from flashkernel.hf import attention as adapter  # noqa: E402
from flashkernel.hf import forwards, layer  # noqa: E402

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
LAYERED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"use_sliding_window": False, "layer_types": None},
}
by_layer = pytest.mark.parametrize("name", LAYERED)
INSIDE = (
    "input_layernorm", "post_attention_layernorm", "self_attn", "mlp", "mlp.act_fn", "self_attn.q_proj",
    "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every pass without gradients counts as short; (tokens, keys) of each layer that ran as one function."""
    ran: list[tuple[int, int]] = []

    def spy(parts: Any, x: Tensor, mask: Any, *args: Any) -> Tensor:
        ran.append((x.shape[1], mask.shape[3]))
        return run(parts, x, mask, *args)

    run = layer._forward
    monkeypatch.setattr(layer, "_forward", spy)
    monkeypatch.setattr(forwards, "_host_bound", lambda x: not torch.is_grad_enabled())
    return ran


def prompt() -> Tensor:
    return test_hf.batch("whole")["input_ids"]


@by_layer
def test_layers_as_one_function(name: str, passes: list[tuple[int, int]]) -> None:
    theirs, ours = (one.eval() for one in pair(name, **LAYERED[name]))
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    expected, found = (one.generate(prompt(), **options) for one in (theirs, ours))
    assert passes == [(tokens, keys) for tokens, keys in [(16, 16), *((1, n) for n in range(17, 22))] for _ in range(2)]
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, {"hidden_act": "gelu"},
                                     {"hidden_act": "gelu_new"}, {"hidden_act": "relu"}])  # fmt: skip
def test_biases_and_gates(changes: dict[str, Any], passes: list[tuple[int, int]]) -> None:
    theirs, ours = (one.eval() for one in pair("llama", **changes))
    expected, found = (one.generate(prompt(), **GREEDY) for one in (theirs, ours))
    assert torch.equal(found, expected)
    assert len(passes) == 12


@pytest.mark.parametrize("where", INSIDE)
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_inside_are_called(where: str, kind: str, passes: list[tuple[int, int]]) -> None:
    theirs, ours = (one.eval() for one in pair("llama"))
    called: list[str] = []
    inner = ours.model.layers[1].get_submodule(where)
    getattr(inner, kind)(lambda *_: called.append(where))
    with torch.no_grad():
        torch.testing.assert_close(ours(prompt()).logits, theirs(prompt()).logits, atol=1e-4, rtol=1e-4)
    assert passes == [(16, 16)]  # the other layer
    assert called == [where]


def test_hooks_on_every_module_are_called(passes: list[tuple[int, int]]) -> None:
    _, ours = pair("llama")
    called: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(lambda one, *_: called.append(type(one).__name__))
    try:
        with torch.no_grad():
            ours.eval()(prompt())
    finally:
        hook.remove()
    assert not passes
    assert called.count("Linear") == 15


def test_replaced_and_adapted_parts_take_the_long_way(passes: list[tuple[int, int]]) -> None:
    theirs, ours = (one.eval() for one in pair("llama"))
    for one in (theirs, ours):
        mlp = one.model.layers[0].mlp
        mlp.up_proj = nn.Sequential(mlp.up_proj)
        attention = one.model.layers[1].self_attn
        attention.v_proj.forward = lambda x, layer=attention.v_proj: 2 * nn.functional.linear(x, layer.weight)
    with torch.no_grad():
        torch.testing.assert_close(ours(prompt()).logits, theirs(prompt()).logits, atol=1e-4, rtol=1e-4)
    assert not passes


@pytest.mark.parametrize("merged", [False, True])
def test_lora_in_short_passes(merged: bool, passes: list[tuple[int, int]]) -> None:
    peft = pytest.importorskip("peft")
    found = []
    for ours in (False, True):
        one = model("llama").eval()
        if ours:
            hf.patch(one)
        torch.manual_seed(0)
        options = peft.LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        tuned: Any = peft.get_peft_model(one, options).eval()
        tuned = tuned.merge_and_unload() if merged else tuned
        with torch.no_grad():
            found.append(tuned(input_ids=prompt()).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert len(passes) == (2 if merged else 0)


def test_what_the_layers_were_given_stays_as_it_was(passes: list[tuple[int, int]]) -> None:
    theirs, ours = (one.eval() for one in pair("llama"))
    given = ours.get_input_embeddings()(prompt()).detach()
    seen: dict[Any, list[Tensor]] = {theirs: [given], ours: [given.clone()]}
    with torch.no_grad():
        for one, states in seen.items():
            for each in one.model.layers:
                each.register_forward_hook(lambda _, args, out, states=states: states.extend((args[0], out)))
            one(inputs_embeds=given)
    assert len(passes) == 2
    for found, expected in zip(seen[ours], seen[theirs], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_in_parts_and_padded_prompts_take_the_long_way(passes: list[tuple[int, int]]) -> None:
    theirs, ours = (one.eval() for one in pair("llama"))
    with torch.no_grad():
        cache = ours(prompt()[:, :5]).past_key_values
        passes.clear()
        found = ours(prompt()[:, 5:9], past_key_values=cache).logits
        assert not passes
        torch.testing.assert_close(found, theirs(prompt()[:, :9]).logits[:, 5:], atol=1e-4, rtol=1e-4)
        ours(prompt()[:, 9:10], past_key_values=cache)
        assert passes == [(1, 10)] * 2
        passes.clear()
        ours(**{name: test_hf.batch("left")[name] for name in ("input_ids", "attention_mask")})
        ours(**{name: value for name, value in test_hf.batch("packed").items() if name != "labels"})
        ours.train()(prompt())
    ours.eval()(prompt())  # with gradients
    assert not passes


@pytest.mark.parametrize("cached", [False, True])
def test_packed_sequences_take_the_long_way(cached: bool, passes: list[tuple[int, int]]) -> None:
    """With a cache the mask is plain causal, and the lengths alone separate the sequences."""
    theirs, ours = (one.eval() for one in pair("llama"))
    inputs = test_hf.batch("packed")
    lengths = torch.tensor([0, *test_hf.DOCUMENTS]).cumsum(0).int()
    with torch.no_grad():
        found = ours(
            inputs["input_ids"], position_ids=inputs["position_ids"], cu_seq_lens_q=lengths, cu_seq_lens_k=lengths,
            max_length_q=7, max_length_k=7, use_cache=cached,
        ).logits  # fmt: skip
        torch.testing.assert_close(found, test_hf.one_by_one(theirs, inputs), atol=1e-4, rtol=1e-4)
    assert not passes


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2},
                                     {"prompt_lookup_num_tokens": 3}])  # fmt: skip
def test_caches_are_reordered_and_cropped(options: dict[str, Any], passes: list[tuple[int, int]]) -> None:
    tokens = prompt()[:1] if "prompt_lookup_num_tokens" in options else prompt()
    theirs, ours = (one.eval() for one in pair("llama"))
    expected, found = (one.generate(tokens, **GREEDY, **options) for one in (theirs, ours))
    assert torch.equal(found, expected)
    assert passes


def test_a_cache_that_the_mask_does_not_know_is_refused(passes: list[tuple[int, int]]) -> None:
    _, ours = pair("llama")
    one = ours.eval().model.layers[0]
    x, angles = torch.randn(2, 1, 32), (torch.ones(2, 1, 8), torch.zeros(2, 1, 8))
    cache = transformers.DynamicCache(config=ours.config)
    cache.update(torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8), 0)
    with torch.no_grad(), pytest.raises(ValueError, match="the cache that the mask was made with must be the one"):
        one(x, attention_mask=hf.layer_mask(2, 1, 9, 8, 0), position_embeddings=angles, past_key_values=cache)
    assert passes


def test_weights_are_read_anew(passes: list[tuple[int, int]]) -> None:
    theirs, ours = (one.eval() for one in pair("llama"))
    with torch.no_grad():
        ours(prompt())
        for one in (theirs, ours):
            one.double()
            one.load_state_dict({name: value + 0.05 for name, value in model("llama").state_dict().items()})
            one.model.layers[0].mlp.down_proj.weight = nn.Parameter(torch.ones(32, 48, dtype=torch.double))
        theirs_logits = theirs(prompt()).logits
        torch.testing.assert_close(ours(prompt()).logits, theirs_logits, atol=1e-4, rtol=1e-4)
    assert len(passes) == 4


def test_one_query_goes_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spy(q: Tensor, *args: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((q.shape[1], mask is None))
        return run(q, *args, mask=mask, **kwargs)

    run = adapter.attention
    monkeypatch.setattr(adapter, "attention", spy)
    _, ours = pair("llama", num_hidden_layers=1)
    tokens = test_hf.batch("whole")["input_ids"]
    ours.eval().generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert seen == [(16, False), (1, True), (1, True)]


@pytest.mark.parametrize("long", [0, 10**6])
@by_family
def test_host_bound_decoding_steps(name: str, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def spy(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(k.shape[1])
        return split(q, k, *args, **kwargs)

    split = forwards.decode_attention
    monkeypatch.setattr(forwards, "decode_attention", spy)
    monkeypatch.setattr(forwards, "MIN_SPLIT_KEYS", long)
    monkeypatch.setattr(forwards, "_host_bound", lambda x: x.shape[1] == 1)
    theirs, ours = pair(name)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = test_hf.batch("whole")["input_ids"]
    expected, found = (one.eval().generate(tokens, **options) for one in (theirs, ours))
    assert torch.equal(found, expected)
    splitting = name in ("gpt_oss", "gemma2") or (long == 0 and name not in ("mistral", "mixtral"))
    assert bool(calls) == splitting
    if splitting:
        assert calls[-1] == 16 + 5


def test_compiled_steps_with_a_static_cache_are_one_graph() -> None:
    """As generate() runs them on a GPU: the mask is made ahead, outside of the graph; the last step fills the cache."""
    theirs, ours = (one.eval() for one in pair("llama", num_hidden_layers=1))
    tokens = test_hf.batch("whole")["input_ids"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    cache = transformers.StaticCache(config=ours.config, max_cache_len=19)
    with torch.no_grad():
        ours(tokens, past_key_values=cache, use_cache=True)
        for place in range(16, 19):
            last, positions = tokens[:, -1:].contiguous(), torch.full((3, 1), place)
            mask = transformers.masking_utils.create_masks_for_generate(
                config=ours.config, inputs_embeds=ours.get_input_embeddings()(last), past_key_values=cache,
                attention_mask=torch.ones(3, place + 1, dtype=torch.long), position_ids=positions,
            )  # fmt: skip
            found = compiled(last, attention_mask=mask, past_key_values=cache, position_ids=positions).logits
            tokens = torch.cat([tokens, last], 1)
            torch.testing.assert_close(found, theirs(tokens).logits[:, -1:], atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.gpu
@by_family
def test_a_bfloat16_decoding_step_on_a_gpu(name: str) -> None:
    logits = []
    tokens = test_hf.batch("whole")["input_ids"].cuda()
    for half, ours in ((False, False), (True, False), (True, True)):
        one = model(name).cuda().eval()
        one = one.bfloat16() if half else one
        if ours:
            hf.patch(one)
            x = torch.zeros(3, 1, 32, dtype=torch.bfloat16, device="cuda")
            assert forwards._host_bound(x) is False  # with gradients
        with torch.no_grad():
            cache = one(tokens[:, :-1], use_cache=True).past_key_values
            logits.append(one(tokens[:, -1:], past_key_values=cache).logits.float())
    exact, near, found = logits
    assert (found - exact).norm() <= 2 * (near - exact).norm() + 0.02 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_compiled_static_cache_on_a_gpu(name: str) -> None:
    theirs, ours = (one.cuda().bfloat16().eval() for one in pair(name))
    tokens = test_hf.batch("whole")["input_ids"].cuda()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True,
               "return_dict_in_generate": True, "cache_implementation": "static"}  # fmt: skip
    expected, found = (one.generate(tokens, **options) for one in (theirs, ours))
    torch.testing.assert_close(found.logits[0].float(), expected.logits[0].float(), atol=0.1, rtol=0.1)
    torch._dynamo.reset()
