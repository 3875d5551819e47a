"""The figures that the estimate exists for, with the arithmetic in comments."""

import pytest

from pipeline.models.dtypes import load_model_as
from pipeline.models.files import load_model
from pipeline.planner.cards import gpu_named
from pipeline.planner.lengths.lengths import output_lengths
from pipeline.planner.lengths.shapes import mean_emitted
from pipeline.planner.memory.sizing import Sized, assess
from pipeline.planner.rate.point import PointQuery, rate_at_point
from pipeline.planner.rate.ranking import Load, RatedSearch, rated_search
from pipeline.planner.rate.search import HardwareOption, SearchLimits, SearchQuery
from pipeline.planner.rate.throughput import Rate
from pipeline.planner.sglang.flags import parse_launch_line
from schemas.plan import ModelFacts
from schemas.units import GIB

COMPLETIONS = 902_087
MEAN_TOKENS = 2529


def facts(name: str) -> ModelFacts:
    """A model of the catalogue."""
    return load_model(name)


def qwen(gpu: str, running: float, *, cv: float = 0.0, accept_length: float | None = None) -> Rate:
    """Qwen3.6-27B in bf16 on one card, 512 prompt tokens."""
    return rate_at_point(
        PointQuery(
            model=load_model_as("Qwen/Qwen3.6-27B", "bf16"), gpu=gpu, num_gpus=1, tp_size=1,
            running_requests=running, input_tokens=512, output_tokens=MEAN_TOKENS, output_cv=cv,
            accept_length=accept_length,
        )
    )  # fmt: skip


def search(
    name: str, gpu: str, count: int, limits: SearchLimits | None = None, line: str = ""
) -> RatedSearch:
    """The best launches for the founding job: CV 1.2, cut at 32,768."""
    load = Load(
        prompt_tokens_mean=512, lengths=output_lengths(MEAN_TOKENS, 1.2, 32_768, "founding")
    )
    return rated_search(
        SearchQuery(
            model=facts(name),
            options=(HardwareOption(gpu=gpu_named(gpu), count=count),),
            limits=limits or SearchLimits(),
            base=parse_launch_line([*line.split(), "--model-path", name]),
        ),
        load,
    )


def days(found: RatedSearch, place: int = 0) -> float:
    """Generating alone."""
    return COMPLETIONS * MEAN_TOKENS / found.plans[place].tokens_per_s / 86_400


def test_one_request_on_rtx_pro_6000_runs_at_the_measured_rate() -> None:
    # The bench read 26.7 tokens/s. Weights alone: 51.2 GB (25.6 B parameters) / 1.792 TB/s =
    # 28.6 ms = 35 tokens/s; 84 % of the bandwidth and 2 ms of overhead leave 27.6.
    assert qwen("rtx-pro-6000", 1).tokens_per_s == pytest.approx(26.7, rel=0.10)


def test_four_hundred_tokens_a_second_is_a_batch_of_eight_with_mtp() -> None:
    # The bench read 400 tokens/s a GPU "at high concurrency". Eight requests that keep 2.6 tokens
    # a verify step of about 50 ms: 8 x 2.6 / 0.050 = 416, less prefill.
    rate = qwen("rtx-pro-6000", 8, accept_length=2.6).tokens_per_s
    assert 386 <= rate <= 418
    # No MTP at twice the batch gives the same: MTP took as many requests as it gave tokens.
    assert qwen("rtx-pro-6000", 16).tokens_per_s == pytest.approx(rate, rel=0.10)


def test_the_bench_implies_the_length_of_a_completion() -> None:
    # 4 cards x 400 tokens/s x 16.5 days x 86,400 s = 2.281e9 tokens over 902,087 completions
    assert round(4 * 400 * 16.5 * 86_400 / COMPLETIONS) == MEAN_TOKENS


@pytest.mark.parametrize(("running", "low", "high"), [(48, 803, 884), (80, 1035, 1182)])
def test_batches_without_mtp_run_as_two_independent_models_say(
    running: int, low: float, high: float
) -> None:
    # Rooflines with untuned and fitted constants, times 0.93 and 0.91 for the spread of lengths; at
    # 80 up to 2 % less, for the bench of one request is slower than both.
    assert low <= qwen("rtx-pro-6000", running, cv=1.2).tokens_per_s <= high


