"""How far a predicted rate may be off, by what it was predicted for.

Standard deviations of the logarithm of measured over predicted tokens/s, each from models and
cards that the constants were not fitted to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.planner.rate_groups import Spread

RateClass = Literal["bf16 dense", "fp8 dense", "bf16 experts", "fp8 experts", "4-bit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassError:
    """What readings of one class were off by."""

    log_sd: float
    readings: int


# fitted: what the constants of `fitted_kernels` leave of the published readings, 80 % of them
# within 1.084 of these; "bf16 dense" is wider than its few readings say
CLASS_ERRORS: Mapping[RateClass, ClassError] = {
    "bf16 dense": ClassError(log_sd=0.12, readings=8),
    "fp8 dense": ClassError(log_sd=0.16, readings=19),
    "bf16 experts": ClassError(log_sd=0.17, readings=32),
    "fp8 experts": ClassError(log_sd=0.28, readings=65),
    "4-bit": ClassError(log_sd=0.30, readings=131),
}
# Residuals cluster by pair of model and GPU: pairs that the constants were not fitted to err by
# more. Specified with the classes' own spread, and kept by `make estimate-score`
UNMEASURED_PAIR = 1.25
RUNNING_REQUESTS_SD = 0.15  # the cap is computed, not read from the engine's log. fitted, as above
ACCEPT_LENGTH_SD = 0.12  # assumed: 2.2 to 3.0 about 2.6 in eight cases of ten
RELEASE_SD = 0.10  # readings of one setting differ by up to 22 % between releases, p90


def rate_spreads(
    rate_class: RateClass,
    *,
    pair_measured: bool,
    cap_logged: bool,
    accept_length: float | None,
    accept_measured: bool,
    release: str,
    release_measured: bool,
    class_errors: Mapping[RateClass, ClassError] = CLASS_ERRORS,
) -> tuple[Spread, ...]:
    """All that may make the rate another. `accept_length` is None where MTP is off."""
    spreads = [_model_error(rate_class, class_errors[rate_class], pair_measured)]
    if not cap_logged:
        spreads.append(
            Spread(
                name="running requests",
                value="as the memory plan says ± 15 %",
                source="fitted: computed caps against logged ones",
                measure="the engine's log line with max_running_requests, from one launch",
                log_sd=RUNNING_REQUESTS_SD,
            )
        )
    if accept_length is not None and not accept_measured:
        spreads.append(
            Spread(
                name="accept length",
                value=f"{accept_length:g} ± 12 %",
                source="assumed: thinking at temperature 1, 3 draft steps",
                measure="the accept length that the engine logs, over 15 minutes of these prompts",
                log_sd=ACCEPT_LENGTH_SD,
            )
        )
    if not release_measured:
        spreads.append(
            Spread(
                name="engine release",
                value=release,
                source="assumed: no reading of this release is among those fitted to",
                measure="15 minutes of the run on this release",
                log_sd=RELEASE_SD,
            )
        )
    return tuple(spreads)


def _model_error(rate_class: RateClass, error: ClassError, pair_measured: bool) -> Spread:
    log_sd = error.log_sd * (1.0 if pair_measured else UNMEASURED_PAIR)
    return Spread(
        name="rate model",
        value=f"{rate_class}, ± {100 * log_sd:.0f} %",
        source=f"fitted: residuals of {error.readings} readings of this class",
        measure="15 minutes on the target card at the target running requests",
        log_sd=log_sd,
        heavy_tailed=True,
    )
