"""Estimate one run on every hardware option: plans, rates, days, dollars and their bands.

The walk: memory search → running requests → rate → job time → bill. Every option gets its own best
plan, so options are compared at equal memory and never at equal batch size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

from pipeline.errors import PlanError
from pipeline.planner.cards import speed_of
from pipeline.planner.estimate.cost import (
    CostedHours,
    Preemption,
    bill,
    dollar_assumptions,
    long_request_warning,
)
from pipeline.planner.estimate.job_time import (
    CAPTURE_HIGH_S,
    CAPTURE_LOW_S,
    JobTime,
    job_time,
    whole_job,
)
from pipeline.planner.estimate.prices import prices_of
from pipeline.planner.lengths.contexts import p99_of_summed_contexts
from pipeline.planner.rate.errors import RateEvidence, RateGroup, rate_spreads
from pipeline.planner.rate.own_launch import rated_launch
from pipeline.planner.rate.ranking import Load, RatedPlan, RatedSearch, rated_search
from pipeline.planner.rate.search import HardwareOption, SearchLimits, SearchQuery
from pipeline.planner.rate.step_time import decode_step
from pipeline.planner.rate.throughput import Workload, log_band, rate_at
from pipeline.planner.sglang.flags import LaunchFlags
from pipeline.planner.sglang.releases import rules_for
from schemas.estimate import (
    AsLaunched,
    Band,
    ChosenPlan,
    Dollars,
    HardwareEstimate,
    Price,
    PromptLengths,
    RunEstimate,
    UnfitOption,
)
from schemas.plan import Calibration, ModelFacts, NoSpeculation

# Four physical cores, for one engine's tokenizer and scheduler.
_LEAST_VCPUS_PER_GPU = 8
# Steps shorter than this with more requests than that may be limited by the host.
_SHORT_STEP_S, _SHORT_STEP_REQUESTS = 6e-3, 64
_NO_ROCM = "regenerate starts no engine on ROCm; a server on such cards can be its endpoint"
# The factor on the mean length by which the elasticity of the rate is measured.
_LONGER = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedGroup:
    """Cards of one kind in an option, with the user's own prices where there are any."""

    hardware: HardwareOption
    own_usd: float | None = None
    own_spot_usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateQuery:
    """A run, with everything that is known or assumed about it."""

    model: ModelFacts
    num_completions: int
    prompts: PromptLengths
    load: Load
    limits: SearchLimits
    base: LaunchFlags
    version: str | None
    release_known: bool
    """True for a release whose rules are known; False where the newest rules stand in for it."""
    storage_bytes_per_s: float
    hours_between_preemptions: float
    calibrations: Mapping[str, Calibration]
    today: date
    own_launch: LaunchFlags | None = None
    """The user's own launch line, to be estimated beside the best plan."""


def run_estimate(query: EstimateQuery, options: Sequence[tuple[PricedGroup, ...]]) -> RunEstimate:
    """Estimate every option, those that can run first.

    Among these the cheapest million tokens is first; those without a price come last, by days.
    """
    fitting: list[HardwareEstimate] = []
    unfit: list[UnfitOption] = []
    for groups in options:
        try:
            fitting.append(_hardware_estimate(query, groups))
        except PlanError as error:
            unfit.append(UnfitOption(option=option_name(groups), reason=str(error)))
    fitting.sort(key=_rank)
    return RunEstimate(
        model=query.model.name,
        num_completions=query.num_completions,
        prompt_lengths=query.prompts,
        output_lengths=query.load.lengths.summary,
        options=tuple(fitting),
        unfit=tuple(unfit),
        assumptions=fitting[0].assumptions[:3] if fitting else (),
        as_launched=_as_launched(query, options),
    )


def option_name(groups: Sequence[PricedGroup]) -> str:
    """Name an option: `7 x B200`, `4 x RTX PRO 6000 Blackwell + 2 x B200`."""
    return " + ".join(f"{group.hardware.count} x {group.hardware.gpu.name}" for group in groups)


def _rank(option: HardwareEstimate) -> tuple[bool, bool, float, float]:
    main = option.bills[0].usd_per_million_tokens.p50 if option.bills else 0.0
    return option.cannot_run is not None, not option.bills, main, option.days.p50


def _as_launched(
    query: EstimateQuery, options: Sequence[tuple[PricedGroup, ...]]
) -> tuple[AsLaunched, ...]:
    """Estimate the user's own launch line on each option, where one is given."""
    found: list[AsLaunched] = []
    for groups in options if query.own_launch else ():
        estimate, reason = None, ""
        try:
            rated = [_launched_group(query, group) for group in groups]
            estimate = _costed(query, rated, groups)
        except PlanError as error:
            reason = str(error)
        found.append(AsLaunched(option=option_name(groups), estimate=estimate, reason=reason))
    return tuple(found)


