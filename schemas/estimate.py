"""How fast, how long, how much: what the estimate learns about a job, in the order it is learned.

Rates are output tokens, never prompt and output together. A band is the p10, p50 and p90 of what
is not known.
"""

from dataclasses import dataclass
from typing import Literal

from schemas.plan import BudgetRow
from schemas.prompt import Longest

PriceKind = Literal["on_demand", "spot", "own"]
ReadingInput = Literal["running_requests", "step_time", "accept_length", "prefill_share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The middle 80 % of a figure that is not known."""

    p10: float
    p50: float
    p90: float

    def times(self, factor: float) -> "Band":
        return Band(p10=self.p10 * factor, p50=self.p50 * factor, p90=self.p90 * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeed:
    """What one card can move and multiply at best, dense; 0: no such units."""

    vendor: Literal["nvidia", "amd"]
    memory_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float
    vector_flops: float
    """In fp32, outside the tensor cores: what widens narrow weights."""
    link_bytes_per_s: float
    """To another card of the node, in one direction."""
    nvlink: bool
    vcpus_per_gpu: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one GPU costs an hour, where that was read and when."""

    kind: PriceKind
    low_usd_per_gpu_hour: float
    usd_per_gpu_hour: float
    high_usd_per_gpu_hour: float
    source: str
    date: str
    stale: bool
    """More than 90 days old, or of no known date."""


# --- lengths -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLengths:
    """Completion lengths in tokens, as written: cut at the limit."""

    mean_tokens: float
    cv: float
    """Standard deviation over mean."""
    limit_tokens: int
    at_limit_fraction: float
    mean_relative_error: float
    """Standard error of the mean over the mean: what is not known about it."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Prompt lengths in tokens."""

    mean_tokens: float
    cv: float
    sampled: int
    """Prompts that were counted; 0 where the mean is the run file's word."""
    source: str


# --- rate --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Where the seconds of one decode step go (of one verify step and its drafts, with MTP)."""

    dense_s: float
    experts_s: float
    attention_s: float
    communication_s: float
    overhead_s: float
    draft_s: float
    hand_over_s: float = 0.0
    """Activations from one pipeline stage to the next."""
    idle_s: float = 0.0
    """A pipeline stage waits: for a slower one, for requests, for the host. The parts above it are
    then a mean stage's."""

    def step_s(self) -> float:
        """The whole step."""
        return (
            self.dense_s + self.experts_s + self.attention_s
            + self.communication_s + self.overhead_s + self.draft_s + self.hand_over_s + self.idle_s
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """One point of tokens/s against running requests, of one replica."""

    running_requests: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Tokens/s against running requests for MTP on or off, each up to its own cap."""

    mtp: bool
    cap_requests: int
    points: tuple[RatePoint, ...]


# --- the job -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One input that was assumed, what it may be, and what would settle it."""

    name: str
    value: str
    source: str
    variance_share: float
    """Its part of the variance of log days, 0 to 1."""
    measure: str
    """The measurement that would narrow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """The launch that one kind of card runs."""

    gpu: str
    num_gpus: int
    tp_size: int
    pp_size: int
    replicas: int
    mtp: bool
    num_draft_tokens: int
    prefix_cache: bool
    cap_requests: int
    """Requests that one replica can run at once."""
    running_requests: float
    """Requests that one replica runs on average: the cap times the occupancy."""
    limited_by: str
    retraction_risk: bool
    """The p99 of the summed lengths is more than the KV pool holds."""
    argv: tuple[str, ...]
    budget: tuple[BudgetRow, ...]
    step: StepParts
    prefill_share: float
    """Of device time."""
    tokens_per_s_per_gpu: Band
    curves: tuple[RateCurve, ...]
    break_even_requests: int | None
    """Running requests above which MTP gives less than none; None where the model has no MTP."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dollars:
    """The bill at one price."""

    price: Price
    usd: Band
    usd_per_million_tokens: Band
    preemption_usd: float
    """Of the p50: work lost to preemptions, and starting again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareEstimate:
    """One hardware option: its plans, and what the whole job takes on it."""

    option: str
    """As a person would write it: `7 x B200`, `4 x RTX PRO 6000 + 2 x B200`."""
    num_gpus: int
    plans: tuple[ChosenPlan, ...]
    tokens_per_s: Band
    days: Band
    gpu_hours: Band
    start_hours: float
    tail_hours: float
    restart_hours: float
    """Of the p50: hours that restarts cost."""
    bills: tuple[Dollars, ...]
    assumptions: tuple[Assumption, ...]
    """Widest first."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfitOption:
    """An option that runs no plan, and why."""

    option: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """Every option for one run, cheapest a million tokens first."""

    model: str
    num_completions: int
    prompt_lengths: PromptLengths
    output_lengths: OutputLengths
    options: tuple[HardwareEstimate, ...]
    unfit: tuple[UnfitOption, ...]
    assumptions: tuple[Assumption, ...]
    """The three that widen the first option's band most."""


# --- the running job ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReading:
    """One engine over one span of time, by its counters."""

    engine: str
    start_s: float
    """Since the job began."""
    end_s: float
    engine_age_s: float
    """At the span's start, since the engine's first request after its launch."""
    cap_requests: int
    """Most requests that the engine admits at once."""
    running_requests: float
    """Mean over the span."""
    tokens_per_s: float
    """Output tokens by the engine's counter, finished or not."""
    accept_length: float | None
    """None where MTP is off or the engine does not report it."""
    prompt_tokens_per_s: float
    """Prefilled tokens, without prefix cache hits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One input of the plan that the running job deviates from."""

    input: ReadingInput
    predicted: float
    measured: float
    """Requests, seconds, tokens per step or share of GPU time, by input."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUpdate:
    """Engines of one launch on one kind of card: measured, and as planned."""

    name: str
    engines: int
    running_requests: float
    """Per engine."""
    tokens_per_s: Band
    """Sum over the group's engines, before availability."""
    accept_length: float | None
    independent_readings: float
    """Half mean residence times of steady running; 0 while there are none."""
    expected_running_requests: float | None
    expected_tokens_per_s: Band | None
    """Plan for as many engines, at the planned running requests."""
    expected_accept_length: float | None
    disagreements: tuple[Deviation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUpdate:
    """The estimate of a running job, from its plan and its readings together."""

    model: str
    rows_total: int
    rows_done: int
    completions_left: float
    """Includes those in flight."""
    tokens_left: float
    output_lengths: OutputLengths
    expected_output_lengths: OutputLengths
    completions_seen: int
    """Finished completions that the lengths are estimated from."""
    running_seen: int
    groups: tuple[GroupUpdate, ...]
    tokens_per_s: Band
    """Sum over all engines, before availability."""
    availability: Band
    days_left: Band
    expected_days_left: Band | None
    """Days left by the plan alone: its lengths, rates and availability."""
    usd_left: Band | None
    """At the price below; None where no price is known."""
    price: Price | None
    counted_by: Literal["engine", "answers"]
    """`engine` if every reading comes from the engine's own counters."""
    no_dry_run: str | None
    """Reason why there is no plan to compare with; None where there is one."""
    disagreements: tuple[Deviation, ...]
    assumptions: tuple[Assumption, ...]
    """Assumptions that widen the band, the widest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSize:
    """Completions to generate, and the lengths of the prompts."""

    num_completions: int
    prompts: PromptLengths
    longest: Longest | None
    """As frozen prompts note it: what the context has to hold."""
