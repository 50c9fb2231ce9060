"""Text on a terminal: `flashkernel generate` and `flashkernel chat`. Text goes to standard output, remarks to
standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from flashkernel.engine.core import RequestError
from flashkernel.engine.llm import LLM
from flashkernel.engine.sampling import SamplingParams
from flashkernel.engine.sequence import Completion, Event
from flashkernel.engine.tokenizer import Message

HELP = "Type a message. /new starts over, /exit or Ctrl-D ends, Ctrl-C stops a reply."


def generate(llm: LLM, prompt: str, params: SamplingParams, *, plain: bool) -> Completion:
    """Print a completion while it comes. A model with a chat template is asked the prompt, unless `plain`."""
    if plain or llm.tokenizer is None or llm.tokenizer.template is None:
        return show(llm.stream(prompt, params))
    return show(llm.stream_chat([{"role": "user", "content": prompt}], params))


def check_prompt(prompt: str) -> str:
    """The prompt, where it says anything; asked before a model is loaded for nothing."""
    if not prompt.strip():
        raise ValueError("the prompt is empty; say what the text begins with, or what is asked")
    return prompt


def show(events: Iterator[Event]) -> Completion:
    """Print the text of events as they come."""
    last: Completion | None = None
    for event in events:
        sys.stdout.write(event.text)
        sys.stdout.flush()
        last = event.completion
    sys.stdout.write("\n")
    assert last is not None, "a request ends with its completion"
    return last


def summary(done: Completion) -> str:
    """One line on how fast it was."""
    timing, count = done.timing, len(done.tokens)
    first = timing.to_first_token or 0.0
    took = timing.finished - timing.arrived - first
    speed = f", then {(count - 1) / took:.1f} tokens/s" if count > 1 and took > 0 else ""
    return f"{len(done.prompt_tokens)} tokens in, {count} out; the first after {first * 1e3:.0f} ms{speed}"


def chat(llm: LLM, params: SamplingParams, system: str | None, tell: Callable[[str], None]) -> None:
    """A conversation until the user ends it; where it outgrows the context, its oldest messages are dropped."""
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    tell(HELP)
    while (line := _ask()) is not None:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/new":
            messages = list(start)
        elif text:
            messages.append({"role": "user", "content": text})
            reply = _reply(llm, messages, len(start), params, tell)
            if reply is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": reply})


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def _reply(
    llm: LLM, messages: list[Message], kept: int, params: SamplingParams, tell: Callable[[str], None]
) -> str | None:
    """The model's answer, printed as it comes; None where there can be none."""
    while True:
        try:
            events = llm.stream_chat(messages, params)
            break
        except RequestError as error:
            if len(messages) <= kept + 1:
                tell(str(error))
                return None
            del messages[kept : kept + 2]  # a question and its answer
            tell("The conversation has outgrown the context; its oldest messages were dropped.")
    parts: list[str] = []
    began = time.monotonic()
    try:
        for event in events:
            parts.append(event.text)
            sys.stdout.write(event.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        tell(f"stopped after {time.monotonic() - began:.1f} s")
    sys.stdout.write("\n")
    return "".join(parts)
