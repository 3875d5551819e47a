"""SGLang's /metrics page, parsed into counters and load."""

import pytest

from pipeline.planner.sglang.metrics import EngineCounters, EngineLoad, engine_counters, engine_load

PAGE = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 12.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.97
sglang:full_token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.41
sglang:mamba_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.97
sglang:num_retracted_requests_total{model_name="m"} 2.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="0"} 900.0
sglang:realtime_tokens_total{mode="prefill_cache",model_name="m",tp_rank="0"} 70.0
sglang:realtime_tokens_total{mode="decode",model_name="m",tp_rank="0"} 1.5e+03
sglang:gen_throughput{model_name="m",tp_rank="0"} 310.5
sglang:spec_accept_length{tp_rank="0"} 2.75
python_gc_objects_collected_total{generation="0"} 6401.0
"""
# The ranks of one engine with attention data parallelism each report their own requests.
TWO_RANKS = PAGE + PAGE.replace('tp_rank="0"} 12.0', 'tp_rank="1"} 5.0').replace(
    'tp_rank="0"} 0.41', 'tp_rank="1"} 0.6'
).replace('mode="decode",model_name="m",tp_rank="0"} 1.5e+03', 'mode="decode"} 100.0')
OLD_PAGE = """\
sglang:num_running_reqs{model_name="m"} 3.0
sglang:token_usage{model_name="m"} 0.25
sglang:gen_throughput{model_name="m"} 9.5
sglang:generation_tokens_total{model_name="m"} 40.0
sglang:num_used_tokens{model_name="m"} 77.0
"""


def test_counters_are_those_of_the_newest_release() -> None:
    assert engine_counters(PAGE) == EngineCounters(
        running_requests=12, decoded_tokens=1500, prefilled_tokens=900, tokens_per_s=310.5,
        accept_length=2.75,
    )  # fmt: skip


def test_old_release_has_the_throughput_gauge_alone() -> None:
    assert engine_counters(OLD_PAGE) == EngineCounters(
        running_requests=3, decoded_tokens=None, prefilled_tokens=None, tokens_per_s=9.5,
        accept_length=None,
    )  # fmt: skip


def test_load_sums_tokens_of_all_modes() -> None:
    # `token_usage` is the fullest of all pools; the KV pool's own figure is `full_token_usage`.
    assert engine_load(PAGE) == EngineLoad(
        running=12, queued=3, retracted=2, token_usage=0.41, state_usage=0.97,
        progress=(2470.0, 0.0, 0.0, 0.0, 0.0, 310.5),
    )  # fmt: skip


def test_load_of_an_old_release_has_its_older_metrics() -> None:
    assert engine_load(OLD_PAGE) == EngineLoad(
        running=3, queued=0, retracted=0, token_usage=0.25, state_usage=0,
        progress=(0.0, 40.0, 0.0, 77.0, 0.0, 9.5),
    )  # fmt: skip


def test_ranks_are_summed_and_the_fullest_pool_counts() -> None:
    counters, load = engine_counters(TWO_RANKS), engine_load(TWO_RANKS)
    assert counters is not None
    assert load is not None
    assert (counters.running_requests, counters.decoded_tokens) == (17, 1600)
    assert (counters.tokens_per_s, counters.accept_length) == (621, 2.75)
    assert (load.running, load.queued, load.token_usage) == (17, 6, 0.6)


@pytest.mark.parametrize("page", ["", "vllm:num_requests_running 3.0\n", "sglang:token_usage 0.1"])
def test_page_without_running_requests_is_not_of_sglang(page: str) -> None:
    assert engine_counters(page) is None
    assert engine_load(page) is None


def test_accept_length_of_zero_means_that_mtp_is_off() -> None:
    counters = engine_counters(PAGE.replace(" 2.75", " 0.0"))
    assert counters is not None
    assert counters.accept_length is None
