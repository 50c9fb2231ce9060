"""The paged KV cache: a pool of pages, page tables, prefix caching, and the tensors that kernels take."""

from flashkernel.kvcache.batch import BatchTensors, Step
from flashkernel.kvcache.cache import KVCache, OutOfSequences
from flashkernel.kvcache.pool import EMPTY_PAGE, OutOfPages, PagePool
from flashkernel.kvcache.prefix import PrefixIndex
from flashkernel.kvcache.storage import LayerPages, PageStorage
from flashkernel.kvcache.usage import Usage

__all__ = [
    "EMPTY_PAGE",
    "BatchTensors",
    "KVCache",
    "LayerPages",
    "OutOfPages",
    "OutOfSequences",
    "PagePool",
    "PageStorage",
    "PrefixIndex",
    "Step",
    "Usage",
]
