"""`LLM`: a model that is ready to generate."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashkernel.engine import hub
from flashkernel.engine.build import DTYPES, EngineArgs, build_engine, device_and_dtype, parse_device
from flashkernel.engine.checkpoint import open_checkpoint
from flashkernel.engine.config import ModelConfig
from flashkernel.engine.model_loader import load_model
from flashkernel.engine.model_runner import Progress
from flashkernel.engine.outputs import RequestOutput, StepOutput
from flashkernel.engine.sampling_params import SamplingParams
from flashkernel.engine.tokenizer import Message, Tokenizer
from flashkernel.engine.transformer import Transformer

Prompt = str | Sequence[int]  # a text, or token ids
ACCEPTED_PROMPTS = "a str, a list of str, a list of token ids, or a list of lists of token ids"


class LLM:
    """A model and the engine that serves it.

    Args:
        model: A folder as Transformers saves it, a GGUF file, a Hugging Face repository ("owner/name") that is in the
            local cache, "smollm2" (downloaded on first use), or a `Transformer`.
        tokenizer: Replaces the model's own.
        download: Downloads a Hugging Face repository that is not in the local cache.
        progress: Called as `progress(layers loaded, layers)` while the weights are loaded.
        start_progress: Called as `progress(what, done, total)` while kernels are compiled and graphs captured.
        **engine_args: The fields of `EngineArgs`.

    Raises:
        ModelError: The model cannot be found, read or run; the message says what to do.

    Example:
        >>> from flashkernel.engine import LLM, SamplingParams
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> llm = LLM(tiny_transformer(), kv_cache_tokens=256)
        >>> outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=8))
        >>> [len(output.outputs[0].token_ids) for output in outputs]
        [8, 8]
    """

    def __init__(
        self,
        model: str | Path | Transformer = hub.DEFAULT_MODEL,
        tokenizer: Tokenizer | None = None,
        *,
        download: bool = False,
        progress: Callable[[int, int], None] | None = None,
        start_progress: Progress | None = None,
        **engine_args: Any,
    ) -> None:
        self.engine_args = EngineArgs(**engine_args)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise TypeError(
                f"LLM: tokenizer is {type(tokenizer).__name__}; it must be a Tokenizer, such as "
                "Tokenizer.from_folder(path)"
            )
        if isinstance(model, Transformer):
            _check_placed(model, self.engine_args)
            quantization = self.engine_args.quantization
            self.model = model if quantization is None else model.quantized(quantization)
            self.tokenizer, self.name = tokenizer, model.config.architecture
        else:
            self.name = str(model)
            self.model, found = _load(hub.resolve(model, download), self.engine_args, progress)
            self.tokenizer = found if tokenizer is None else tokenizer
        self.engine = build_engine(self.model, self.tokenizer, self.engine_args, start_progress)
        self._step_lock = threading.Lock()
        self._queues: dict[str, deque[StepOutput]] = {}  # by request: outputs of its call that nobody has read

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.model.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts together.

        A request that fails alone (its logits are NaN) has the finish_reason "error" and says why in `error`; the
        others are not affected.

        Args:
            prompts: A str, a list of str, a list of token ids, or a list of lists of token ids.
            sampling_params: One for all prompts, or one for each; None takes the defaults.

        Returns:
            One output for each prompt, in their order.

        Raises:
            TypeError: `prompts` is something else.
            RequestError: A prompt can never be served; none is started.
            RuntimeError: A step failed, or every request.

        Example:
            >>> from flashkernel.engine import LLM, SamplingParams
            >>> from flashkernel.engine.dummy_weights import tiny_transformer
            >>> llm = LLM(tiny_transformer(), kv_cache_tokens=64)
            >>> llm.generate([1, 2, 3], SamplingParams(max_tokens=5))[0].outputs[0].finish_reason
            'length'
            >>> llm.generate(b"abc")
            Traceback (most recent call last):
            TypeError: generate: prompts is bytes; it must be a str, a list of str, a list of token ids, or a list of \
lists of token ids
        """
        several = _as_list("generate", prompts)
        params = _for_each(sampling_params, len(several))
        requests = [(prompt, one) for prompt, given in zip(several, params) for one in _completions(given)]
        request_ids = self._add([prompt for prompt, _ in requests], [one for _, one in requests], streaming=False)
        found = {
            step.request_id: step.request_output for step in self._steps(request_ids) if step.request_output is not None
        }
        left = iter(request_ids)
        outputs = [_merged([found[next(left)] for _ in range(given.n)]) for given in params]
        if outputs and all(output.outputs[0].finish_reason == "error" for output in outputs):
            raise RuntimeError(outputs[0].error)
        return outputs

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Generates for one prompt, token by token. Leaving the iteration aborts the request.

        Args:
            prompt: A str, or token ids.
            sampling_params: None takes the defaults.

        Returns:
            An iterator over a `StepOutput` for each token; the last one has the `request_output`.

        Example:
            >>> from flashkernel.engine import LLM, SamplingParams
            >>> from flashkernel.engine.dummy_weights import tiny_transformer
            >>> llm = LLM(tiny_transformer(), kv_cache_tokens=64)
            >>> len([step.token_id for step in llm.stream([1, 2, 3], SamplingParams(max_tokens=5))])
            5
        """
        request_ids = self._add([prompt], [sampling_params or SamplingParams()], streaming=True)
        return self._raising(self._steps(request_ids))

    def stream_batch(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, StepOutput]]:
        """Generates for several prompts together, token by token.

        Args:
            prompts: As for `generate`.
            sampling_params: One for all prompts, or one for each; None takes the defaults.

        Returns:
            An iterator over (index of the prompt, `StepOutput`).

        Example:
            >>> from flashkernel.engine import LLM, SamplingParams
            >>> from flashkernel.engine.dummy_weights import tiny_transformer
            >>> llm = LLM(tiny_transformer(), kv_cache_tokens=256)
            >>> [index for index, _ in llm.stream_batch([[1, 2], [3]], SamplingParams(max_tokens=2))]
            [0, 1, 0, 1]
        """
        several = _as_list("stream_batch", prompts)
        request_ids = self._add(several, _for_each(sampling_params, len(several)), streaming=True)
        indices = {request_id: index for index, request_id in enumerate(request_ids)}
        return ((indices[step.request_id], step) for step in self._steps(request_ids))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Generates the next message of a conversation.

        Args:
            messages: Such as `[{"role": "user", "content": "Hello"}]`; the model's chat template renders them.
            sampling_params: None takes the defaults.
            tools: Functions that the model may call, as OpenAI's API has them; for templates that know tools.
            chat_template_kwargs: Further variables of the template, such as `{"enable_thinking": False}`.

        Returns:
            The output; `outputs[0].text` is the message.

        Raises:
            ValueError: The model has no tokenizer or chat template, or these are no messages.

        Example:
            >>> import tokenizers
            >>> from flashkernel.engine import LLM, SamplingParams, Tokenizer
            >>> from flashkernel.engine.dummy_weights import tiny_transformer
            >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "sea": 1}, "[UNK]"))
            >>> template = "{% for message in messages %}{{ message.content }}{% endfor %}"
            >>> llm = LLM(tiny_transformer(), Tokenizer(words, chat_template=template), kv_cache_tokens=64)
            >>> llm.chat([{"role": "user", "content": "sea"}], SamplingParams(max_tokens=2)).prompt_token_ids
            (1,)
        """
        return self.generate([self._conversation(messages, tools, chat_template_kwargs)], sampling_params)[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[StepOutput]:
        """Generates the next message, token by token; the arguments are those of `chat`.

        Args:
            messages: As for `chat`.
            sampling_params: As for `chat`; None: the defaults.
            tools: As for `chat`.
            chat_template_kwargs: As for `chat`.
        """
        return self.stream(self._conversation(messages, tools, chat_template_kwargs), sampling_params)

    def _conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("chat: the model came without a tokenizer")
        if tools and "tools" not in self.tokenizer.template_variables:
            raise ValueError("chat: the model's chat template has no tools, so it would not know of them")
        given: dict[str, Any] = {**({"tools": list(tools)} if tools else {}), **(variables or {})}
        return self.tokenizer.apply_chat_template(messages, **given)

    def _add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], streaming: bool) -> list[str]:
        """Queues all requests, or none if one is refused."""
        request_ids = [self.engine.new_request_id() for _ in prompts]
        queue: deque[StepOutput] = deque()
        self._queues.update(dict.fromkeys(request_ids, queue))  # first: another thread may step at once
        try:
            self.engine.add_requests(zip(request_ids, prompts, params, repeat(streaming)))
        except BaseException:
            self._abort_all(request_ids)
            raise
        return request_ids

    def _abort(self, request_id: str) -> None:
        self.engine.abort_request(request_id)
        self._queues.pop(request_id, None)

    def _steps(self, request_ids: Sequence[str]) -> Iterator[StepOutput]:
        """Outputs of these requests. Whoever iterates steps the engine, also for other threads that wait."""
        steps = self._taken(request_ids)
        weakref.finalize(steps, self._abort_all, request_ids).atexit = False  # if nobody ever iterates
        return steps

    def _abort_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._abort(request_id)

    def _taken(self, request_ids: Sequence[str]) -> Iterator[StepOutput]:
        left, before = dict.fromkeys(request_ids), self.engine.failure
        queue = self._queues[request_ids[0]] if request_ids else deque()
        try:
            while left:
                with self._step_lock:
                    if not queue:
                        self._step()
                while queue:
                    step = queue.popleft()
                    if step.request_output is not None:
                        del left[step.request_id], self._queues[step.request_id]
                        failed = step.request_output.error is not None
                        if failed and self.engine.failure is not before:
                            raise RuntimeError(step.request_output.error) from self.engine.failure
                    yield step
        finally:
            self._abort_all(left)

    @staticmethod
    def _raising(steps: Iterator[StepOutput]) -> Iterator[StepOutput]:
        """The outputs of one request; RuntimeError if it fails."""
        with contextlib.closing(steps):  # type: ignore[type-var]
            for step in steps:
                if step.request_output is not None and step.request_output.error is not None:
                    raise RuntimeError(step.request_output.error)
                yield step

    def _step(self) -> None:
        for step in self.engine.step():
            queue = self._queues.get(step.request_id)
            if queue is not None:
                queue.append(step)


