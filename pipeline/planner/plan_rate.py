"""Tokens/s of one engine from a plan that is made: what a step of the ladder is priced by."""

from pipeline.planner.fitted_kernels import FITTED
from pipeline.planner.launch_flags import parse_launch_line
from pipeline.planner.parallel import parallel_of
from pipeline.planner.pipeline_stages import requests_at_once
from pipeline.planner.rated_plans import Load
from pipeline.planner.resident import occupancy
from pipeline.planner.state_pool import slot_bytes, ssm_dtype
from pipeline.planner.step_time import replica_of
from pipeline.planner.throughput import rate_at
from schemas.plan import Gpu, LaunchPlan, LinearState, ModelFacts


def plan_tokens_per_s(plan: LaunchPlan, model: ModelFacts, gpu: Gpu, load: Load) -> float:
    """At the plan's own cap; 0 where it runs no request. Raises PlanError for an unknown speed."""
    flags = parse_launch_line(plan.argv)
    ranks = parallel_of(flags)
    work = load.workload()
    held = int(plan.capacity.max_total_num_tokens / max(work.context_tokens(), 1.0))
    at_once = requests_at_once(
        plan.capacity.max_running_requests, ranks.pp_size, ranks.micro_batches,
        ranks.largest_micro_batch,
    )  # fmt: skip
    cap = min(at_once, held) * ranks.attention_dp_size
    if cap < 1:
        return 0.0
    slot = 0.0
    if isinstance(model.state, LinearState):
        slot = slot_bytes(model.state, ranks, ssm_dtype(flags, model.state))
    replica = replica_of(model, plan.settings, ranks, gpu, state_slot_bytes=slot, kernels=FITTED)
    accept = load.accept_length(replica)
    full = rate_at(replica, cap, work, accept_length=accept)
    running = cap * occupancy(full.prefill_share)
    return rate_at(replica, running, work, accept_length=accept).tokens_per_s