# --- one option -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedGroup:
    """A group of cards with its search, its best plan and its rate."""

    group: PricedGroup
    search: RatedSearch
    rate: RateGroup

    @property
    def best(self) -> RatedPlan:
        return self.search.plans[0]


def _hardware_estimate(query: EstimateQuery, groups: Sequence[PricedGroup]) -> HardwareEstimate:
    return _costed(query, [rated_group(query, group) for group in groups], groups)


def _costed(
    query: EstimateQuery, rated: Sequence[RatedGroup], groups: Sequence[PricedGroup]
) -> HardwareEstimate:
    """Return time and cost of the job on groups whose launches are rated."""
    work = whole_job(query.num_completions, query.load.lengths)
    time = job_time(work, [item.rate for item in rated])
    bills = _bills(query, rated, time, work.tokens)
    assumptions = time.assumptions
    if bills:
        assumptions = dollar_assumptions(assumptions, bills[0].price, time.gpu_hours)
    return HardwareEstimate(
        option=option_name(groups),
        num_gpus=sum(group.hardware.count for group in groups),
        plans=tuple(_chosen(query, item) for item in rated),
        tokens_per_s=time.tokens_per_s,
        days=time.days,
        gpu_hours=_all_cards(time, groups),
        start_hours=time.start_hours,
        tail_hours=time.tail_hours,
        restart_hours=time.restart_hours,
        bills=bills,
        assumptions=assumptions,
        warnings=_option_warnings(query, rated),
        cannot_run=_cannot_run(groups),
    )


def _cannot_run(groups: Sequence[PricedGroup]) -> str | None:
    cards = [group.hardware.gpu for group in groups]
    amd = dict.fromkeys(gpu.name for gpu in cards if speed_of(gpu).vendor == "amd")
    return f"{', '.join(amd)}: {_NO_ROCM}" if amd else None


def rated_group(query: EstimateQuery, group: PricedGroup) -> RatedGroup:
    """Find the best plan for one kind of card and its rate. Raises PlanError where none fits."""
    question = SearchQuery(
        model=query.model,
        options=(group.hardware,),
        limits=query.limits,
        base=query.base,
        version=query.version,
        calibrations=query.calibrations,
    )
    search = rated_search(question, query.load, most=1)
    best = search.plans[0]
    return RatedGroup(group=group, search=search, rate=_rate_group(query, best))


def _launched_group(query: EstimateQuery, group: PricedGroup) -> RatedGroup:
    """Rate the user's own launch line on one kind of card. Raises PlanError for one that fails."""
    assert query.own_launch is not None
    best = rated_launch(
        query.model,
        group.hardware,
        query.own_launch,
        query.load,
        version=query.version,
        calibrations=query.calibrations,
    )
    search = RatedSearch(plans=(best,), curves=(), break_even_requests=None)
    return RatedGroup(group=group, search=search, rate=_rate_group(query, best))


def _rate_group(query: EstimateQuery, best: RatedPlan) -> RateGroup:
    replica, standing = best.replica, best.resident
    speculative = not isinstance(replica.settings.speculation, NoSpeculation)
    measured_accept = query.load.accept_length(replica)
    gpus = replica.ranks.tp_size * replica.ranks.pp_size
    calibrated = best.found.candidate.launch.calibration is not None
    return RateGroup(
        name=f"{best.found.hardware.count} x {best.found.hardware.gpu.name}",
        replicas=best.found.replicas,
        gpus_per_replica=gpus,
        tokens_per_s=standing.rate.tokens_per_s,
        running_requests=standing.running_requests,
        small_step_s=_alone_s(query, best),
        load_s=best.found.plan.weights_bytes * gpus / query.storage_bytes_per_s,
        spreads=rate_spreads(
            RateEvidence(
                model_log_sd=standing.rate.model_log_sd,
                support=standing.rate.support,
                cap_logged=calibrated,
                accept_length=standing.rate.accept_length if speculative else None,
                accept_measured=measured_accept is not None,
                release=best.found.plan.release_profile,
                release_measured=query.release_known,
                stages=replica.ranks.pp_size,
            )
        ),
        elasticity_to_length=_elasticity(query, best),
    )


def _alone_s(query: EstimateQuery, best: RatedPlan) -> float:
    """Return seconds per token of a request that runs nearly alone, late in its life."""
    context = query.load.workload().context_tokens() * 2
    step = decode_step(best.replica, 1, context).step_s()
    return step / best.resident.rate.accept_length


