"""Estimate made by hand, for tests of pages and text: its figures are examples.

902,087 completions of 2,529 tokens are 2.2814e9 tokens. 4 x RTX PRO 6000 at 1,080 tokens/s a card:
528,100 s, 6.11 days, 587 GPU-hours, $991 at $1.69. 7 x B200 at 4,200: 77,600 s, 0.90 days.
"""

from dataclasses import replace

from schemas.estimate import (
    Assumption,
    Band,
    ChosenPlan,
    Dollars,
    HardwareEstimate,
    OutputLengths,
    Price,
    PriceKind,
    PromptLengths,
    RateCurve,
    RatePoint,
    RunEstimate,
    StepParts,
    Support,
    UnfitOption,
)
from schemas.plan import BudgetRow

COMPLETIONS = 902_087
MEAN_TOKENS = 2529.0
_TOKENS = COMPLETIONS * MEAN_TOKENS
_MIB = 1 << 20
# The share of a spot node's time that preemptions take.
_PREEMPTED = 0.019
_SOURCE = "price list of a GPU cloud, as copied by an open catalogue"


def around(middle: float, factor: float = 1.34) -> Band:
    """Return a band that is equally wide below and above, by ratio."""
    return Band(p10=middle / factor, p50=middle, p90=middle * factor)


def price(kind: PriceKind, usd_per_gpu_hour: float, *, stale: bool = False) -> Price:
    """Return a price in the middle of a range."""
    return Price(
        kind=kind,
        low_usd_per_gpu_hour=round(usd_per_gpu_hour * 0.78, 2),
        usd_per_gpu_hour=usd_per_gpu_hour,
        high_usd_per_gpu_hour=round(usd_per_gpu_hour * 1.55, 2),
        source=_SOURCE,
        date="2026-06-11" if stale else "2026-11-30",
        stale=stale,
    )


def option(
    name: str,
    plans: tuple[ChosenPlan, ...],
    prices: tuple[Price, ...],
    *,
    warnings: tuple[str, ...] = (),
) -> HardwareEstimate:
    """Return the option of these plans, with the sum of their rates."""
    num_gpus = sum(plan.num_gpus for plan in plans)
    rate = sum(plan.tokens_per_s_per_gpu.p50 * plan.num_gpus for plan in plans)
    hours = _TOKENS / rate / 3600
    gpu_hours = hours * num_gpus
    bills = tuple(
        Dollars(
            price=item,
            days=around(hours / 24 * (1 + _PREEMPTED * (item.kind == "spot")), 1.38),
            usd=around(gpu_hours * item.usd_per_gpu_hour, 1.4),
            usd_per_million_tokens=around(gpu_hours * item.usd_per_gpu_hour / _TOKENS * 1e6, 1.36),
            preemption_usd=gpu_hours * item.usd_per_gpu_hour * _PREEMPTED * (item.kind == "spot"),
        )
        for item in prices
    )
    return HardwareEstimate(
        option=name,
        num_gpus=num_gpus,
        plans=plans,
        tokens_per_s=around(rate),
        days=around(hours / 24, 1.38),
        gpu_hours=around(gpu_hours, 1.38),
        start_hours=0.18,
        tail_hours=0.21,
        restart_hours=hours * 0.03,
        bills=bills,
        assumptions=ASSUMPTIONS,
        warnings=warnings,
    )


def _budget(*rows: tuple[str, float, str]) -> tuple[BudgetRow, ...]:
    return tuple(
        BudgetRow(name=name, bytes=round(mib * _MIB), note=note) for name, mib, note in rows
    )


def _curve(*points: tuple[int, float], mtp: bool) -> RateCurve:
    return RateCurve(
        mtp=mtp,
        cap_requests=points[-1][0],
        points=tuple(
            RatePoint(running_requests=running, tokens_per_s=rate) for running, rate in points
        ),
    )


RTX_PRO_6000 = ChosenPlan(
    readings=(
        Support(
            relation="models of this kind on this card", readings=3,
            sources=("community report, 2026",), first_date=None, last_date=None,
        ),
    ),
    gpu="RTX PRO 6000 Blackwell",
    num_gpus=4,
    tp_size=1,
    pp_size=1,
    replicas=4,
    mtp=False,
    num_draft_tokens=0,
    prefix_cache=False,
    cap_requests=91,
    running_requests=82.4,
    limited_by="KV tokens at the mean context",
    retraction_risk=True,
    argv=(
        "python", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3.6-27B",
        "--mem-fraction-static", "0.9", "--disable-radix-cache", "--max-running-requests", "91",
    ),
    budget=_budget(
        ("context, drivers, communicators", 819, "before the weights"),
        ("weights", 52306, "no quantisation config"),
        ("state pool", 16148, "109 slots of 146.81 MiB"),
        ("KV pool", 18237, "291,787 tokens of 65,536 B"),
        ("request-to-token table", 113, "in the headroom"),
        ("FlashInfer workspace", 389, "in the headroom"),
        ("runtime: kernel modules, cuBLAS, communicators", 297, "in the headroom"),
        ("decode graphs", 348, "in the headroom"),
        ("prefill graphs", 461, "in the headroom"),
        ("prefill graphs' activations", 1413, "in the headroom"),
        ("activations of one prefill chunk", 2836, "in the headroom"),
        ("left over", 3882, "unclaimed"),
    ),
    step=StepParts(
        dense_s=0.0437, experts_s=0.0, attention_s=0.0221, communication_s=0.0, overhead_s=0.0016,
        draft_s=0.0,
    ),
    prefill_share=0.056,
    tokens_per_s_per_gpu=around(1080.0),
    curves=(
        _curve((1, 26.5), (8, 196), (16, 362), (32, 640), (48, 843), (64, 985), (80, 1085),
               (91, 1142), mtp=False),
        _curve((1, 56), (4, 208), (8, 388), (12, 531), (16, 640), (24, 820), mtp=True),
    ),
    break_even_requests=84,
    warnings=(
        "host: 3 physical cores a GPU; detokenising may hold the engine back",
        "the KV pool overflows more than 1 % of the time; cap running requests at 64",
    ),
)  # fmt: skip

