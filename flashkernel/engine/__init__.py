"""Text generation: `LLM` loads a model and generates; `LLMEngine` is what a server steps.

Names are vLLM's: `SamplingParams`, `RequestOutput`, `max_num_seqs`, `max_model_len`, ...
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashkernel.engine.build import EngineArgs, build_engine
    from flashkernel.engine.config import ModelConfig, ModelError
    from flashkernel.engine.input_processor import RequestError
    from flashkernel.engine.llm import LLM
    from flashkernel.engine.llm_engine import EngineStats, LLMEngine
    from flashkernel.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StepOutput, TokenLogprob
    from flashkernel.engine.sampling_params import SamplingParams, StructuredOutputs
    from flashkernel.engine.tokenizer import Tokenizer
    from flashkernel.engine.transformer import Transformer
else:
    from flashkernel import lazy_loading

    __getattr__, __dir__ = lazy_loading.attach(
        __name__,
        {
            "build": ["EngineArgs", "build_engine"],
            "config": ["ModelConfig", "ModelError"],
            "input_processor": ["RequestError"],
            "llm": ["LLM"],
            "llm_engine": ["EngineStats", "LLMEngine"],
            "outputs": ["CompletionOutput", "RequestMetrics", "RequestOutput", "StepOutput", "TokenLogprob"],
            "sampling_params": ["SamplingParams", "StructuredOutputs"],
            "tokenizer": ["Tokenizer"],
            "transformer": ["Transformer"],
        },
    )

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
