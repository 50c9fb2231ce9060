"""flashkernel.hf.patch on small random models of every family, against the same models unpatched."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.17")

import test_hf  # noqa: E402

import flashkernel.hf as hf  # noqa: E402
from flashkernel.hf import families, forwards  # noqa: E402

SIZES = test_hf.SIZES
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **test_hf.MODELS,
    "qwen2": ("Qwen2", {name: size for name, size in SIZES.items() if name != "head_dim"}),
    "gemma": ("Gemma", SIZES),
    "gemma2": ("Gemma2", {**test_hf.MODELS["gemma2"][1], "final_logit_softcapping": 3.0}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
}
REPLACED = {  # part -> kernel, besides attention and the loss
    "llama": {"rope": "rope", "norm": "rms_norm", "mlp": "swiglu", "layer": "one"},
    "mistral": {"rope": "rope", "norm": "rms_norm", "mlp": "swiglu", "layer": "one"},
    "mixtral": {"rope": "rope", "norm": "rms_norm", "mlp": "swiglu"},
    "qwen2": {"rope": "rope", "norm": "rms_norm", "mlp": "swiglu", "layer": "one"},
    "qwen3": {"rope": "rope", "norm": "rms_norm", "mlp": "swiglu", "layer": "one"},
    "gemma": {"rope": "rope", "norm": "rms_norm", "mlp": "geglu"},
    "gemma2": {"rope": "rope", "norm": "rms_norm", "mlp": "geglu"},
    "gemma3": {"rope": "rope", "norm": "rms_norm", "mlp": "geglu"},
    "gpt_oss": {"rope": "rope", "norm": "rms_norm", "mlp": "gpt_oss_glu"},
    "gpt2": {"norm": "layer_norm", "mlp": "gelu_tanh"},
}
by_family = pytest.mark.parametrize("name", MODELS)


OWN = forwards._own


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small spend their time waiting for threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator runs, also those that a CPU leaves to Transformers."""
    monkeypatch.setattr(forwards, "_own", lambda x: False)


