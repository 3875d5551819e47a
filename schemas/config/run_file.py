"""The whole run file.

Unknown keys are refused. The models are frozen: a run file is resolved once and then only read.
"""

from typing import Annotated, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from schemas.config.engine import EngineConfig
from schemas.config.planning import EstimateConfig, HardwareConfig, LengthsConfig, PlannerConfig
from schemas.config.quality import QualityConfig
from schemas.config.requests import (
    MAX_INT32,
    PromptsConfig,
    SamplingConfig,
    check_request_fields,
)
from schemas.config.running import (
    ClusterConfig,
    EventsConfig,
    OutputConfig,
    RetryConfig,
    WorkConfig,
)
from schemas.config.section import Section

# assumed: queueing and prefill of a request
_DEADLINE_BASE_S = 60.0


class RunFile(Section):
    """The whole run file. `prompts.path`, `model` and `output.folder` are required."""

    prompts: PromptsConfig
    model: Annotated[str, Field(min_length=1)]
    """Name on the hub, or a folder."""
    thinking: bool = True
    """Request thinking, by the switch of the model's chat template."""
    reasoning_in_history: bool = False
    """Send the reasoning of earlier turns back to the model."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Added to every request, after the model family's own argument for thinking."""
    sampling: SamplingConfig = SamplingConfig()
    request: dict[str, JsonValue] = {}
    """Further fields of every request's body, such as `custom_params: {thinking_budget: 2048}`."""
    samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    """Completions of each prompt, each with a seed of its own."""
    engine: EngineConfig = EngineConfig()
    retry: RetryConfig = RetryConfig()
    work: WorkConfig = WorkConfig()
    output: OutputConfig
    cluster: ClusterConfig = ClusterConfig()
    events: EventsConfig = EventsConfig()
    hardware: list[HardwareConfig] = []
    """Cards for planner and estimate; one entry for each option."""
    lengths: LengthsConfig = LengthsConfig()
    planner: PlannerConfig = PlannerConfig()
    estimate: EstimateConfig = EstimateConfig()
    quality: QualityConfig = QualityConfig()

    @field_validator("sampling", mode="before")
    @classmethod
    def _sampling_of_model(cls, value: object) -> object:
        return {"base": "model"} if value == "model" else value

    @field_validator("request")
    @classmethod
    def _check_request(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        check_request_fields(value)
        return value

    @model_validator(mode="after")
    def _check_min_engines(self) -> Self:
        most, least = self.engine.num_workers, self.cluster.min_engines
        if most is not None and least > most:
            raise ValueError(
                f"cluster.min_engines: found {least}; expected at most the run's {most} engines"
            )
        return self

    @property
    def request_timeout_s(self) -> float:
        """Deadline of one request: as given, or the largest budget at the slowest rate."""
        if self.engine.request_timeout_s is not None:
            return self.engine.request_timeout_s
        return _DEADLINE_BASE_S + self.most_completion_tokens / self.engine.min_tokens_per_s

    @property
    def most_completion_tokens(self) -> int:
        """Largest token budget of one request, including the last attempt of a cut turn."""
        quality = self.quality
        cut = (quality.cut_in_thinking, quality.cut_in_answer)
        # A turn that was cut and loops is retried for the loop, also with the larger budget.
        has_retries = any(flag.enabled and flag.policy == "retry" for flag in quality.flags())
        is_retried = has_retries and any(flag.enabled for flag in cut)
        if self.sampling.max_tokens is None or not is_retried:
            return self.sampling.limit_tokens
        growth = quality.budget_factor ** (quality.max_attempts - 1)
        return min(MAX_INT32, int(self.sampling.max_tokens * growth))
