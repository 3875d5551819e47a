"""Reasons why a measured rate may differ from the predicted one, each with its size.

Sizes are standard deviations of the logarithm of measured over predicted tokens/s. That of the rate
model is what the readings near to a launch leave open: see `readings.offsets`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.models.formats import format_of
from schemas.estimate import Support
from schemas.plan import ModelFacts, Moe

RateClass = Literal["bf16 dense", "fp8 dense", "bf16 experts", "fp8 experts", "4-bit"]
_FOUR_BITS = {"nvfp4", "mxfp4", "int4", "int4-awq", "int4-gptq"}
_EIGHT_BITS = {"fp8", "fp8-block", "mxfp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Reason why a measured rate may differ. Spreads of one name go together in all groups.

    `log_sd` is of the logarithm of tokens/s. A heavy-tailed spread is a Student's t of 4 degrees of
    freedom with that standard deviation.
    """

    name: str
    value: str
    source: str
    measure: str
    log_sd: float
    heavy_tailed: bool = False


RATE_CLASSES: tuple[RateClass, ...] = get_args(RateClass)
# A cap that is computed rather than read from the engine's log. fitted, as above
RUNNING_REQUESTS_SD = 0.15
# assumed: 2.2 to 3.0 around 2.6 in eight cases of ten
ACCEPT_LENGTH_SD = 0.12
# assumed: no reading has stages; hand-over, host and bubbles are computed only
PIPELINE_SD = 0.20
# Readings of one setting differ by up to 22 % between releases, p90.
RELEASE_SD = 0.10


def rate_class_of(model: ModelFacts) -> RateClass:
    """Return the class of a model's rate error."""
    formats = {format_of(group, model.format) for group in model.tensors}
    moe = isinstance(model.ffn, Moe)
    if formats & _FOUR_BITS:
        return "4-bit"
    if formats & _EIGHT_BITS:
        return "fp8 experts" if moe else "fp8 dense"
    return "bf16 experts" if moe else "bf16 dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEvidence:
    """Facts behind a predicted rate. `accept_length` is None where MTP is off."""

    model_log_sd: float
    support: tuple[Support, ...]
    cap_logged: bool
    accept_length: float | None
    accept_measured: bool
    release: str
    release_measured: bool
    stages: int


def rate_spreads(evidence: RateEvidence) -> tuple[Spread, ...]:
    """List the reasons why the measured rate may differ from the predicted one."""
    spreads = [_model_error(evidence)]
    if not evidence.cap_logged:
        spreads.append(
            Spread(
                name="running requests",
                value="memory plan ± 15 %",
                source="fitted: computed caps against logged ones",
                measure="max_running_requests in the log of one launch",
                log_sd=RUNNING_REQUESTS_SD,
            )
        )
    if evidence.accept_length is not None and not evidence.accept_measured:
        spreads.append(
            Spread(
                name="accept length",
                value=f"{evidence.accept_length:g} ± 12 %",
                source="assumed: thinking at temperature 1, 3 draft steps",
                measure="accept length in the engine's log over 15 minutes of these prompts",
                log_sd=ACCEPT_LENGTH_SD,
            )
        )
    if evidence.stages > 1:
        spreads.append(
            Spread(
                name="pipeline stages",
                value=f"{evidence.stages} stages ± {100 * PIPELINE_SD:.0f} %",
                source="assumed: no fitted reading has pipeline stages",
                measure="15 minutes of the run with these stages and without",
                log_sd=PIPELINE_SD,
            )
        )
    if not evidence.release_measured:
        spreads.append(
            Spread(
                name="engine release",
                value=evidence.release,
                source="assumed: no fitted reading is of this release",
                measure="15 minutes of the run on this release",
                log_sd=RELEASE_SD,
            )
        )
    return tuple(spreads)


def _model_error(evidence: RateEvidence) -> Spread:
    nearest = evidence.support[0] if evidence.support else None
    stands_on = "no reading near to it"
    if nearest is not None:
        plural = "" if nearest.readings == 1 else "s"
        stands_on = f"{nearest.readings} reading{plural} of {nearest.relation}"
    return Spread(
        name="rate model",
        value=f"{stands_on}, ± {100 * evidence.model_log_sd:.0f} %",
        source="fitted: public readings, each pair of model and card predicted without its own",
        measure="15 minutes on the target card at the target running requests",
        log_sd=evidence.model_log_sd,
        heavy_tailed=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RateGroup:
    """Replicas of one launch on one kind of card.

    `tokens_per_s` (net of prefill) and `running_requests` are per replica. `small_step_s` is the
    time per token of a request that runs nearly alone, MTP included. `load_s` is the time to read
    the weights from storage. `elasticity_to_length` is the change of log tokens/s per change of log
    mean length: below 0 where KV limits the batch.
    """

    name: str
    replicas: int
    gpus_per_replica: int
    tokens_per_s: float
    running_requests: float
    small_step_s: float
    load_s: float
    spreads: tuple[Spread, ...]
    elasticity_to_length: float = 0.0


def rate_of(groups: Iterable[RateGroup]) -> float:
    """Sum tokens/s over all groups: one queue feeds them, so none waits for another."""
    return sum(group.replicas * group.tokens_per_s for group in groups)
