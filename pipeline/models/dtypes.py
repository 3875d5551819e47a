"""Load a model with its weights in a format of a common name, such as fp8 or w4a16."""

import re
from dataclasses import replace

from pipeline.errors import PlanError
from pipeline.models.facts import model_facts
from pipeline.models.files import catalogue_names, find_model
from schemas.plan import ModelFacts

# Formats by their usual names.
_FORMATS = {
    "bf16": "bf16", "fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "auto": None,
    "fp8": "fp8", "fp8-block": "fp8-block", "mxfp8": "mxfp8", "mxfp4": "mxfp4",
    "fp4": "nvfp4", "nvfp4": "nvfp4", "w4a16": "nvfp4", "nvfp4-w4a16": "nvfp4",
    "fp4+fp8": None, "awq-int4": "int4-awq", "gptq-int4": "int4-gptq",
    "int4": "int4", "awq": "int4-awq", "int4-awq": "int4-awq", "gptq": "int4-gptq",
    "int4-gptq": "int4-gptq", "int8": "fp8", "w8a8": "fp8",
}  # fmt: skip


def load_model_as(name: str, dtype: str | None) -> ModelFacts:
    """Return the facts of a model whose weights have this format.

    Raises PlanError for an unknown format or model.
    """
    word = (dtype or "auto").lower().strip()
    # A format after a plus is that of the KV cache, or of the dense layers of a mixed checkpoint.
    first = word.partition(" + ")[0].replace("(", "-").replace(")", "").strip()
    cleaned = re.sub(r"[ -]+", "-", first)
    if cleaned not in _FORMATS:
        raise PlanError(f"--dtype: found {dtype!r}; known: {', '.join(_FORMATS)}")
    weights_format = _FORMATS[cleaned]
    if cleaned == "fp4" and "gpt-oss" in name.lower():
        # Its only published four-bit format.
        weights_format = "mxfp4"
    files = find_model(_published(name) if weights_format == "nvfp4" else name)
    model = model_facts(name, files.config, hf_quant=files.hf_quant, weights_format=weights_format)
    return replace(model, multiplied_in_16_bits=True) if "w4a16" in cleaned else model


def _published(name: str) -> str:
    """Name NVIDIA's NVFP4 checkpoint of the model, if the catalogue has it.

    Checkpoints differ in which weights have four bits, and in whether they are multiplied so.
    """
    published = f"nvidia/{name.rsplit('/', 1)[-1]}-NVFP4"
    return published if published in catalogue_names() else name
