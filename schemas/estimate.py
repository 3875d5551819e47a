"""Records of the estimate: speeds, prices, lengths, rates, options and running jobs.

Rates count output tokens, never prompt and output together.
"""

from dataclasses import dataclass
from typing import Literal

from schemas.plan import BudgetRow
from schemas.prompt import Longest, RowBudgets

PriceKind = Literal["on_demand", "spot", "own"]
ReadingInput = Literal["running_requests", "step_time", "accept_length", "prefill_share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Middle 80 % of an uncertain figure."""

    p10: float
    p50: float
    p90: float

    def times(self, factor: float) -> "Band":
        return Band(p10=self.p10 * factor, p50=self.p50 * factor, p90=self.p90 * factor)

    def plus(self, other: "Band") -> "Band":
        """Return the sum of two amounts that are long or short together."""
        return Band(p10=self.p10 + other.p10, p50=self.p50 + other.p50, p90=self.p90 + other.p90)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeed:
    """Peak rates of a card, dense; 0 if it has no such units."""

    vendor: Literal["nvidia", "amd"]
    memory_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float
    vector_flops: float
    """Rate in fp32 outside the tensor cores, which widens narrow weights."""
    link_bytes_per_s: float
    """Rate to another card of the node, in one direction."""
    nvlink: bool
    vcpus_per_gpu: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of a GPU-hour, with its source and date."""

    kind: PriceKind
    low_usd_per_gpu_hour: float
    usd_per_gpu_hour: float
    high_usd_per_gpu_hour: float
    source: str
    date: str
    stale: bool
    """True if more than 90 days old or without a date."""


# --- lengths -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLengths:
    """Completion lengths in tokens, cut at the limit."""

    mean_tokens: float
    cv: float
    """Standard deviation over mean."""
    limit_tokens: int
    at_limit_fraction: float
    mean_relative_error: float
    """Standard error of the mean over the mean."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Prompt lengths in tokens."""

    mean_tokens: float
    cv: float
    sampled: int
    """Number of counted prompts; 0 if the mean comes from the run file."""
    source: str


# --- rate --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Time of a decode step by part; with MTP, of a verify step and its drafts."""

    dense_s: float
    experts_s: float
    attention_s: float
    communication_s: float
    overhead_s: float
    draft_s: float
    hand_over_s: float = 0.0
    """Transfer of activations to the next pipeline stage."""
    idle_s: float = 0.0
    """Wait of a pipeline stage for a slower one, for requests or for the host. The parts above are
    then those of a mean stage."""

    def step_s(self) -> float:
        """Add up the whole step."""
        return (
            self.dense_s + self.experts_s + self.attention_s
            + self.communication_s + self.overhead_s + self.draft_s + self.hand_over_s + self.idle_s
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """Point of tokens/s against running requests of one replica."""

    running_requests: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Tokens/s against running requests, with MTP on or off, up to the cap."""

    mtp: bool
    cap_requests: int
    points: tuple[RatePoint, ...]


# --- the job -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """Assumed input, its range, and what would narrow it."""

    name: str
    value: str
    source: str
    variance_share: float
    """Share of the variance of log days, 0 to 1."""
    measure: str
    """Measurement that would narrow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Public readings of one relation to a launch, which its rate stands on."""

    relation: str
    readings: int
    sources: tuple[str, ...]
    first_date: str | None
    """Earliest date; None, as the last, where no date was published."""
    last_date: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """Launch chosen for one kind of card."""

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
    """True if the p99 of the summed lengths exceeds the KV pool."""
    argv: tuple[str, ...]
    budget: tuple[BudgetRow, ...]
    step: StepParts
    prefill_share: float
    """Share of GPU time."""
    tokens_per_s_per_gpu: Band
    curves: tuple[RateCurve, ...]
    break_even_requests: int | None
    """Running requests above which MTP lowers the rate; None if the model has no MTP."""
    readings: tuple[Support, ...]
    """Public readings that the rate stands on, nearest first."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dollars:
    """Bill at one price."""

    price: Price
    days: Band
    """Time of the whole job: on spot, with what preemptions add."""
    usd: Band
    usd_per_million_tokens: Band
    preemption_usd: float
    """Part of the p50 for work lost to preemptions and for restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareEstimate:
    """Hardware option: its plans, and time and cost of the whole job on it."""

    option: str
    """Name of the option: `7 x B200`, `4 x RTX PRO 6000 + 2 x B200`."""
    num_gpus: int
    plans: tuple[ChosenPlan, ...]
    tokens_per_s: Band
    days: Band
    gpu_hours: Band
    start_hours: float
    tail_hours: float
    restart_hours: float
    """Part of the p50 for restarts."""
    bills: tuple[Dollars, ...]
    assumptions: tuple[Assumption, ...]
    """Widest first."""
    warnings: tuple[str, ...]
    cannot_run: str | None = None
    """Reason why this product starts no engine on these cards; None where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The option that answers a question, such as which is the cheapest, at one of its prices."""

    option: str
    price_kind: PriceKind | None
    """Kind of the price; None for an option without one."""
    days: Band
    usd: Band | None
    usd_per_million_tokens: Band | None
    preemption_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AsLaunched:
    """The user's own launch line on one option."""

    option: str
    estimate: HardwareEstimate | None
    """Estimate with that launch; None where it does not start."""
    reason: str
    """Reason why it does not start; empty where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfitOption:
    """Option without a plan that runs, and the reason."""

    option: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """Options of a run: those that can run first, then the cheapest million tokens first.

    That is at the user's own price or on demand; `answers` compares spot prices as well.
    """

    model: str
    num_completions: int
    prompt_lengths: PromptLengths
    output_lengths: OutputLengths
    options: tuple[HardwareEstimate, ...]
    unfit: tuple[UnfitOption, ...]
    assumptions: tuple[Assumption, ...]
    """Three assumptions that widen the first option's band most."""
    as_launched: tuple[AsLaunched, ...] = ()
    """The user's own launch line on each option, in the order given; empty where none is given."""


# --- the running job ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReading:
    """Readings of an engine over one span of time, by its counters."""

    engine: str
    start_s: float
    """Time since the job began."""
    end_s: float
    engine_age_s: float
    """Time from the engine's first request after its launch to the span's start."""
    cap_requests: int
    """Most requests that the engine admits at once."""
    running_requests: float
    """Mean over the span."""
    tokens_per_s: float
    """Output tokens by the engine's counter, finished or not."""
    accept_length: float | None
    """Mean tokens kept per step; None if MTP is off or the engine does not report it."""
    prompt_tokens_per_s: float
    """Prefilled tokens, without prefix cache hits."""
    finished: int = 0
    """Completions that ended in the span; 0 also in logs that did not count them."""
    finished_tokens: int = 0
    """Sum of their lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Input of the plan that the running job deviates from."""

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
    running_requests: float | None
    """Mean per engine; None while it is unknown."""
    tokens_per_s: Band | None
    """Sum over the group's engines, before availability; None while it is unknown."""
    accept_length: float | None
    independent_readings: float
    """Half mean residence times of steady running; 0 while there are none."""
    expected_running_requests: float | None
    expected_tokens_per_s: Band | None
    """Plan for as many engines, at the planned running requests."""
    expected_accept_length: float | None
    deviations: tuple[Deviation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUpdate:
    """The estimate of a running job, from its plan and its readings together."""

    model: str
    rows_total: int
    rows_done: int
    completions_left: float
    """Completions left, including those in flight."""
    tokens_left: float
    output_lengths: OutputLengths
    expected_output_lengths: OutputLengths
    completions_seen: int
    """Finished completions that the lengths are estimated from."""
    running_seen: int
    groups: tuple[GroupUpdate, ...]
    tokens_per_s: Band | None
    """Sum over all engines, before availability; None while it is unknown."""
    availability: Band
    days_left: Band | None
    """Time left; None while it is unknown, 0 once every row has ended."""
    expected_days_left: Band | None
    """Days left by the plan alone: its lengths, rates and availability."""
    expected_whole_days: Band | None
    """Days of the whole run by the plan alone, with the start."""
    usd_left: Band | None
    """Cost at the price below; None if no price is known."""
    price: Price | None
    counted_by: Literal["engine", "answers"]
    """`engine` if every reading comes from the engine's own counters."""
    no_dry_run: str | None
    """Reason why there is no plan to compare with; None where there is one."""
    deviations: tuple[Deviation, ...]
    assumptions: tuple[Assumption, ...]
    """Assumptions that widen the band, the widest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSize:
    """Completions to generate, and the lengths of the prompts."""

    num_completions: int
    prompts: PromptLengths
    longest: Longest | None
    """Longest prompts, which the context must fit; from frozen prompts."""
    budgets: RowBudgets | None = None
    """Token budgets that rows set themselves; None where no row does."""
