"""What flashkernel.hf.patch replaces, leaves and reports in models of every family, and what unpatch restores."""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.17")

import test_hf  # noqa: E402
from patched_models import (  # noqa: E402, F401
    SIZES,
    _as_on_a_gpu,
    _one_thread,
    by_family,
    gradients_match,
    model,
    pair,
)

import flashkernel.hf as hf  # noqa: E402
from flashkernel.hf import forwards, patching  # noqa: E402

REPLACED = {  # part -> kernel, besides attention and the loss
    "llama": {"rope": "rope", "norm": "rms_norm", "mlp": "swiglu", "layer": "one"},
    "mistral": {"rope": "rope", "norm": "rms_norm", "mlp": "swiglu", "layer": "one"},
    "mixtral": {"rope": "rope", "norm": "rms_norm", "mlp": "moe_experts"},
    "qwen3_moe": {"rope": "rope", "norm": "rms_norm", "mlp": "moe_experts"},
    "qwen2": {"rope": "rope", "norm": "rms_norm", "mlp": "swiglu", "layer": "one"},
    "qwen3": {"rope": "rope", "norm": "rms_norm", "mlp": "swiglu", "layer": "one"},
    "gemma": {"rope": "rope", "norm": "rms_norm", "mlp": "geglu"},
    "gemma2": {"rope": "rope", "norm": "rms_norm", "mlp": "geglu"},
    "gemma3": {"rope": "rope", "norm": "rms_norm", "mlp": "geglu"},
    "gpt_oss": {"rope": "rope", "norm": "rms_norm", "mlp": "moe_experts"},
    "gpt2": {"norm": "layer_norm", "mlp": "gelu_tanh"},
}
OWN = forwards._keeps_own_code


