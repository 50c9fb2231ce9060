"""The examples run, and show what they say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from flashkernel.lab import moe_study, results

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_gpt_oss_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("finetune_gpt_oss")
    runs = example.main(["--tiny", "--steps", "6", "--length", "64", "--out", str(tmp_path / "loss.png")])
    assert runs["fkernel"].losses == pytest.approx(runs["eager"].losses, abs=1e-4)
    assert runs["fkernel"].losses[-1] < runs["fkernel"].losses[0]
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("finetune_gpt_oss", ["no/such/folder"], "has no config.json"),
        ("finetune_gpt_oss", ["somebody/no-such-model"], "hf download somebody/no-such-model"),
        ("finetune_gpt_oss", ["--tiny", "--steps", "0"], "0 is no whole number"),
        ("finetune_gpt_oss", ["--tiny", "--length", "99999999"], "the text has"),
        ("moe_study", ["--tiny", "--only", "softmax", "best"], "there is no 'best'; there are softmax"),
        ("moe_study", ["--tiny", "--steps", "0"], "at least 1"),
    ],
)
def test_mistakes_end_in_a_message(
    example: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit):
        importlib.import_module(example).main(arguments)
    assert message in capsys.readouterr().err


def test_gpt_oss_from_its_released_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA on attention and router; the experts' bytes stay as they were stored."""
    import transformers
    from safetensors.torch import load_file, save_file

    from flashkernel import Weight
    from flashkernel.hf import load_gpt_oss

    config = transformers.GptOssConfig(
        vocab_size=256, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = Weight.quantize(stored.pop(name).float().transpose(1, 2).contiguous(), "mxfp4")
        assert weight.scales is not None
        stored[f"{name}_blocks"] = weight.data.unflatten(-1, (-1, 16)).contiguous()
        stored[f"{name}_scales"] = weight.scales.contiguous()
    save_file(stored, file)
    model = load_gpt_oss(tmp_path, "cpu", torch.float32)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.weight.format == "mxfp4"
    assert experts.gate_up_proj.data.dtype == torch.uint8
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("finetune_gpt_oss")
    (run,) = example.main([str(tmp_path), "--steps", "40", "--length", "96", "--rank", "4"]).values()
    assert sum(run.losses[-10:]) < sum(run.losses[:10])  # texts differ from step to step by more than a few steps teach


def test_moe_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("moe_study")
    text = torch.tensor(list(b"the sea and the sky and the shore, " * 300))  # three steps must teach something
    monkeypatch.setattr(example, "corpus", lambda: text)  # documents change
    names = ["softmax+cv", "sigmoid+bias", "expert choice (leaks)"]
    paths = [tmp_path / name for name in ("study.svg", "usage.png", "cpu/moe_study.json")]
    runs = example.main(["--tiny", "--steps", "3", "--only", *names, "--out", str(paths[0]), "--usage", str(paths[1]),
                         "--save", str(paths[2].parent)])  # fmt: skip
    assert list(runs) == names
    assert all(run.losses[-1] < run.losses[0] for run in runs.values())
    assert float(runs[names[2]].usage.statistic("min_over_max").min()) == 1
    assert all(path.stat().st_size > 1000 for path in paths)
    saved = json.loads(paths[2].read_text())
    assert saved["sizes"]["steps"] == len(saved["routers"][0]["losses"]) == 3
    assert saved["command"].startswith("python examples/moe_study.py --tiny --steps 3")
    assert moe_study.digest(saved["routers"]) in paths[0].read_text()
    table = moe_study.block(tmp_path)
    assert table is not None
    assert "| expert choice (leaks) |" in table
    assert results.load_folder(tmp_path / "cpu") == {}, "it has no records of speed"


def test_the_picture_of_the_moe_study_is_of_the_saved_losses() -> None:
    root = Path(EXAMPLES).parent
    saved = json.loads((root / "results" / "cpu" / "moe_study.json").read_text())
    drawn = (root / "docs" / "pictures" / "moe-study.svg").read_text()
    assert f"<dc:description>{moe_study.digest(saved['routers'])}</dc:description>" in drawn
    assert "pictures/moe-study.svg)" in (root / "flashkernel" / "ops" / "moe" / "README.md").read_text()
