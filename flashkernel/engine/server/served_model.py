"""A model as the API knows it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashkernel.engine.server.server_args import ServerArgs
from flashkernel.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from flashkernel.engine.llm import LLM


@dataclass(frozen=True)
class ServedModel:
    """What processes that serve the API need of a model.

    Args:
        name: What clients call it.
        tokenizer: None: prompts are token ids.
        max_model_len: Most tokens of a prompt and its answer.
        created: When the server was started, in Unix time.
    """

    name: str
    tokenizer: Tokenizer | None
    max_model_len: int
    created: int

    @classmethod
    def of(cls, llm: LLM, args: ServerArgs) -> ServedModel:
        """Describes the model of `llm`."""
        name = args.served_model_name or os.path.basename(os.path.abspath(llm.name))
        return cls(name, llm.tokenizer, llm.engine.max_model_len, int(time.time()))