def _elasticity(query: EstimateQuery, best: RatedPlan) -> float:
    """Return d log(tokens/s) / d log(mean length) at the plan's running requests.

    Where the KV pool limits the running requests, they fall as contexts grow.
    """
    work, standing = query.load.workload(), best.resident
    longer = Workload(
        prompt_tokens_mean=work.prompt_tokens_mean,
        output_tokens_mean=work.output_tokens_mean * _LONGER,
        output_tokens_cv=work.output_tokens_cv,
    )
    running = standing.running_requests
    if standing.retraction_risk:
        running *= work.context_tokens() / longer.context_tokens()
    accept = query.load.accept_length(best.replica)
    rate = rate_at(best.replica, running, longer, accept_length=accept)
    return (rate.tokens_per_s / standing.rate.tokens_per_s - 1) / (_LONGER - 1)


# --- what it costs ----------------------------------------------------------------------------


def _all_cards(time: JobTime, groups: Sequence[PricedGroup]) -> Band:
    """Return GPU-hours of all cards: those that no replica uses are paid for too."""
    cards = sum(group.hardware.count for group in groups)
    return Band(
        p10=time.days.p10 * 24 * cards, p50=time.days.p50 * 24 * cards,
        p90=time.days.p90 * 24 * cards,
    )  # fmt: skip


def _bills(
    query: EstimateQuery, rated: Sequence[RatedGroup], time: JobTime, tokens: float
) -> tuple[Dollars, ...]:
    """Return the bill on demand (or at the own price), then on spot, if all groups are priced."""
    hours = CostedHours(
        days=time.days,
        gpu_hours=_all_cards(time, [item.group for item in rated]),
        tokens=tokens,
        tokens_per_s=time.tokens_per_s,
    )
    found = []
    for spot in (False, True):
        prices = [_price(query, item.group, spot=spot) for item in rated]
        known = [price for price in prices if price is not None]
        if len(known) == len(prices):
            blended = _blended(known, [item.group.hardware.count for item in rated])
            preemption = _mean_preemption(query, rated, known) if spot else None
            found.append(bill(hours, blended, preemption))
    return tuple(found)


def _price(query: EstimateQuery, group: PricedGroup, *, spot: bool) -> Price | None:
    prices = prices_of(
        group.hardware.gpu, query.today, own_usd=group.own_usd, own_spot_usd=group.own_spot_usd
    )
    return next((price for price in prices if (price.kind == "spot") == spot), None)


def _blended(prices: Sequence[Price], counts: Sequence[int]) -> Price:
    """Average the price per GPU-hour over an option with several kinds of cards."""
    if len(prices) == 1:
        return prices[0]
    total = sum(counts)

    def mean(figures: Sequence[float]) -> float:
        return sum(x * count for x, count in zip(figures, counts, strict=True)) / total

    return Price(
        kind=prices[0].kind,
        low_usd_per_gpu_hour=mean([price.low_usd_per_gpu_hour for price in prices]),
        usd_per_gpu_hour=mean([price.usd_per_gpu_hour for price in prices]),
        high_usd_per_gpu_hour=mean([price.high_usd_per_gpu_hour for price in prices]),
        source="; ".join(dict.fromkeys(price.source for price in prices)),
        date="; ".join(dict.fromkeys(price.date for price in prices)),
        stale=any(price.stale for price in prices),
    )


def _mean_preemption(
    query: EstimateQuery, rated: Sequence[RatedGroup], prices: Sequence[Price]
) -> Preemption:
    """Average the preemption over all cards, weighted by what each kind costs."""
    each = [_preemption(query, item) for item in rated]
    weights = [
        item.group.hardware.count * price.usd_per_gpu_hour
        for item, price in zip(rated, prices, strict=True)
    ]
    total = sum(weights)
    if not total:
        # Owned hardware: lost time costs nothing.
        return each[0]

    def mean(figures: Sequence[float]) -> float:
        return sum(x * weight for x, weight in zip(figures, weights, strict=True)) / total

    return replace(
        each[0],
        seconds_a_token=mean([item.seconds_a_token for item in each]),
        start_s=mean([item.start_s for item in each]),
    )


def _preemption(query: EstimateQuery, rated: RatedGroup) -> Preemption:
    standing, work = rated.best.resident, query.load.workload()
    capture_s = (CAPTURE_LOW_S + CAPTURE_HIGH_S) / 2
    return Preemption(
        hours_between=query.hours_between_preemptions,
        emitted_tokens=work.context_tokens() - work.prompt_tokens_mean,
        seconds_a_token=standing.running_requests / standing.rate.tokens_per_s,
        start_s=rated.rate.load_s + capture_s,
        source="estimate.hours_between_preemptions",
    )


