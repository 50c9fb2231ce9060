"""Generation: a model from disk, requests in, text out. `LLM` is the way in; `Engine` is what a server drives."""

from flashkernel.engine.config import ModelConfig, ModelError
from flashkernel.engine.core import Engine, RequestError, Stats
from flashkernel.engine.llm import LLM, EngineOptions, build_engine
from flashkernel.engine.sampling import SamplingParams
from flashkernel.engine.sequence import Completion, Event, Logprob, Timing
from flashkernel.engine.tokenizer import Tokenizer
from flashkernel.engine.transformer import Transformer

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineOptions",
    "Event",
    "Logprob",
    "ModelConfig",
    "ModelError",
    "RequestError",
    "SamplingParams",
    "Stats",
    "Timing",
    "Tokenizer",
    "Transformer",
    "build_engine",
]