def model(name: str, **changes: Any) -> Any:
    """A model with eager attention whose norms, biases and sinks are as random as its matrices."""
    prefix, options = MODELS[name]
    config = getattr(transformers, "Gemma3TextConfig" if name == "gemma3" else f"{prefix}Config")
    build = getattr(transformers, f"{prefix}LMHeadModel" if name == "gpt2" else f"{prefix}ForCausalLM")
    made = build._from_config(config(**{**options, **changes}), attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for label, parameter in made.named_parameters():
            centre = 0.0 if parameter.ndim > 1 or "bias" in label or "gemma" in name else 1.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return made


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    """(as Transformers made it, patched)."""
    theirs, ours = model(name, **changes), model(name, **changes)
    hf.patch(ours)
    return theirs, ours


def gradients_match(theirs: Any, ours: Any, inputs: dict[str, Any], tolerance: float = 1e-5) -> None:
    expected, expected_gradients = test_hf.loss_and_gradients(theirs, inputs)
    loss, gradients = test_hf.loss_and_gradients(ours, inputs)
    torch.testing.assert_close(loss.to(expected.dtype), expected, atol=tolerance, rtol=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for label, gradient in expected_gradients.items():
        assert (gradient is None) == (gradients[label] is None), label
        if gradient is not None:
            within = tolerance * (1 + 10 * gradient.abs().max().item())
            torch.testing.assert_close(
                gradients[label], gradient, atol=within, rtol=0, msg=lambda text, label=label: f"{label}: {text}"
            )


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


@by_family
def test_a_cpu_keeps_what_it_would_not_gain_from(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "_own", OWN)
    for operator in ("rms_norm", "layer_norm", "rope", "swiglu", "geglu", "gelu", "gpt_oss_glu"):
        monkeypatch.setattr(forwards, operator, None)
    theirs, ours = pair(name)
    gradients_match(theirs, ours, test_hf.batch("left"))
    tokens = test_hf.batch("whole")["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected, found = (one.eval().generate(tokens, **options) for one in (theirs, ours))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_fused_linear_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def spy(x: Tensor, weights: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        calls.append(len(weights))
        return linear(x, weights, *args, **kwargs)

    linear = forwards.linear
    monkeypatch.setattr(forwards, "linear", spy)
    monkeypatch.setattr(forwards, "_fused", lambda x, layers: all(forwards._plain(layer) for layer in layers))
    theirs, ours = pair(name)
    inputs = test_hf.batch("whole")
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).loss, theirs(**inputs).loss, atol=1e-5, rtol=1e-5)
    assert calls == [3, 2] * 2
    ours.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    ours(**inputs)
    assert calls == [3, 2] * 2 + [3, 3, 2]


def keys(of: nn.Module) -> list[set[str]]:
    return [set(module.__dict__) for module in of.modules()]


@by_family
def test_unpatch_restores(name: str) -> None:
    one = model(name).train()
    inputs = test_hf.batch("left")
    before, before_gradients = test_hf.loss_and_gradients(one, inputs)
    attributes, state = keys(one), list(one.state_dict())
    hf.patch(one)
    assert one.config._attn_implementation == "fkernel"
    assert list(one.state_dict()) == state
    test_hf.loss_and_gradients(one, inputs)
    hf.unpatch(one)
    assert keys(one) == attributes
    assert one.config._attn_implementation == "eager"
    after, gradients = test_hf.loss_and_gradients(one, inputs)
    assert torch.equal(after, before)
    for label, gradient in before_gradients.items():
        assert (gradient is None and gradients[label] is None) or torch.equal(gradients[label], gradient), label
    hf.unpatch(one)  # again, to no effect


def test_patched_is_for_the_block_alone() -> None:
    one = model("llama")
    attributes = keys(one)

    def fails() -> None:
        with hf.patched(one, loss="logits") as report:
            assert report.replaced
            with pytest.raises(ValueError, match="patched already"), hf.patched(one):
                pass
            raise KeyError("from inside")

    with pytest.raises(KeyError, match="from inside"):
        fails()
    assert keys(one) == attributes
    assert one.config._attn_implementation == "eager"


def test_patching_again_takes_the_new_options() -> None:
    one = model("llama")
    attributes = keys(one)
    hf.patch(one)
    hf.patch(one, loss=None)
    assert "forward" not in one.__dict__
    assert "_loss_function" not in one.__dict__
    hf.unpatch(one)
    assert keys(one) == attributes
    assert one.config._attn_implementation == "eager"


@by_family
def test_the_report(name: str) -> None:
    report = hf.patch(model(name))
    kernels = {entry.part: entry.kernel or "" for entry in report.replaced}
    for part, kernel in {**REPLACED[name], "attention": "attention", "loss": "linear_cross_entropy"}.items():
        assert kernels.pop(part).split(",")[0].split(" ")[0] == kernel, part
    assert not kernels
    assert not report.left
    norms = [entry.count for entry in report.replaced if entry.part == "norm"]
    assert norms == [{"qwen3": 9, "gemma2": 9, "gemma3": 13}.get(name, 5)]
    found = report.as_dict()
    assert found["model"] == report.model == type(model(name)).__name__
    assert len(found["replaced"]) == len(report.replaced)
    assert found["replaced"][0]["part"] == "attention"
    for entry in report.entries:
        assert entry.module in str(report)


def test_an_unknown_family_says_what_it_keeps() -> None:
    config = transformers.Olmo2Config(**{**SIZES, "vocab_size": 64})
    one = transformers.Olmo2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    tokens = test_hf.batch("whole")["input_ids"]
    expected = one(tokens).logits
    report = hf.patch(one)
    assert [entry.part for entry in report.replaced] == ["attention"]
    left = {entry.module: (entry.part, entry.count, entry.reason) for entry in report.left}
    reason = "not in the tables; it keeps its own"
    assert left == {
        "Olmo2Attention": ("rope", 2, reason), "Olmo2RMSNorm": ("norm", 9, reason), "Olmo2MLP": ("mlp", 2, reason),
        "Olmo2ForCausalLM": ("loss", 1, reason),
    }  # fmt: skip
    torch.testing.assert_close(one(tokens).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_model_without_the_interface_keeps_its_attention() -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    one = transformers.BloomForCausalLM(config).eval()
    tokens = test_hf.batch("whole")["input_ids"]
    expected = one(tokens).logits
    report = hf.patch(one)
    assert "does not go through AttentionInterface" in report.left[0].reason
    assert [entry.kernel for entry in report.replaced] == ["layer_norm"]
    torch.testing.assert_close(one(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_replaced_says_why() -> None:
    one = model("llama", hidden_act="tanh", output_attentions=True)
    one.model.norm.forward = one.model.norm.forward
    one._loss_function = lambda *args, **kwargs: torch.zeros(())
    reasons = {(entry.part, entry.count): entry.reason for entry in hf.patch(one).left}
    assert "never held" in reasons["attention", 1]
    assert "no kernel gates by Tanh" in reasons["mlp", 2]
    assert "something else has replaced its forward" in reasons["norm", 1]
    assert "a loss function of its own" in reasons["loss", 1]
    hf.unpatch(one)
    assert "forward" in one.model.norm.__dict__
    assert "_loss_function" in one.__dict__
    reasons = {entry.part: entry.reason for entry in hf.patch(model("gpt2", activation_function="mish")).left}
    assert "no kernel for MishActivation" in reasons["mlp"]
    experts = model("mixtral")
    experts.set_experts_implementation("eager")
    assert "not a function of its own" in hf.patch(experts).left[0].reason


def test_wrong_inputs() -> None:
    with pytest.raises(TypeError, match=r"the model is a Linear; it must be a transformers\.PreTrainedModel"):
        hf.patch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"before torch\.compile"):
        hf.patch(torch.compile(model("llama")))
    with pytest.raises(TypeError, match="it must be a transformers"):
        hf.unpatch("llama")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss is 'fast'; it must be 'fused', 'logits' or None"):
        hf.patch(model("llama"), loss="fast")


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
    whole = ours(inputs["input_ids"], labels=inputs["labels"], return_dict=False)
    assert isinstance(whole, tuple)
    assert whole[0].ndim == 0


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_routers_loss(name: str) -> None:
    theirs, ours = pair(name, output_router_logits=True, router_aux_loss_coef=0.5)
    inputs = test_hf.batch("left")
    gradients_match(theirs, ours, inputs)
    expected, found = theirs(**inputs), ours(**inputs)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, atol=1e-5, rtol=1e-5)
    assert len(found.router_logits) == len(expected.router_logits) == 2


def test_the_signature_that_trainers_and_generate_read_is_kept() -> None:
    theirs, ours = pair("gpt2")
    expected = inspect.signature(theirs.forward).parameters
    found = inspect.signature(ours.forward).parameters
    assert list(found) == list(expected)
    assert all(found[name].default == one.default for name, one in expected.items())
    tokens = test_hf.batch("whole")["input_ids"]
    cache = transformers.DynamicCache(config=ours.config)
    assert ours(tokens, cache, labels=tokens).past_key_values is cache  # the second of GPT-2's arguments


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


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_models_of_their_own(name: str, duplicate: Any) -> None:
    theirs, ours = pair(name)
    inputs = test_hf.batch("left")
    twin = duplicate(ours)
    for module in twin.modules():
        forward = module.__dict__.get("forward")
        assert forward is None or forward.args[0] is module
    gradients_match(theirs, twin, inputs)
    hf.unpatch(twin)
    assert twin.config._attn_implementation == "eager"
    assert torch.equal(twin(**inputs).loss, theirs(**inputs).loss)
    assert ours.config._attn_implementation == "fkernel"
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
    expected, expected_gradients = test_hf.loss_and_gradients(ours, inputs)
    torch._dynamo.reset()
    ours.zero_grad()
    loss = torch.compile(ours, backend="aot_eager", fullgraph=whole)(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, atol=1e-5, rtol=1e-5)
    for label, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_gradients[label], atol=1e-4, rtol=1e-3)
    torch._dynamo.reset()


def test_hooks_are_called_and_another_attention_may_be_chosen() -> None:
    theirs, ours = pair("llama")
    inputs = test_hf.batch("whole")
    called: list[str] = []
    for label in ("model.norm", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp", "model.layers.1.self_attn"):
        ours.get_submodule(label).register_forward_hook(lambda *_, label=label: called.append(label))
    ours(**inputs)
    assert len(called) == 4
    ours.set_attn_implementation("sdpa")
    gradients_match(theirs, ours, inputs)
    hf.unpatch(ours)
    assert ours.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("first", ["patch", "hook"])
def test_accelerates_hooks_stay_in_front(first: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    theirs, ours = model("llama"), model("llama")
    seen: list[str] = []

    class Count(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module).__name__)
            return args, kwargs

    for step in ["patch", "hook"] if first == "patch" else ["hook", "patch"]:
        if step == "patch":
            hf.patch(ours)
        else:
            hooks.add_hook_to_module(ours.model.norm, Count())
    inputs = test_hf.batch("left")
    gradients_match(theirs, ours, inputs)
    assert seen == ["LlamaRMSNorm"]
    assert ours.model.norm._old_forward.func is forwards.norm
    hf.unpatch(ours)
    assert not isinstance(ours.model.norm._old_forward, partial)
    hooks.remove_hook_from_module(ours.model.norm)
    assert torch.equal(ours(**inputs).loss, theirs(**inputs).loss)


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
