"""The sections that only the planner and the estimate read."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from schemas.config.section import PathText, Section


class HardwareConfig(Section):
    """Cards of one kind in one machine, as an option for the planner."""

    gpu: Annotated[str, Field(min_length=1)]
    """Card of the catalogue, in any usual spelling."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of cards."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of a card that is not in the catalogue, or instead of the catalogue's figure."""
    usd_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None
    """Your own price. Null: the catalogue's list prices."""
    spot_usd_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None
    """Your own price on spot. Null: the catalogue's."""


class LengthsConfig(Section):
    """Expected lengths in tokens. The limit is `sampling.max_tokens`."""

    prompt_tokens_mean: Annotated[float, Field(gt=0)] | None = None
    """Mean prompt. Null: counted on a sample of the prompts."""
    output_tokens_mean: Annotated[float, Field(gt=0)] | None = None
    """Mean completion, cut at the limit. Null: 2500 with thinking, 500 without, before the cut."""
    output_tokens_cv: Annotated[float, Field(ge=0, le=5)] | None = None
    """Standard deviation over mean. Null: 1.2 with thinking, 1.0 without."""
    output_tokens_column: str | None = None
    """Column of the prompts with the length of each completion in an earlier run."""


class EstimateConfig(Section):
    """Assumptions of the estimate beyond the plan."""

    accept_length: Annotated[float, Field(ge=1, le=16)] | None = None
    """Measured mean of tokens kept per verify step with `draft_tokens`. Null: 2.6 of 4, assumed."""
    draft_tokens: Annotated[int, Field(ge=2, le=16)] = 4
    """Tokens verified per step, the one of the model itself included."""
    storage_gb_per_s: Annotated[float, Field(gt=0)] = 1.0
    """Rate at which one replica reads its weights, in 10^9 bytes/s."""
    hours_between_preemptions: Annotated[float, Field(gt=0)] = 12.0
    """Mean time between preemptions of one spot node."""

    @model_validator(mode="after")
    def _check_accept_length(self) -> Self:
        if self.accept_length is not None and self.accept_length > self.draft_tokens:
            raise ValueError(
                f"accept_length: found {self.accept_length:g}; expected at most the "
                f"{self.draft_tokens} draft_tokens"
            )
        return self


class PlannerConfig(Section):
    """Options that `jobs.plan` may try. The last two switches can change the model's output."""

    sglang_version: str | None = None
    """Release to plan for. Null: the newest that the planner knows."""
    model_config_path: PathText | None = None
    """A config.json or its folder. Null: looked up by the model's name."""
    weights_format: str | None = None
    """Format of the weights, such as fp8. Null: from the model's config."""
    allow_mtp: bool = True
    """Try speculative decoding with the model's own draft head."""
    allow_prefix_cache: bool = True
    """Try launches with the prefix cache on."""
    allow_attention_dp: bool = True
    """Try data parallelism of the attention layers."""
    allow_pipeline: bool = True
    """Try pipeline stages, on cards without NVLink."""
    allow_kv_dtype: bool = False
    """Try an 8-bit KV cache."""
    allow_state_dtype: bool = False
    """Try 16-bit states of linear attention."""
