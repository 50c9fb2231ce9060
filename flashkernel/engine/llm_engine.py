"""The engine: requests go in, steps are taken, outputs come out.

Any thread may add and abort requests; one thread takes steps. On a GPU a step is launched before the tokens of the
step before it are read (asynchronous scheduling), so the device does not wait for the host. The end of a text is then
noticed one step late, and that step's token is dropped.
"""

from __future__ import annotations

import collections.abc
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashkernel.core import build_counter
from flashkernel.engine.input_processor import InputProcessor, RequestError
from flashkernel.engine.model_runner import LaunchedStep, ModelRunner, Progress
from flashkernel.engine.outputs import StepOutput, TokenLogprob
from flashkernel.engine.sampler import INVALID_TOKEN
from flashkernel.engine.sampling_params import SamplingParams
from flashkernel.engine.scheduler import Scheduler
from flashkernel.engine.sequence import Sequence
from flashkernel.engine.tokenizer import Tokenizer

NOT_FINITE = (
    "the model's logits are NaN or infinite after these tokens, so no token can be chosen; check its weights for NaN, "
    "and run it in bfloat16 or float32 if it overflows in float16"
)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was built, and what it holds now.

    Args:
        num_waiting: Requests in the queue.
        num_running: Requests that hold blocks.
        num_finished: Requests that are finished, for whatever reason.
        prompt_tokens: Prompt tokens of requests that were started.
        cached_tokens: Of those, tokens found in the prefix cache.
        generation_tokens: Tokens generated.
        num_preemptions: How often a request lost its blocks.
        num_steps: Steps computed.
        num_used_blocks: KV cache blocks that requests hold.
        num_blocks: KV cache blocks in all.
        compiled_in_service: Kernels compiled, graphs captured and configs tuned since `warm_up` ended. It should stay
            at 0: each of them makes requests wait.
        warm_up_s: Seconds that `warm_up` took.
        compiled_at_start: Kernels that were compiled for `warm_up`, by worker processes too; above 0 the caches on disk
            did not have all of them.
        num_draft_tokens: Tokens that prompt look-up drafted and a step checked.
        num_accepted_tokens: Of those, tokens that were kept.
        step_s: Seconds that steps took.
        wait_s: Of those, seconds that the host waited for the device. Near 0, the host is the bound.

    Example:
        >>> from flashkernel.engine import LLM, SamplingParams
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> llm = LLM(tiny_transformer(), kv_cache_tokens=64, block_size=16)
        >>> _ = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        >>> stats = llm.engine.stats()
        >>> stats.generation_tokens, stats.num_finished, stats.num_used_blocks, stats.num_blocks
        (4, 1, 0, 4)
    """

    num_waiting: int
    num_running: int
    num_finished: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    num_preemptions: int
    num_steps: int
    num_used_blocks: int
    num_blocks: int
    compiled_in_service: int = 0
    warm_up_s: float = 0.0
    compiled_at_start: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0


class LLMEngine:
    """Continuous batching over one model; `build_engine` makes one.

    Args:
        runner: Runs steps on the device.
        scheduler: Decides what a step computes.
        tokenizer: None takes prompts as token ids only.
        max_model_len: Most tokens of a sequence, prompt and output together.
        async_scheduling: Launches a step before the tokens of the one before it are read.

    Example:
        >>> from flashkernel.engine import EngineArgs, SamplingParams, build_engine
        >>> from flashkernel.engine.dummy_weights import tiny_transformer
        >>> engine = build_engine(tiny_transformer(), None, EngineArgs(kv_cache_tokens=64))
        >>> request_id = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2), streaming=False)
        >>> outputs = []
        >>> while engine.has_unfinished_requests():
        ...     outputs += engine.step()
        >>> outputs[0].request_id == request_id, outputs[0].request_output.outputs[0].finish_reason
        (True, 'length')
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        async_scheduling: bool,
    ) -> None:
        self.runner, self.scheduler, self.tokenizer, self.max_model_len = runner, scheduler, tokenizer, max_model_len
        self._async_scheduling = async_scheduling
        self._launched: deque[LaunchedStep] = deque()
        self._unfinished: dict[str, Sequence] = {}
        self._added: deque[Sequence] = deque()
        self._aborted: deque[str] = deque()
        self._changed = threading.Condition()
        self._num_requests = 0
        self.failure: BaseException | None = None  # the error of the last step that failed
        self._warm_up_s, self._builds = 0.0, build_counter.counts()
        self._compiled_at_start = 0
        self._step_s = self._wait_s = 0.0
        drafts = scheduler.num_speculative_tokens > 0
        self.input_processor = InputProcessor(tokenizer, runner.model.config, max_model_len, drafts)
        self._counts = dict.fromkeys(("finished", "prompt", "cached", "generated", "steps", "drafted", "accepted"), 0)

    def warm_up(self, progress: Progress = lambda what, done, total: None, compiled_before: int = 0) -> None:
        """Compiles all kernels and captures all graphs, before the first request.

        Args:
            progress: Called as `progress(what, done, total)`.
            compiled_before: Kernels that other processes have compiled for it.
        """
        began, before = time.monotonic(), build_counter.counts()
        self.runner.warm_up(progress)
        self._warm_up_s, self._builds = time.monotonic() - began, build_counter.counts()
        self._compiled_at_start = compiled_before + self._builds.compiled - before.compiled

    def prepare_grammars(self) -> None:
        """Makes what structured outputs share, which the first of them would hold up all requests for.

        Raises:
            RequestError: The library does not take the model's tokenizer.
        """
        self.input_processor.prepare_grammars()

    def add_request(
        self,
        prompt: str | collections.abc.Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        streaming: bool = True,
    ) -> str:
        """Queues a request.

        Args:
            prompt: A text, or token ids.
            params: Sampling parameters; None takes the defaults.
            request_id: Must differ from those of unfinished requests; None makes one.
            streaming: The request has a `StepOutput` for every token; else only one, when it is finished.

        Returns:
            The request's id.

        Raises:
            RequestError: It can never be served.
            TypeError: The prompt is neither text nor token ids.
        """
        name = self.new_request_id() if request_id is None else request_id
        self.add_requests([(name, prompt, params or SamplingParams(), streaming)])
        return name

    def add_requests(
        self, requests: Iterable[tuple[str, str | collections.abc.Sequence[int], SamplingParams, bool]]
    ) -> None:
        """Queues requests together: one step sees all of them, or none if one is refused.

        Args:
            requests: Of each its id, prompt, sampling parameters, and whether it is streamed, as for `add_request`.

        Raises:
            RequestError: One can never be served.
            TypeError: A prompt is neither text nor token ids.
        """
        sequences = [self.input_processor.process(*request) for request in requests]
        with self._changed:
            added: dict[str, Sequence] = {}
            for sequence in sequences:
                name = sequence.request_id
                if name in self._unfinished or name in added:
                    raise RequestError(f"request {name!r} is being served already; ids must differ")
                added[name] = sequence
            self._unfinished.update(added)
            self._added.extend(sequences)
            self._changed.notify_all()

    def new_request_id(self) -> str:
        """An id that no other request is given, for who must know it before the request's first output."""
        with self._changed:
            self._num_requests += 1
            return f"request-{self._num_requests}"

    def abort_request(self, request_id: str) -> None:
        """Ends the request `request_id`; the next step returns its output so far. Unknown ids are ignored.

        Args:
            request_id: As `add_request` returned it.
        """
        with self._changed:
            if request_id in self._unfinished:
                self._aborted.append(request_id)
                self._changed.notify_all()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._unfinished or self._launched)

    def wait(self, timeout: float | None = None) -> bool:
        """Sleeps until there is an unfinished request; returns False after `timeout` seconds without one.

        Args:
            timeout: Seconds; None: until there is a request.
        """
        with self._changed:
            return self._changed.wait_for(self.has_unfinished_requests, timeout)

    def step(self) -> list[StepOutput]:
        """Schedules and computes one batch.

        An error, of the device or of the code, ends all requests with finish_reason "error" and is kept in `failure`;
        later requests are served, if the device still works.

        Returns:
            What is new for each request.
        """
        outputs: list[StepOutput] = []
        began = time.monotonic()
        self._apply_changes(outputs)
        try:
            scheduled = self.scheduler.schedule()
            if scheduled.num_tokens:
                self._launched.append(self.runner.launch(scheduled))
                self._count(scheduled.admitted)
            while self._launched and (len(self._launched) > self._async_scheduling or not scheduled.num_tokens):
                self._read(self._launched.popleft(), outputs)
        except BaseException as error:
            self.failure = error
            self._fail(f"{type(error).__name__}: {error}", outputs)
            if not isinstance(error, Exception):
                raise
        self._step_s += time.monotonic() - began
        return outputs

    def stats(self) -> EngineStats:
        """Counters, and what the engine holds now."""
        scheduler, counts = self.scheduler, self._counts
        pool = scheduler.cache.pool
        return EngineStats(
            num_waiting=len(scheduler.waiting) + len(self._added),
            num_running=len(scheduler.running),
            num_finished=counts["finished"],
            prompt_tokens=counts["prompt"],
            cached_tokens=counts["cached"],
            generation_tokens=counts["generated"],
            num_preemptions=scheduler.num_preemptions,
            num_steps=counts["steps"],
            num_used_blocks=pool.in_use,
            num_blocks=pool.pages - 1,
            compiled_in_service=build_counter.counts().total - self._builds.total,
            warm_up_s=self._warm_up_s,
            compiled_at_start=self._compiled_at_start,
            num_draft_tokens=counts["drafted"],
            num_accepted_tokens=counts["accepted"],
            step_s=self._step_s,
            wait_s=self._wait_s,
        )

    def _apply_changes(self, outputs: list[StepOutput]) -> None:
        """Queues added requests; ends aborted ones."""
        with self._changed:
            while self._added:
                self.scheduler.add(self._added.popleft())
            aborted = [self._unfinished[name] for name in self._aborted if name in self._unfinished]
            self._aborted.clear()
        for sequence in dict.fromkeys(aborted):
            self._finish(sequence, "abort", outputs)

    def _count(self, admitted: list[Sequence]) -> None:
        self._counts["steps"] += 1
        for sequence in admitted:
            if not sequence.num_preemptions:
                self._counts["prompt"] += sequence.num_prompt_tokens
                self._counts["cached"] += sequence.num_cached_tokens

    def _read(self, launched: LaunchedStep, outputs: list[StepOutput]) -> None:
        """Waits for a step's tokens and appends them to their sequences."""
        token_ids, logprobs = launched.read()
        now = time.monotonic()
        self._wait_s += launched.waited_s
        for sequence, position, score in launched.read_prompt_logprobs():
            sequence.add_prompt_logprob(position, score)
        for index, (sequence, token_id) in enumerate(zip(launched.sequences, token_ids)):
            sequence.num_in_flight -= 1
            if sequence.lookup is not None and not self._follows(sequence, launched.assumed[index]):
                continue
            if sequence.finish_reason is None:
                self._append_alone(sequence, token_id, logprobs.get(index), now, outputs)

        for sequence in dict.fromkeys(one for one in launched.sequences if one.lookup is not None):
            if sequence.finish_reason is None:
                self.scheduler.accept(sequence)

    def _follows(self, sequence: Sequence, assumed: int | None) -> bool:
        """Whether a sample counts: the tokens of a draft before it were all right. Counts the draft's tokens."""
        if assumed is None:
            sequence.draft_rejected = False
            return True
        if sequence.token_ids[-1] != assumed:
            sequence.draft_rejected = True
        self._counts["drafted"] += 1
        self._counts["accepted"] += not sequence.draft_rejected
        return not sequence.draft_rejected

    def _append_alone(
        self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, now: float, outputs: list[StepOutput]
    ) -> None:
        """Appends a token; an error of the sequence's own text or grammar ends it and no other."""
        try:
            self._append(sequence, token_id, logprob, now, outputs)
        except Exception as error:
            if sequence.request_id not in self._unfinished:
                raise
            sequence.detokenizer = None  # its text cannot be made
            self._finish(sequence, "error", outputs, error=f"{type(error).__name__}: {error}")

    def _append(
        self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, now: float, outputs: list[StepOutput]
    ) -> None:
        params, detokenizer = sequence.params, sequence.detokenizer
        if token_id == INVALID_TOKEN:
            self._finish(sequence, "error", outputs, error=NOT_FINITE)
            return
        sequence.token_ids.append(token_id)
        self._counts["generated"] += 1
        if sequence.first_token_time is None:
            sequence.first_token_time = now
        if params.logprobs is None:
            logprob = None
        elif logprob is not None:
            if len(logprob.top_logprobs) > params.logprobs:  # another request of the step asked for more
                logprob = replace(logprob, top_logprobs=logprob.top_logprobs[: params.logprobs])
            sequence.logprobs.append(logprob)
        stops = is_end = token_id in sequence.end_token_ids
        if sequence.grammar is not None:
            sequence.grammar.advance(token_id)
            stops = stops or sequence.grammar.finished
        if detokenizer is not None and not is_end:
            may_stop = len(sequence.token_ids) - sequence.num_prompt_tokens > params.min_tokens
            detokenizer.append(token_id, decode=sequence.streaming or bool(params.stop), may_stop=may_stop)
        reason = None
        if stops or (detokenizer is not None and detokenizer.stopped):
            reason = "stop"
        elif len(sequence.token_ids) >= sequence.max_tokens:
            reason = "length"
        if reason is not None:
            self._finish(sequence, reason, outputs, token_id, logprob)
        elif sequence.streaming:
            text = "" if detokenizer is None else detokenizer.next_text()
            is_first = len(sequence.token_ids) == sequence.num_prompt_tokens + 1
            scores = sequence.known_prompt_logprobs() if is_first else None
            outputs.append(StepOutput(sequence.request_id, token_id, text, logprob, prompt_logprobs=scores))

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        outputs: list[StepOutput],
        token_id: int | None = None,
        logprob: TokenLogprob | None = None,
        error: str | None = None,
    ) -> None:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)
        text = ""
        if sequence.detokenizer is not None:
            sequence.detokenizer.finish()
            text = sequence.detokenizer.next_text(finished=True)
        with self._changed:
            del self._unfinished[sequence.request_id]
        self._counts["finished"] += 1
        outputs.append(StepOutput(sequence.request_id, token_id, text, logprob, sequence.output(error)))

    def _fail(self, message: str, outputs: list[StepOutput]) -> None:
        """Ends all requests and empties the prefix cache: what a failed step wrote is unknown."""
        self._launched.clear()
        self._apply_changes(outputs)
        for sequence in list(self._unfinished.values()):
            self._finish(sequence, "error", outputs, error=message)
        self.scheduler.reset_prefix_cache()