def _check_placed(model: Transformer, args: EngineArgs) -> None:
    """Raises ValueError for a device or dtype that a loaded model does not have."""
    if args.device is not None:
        wanted = parse_device(args.device)
        if wanted.type != model.device.type or wanted.index not in (None, model.device.index):
            raise ValueError(f"LLM: device is {args.device!r}, and the Transformer is on {model.device}; leave it out")
    if args.dtype is not None and DTYPES[args.dtype] != model.dtype:
        raise ValueError(f"LLM: dtype is {args.dtype!r}, and the Transformer is in {model.dtype}; leave it out")


def _load(
    path: Path, args: EngineArgs, progress: Callable[[int, int], None] | None
) -> tuple[Transformer, Tokenizer | None]:
    checkpoint = open_checkpoint(path)
    device, dtype = device_and_dtype(checkpoint, args.device, args.dtype)
    return load_model(checkpoint, device, dtype, progress, args.quantization), checkpoint.tokenizer()


def _as_list(caller: str, prompts: Any) -> list[Prompt]:
    """The prompts as a list; TypeError if they are none. The engine checks the token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_sequence(prompts):
        raise TypeError(f"{caller}: prompts is {type(prompts).__name__}; it must be {ACCEPTED_PROMPTS}")
    several = list(prompts)
    if several and all(_is_token_id(one) for one in several):
        return [several]
    for one in several:
        if not isinstance(one, str) and not _is_sequence(one):
            raise TypeError(f"{caller}: prompts has a {type(one).__name__} in it; it must be {ACCEPTED_PROMPTS}")
    return several


def _is_sequence(value: Any) -> bool:
    """Whether this can be a list of prompts or of token ids. Bytes are neither text nor token ids."""
    return isinstance(value, (Sequence, np.ndarray, torch.Tensor)) and not isinstance(
        value, (str, bytes, bytearray, memoryview)
    )


def _is_token_id(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_floating_point()
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _completions(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` completions of a prompt: with a seed, their seeds differ."""
    first, alone = replace(params, n=1), replace(params, n=1, prompt_logprobs=None)  # the prompt's are the same for all
    if params.seed is None:
        return [first, *[alone] * (params.n - 1)]
    return [first, *(replace(alone, seed=(params.seed + index) % 2**63) for index in range(1, params.n))]


def _merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output with the completions of all."""
    completions = tuple(replace(output.outputs[0], index=index) for index, output in enumerate(outputs))
    error = next((output.error for output in outputs if output.error is not None), None)
    return replace(outputs[0], outputs=completions, error=error) if len(outputs) > 1 else outputs[0]


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    wrong = [one for one in params if not isinstance(one, SamplingParams)] if _is_sequence(params) else [params]
    if wrong:
        raise TypeError(
            f"generate: sampling_params has a {type(wrong[0]).__name__} in it; it must be SamplingParams(...), or a "
            "list of them"
        )
    if len(params) != count:
        raise ValueError(
            f"generate: {len(params)} sampling_params were given for {count} prompts; give one, or one for each"
        )
    return list(params)
