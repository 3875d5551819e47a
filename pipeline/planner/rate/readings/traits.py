"""Traits of a launch by which readings are near to it: engine, card, and what the model is.

Models count by their shape and not by their name, so that a tuned or renamed checkpoint has the
readings of the model that it was made from.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.models.formats import format_of
from schemas.plan import Dense, LinearState, ModelFacts, WeightFormat

Engine = Literal["sglang", "vllm", "trtllm"]
ENGINES: tuple[Engine, ...] = ("sglang", "vllm", "trtllm")

# Formats whose kernels are the same.
_ALIKE: dict[WeightFormat, str] = {
    "fp32": "bf16", "fp8-block": "fp8", "mxfp8": "fp8", "int4-awq": "int4", "int4-gptq": "int4",
}  # fmt: skip
_ENDINGS = ("-Instruct", "-Thinking", "-2507", "-NVFP4", "-AWQ", "-FP8", "-BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Origins that an error of the rate may have."""

    engine: str
    vendor: str
    card: str
    kind: str
    family: str
    model: str
    format: str


def traits_of(model: ModelFacts, card: str, engine: str) -> Traits:
    """Return the traits of a model on a card with an engine."""
    return Traits(
        engine=engine,
        vendor="amd" if card.startswith("Instinct") else "nvidia",
        card=card,
        kind=_kind(model),
        family=f"{model.layers} x {model.hidden_size}, {model.heads}/{model.kv_heads} heads, "
        f"{0 if isinstance(model.ffn, Dense) else model.ffn.experts} experts",
        model=_model_name(model.name),
        format=_format(model),
    )


def _kind(model: ModelFacts) -> str:
    """Name the kernels of a layer: its attention, its state and its feed-forward part."""
    attention = type(model.cache).__name__.removesuffix("Cache")
    state = " linear" if isinstance(model.state, LinearState) else ""
    return f"{attention}{state} {'dense' if isinstance(model.ffn, Dense) else 'experts'}"


def _model_name(name: str) -> str:
    tail = name.rstrip("/").rsplit("/", 1)[-1]
    for ending in _ENDINGS:
        tail = tail.replace(ending, "")
    return tail


def _format(model: ModelFacts) -> str:
    """Name the format of most parameters, and whether they are multiplied in 16 bits."""
    largest = max(model.tensors, key=lambda group: group.params)
    format_ = format_of(largest, model.format)
    name = _ALIKE.get(format_, format_)
    return f"{name} in 16 bits" if name == "nvfp4" and model.multiplied_in_16_bits else name
