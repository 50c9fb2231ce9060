"""Text on a terminal: `flashkernel generate` and `flashkernel chat`. Text goes to stdout, remarks to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from flashkernel.engine.input_processor import RequestError
from flashkernel.engine.llm import LLM
from flashkernel.engine.outputs import RequestOutput, StepOutput
from flashkernel.engine.sampling_params import SamplingParams
from flashkernel.engine.tokenizer import Message

HELP = "Type a message. /new starts over, /exit or Ctrl-D ends, Ctrl-C stops a reply."


def generate(llm: LLM, prompt: str, params: SamplingParams, *, plain: bool) -> RequestOutput:
    """Prints the text as it is generated. A model with a chat template answers the prompt; with `plain` it goes on."""
    if plain or llm.tokenizer is None or llm.tokenizer.chat_template is None:
        return show(llm.stream(prompt, params))
    return show(llm.stream_chat([{"role": "user", "content": prompt}], params))


def check_prompt(prompt: str) -> str:
    """Returns the prompt; ValueError if it is empty. Called before a model is loaded in vain."""
    if not prompt.strip():
        raise ValueError("the prompt is empty; say what the text begins with, or what is asked")
    return prompt


def show(steps: Iterator[StepOutput]) -> RequestOutput:
    """Prints text as it is generated; returns the finished request."""
    last: RequestOutput | None = None
    for step in steps:
        sys.stdout.write(step.text)
        sys.stdout.flush()
        last = step.request_output
    sys.stdout.write("\n")
    assert last is not None, "the last step has the request's output"
    return last


def summary(output: RequestOutput) -> str:
    """One line on how fast it was."""
    metrics, count = output.metrics, len(output.outputs[0].token_ids)
    first = metrics.time_to_first_token or 0.0
    decode = metrics.finished_time - metrics.arrival_time - first
    speed = f", then {(count - 1) / decode:.1f} tokens/s" if count > 1 and decode > 0 else ""
    return f"{len(output.prompt_token_ids)} tokens in, {count} out; the first after {first * 1e3:.0f} ms{speed}"


def chat(llm: LLM, params: SamplingParams, system: str | None, tell: Callable[[str], None]) -> None:
    """Chats until the user ends it. If the conversation outgrows max_model_len, its oldest messages are dropped."""
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
    """Prints and returns the model's answer; None if there can be none."""
    while True:
        try:
            steps = llm.stream_chat(messages, params)
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
        for step in steps:
            parts.append(step.text)
            sys.stdout.write(step.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        tell(f"stopped after {time.monotonic() - began:.1f} s")
    sys.stdout.write("\n")
    return "".join(parts)