def test_the_same_four_cards_finish_in_a_third_of_the_time() -> None:
    # Prefix cache off, MTP off, one card a replica. At 0.90: usable (94.97 - 0.7) x 0.90 less 51.7
    # of weights = 33.1 GiB; a request holds 3,597 tokens x 64 KiB + 146.8 MiB = 371.6 MiB: 91.
    limits = SearchLimits(mtp=False, prefix_cache=False)
    line = "--tp-size 1 --disable-radix-cache"
    found = search("Qwen/Qwen3.6-27B", "rtx-pro-6000", 4, limits, line)
    # The search also takes fractions over 0.90.
    assert 65 <= found.plans[0].resident.cap_requests <= 100
    assert 5.4 <= days(found) <= 8.2


def test_mean_context_of_the_founding_job() -> None:
    # 512 + 2,529 x (1 + 1.44) / 2 = 3,597, but for the little that the limit cuts
    shape = output_lengths(MEAN_TOKENS, 1.2, 32_768, "founding").shape
    assert 512 + mean_emitted(shape) == pytest.approx(3597, rel=0.01)


def test_seven_b200_are_well_under_two_days() -> None:
    found = search("Qwen/Qwen3.6-27B", "b200", 7)
    assert days(found) < 1.5


def test_mtp_halves_the_batch_of_deepseek_v4_flash_and_loses() -> None:
    # NVFP4 at TP4 with the states of SGLang's defaults: 16 requests without MTP, 8 with it.
    def rate(running: int, accept_length: float | None) -> float:
        return rate_at_point(
            PointQuery(
                model=facts("nvidia/DeepSeek-V4-Flash-NVFP4"),
                gpu="rtx-pro-6000", num_gpus=4, tp_size=4,
                running_requests=running, input_tokens=512, output_tokens=MEAN_TOKENS,
                accept_length=accept_length,
            )
        ).tokens_per_s  # fmt: skip

    assert rate(8, 2.6) > rate(8, None)  # at equal batch it would win
    assert rate(8, 2.6) < rate(16, None)


def test_mtp_is_judged_at_the_batch_that_it_leaves() -> None:
    found = search("Qwen/Qwen3.6-27B", "rtx-pro-6000", 4, line="--tp-size 1")
    off, on = sorted(found.curves, key=lambda curve: curve.mtp)
    assert on.cap_requests < off.cap_requests
    assert found.break_even_requests is not None
    # The curves cross where the break-even says: more below it, no more from it on.
    assert on.points[0].tokens_per_s > off.points[0].tokens_per_s


def test_cap_is_what_the_pool_holds_at_the_mean_context() -> None:
    found = search("Qwen/Qwen3.6-27B", "b200", 1, SearchLimits(mtp=False), "--disable-radix-cache")
    candidate = found.plans[0].found.candidate
    sized = assess(candidate.launch)
    assert isinstance(sized, Sized)
    context = 512 + MEAN_TOKENS * (1 + 1.2**2) / 2
    cap = found.plans[0].resident.cap_requests
    assert cap <= sized.pool.tokens / context
    assert cap * context * 65_536 / GIB < 130  # GiB of a 178 GiB card


def test_stages_have_to_win_by_more_than_their_own_error() -> None:
    # Over PCIe two stages read 25.6 GB once for each of two micro-batches, as two ranks do, and add
    # nothing up between layers: they are rated higher, by less than e^0.20, which no reading backs.
    found = search("Qwen/Qwen3.6-27B", "rtx-pro-6000", 4, SearchLimits(mtp=False))
    ranks = [plan.replica.ranks for plan in found.plans]
    staged = next(plan for plan in found.plans if plan.replica.ranks.pp_size == 2)
    assert ranks[0].pp_size == 1
    assert 1 < staged.tokens_per_s / found.plans[0].tokens_per_s < 1.22
    assert staged.resident.rate.log_sd > found.plans[0].resident.rate.log_sd
