"""Losses, gradients and generated tokens of patched models of every family, against the same models unpatched."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

import test_hf
from patched_models import _as_on_a_gpu, _one_thread, by_family, gradients_match, model, pair  # noqa: F401

import flashkernel.hf as hf
from flashkernel.hf import families, forwards


@pytest.mark.parametrize("kind", ["left", "packed"])
@by_family
def test_logits_loss_and_every_gradient(name: str, kind: str) -> None:
    theirs, ours = pair(name)
    inputs = test_hf.batch(kind)
    gradients_match(theirs, ours, inputs)
    expected, found = theirs.eval()(**inputs), ours.eval()(**inputs)
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    torch.testing.assert_close(found.logits[real], expected.logits[real], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("table, key, entry, name", [
    ("NORMS", "gemma3.Gemma3RMSNorm", families.Norm("eps", offset=0.9), "gemma3"),
    ("NORMS", "llama.LlamaRMSNorm", families.Norm("variance_epsilon", offset=0.1), "llama"),
    ("ATTENTIONS", "gemma2.Gemma2Attention", families.Attention({"sliding_window": "sliding_window"}), "gemma2"),
    ("ATTENTIONS", "gpt_oss.GptOssAttention", families.Attention(), "gpt_oss"),
    ("ATTENTIONS", "qwen3.Qwen3Attention", families.Attention(), "qwen3"),
    ("EXPERTS", "gpt_oss.GptOssExperts", "swiglu", "gpt_oss"),
    ("HEADS", "gemma2.Gemma2ForCausalLM", families.Head(), "gemma2"),
])  # fmt: skip
def test_the_comparison_sees_a_wrong_table(
    table: str, key: str, entry: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(getattr(families, table), key, entry)
    theirs, ours = pair(name)
    inputs = test_hf.batch("left")
    assert abs(ours(**inputs).loss - theirs(**inputs).loss) > 1e-3


@pytest.mark.parametrize("padded, cache", [(False, "dynamic"), (True, "dynamic"), (True, "static")])
@by_family
def test_generated_tokens(name: str, padded: bool, cache: str) -> None:
    inputs = test_hf.batch("left")
    prompt = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    if not padded:
        prompt = {"input_ids": inputs["input_ids"].clamp(min=1)}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache,
               "disable_compile": True}  # fmt: skip
    expected, found = (one.eval().generate(**prompt, **options) for one in pair(name))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("loss", ["fused", "logits", None])
@pytest.mark.parametrize("training", [True, False])
def test_which_loss_runs(loss: str | None, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("cross_entropy", "linear_cross_entropy"):
        run = getattr(forwards, name)
        monkeypatch.setattr(
            forwards, name, lambda *args, name=name, run=run, **kwargs: called.append(name) or run(*args, **kwargs)
        )
    theirs, ours = model("llama").train(training), model("llama").train(training)
    hf.patch(ours, loss=loss)
    inputs = test_hf.batch("left")
    expected, found = theirs(**inputs), ours(**inputs)
    fused = training and loss == "fused"
    assert called == ([] if loss is None else ["linear_cross_entropy" if fused else "cross_entropy"])
    assert (found.logits is None) == fused
    assert type(found) is type(expected)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [
    {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"ignore_index": 5},
    {"output_hidden_states": True}, {"use_cache": True}, {"logits_to_keep": 4},
    {"shift_labels": torch.arange(48).reshape(3, 16)},
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_loss_options(options: dict[str, Any], training: bool) -> None:
    theirs, ours = (one.train(training) for one in pair("llama"))
    inputs = {**test_hf.batch("whole"), **options}
    if "logits_to_keep" in options:
        inputs["shift_labels"] = inputs["labels"][:, -4:].contiguous()
    expected, found = theirs(**inputs), ours(**inputs)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert {*found, "logits"} == set(expected)
    for one, other in zip(found.hidden_states or (), expected.hidden_states or ()):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    expected, found = (one(inputs["input_ids"], labels=inputs["labels"], return_dict=False) for one in (theirs, ours))
    assert isinstance(found, tuple)
    assert len(found) == len(expected)
    for one, other in zip(found[:2], expected[:2]):  # a tuple has its logits, in the second place
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert (ours(**inputs, return_dict=None).logits is None) == (training and "logits_to_keep" not in options)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_routers_loss(name: str) -> None:
    theirs, ours = pair(name, output_router_logits=True, router_aux_loss_coef=0.5)
    inputs = test_hf.batch("left")
    gradients_match(theirs, ours, inputs)
    expected, found = theirs(**inputs), ours(**inputs)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, atol=1e-5, rtol=1e-5)
    assert len(found.router_logits) == len(expected.router_logits) == 2


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gpt2"])
def test_gradient_checkpointing(name: str) -> None:
    theirs, ours = pair(name)
    inputs = test_hf.batch("left")
    expected, expected_gradients = test_hf.loss_and_gradients(ours, inputs)
    ours.gradient_checkpointing_enable()
    loss, gradients = test_hf.loss_and_gradients(ours, inputs)
    assert torch.equal(loss, expected)
    for label, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[label], gradient, msg=label)
    theirs.gradient_checkpointing_enable()
    gradients_match(theirs, ours, inputs)


def test_moved_and_reloaded_after_patching() -> None:
    theirs, ours = pair("llama")
    inputs = test_hf.batch("whole")
    theirs.double(), ours.double()
    gradients_match(theirs, ours, inputs)
    theirs.to(torch.bfloat16), ours.to(torch.bfloat16)
    torch.testing.assert_close(ours(**inputs).loss.float(), theirs(**inputs).loss.float(), atol=2e-2, rtol=2e-2)
    theirs.float(), ours.float()
    state = {name: value + 0.1 for name, value in theirs.state_dict().items()}
    theirs.load_state_dict(state), ours.load_state_dict(state)
    gradients_match(theirs, ours, inputs)
    ours.to("meta")
    shape = ours(**{name: value.to("meta") for name, value in inputs.items()}).loss.shape
    assert shape == ()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "gpt_oss"])
def test_autocast(name: str) -> None:
    theirs, ours = pair(name)
    inputs = test_hf.batch("left")
    expected = theirs(**inputs).loss
    with torch.autocast("cpu", torch.bfloat16):
        rounded = theirs(**inputs).loss
        loss = ours(**inputs).loss
    loss.backward()
    assert abs(loss - expected) <= 2 * abs(rounded - expected) + 1e-2
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in ours.parameters())
    assert ours.eval().generate(inputs["input_ids"], max_new_tokens=2, pad_token_id=0).shape == (3, 18)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma"])
def test_norms_in_float32_give_the_dtype_they_gave(name: str) -> None:
    theirs, ours = pair(name)
    x = torch.randn(2, 3, 32).to(torch.bfloat16)
    expected, found = theirs.model.norm(x), ours.model.norm(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name, whole", [("llama", True), ("gpt2", False)])
def test_compiled(name: str, whole: bool) -> None:
    _, ours = pair(name, **({"n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}))
    inputs = {**test_hf.batch("left"), "use_cache": False}
    test_hf.compiled_agrees(ours, inputs, fullgraph=whole)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "gate_proj"], ["k_proj", "down_proj", "lm_head"]])
@pytest.mark.parametrize("order", ["before", "after"])
def test_peft_lora_trains_alike(order: str, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    losses = []
    inputs = test_hf.batch("left")
    for ours in (False, True):
        one = model("llama")
        if ours and order == "before":
            hf.patch(one)
        torch.manual_seed(0)
        options = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=["norm"], task_type="CAUSAL_LM")
        tuned = peft.get_peft_model(one, options).train()
        state = list(tuned.state_dict())
        if ours and order == "after":
            kernel = next(entry.kernel for entry in hf.patch(tuned).replaced if entry.part == "loss")
            assert kernel == ("cross_entropy" if "lm_head" in targets else "linear_cross_entropy in training")
        optimizer = torch.optim.AdamW([x for x in tuned.parameters() if x.requires_grad], lr=0.03)
        losses.append([])
        for _ in range(4):
            loss = tuned(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        assert list(tuned.state_dict()) == state
        if ours:
            hf.unpatch(tuned)
            assert not any(isinstance(module.__dict__.get("forward"), partial) for module in tuned.modules())
    assert losses[0][-1] < losses[0][0] - 0.1
    torch.testing.assert_close(losses[1], losses[0], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_bfloat16_on_a_gpu(name: str) -> None:
    """No further from float32 than twice what Transformers itself is in bfloat16."""
    truth, theirs, ours = model(name).cuda(), model(name).cuda().bfloat16(), model(name).cuda().bfloat16()
    hf.patch(ours)
    inputs = {key: value.cuda() for key, value in test_hf.batch("left").items()}
    (expected, exact), (rounded, near), (loss, found) = (
        test_hf.loss_and_gradients(one, inputs) for one in (truth, theirs, ours)
    )
    assert abs(loss - expected) <= 2 * abs(rounded - expected) + 2e-2
    for label, gradient in exact.items():
        allowed = 2 * (near[label].float() - gradient).norm() + 0.05 * gradient.norm() + 1e-4
        assert (found[label].float() - gradient).norm() <= allowed, label


@pytest.mark.gpu
@by_family
def test_every_gradient_and_generated_tokens_on_a_gpu(name: str) -> None:
    theirs, ours = (one.cuda() for one in pair(name))
    inputs = {key: value.cuda() for key, value in test_hf.batch("left").items()}
    gradients_match(theirs, ours, inputs, 1e-3)
    prompt = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True,
               "return_dict_in_generate": True}  # fmt: skip
    expected, found = (one.eval().generate(**prompt, **options) for one in (theirs, ours))
    torch.testing.assert_close(found.logits[0], expected.logits[0], atol=2e-2, rtol=2e-2)
