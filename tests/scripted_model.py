"""A tiny model that says what a test wants, token by token, through the whole engine: for what no tiny model writes."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from flashkernel.engine import LLM, Tokenizer

# What templates with tools look like to the server: they read `tools` and teach a format.
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HERMES = "{% if tools %}{{ tools | length }} <tool_call>{% endif %}" + TEMPLATE
LLAMA = "{% if tools %}{{ tools | length }}{% endif %}" + TEMPLATE


def scripted(base: LLM, text: str, template: str | None = None, **options: Any) -> LLM:
    """The model of `base` with another chat template; whatever it is asked, it generates `text` and ends."""
    known = base.tokenizer
    assert known is not None
    tokenizer = known
    if template is not None:
        tokenizer = Tokenizer(known.backend, chat_template=template, special_tokens=known.special_tokens)
    llm = LLM(base.model, tokenizer, **{"kv_cache_tokens": 4096, "block_size": 16, **options})
    script = [*known.encode(text, add_special_tokens=False), llm.config.eos_token_ids[0]]
    launch = llm.engine.runner.launch

    def launch_scripted(batch: Any) -> Any:
        launched = launch(batch)
        places = [len(one.token_ids) - one.num_prompt_tokens for one in launched.sequences]
        tokens = launched.results[0].clone()
        for index, place in enumerate(places):
            tokens[index] = script[min(place, len(script) - 1)]
        launched.results[0] = tokens
        return launched

    llm.engine.runner.launch = launch_scripted  # type: ignore[method-assign]
    return llm


def count_compiled_templates(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which each chat template is added when it is compiled."""
    compiled: list[str] = []
    compile_source = jinja2.Environment.compile

    def counting(self: Any, source: Any, *given: Any, **named: Any) -> Any:
        compiled.append(source)
        return compile_source(self, source, *given, **named)

    monkeypatch.setattr(jinja2.Environment, "compile", counting)
    return compiled
