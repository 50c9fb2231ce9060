"""Transformers with attn_implementation="fkernel" against "eager": losses, gradients, generated tokens, masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers import masking_utils as theirs  # noqa: E402

import flashkernel.hf  # noqa: E402
from flashkernel.blocks.mask import EMPTY, FULL, causal  # noqa: E402
from flashkernel.hf import LayerMask, attention_forward, layer_mask  # noqa: E402
from flashkernel.hf import attention as adapter  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LAYERS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOss", {**SIZES, **LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 4}),
    "gemma2": ("Gemma2", {**SIZES, **LAYERS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5}),
    "gemma3": ("Gemma3", {**SIZES, **LAYERS, "query_pre_attn_scalar": 5}),
    "qwen3": ("Qwen3", {**SIZES, **LAYERS, "use_sliding_window": True}),
    "gpt2": ("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
                      "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}),
}  # fmt: skip
INPUTS = ["whole", "right", "left", "packed"]
LENGTH, DOCUMENTS = 16, (5, 4, 7)


def pair(name: str, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """The same model with eager attention and with ours; weights large enough that attention is far from uniform."""
    prefix, options = MODELS[name]
    kind = "Gemma3TextConfig" if name == "gemma3" else f"{prefix}Config"
    config = getattr(transformers, kind)(**{**options, **changes})
    build = getattr(transformers, f"{prefix}LMHeadModel" if name == "gpt2" else f"{prefix}ForCausalLM")
    torch.manual_seed(0)
    models = [build._from_config(copy.deepcopy(config), attn_implementation=kind) for kind in ("eager", "fkernel")]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for label, parameter in models[0].named_parameters():
            if parameter.ndim > 1 or "sinks" in label:
                parameter.normal_(0, 1.0 if "sinks" in label else 0.2, generator=generator)
    models[1].load_state_dict(models[0].state_dict())
    assert models[1].config._attn_implementation == "fkernel"
    return models[0], models[1]


def batch(kind: str) -> dict[str, Any]:
    """Tokens and labels; padded tokens have no label, and neither has the first token of a packed document."""
    size = 1 if kind == "packed" else 3
    tokens = torch.randint(1, 64, (size, LENGTH), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    if kind == "whole":
        return {"input_ids": tokens, "labels": labels}
    if kind == "packed":
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
        labels[positions == 0] = -100
        return {"input_ids": tokens, "labels": labels, "position_ids": positions, "use_cache": False}
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [11], [6]])
    real = real.flip(1) if kind == "left" else real
    labeled = real & real.roll(1, 1)  # the first real token would be predicted from a padded one
    return {"input_ids": tokens * real, "labels": labels.masked_fill(~labeled, -100), "attention_mask": real.long()}


def loss_and_gradients(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def gradients_agree(gradients: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for label, gradient in expected.items():
        assert (gradient is None) == (gradients[label] is None), label
        if gradient is not None:
            within = tolerance * (1 + 10 * gradient.abs().max().item())
            torch.testing.assert_close(
                gradients[label], gradient, atol=within, rtol=0, msg=lambda text, label=label: f"{label}: {text}"
            )


def compiled_agrees(model: Any, inputs: dict[str, Any], fullgraph: bool) -> None:
    """Compiled, a model has the loss and the gradients that it has without."""
    expected, expected_gradients = loss_and_gradients(model, inputs)
    torch._dynamo.reset()
    model.zero_grad()
    loss = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, atol=1e-5, rtol=1e-5)
    for label, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_gradients[label], atol=1e-4, rtol=1e-3)
    torch._dynamo.reset()


def compare(name: str, kind: str, device: str, tolerance: float) -> None:
    eager, ours = (model.to(device) for model in pair(name))
    inputs = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in batch(kind).items()}
    expected, expected_gradients = loss_and_gradients(eager, inputs)
    loss, gradients = loss_and_gradients(ours, inputs)
    torch.testing.assert_close(loss, expected, atol=tolerance, rtol=tolerance)
    gradients_agree(gradients, expected_gradients, tolerance)
    assert gradients[next(label for label in gradients if "attn" in label)].abs().max() > 1e-3


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_match_eager(name: str, inputs: str) -> None:
    compare(name, inputs, "cpu", 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_match_eager_on_a_gpu(name: str, inputs: str) -> None:
    compare(name, inputs, "cuda", 1e-3)


@pytest.mark.parametrize("name, inputs", [("llama", "right"), ("mistral", "packed")])
def test_a_compiled_model_is_one_graph(name: str, inputs: str) -> None:
    _, ours = pair(name)
    given = {**batch(inputs), "use_cache": False}
    compiled_agrees(ours, given, fullgraph=True)


@pytest.mark.parametrize("name, option", [
    ("gpt_oss", "sinks"), ("gpt_oss", "mask"), ("llama", "mask"), ("mistral", "mask"), ("gemma2", "softcap"),
    ("gemma2", "scale"), ("gemma3", "scale"), ("gemma3", "mask"), ("qwen3", "mask"), ("gpt2", "mask"),
])  # fmt: skip
def test_the_comparison_sees_what_is_left_out(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*args: Any, **kwargs: Any) -> Any:
        kwargs[option] = {"softcap": 0.0, "mask": causal()}.get(option)
        return whole(*args, **kwargs)

    whole = adapter.attention
    eager, ours = pair(name)
    expected = eager(**batch("packed")).loss
    monkeypatch.setattr(adapter, "attention", without)
    assert abs(ours(**batch("packed")).loss - expected) > 1e-3


def one_by_one(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Logits of packed documents computed each on its own."""
    parts = inputs["input_ids"].split(DOCUMENTS, 1)
    return torch.cat([model(input_ids=tokens).logits for tokens in parts], 1)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss"])  # it makes masks without position_ids
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    _, ours = pair(name)
    inputs = batch("packed")
    torch.testing.assert_close(ours(**inputs).logits, one_by_one(ours, inputs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_cumulative_lengths_keep_documents_apart(name: str, cached: bool) -> None:
    _, ours = pair(name)
    inputs = batch("packed")
    lengths = torch.tensor([0, *DOCUMENTS]).cumsum(0).to(torch.int32)
    options = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 7, "max_length_k": 7}
    plain = {"input_ids": inputs["input_ids"], "position_ids": inputs["position_ids"], "use_cache": cached}
    found, expected = ours(**plain, **options).logits, one_by_one(ours, inputs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if cached:  # then Transformers does not look for packed positions, and only the lengths separate the documents
        assert (ours(**plain).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_match_eager(name: str, cache: str) -> None:
    inputs = batch("left")
    prompt = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True,
               "return_dict_in_generate": True, "cache_implementation": cache, "disable_compile": True}  # fmt: skip
    expected, found = (model.eval().generate(**prompt, **options) for model in pair(name))
    assert found.sequences.shape == (3, LENGTH + 8)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padding", ["none", "left", "left, of booleans"])
@pytest.mark.parametrize("name", MODELS)
def test_a_static_cache_is_filled_in_chunks(name: str, padding: str) -> None:
    """A prompt, single tokens and several at once, as eager attention has them."""
    inputs = batch("left" if padding != "none" else "whole")
    tokens, real = inputs["input_ids"], inputs.get("attention_mask")
    if padding.endswith("booleans"):
        real = real.bool()
    logits = []
    for model in pair(name):
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 5)
        parts, first = [], 0
        for end in (LENGTH - 7, LENGTH - 6, LENGTH - 5, LENGTH):
            given = {} if real is None else {"attention_mask": real[:, :end]}
            parts.append(model.eval()(input_ids=tokens[:, first:end], past_key_values=cache, **given).logits)
            first = end
        found = torch.cat(parts, 1)
        logits.append(found if real is None else found[real.bool()])
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cuts", [[[5, 4, 7], [5, 4, 7]], [[9, 7], [1, 1, 14]], [[1] * 16, [16]]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_batch_are_packed_each_in_its_way(name: str, cuts: list[list[int]]) -> None:
    """By position_ids alone; whether Transformers looks for packed rows is the model's to say, as in eager."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in cuts])
    tokens = torch.randint(1, 60, (2, 16), generator=torch.Generator().manual_seed(5))
    expected, found = (
        model.eval()(input_ids=tokens, position_ids=positions, use_cache=False).logits for model in pair(name)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


LATENT = {
    **{name: value for name, value in SIZES.items() if name != "head_dim"},
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 24, "index_topk": 5, "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip
SELECTING = {
    "DeepseekV32": LATENT,
    "GlmMoeDsa": LATENT,
    "Doge": {**SIZES, "keep_window_size": 5},
}


@pytest.mark.parametrize("inputs", ["whole", "left"])
@pytest.mark.parametrize("family", SELECTING)
def test_layers_that_read_the_mask_and_select_keys(family: str, inputs: str) -> None:
    """By an indexer, whose keys attention is given, or by adding to the mask; more tokens than keys are selected."""
    config = getattr(transformers, f"{family}Config")(**SELECTING[family])
    build = getattr(transformers, f"{family}ForCausalLM")
    models = [build._from_config(copy.deepcopy(config), attn_implementation=kind) for kind in ("eager", "fkernel")]
    for one in models:
        torch.manual_seed(0)
        for parameter in one.parameters():
            nn.init.normal_(parameter, std=0.2)
    given = batch(inputs)
    expected, expected_gradients = loss_and_gradients(models[0], given)
    loss, gradients = loss_and_gradients(models[1], given)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    gradients_agree(gradients, expected_gradients, 1e-5)
    del given["labels"]
    tokens = [one.eval().generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=0) for one in models]
    assert torch.equal(*tokens)


def test_a_mask_is_read_as_the_tensor_that_it_stands_for() -> None:
    real = torch.arange(6) >= torch.tensor([[0], [2]])
    mask = layer_mask(2, 6, 6, attention_mask=real, device=real.device)
    expected = theirs.sdpa_mask(2, 6, 6, attention_mask=real, allow_is_causal_skip=False)
    other = torch.rand(2, 1, 6, 6) < 0.5
    assert (mask.dtype, mask.device, mask.is_floating_point()) == (torch.bool, torch.device("cpu"), False)
    for read in (
        lambda m: m[:, 0, :, :4], lambda m: ~m, lambda m: m & other, lambda m: other & m, lambda m: other | m,
        lambda m: torch.where(m, 0.0, -1.0), lambda m: other.float().masked_fill(m, 2.0), lambda m: m.to(torch.float16),
        lambda m: m.expand(2, 3, 6, 6), lambda m: torch.cat([m, other], -1),
    ):  # fmt: skip
        assert torch.equal(read(mask), read(expected))
    assert copy.deepcopy(mask).shape == mask.shape


def test_an_encoder_sees_both_ways_and_no_padding() -> None:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    eager, ours = (
        transformers.BertModel._from_config(copy.deepcopy(config), attn_implementation=kind).eval()
        for kind in ("eager", "fkernel")
    )
    ours.load_state_dict(eager.state_dict())
    for kind in ("whole", "right", "left"):
        inputs = {name: value for name, value in batch(kind).items() if name != "labels"}
        real = inputs.get("attention_mask", torch.ones(3, LENGTH)).bool()
        expected, found = (model(**inputs).last_hidden_state[real] for model in (eager, ours))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("additive", [False, True])
def test_a_ready_made_mask_of_four_dims(additive: bool) -> None:
    eager, ours = pair("llama")
    tokens = batch("whole")["input_ids"]
    seen = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    found = ours(input_ids=tokens, attention_mask=added if additive else seen).logits
    torch.testing.assert_close(found, eager(input_ids=tokens, attention_mask=added).logits, atol=1e-4, rtol=1e-4)


def test_dropout_is_on_in_training_alone_and_survives_checkpointing() -> None:
    eager, ours = pair("llama", attention_dropout=0.5)
    inputs = batch("right")

    def trained(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(seed)
        return loss_and_gradients(ours.train(), inputs)

    loss, gradients = trained(0)
    assert torch.equal(loss, trained(0)[0])
    assert not torch.equal(loss, trained(1)[0])
    ours.gradient_checkpointing_enable()
    again, recomputed = trained(0)
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)
    torch.testing.assert_close(ours.eval()(**inputs).loss, eager.eval()(**inputs).loss, atol=1e-5, rtol=1e-5)


IDS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 7, [0] * 9 + [1] * 7])
BLOCKS = torch.tensor([[-1] * 4 + [0] * 5 + [-1] * 3 + [1] * 4, [0] * 6 + [-1] * 10])
FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "sliding": theirs.sliding_window_causal_mask_function(4),
    "chunked": theirs.chunked_causal_mask_function(5, torch.tensor([0, 3])),
    "bidirectional": theirs.bidirectional_mask_function,
    "bidirectional window": theirs.sliding_window_bidirectional_mask_function(3),
    "packed": theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(IDS)),
    "blocks": theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS)),
    "a model's own": theirs.or_masks(
        theirs.causal_mask_function, lambda b, h, q, k: torch.where(k < 3, torch.abs(q - k) < 6, ~(k % 5 != 0))
    ),
    "tensors first": lambda b, h, q, k: (torch.tensor(9) - q >= 0) & torch.logical_or(torch.tensor(2) < k, q == k),
}
PLACES = {  # queries, keys, query offset, key offset
    "training": (16, 16, 0, 0),
    "decoding": (1, 12, 11, 0),
    "decoding in a window": (1, 4, 11, 8),
    "a longer prompt": (5, 12, 7, 0),
    "an empty static cache": (6, 16, torch.tensor(0), 0),
    "a static cache": (2, 16, torch.tensor([9]), 0),
    "fewer keys": (9, 5, 0, 0),
}


@pytest.mark.parametrize("padding", ["none", "all real", "left", "short"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_masks_are_those_of_transformers(function: str, place: str, padding: str, recwarn: Any) -> None:
    queries, keys, q_offset, kv_offset = PLACES[place]
    real = {"none": None, "all real": torch.ones(2, 16, dtype=torch.bool),
            "left": torch.arange(16) >= torch.tensor([[0], [6]]),
            "short": torch.ones(2, 10, dtype=torch.bool)}[padding]  # fmt: skip
    arguments = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": q_offset,
                 "kv_offset": kv_offset, "mask_function": FUNCTIONS[function], "attention_mask": real}  # fmt: skip
    found = layer_mask(**arguments)
    expected = theirs.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert isinstance(found, LayerMask)
    assert found.shape == tuple(expected.shape)
    assert torch.equal(found.mask.visible(2, 1, queries, keys).expand(expected.shape), expected)
    assert found.mask.name == "transformers"  # recorded, not a table of pairs
    assert not recwarn.list
    status = found.mask.tiles(2, 1, queries, keys, 4, 4).expand(2, 1, -1, -1)
    status = status.repeat_interleave(4, 2).repeat_interleave(4, 3)[:, :, :queries, :keys]
    assert not expected[status == EMPTY].any()
    assert expected[status == FULL].all()
    if real is not None and padding != "all real":
        assert torch.equal(found.to("cpu").mask.visible(2, 1, queries, keys).expand(expected.shape), expected)


def test_a_plain_causal_mask_is_causal() -> None:
    found = layer_mask(2, 16, 16, attention_mask=torch.ones(2, 16, dtype=torch.bool))
    assert found is not None
    assert not adapter.ex.tables(found.mask.expression)
    assert (found.mask.tiles(1, 1, 64, 64, 16, 16) == causal().tiles(1, 1, 64, 64, 16, 16)).all()


def test_a_static_cache_may_count_on_after_the_mask_is_made() -> None:
    offset = torch.tensor(3)
    found = layer_mask(1, 2, 8, q_offset=offset)
    before = found.mask.visible(1, 1, 2, 8).clone()
    offset.add_(2)
    assert torch.equal(found.mask.visible(1, 1, 2, 8), before)


def test_a_function_that_cannot_be_recorded_is_kept_in_full_with_a_warning() -> None:
    def odd(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q.float() / 3).round() >= k

    arguments = {"mask_function": odd, "attention_mask": torch.arange(8) > torch.tensor([[-1], [2]])}
    with pytest.warns(UserWarning, match=r"cannot be traced \(it uses \.float of an index\)"):
        found = layer_mask(2, 8, 8, **arguments)
    expected = theirs.sdpa_mask(2, 8, 8, **arguments, allow_is_causal_skip=False)
    assert torch.equal(found.mask.visible(2, 1, 8, 8), expected)


def test_only_a_layer_that_sees_everything_has_no_mask() -> None:
    everything = {"mask_function": theirs.bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    assert layer_mask(2, 8, 8, **everything) is None
    assert layer_mask(2, 8, 8, attention_mask=torch.ones(2, 8, dtype=torch.bool), **everything) is None
    assert layer_mask(2, 8, 8, attention_mask=torch.arange(8).expand(2, 8) < 6, **everything) is not None
    assert layer_mask(2, 8, 8, allow_is_causal_skip=True) is not None


def test_a_layer_that_gives_no_mask() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
    module = nn.Module()
    module.is_causal = True
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(attention_forward(module, q, k, v, None)[0], expected)
    near = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, near).transpose(1, 2)
    torch.testing.assert_close(attention_forward(module, q, k, v, None, sliding_window=3)[0], expected)
    bias = torch.randn(1, 2, 8, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)
    found = attention_forward(module, q, k, v, None, is_causal=False, position_bias=bias)[0]
    torch.testing.assert_close(found, expected)
    with pytest.raises(NotImplementedError, match="create_bidirectional_sliding_window_mask"):
        attention_forward(module, q, k, v, None, is_causal=False, sliding_window=3)
    with pytest.raises(ValueError, match="gave no mask"):
        attention_forward(module, q[:, :, :3], k, v, None)


def test_refusals_say_what_to_do() -> None:
    q, k, v = torch.randn(3, 2, 2, 8, 4).unbind(0)
    module = nn.Module()
    with pytest.raises(NotImplementedError, match="use attn_implementation='eager'"):
        attention_forward(module, q, k, v, None, output_attentions=True)
    with pytest.raises(NotImplementedError, match="gave cache"):
        attention_forward(module, q, k, v, None, cache=object())
    with pytest.raises(ValueError, match="with 4 dims"):
        attention_forward(module, q, k, v, torch.ones(2, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="the mask has shape"):
        attention_forward(module, q, k, v, torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="the mask was made for"):
        attention_forward(module, q, k, v, layer_mask(2, 8, 9))
    lengths = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="packed sequences are one batch"):
        attention_forward(module, q, k, v, None, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)
    with pytest.raises(NotImplementedError, match="cannot be continued from a cache"):
        attention_forward(
            module, q[:1, :, :3], k[:1], v[:1], layer_mask(1, 3, 8, 5), cu_seq_lens_q=lengths, cu_seq_lens_k=lengths
        )


def test_registering_twice_is_harmless() -> None:
    flashkernel.hf.register()
    flashkernel.hf.register()
    assert transformers.AttentionInterface()["fkernel"] is attention_forward
    assert theirs.AttentionMaskInterface()["fkernel"] is layer_mask
    assert "flash" not in flashkernel.hf.NAME