B200 = replace(
    RTX_PRO_6000,
    gpu="B200",
    num_gpus=7,
    replicas=7,
    cap_requests=297,
    running_requests=268.3,
    limited_by="state slots",
    retraction_risk=False,
    argv=(*RTX_PRO_6000.argv[:-1], "297"),
    budget=_budget(
        ("context, drivers, communicators", 819, "before the weights"),
        ("weights", 52306, "no quantisation config"),
        ("state pool", 52562, "357 slots of 146.81 MiB"),
        ("KV pool", 58675, "938,688 tokens of 65,536 B"),
        ("request-to-token table", 358, "in the headroom"),
        ("TRT-LLM attention workspace", 512, "in the headroom"),
        ("decode graphs", 799, "in the headroom"),
        ("prefill graphs' activations", 2836, "in the headroom"),
        ("activations of one prefill chunk", 5663, "in the headroom"),
        ("left over", 8100, "unclaimed"),
    ),
    step=StepParts(
        dense_s=0.0139, experts_s=0.0, attention_s=0.0262, communication_s=0.0, overhead_s=0.0016,
        draft_s=0.0,
    ),
    prefill_share=0.071,
    tokens_per_s_per_gpu=around(4200.0, 1.42),
    curves=(
        _curve((1, 118), (16, 1440), (48, 3010), (80, 3690), (128, 4110), (192, 4330), (256, 4440),
               (297, 4480), mtp=False),
        _curve((1, 236), (8, 1480), (16, 2310), (32, 3240), (48, 3620), mtp=True),
    ),
    break_even_requests=150,
    warnings=(),
)  # fmt: skip

ASSUMPTIONS = (
    Assumption(
        name="mean output length",
        value="2,529 tokens, ± 20 %",
        source="the run file's prior",
        variance_share=0.46,
        measure="256 completions drawn at random, run to their end on any card",
    ),
    Assumption(
        name="step time of the model",
        value="x 0.84-1.21",
        source="residuals over measured rows of dense and hybrid bf16 models",
        variance_share=0.31,
        measure="15 minutes at the planned number of running requests on the card itself",
    ),
    Assumption(
        name="running requests",
        value="0.90 of the cap (0.82-0.95)",
        source="occupancy seen with short prompts and long outputs",
        variance_share=0.13,
        measure="max_running_requests in the engine's own log line, then its gauge",
    ),
    Assumption(
        name="availability",
        value="0.95 (0.88-0.98)",
        source="assumed: no record of the cluster",
        variance_share=0.06,
        measure="a day of the run itself",
    ),
    Assumption(
        name="release of SGLang",
        value="0.5.23, ± 10 %",
        source="not among the measured releases",
        variance_share=0.04,
        measure="one reading on this release",
    ),
)

EXAMPLE = RunEstimate(
    model="Qwen/Qwen3.6-27B",
    num_completions=COMPLETIONS,
    prompt_lengths=PromptLengths(
        mean_tokens=512.4, cv=0.81, sampled=2000, source="2,000 prompts drawn from the data"
    ),
    output_lengths=OutputLengths(
        mean_tokens=MEAN_TOKENS,
        cv=1.2,
        limit_tokens=32_768,
        at_limit_fraction=0.0041,
        mean_relative_error=0.2,
        source="the run file's prior, thinking on",
    ),
    options=(
        option("7 x B200", (B200,), (price("on_demand", 4.89), price("spot", 1.71, stale=True))),
        option(
            "4 x RTX PRO 6000 Blackwell + 2 x B200",
            (RTX_PRO_6000, replace(B200, num_gpus=2, replicas=2)),
            (price("on_demand", 2.76), price("spot", 0.96, stale=True)),
            warnings=("two kinds of card: the price is the mean over the cards",),
        ),
        option(
            "4 x RTX PRO 6000 Blackwell",
            (RTX_PRO_6000,),
            (price("on_demand", 1.69), price("spot", 0.59)),
        ),
    ),
    unfit=(
        UnfitOption(
            option="8 x L4",
            reason="TP 8 is the least that holds the weights, and leaves 1.9 GiB a card: two "
            "requests of the mean context need 3.4 GiB",
        ),
        UnfitOption(
            option="4 x L40S",
            reason="ValueError: Loaded weights leave no GPU memory for the KV cache under "
            "--mem-fraction-static=0.8. Raise --mem-fraction-static above 0.871",
        ),
    ),
    assumptions=ASSUMPTIONS[:3],
)  # fmt: skip


def many_options(count: int) -> RunEstimate:
    """Return options of 1 to `count` cards, each with two prices; only some are efficient."""
    first = EXAMPLE.options[0]
    options = []
    for n in range(1, count + 1):
        dearer = 1 + (n % 7) / 20
        bills = tuple(
            replace(bill, days=bill.days.times(7 / n), usd=bill.usd.times(dearer))
            for bill in first.bills
        )
        days = first.days.times(7 / n)
        options.append(replace(first, option=f"{n} x B200", days=days, bills=bills))
    return replace(EXAMPLE, options=tuple(options))
