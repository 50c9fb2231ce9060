"""FlashKernel in HF Transformers 5.

    import flashkernel.hf
    print(flashkernel.hf.patch(model))  # a loaded model: attention, rotary embedding, norms, MLPs and the loss

    flashkernel.hf.quantize(model, "fp8")  # its linear layers with weights in fp8
    model = flashkernel.hf.load_quantized(folder)  # a GPTQ, AWQ, compressed-tensors or fp8 checkpoint on these kernels

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fkernel")  # the attention alone
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fkernel")  # the experts alone

Packed documents do not see each other if `cu_seq_lens_q` and `cu_seq_lens_k` are given (DataCollatorWithFlattening
gives them with return_flash_attn_kwargs=True), or if position_ids restart and the model passes them to Transformers'
masks. gpt_oss does not (Transformers 5.17): give it the lengths. Padding goes into attention_mask as usual. A padded
query sees nothing and gives zeros; eager attention gives a mean of all values.

Importing this module registers the attention and its masks; `register()` does it again if they were removed.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("flashkernel.hf needs Transformers 5; pip install flashkernel[hf]") from error

from flashkernel.hf.attention import NAME, LayerMask, attention_forward, layer_mask, register
from flashkernel.hf.experts import register_experts
from flashkernel.hf.gpt_oss import load_gpt_oss
from flashkernel.hf.patching import patch, patched, unpatch
from flashkernel.hf.quantized import load_quantized, quantize
from flashkernel.hf.report import Entry, Report

register()
register_experts()

__all__ = [
    "NAME",
    "Entry",
    "LayerMask",
    "Report",
    "attention_forward",
    "layer_mask",
    "load_gpt_oss",
    "load_quantized",
    "patch",
    "patched",
    "quantize",
    "register",
    "unpatch",
]