# --- the plan and its warnings ----------------------------------------------------------------


def _chosen(query: EstimateQuery, rated: RatedGroup) -> ChosenPlan:
    best, standing = rated.best, rated.best.resident
    plan, settings = best.found.plan, best.replica.settings
    speculation = settings.speculation
    drafted = 0 if isinstance(speculation, NoSpeculation) else speculation.num_draft_tokens
    # The cap is part of the band here: the engine's own is not known yet.
    sd = sum(spread.log_sd**2 for spread in rated.rate.spreads) ** 0.5
    return ChosenPlan(
        gpu=plan.gpu,
        num_gpus=best.found.hardware.count,
        tp_size=settings.tp_size,
        pp_size=settings.pp_size,
        replicas=best.found.replicas,
        mtp=drafted > 0,
        num_draft_tokens=drafted,
        prefix_cache=not settings.disable_radix_cache,
        cap_requests=standing.cap_requests,
        running_requests=standing.running_requests,
        limited_by=standing.limited_by,
        retraction_risk=standing.retraction_risk,
        argv=plan.argv,
        budget=plan.budget.rows,
        step=standing.rate.step,
        prefill_share=standing.rate.prefill_share,
        tokens_per_s_per_gpu=log_band(best.tokens_per_s / best.found.hardware.count, sd),
        curves=rated.search.curves,
        break_even_requests=rated.search.break_even_requests,
        readings=standing.rate.support,
        warnings=_plan_warnings(query, rated),
    )


def _plan_warnings(query: EstimateQuery, rated: RatedGroup) -> tuple[str, ...]:
    best, standing = rated.best, rated.best.resident
    found = list(best.found.plan.warnings)
    if standing.retraction_risk:
        calm = _calm_requests(query, best)
        found.append(
            "the KV pool overflows more than 1 % of the time, so SGLang retracts requests and "
            f"prefills them again; cap running requests at {calm} to avoid it"
        )
    step_s = standing.rate.step.step_s()
    if step_s < _SHORT_STEP_S and standing.running_requests > _SHORT_STEP_REQUESTS:
        found.append(
            f"a step lasts {1000 * step_s:.1f} ms at {standing.running_requests:.0f} requests: "
            "the host's scheduler may become the bottleneck"
        )
    vcpus = speed_of(best.found.hardware.gpu).vcpus_per_gpu
    if vcpus is not None and vcpus < _LEAST_VCPUS_PER_GPU:
        found.append(
            f"nodes with this card have {vcpus:g} vCPUs per GPU; an engine needs "
            f"{_LEAST_VCPUS_PER_GPU}"
        )
    return tuple(found)


def _calm_requests(query: EstimateQuery, best: RatedPlan) -> int:
    """Return the most running requests per replica that fit the KV pool 99 % of the time."""
    shape, prompt = query.load.lengths.shape, query.load.prompt_tokens_mean
    ranks = best.replica.ranks.attention_dp_size
    pool = best.found.candidate.sized.pool.tokens
    low, high = 0, best.resident.cap_requests // ranks
    while high - low > 1:
        middle = (low + high) // 2
        fits = p99_of_summed_contexts(middle, shape, prompt) <= pool
        low, high = (middle, high) if fits else (low, middle)
    return max(low, 1) * ranks


def _option_warnings(query: EstimateQuery, rated: Sequence[RatedGroup]) -> tuple[str, ...]:
    # A named release may be unknown; where none is named, the newest is assumed.
    found = list(rules_for(query.version)[1]) if query.version else []
    for item in rated:
        used = item.rate.replicas * item.rate.gpus_per_replica
        idle = item.group.hardware.count - used
        if idle:
            found.append(
                f"{idle} of {item.group.hardware.count} {item.group.hardware.gpu.name} are idle: "
                f"a replica uses {item.rate.gpus_per_replica}"
            )
        spot = _price(query, item.group, spot=True)
        if spot is None and _price(query, item.group, spot=False) is None:
            found.append(
                f"no price for {item.group.hardware.gpu.name} is known: pass --price to rank this "
                "option by dollars"
            )
        limit = query.load.lengths.summary.limit_tokens
        if spot is not None:
            warning = long_request_warning(_preemption(query, item), limit)
            if warning:
                found.append(f"on spot: {warning}")
    return tuple(found)
