"""Text generation: `LLM` loads a model and generates; `LLMEngine` is what a server steps.

Names are vLLM's: `SamplingParams`, `RequestOutput`, `max_num_seqs`, `max_model_len`, ...
"""

from flashkernel.engine.build import EngineArgs, build_engine
from flashkernel.engine.config import ModelConfig, ModelError
from flashkernel.engine.llm import LLM
from flashkernel.engine.llm_engine import EngineStats, LLMEngine, RequestError
from flashkernel.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StepOutput, TokenLogprob
from flashkernel.engine.sampling_params import SamplingParams, StructuredOutputs
from flashkernel.engine.tokenizer import Tokenizer
from flashkernel.engine.transformer import Transformer

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineStats",
    "LLMEngine",
    "ModelConfig",
    "ModelError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StepOutput",
    "StructuredOutputs",
    "TokenLogprob",
    "Tokenizer",
    "Transformer",
    "build_engine",
]