@by_family
def test_a_cpu_keeps_what_it_would_not_gain_from(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "_keeps_own_code", OWN)
    for operator in ("rms_norm", "layer_norm", "rope", "swiglu", "geglu", "gelu", "run_experts"):
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

    def spy(x: Tensor, weights: Tensor | list[Tensor], *args: Any, **kwargs: Any) -> Any:
        calls.append(1 if isinstance(weights, Tensor) else len(weights))
        return linear(x, weights, *args, **kwargs)

    linear = forwards.linear
    monkeypatch.setattr(forwards, "linear", spy)
    monkeypatch.setattr(
        forwards, "_can_fuse", lambda x, layers: all(forwards._is_plain_linear(layer) for layer in layers)
    )
    theirs, ours = pair(name)
    inputs = test_hf.batch("whole")
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).loss, theirs(**inputs).loss, atol=1e-5, rtol=1e-5)
    assert calls == [3, 1, 2, 1] * 2
    ours.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    ours(**inputs)
    assert calls == [3, 1, 2, 1] * 2 + [3, 1] + [3, 1, 2, 1]


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
    assert not report.skipped
    norms = [entry.count for entry in report.replaced if entry.part == "norm"]
    assert norms == [{"qwen3": 9, "qwen3_moe": 9, "gemma2": 9, "gemma3": 13}.get(name, 5)]
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
    left = {entry.module: (entry.part, entry.count, entry.reason) for entry in report.skipped}
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
    assert "does not go through AttentionInterface" in report.skipped[0].reason
    assert [entry.kernel for entry in report.replaced] == ["layer_norm"]
    torch.testing.assert_close(one(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_stacks_with_copies_of_the_config() -> None:
    """T5's encoder and decoder, which have all of its attention."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    theirs, ours = (
        transformers.T5ForConditionalGeneration._from_config(copy.deepcopy(config), attn_implementation="eager")
        for _ in range(2)
    )
    ours.load_state_dict(theirs.state_dict())
    report = hf.patch(ours)
    assert (report.replaced[0].part, report.replaced[0].reason) == ("attention", "")
    configs = [ours.config, ours.encoder.config, ours.decoder.config]
    assert all(one._attn_implementation == "fkernel" for one in configs)
    inputs = {**test_hf.batch("right"), "labels": test_hf.batch("whole")["input_ids"][:, :7].contiguous()}
    gradients_match(theirs, ours, inputs)
    hf.unpatch(ours)
    assert all(one._attn_implementation == "eager" for one in configs)


def test_a_model_that_extends_an_additive_mask_keeps_its_attention() -> None:
    config = transformers.DeepseekV4Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=24, q_lora_rank=16,
    )  # fmt: skip
    with torch.device("meta"):
        one = transformers.DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager")
    assert "eager attention alone" in hf.patch(one).skipped[0].reason
    assert one.config._attn_implementation == "eager"


def test_what_cannot_be_replaced_says_why() -> None:
    one = model("llama", hidden_act="tanh", output_attentions=True)
    one.model.norm.forward = one.model.norm.forward
    one._loss_function = lambda *args, **kwargs: torch.zeros(())
    reasons = {(entry.part, entry.count): entry.reason for entry in hf.patch(one).skipped}
    assert "never held" in reasons["attention", 1]
    assert "no kernel gates by Tanh" in reasons["mlp", 2]
    assert "something else has replaced its forward" in reasons["norm", 1]
    assert "a loss function of its own" in reasons["loss", 1]
    hf.unpatch(one)
    assert "forward" in one.model.norm.__dict__
    assert "_loss_function" in one.__dict__
    reasons = {entry.part: entry.reason for entry in hf.patch(model("gpt2", activation_function="mish")).skipped}
    assert "no kernel for MishActivation" in reasons["mlp"]
    assert "no kernel gates by Tanh" in hf.patch(model("mixtral", hidden_act="tanh")).skipped[0].reason


def test_wrong_inputs() -> None:
    with pytest.raises(TypeError, match=r"the model is a Linear; it must be a transformers\.PreTrainedModel"):
        hf.patch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"before torch\.compile"):
        hf.patch(torch.compile(model("llama")))
    with pytest.raises(TypeError, match="it must be a transformers"):
        hf.unpatch("llama")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss is 'fast'; it must be 'fused', 'logits' or None"):
        hf.patch(model("llama"), loss="fast")


def test_the_signature_that_trainers_and_generate_read_is_kept() -> None:
    theirs, ours = pair("gpt2")
    expected = inspect.signature(theirs.forward).parameters
    found = inspect.signature(ours.forward).parameters
    assert list(found) == list(expected)
    assert all(found[name].default == one.default for name, one in expected.items())
    tokens = test_hf.batch("whole")["input_ids"]
    cache = transformers.DynamicCache(config=ours.config)
    assert ours(tokens, cache, labels=tokens).past_key_values is cache  # the second of GPT-2's arguments


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


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("first", ["patch", "shard"])
def test_a_sharded_model(first: str, name: str) -> None:
    """fully_shard (FSDP2) gives modules classes of their own; here over one process."""
    fsdp, distributed = pytest.importorskip("torch.distributed.fsdp"), torch.distributed
    theirs, ours = model(name).train(), model(name).train()
    inputs = test_hf.batch("left")
    expected, _ = test_hf.loss_and_gradients(theirs, inputs)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        for step in ["patch", "shard"] if first == "patch" else ["shard", "patch"]:
            if step == "patch":
                report = hf.patch(ours)
                continue
            for each in [*(ours.transformer.h if name == "gpt2" else ours.model.layers), ours]:
                fsdp.fully_shard(each, mesh=mesh)
        assert not report.skipped
        result = ours(**inputs)
        result.loss.backward()
        assert result.logits is None
        torch.testing.assert_close(result.loss.detach(), expected, atol=1e-5, rtol=1e-5)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, atol=1e-4, rtol=1e-4)
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    accelerate.state.AcceleratorState._reset_state(True)


def test_accelerates_mixed_precision_is_unwrapped(accelerator: Any) -> None:
    theirs, ours = pair("llama")
    inputs = test_hf.batch("left")
    wrapped = accelerator.prepare(ours.train())
    assert wrapped(**inputs).logits is None
    names = list(inspect.signature(theirs.forward).parameters)
    assert list(inspect.signature(wrapped.forward).parameters) == names
    plain = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    gradients_match(theirs, plain, inputs)
    assert plain(**inputs).logits is None


def test_accelerates_mixed_precision_stays_behind_after_training(accelerator: Any) -> None:
    """As Trainer(bf16=True) leaves a model: copies are of their own, and unpatch and patch reach what was wrapped."""
    theirs, ours = pair("llama")
    inputs = test_hf.batch("left")
    wrapped = accelerator.prepare(ours.train())
    zeros = copy.deepcopy(wrapped)
    with torch.no_grad():
        for parameter in zeros.parameters():
            parameter.zero_()
    torch.testing.assert_close(zeros(**inputs).loss, torch.tensor(64.0).log(), atol=1e-3, rtol=0)
    hf.unpatch(wrapped)
    assert wrapped(**inputs).logits is not None
    assert hf.patch(wrapped).entries[-1].kernel == "linear_cross_entropy in training"
    assert wrapped(**inputs).logits is None
    assert hf.patch(wrapped, loss="logits").entries[-1].kernel == "cross_entropy"
    assert wrapped(**inputs).logits is not None
    hf.unpatch(wrapped)
    plain = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert torch.equal(plain(**inputs).loss, theirs.train()(**inputs).loss)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2"])
def test_whole_mlps_where_their_layers_are_plain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, an MLP of plain layers is one call of `mlp`, with its gradients; a wrapped layer is called."""
    calls: list[torch.Size] = []

    def spy(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(x.shape)
        return whole(x, *args, **kwargs)

    whole = forwards.mlp
    monkeypatch.setattr(forwards, "mlp", spy)
    theirs, ours = pair(name)
    inputs = test_hf.batch("whole")
    gradients_match(theirs, ours, inputs)
    assert not calls, "float32 products are torch's"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (one.train()(**inputs).loss for one in (ours, theirs))
    assert len(calls) == 2
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    found.backward()
    layers = ours.transformer.h if name == "gpt2" else ours.model.layers
    down = "c_proj" if name == "gpt2" else "down_proj"
    assert all(getattr(layer.mlp, down).weight.grad.dtype == torch.float32 for layer in layers)
    getattr(layers[0].mlp, down).register_forward_hook(lambda *_: None)
    calls.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours(**inputs)
    assert len(calls) == 1


_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0, "moe_intermediate_size": 16,
}  # fmt: skip
_ROUTED = {  # of families that no table names
    "Olmoe": {"num_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Glm4Moe": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0},
    "MiniMax": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    "GraniteMoe": {"num_local_experts": 4},
}


@pytest.mark.parametrize("family", _ROUTED)
def test_experts_of_every_family(family: str) -> None:
    """Those of Transformers' ExpertsInterface, whatever the model."""
    config = getattr(transformers, f"{family}Config")(**_SMALL, **_ROUTED[family])
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        made = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        models.append(made)
    report = hf.patch(models[1])
    kernels = [entry.kernel for entry in report.replaced if entry.part == "mlp" and "Expert" in entry.module]
    assert kernels == ["moe_experts with swiglu"]
    tokens = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    outputs = []
    for one in models:
        result = one.train()(tokens, labels=tokens)
        result.loss.backward()
        stacks = [x.grad for name, x in one.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
        outputs.append([result.loss.detach(), *stacks])
    for expected, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_experts_with_a_gate_of_their_own_are_left() -> None:
    """As those of MiniMax-M3."""
    kind = transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts
    experts = kind.__new__(kind)
    torch.nn.Module.__init__(experts)
    vars(experts).update(has_gate=True, has_bias=False, is_transposed=False, is_concatenated=True, num_experts=2)
    experts.down_proj = nn.Parameter(torch.zeros(2, 4, 4))
    entry = patching._patch_module(experts)[0]
    assert (entry.kernel, entry.reason) == (None, "it has a gate of its own")


def test_attention_gives_a_contiguous_result() -> None:
    """JetMoe, among others, takes a view of it."""
    config = transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, intermediate_size=16,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    one = transformers.JetMoeForCausalLM._from_config(config, attn_implementation="eager").eval()
    tokens = torch.randint(0, 64, (2, 9))
    expected = one(tokens).logits
    hf.register()
    one.set_attn_implementation("fkernel")
    torch.testing.assert_close(one(tokens).logits, expected, atol=1e-5, rtol=1e-4)
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    module = nn.Module()
    assert hf.attention_forward(module, q, k, v, None, is_causal=True)[0].is_contiguous()
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = hf.attention_forward(module, q[:1], k[:1], v[:1], None, is_causal=True, cu_seq_lens_q=ends)[0]
    assert packed.is_contiguous()
