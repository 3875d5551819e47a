"""Changes to launch flags that may be tried: which flags go together, and where each applies.

Three callers draw on this list: the advice of a plan, the search for the best plans and the ladder
after a failed launch. Each decides how far to go; a change that does not apply is not offered.
"""

from collections.abc import Iterator, Mapping

from pipeline.planner.sglang.flags import LaunchFlags
from schemas.plan import LinearState, ModelFacts, Moe, NoSpeculation, PlanSettings

# A flag's new value: '' sets a switch, None drops the flag.
Changes = Mapping[str, str | None]

TENSOR_RANKS = (1, 2, 4, 8, 16)

# assumed: a lower fraction wastes the card, a higher one leaves no room for activations
_FRACTIONS_ALLOWED = (0.4, 0.97)

_SPECULATION_FLAGS = (
    "speculative-algorithm", "speculative-num-steps", "speculative-eagle-topk",
    "speculative-num-draft-tokens", "speculative-draft-model-path",
    "speculative-dspark-block-size", "speculative-dflash-block-size",
    "enable-linear-replayssm-spec",
)  # fmt: skip


# --- memory fraction and chunks -----------------------------------------------------------------


def fraction_change(value: float) -> Changes:
    """Return the change to another memory fraction."""
    return {"mem-fraction-static": f"{value:g}"}


def nearby_fractions(current: float, steps: tuple[float, ...]) -> Iterator[Changes]:
    """List the fractions that lie these steps from the current one, in the order of `steps`."""
    lowest, highest = _FRACTIONS_ALLOWED
    for step in steps:
        value = round(current + step, 2)
        if lowest <= value <= highest:
            yield fraction_change(value)


def chunk_change(settings: PlanSettings, divisor: int) -> Changes:
    """Return the change to a part of the prefill chunk.

    SGLang divides the flag's value by the attention data-parallel ranks.
    """
    whole = settings.chunked_prefill_size * settings.attention_dp_size
    return {"chunked-prefill-size": str(whole // divisor)}


# --- speculation --------------------------------------------------------------------------------


def draft_change(steps: int) -> Changes:
    """Return the change to a chain of `steps` draft tokens."""
    return {
        "speculative-num-steps": str(steps),
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": str(steps + 1),
    }


def shorter_drafts(settings: PlanSettings) -> Iterator[Changes]:
    """List every shorter chain of draft tokens, the longest first."""
    speculation = settings.speculation
    if isinstance(speculation, NoSpeculation):
        return
    if speculation.algorithm in ("EAGLE", "EAGLE3", "NEXTN"):
        yield from map(draft_change, range(speculation.steps - 1, 0, -1))


def without_speculation(flags: LaunchFlags) -> Changes:
    """Return the change that drops every flag of speculative decoding."""
    given = [name for name, _ in flags.values if name.startswith("speculative-")]
    return dict.fromkeys((*_SPECULATION_FLAGS, *given))


# --- prefix cache and states --------------------------------------------------------------------

# One state slot per request instead of three or more.
WITHOUT_PREFIX_CACHE: Changes = {"disable-radix-cache": "", "mamba-radix-cache-strategy": None}
# Five state slots per request; the prefix cache holds states as well as keys and values.
EXTRA_BUFFER: Changes = {"mamba-radix-cache-strategy": "extra_buffer"}
LAZY_EXTRA_BUFFER: Changes = {"mamba-radix-cache-strategy": "extra_buffer_lazy"}
BF16_STATES: Changes = {"mamba-ssm-dtype": "bfloat16"}


def without_prefix_cache(settings: PlanSettings) -> Iterator[Changes]:
    """Offer to switch the prefix cache off."""
    if not settings.disable_radix_cache:
        yield WITHOUT_PREFIX_CACHE


def lazy_extra_buffer(settings: PlanSettings) -> Iterator[Changes]:
    """Offer four state slots per request instead of five."""
    if settings.mamba_strategy == "extra_buffer":
        yield LAZY_EXTRA_BUFFER


def bf16_states(flags: LaunchFlags, model: ModelFacts) -> Iterator[Changes]:
    """Offer half the bytes per state, which changes results."""
    if isinstance(model.state, LinearState) and flags.text("mamba-ssm-dtype") != "bfloat16":
        yield BF16_STATES


# --- tensor-parallel ranks ----------------------------------------------------------------------


def tensor_ranks(model: ModelFacts) -> list[int]:
    """Return the numbers of tensor-parallel ranks that divide the attention heads."""
    return [ranks for ranks in TENSOR_RANKS if model.heads % ranks == 0]


def more_tensor_ranks(
    settings: PlanSettings, model: ModelFacts, num_gpus: int | None = None
) -> Iterator[Changes]:
    """List higher numbers of tensor-parallel ranks, up to the cards where their number is given."""
    experts = model.ffn.experts if isinstance(model.ffn, Moe) else 0
    most = TENSOR_RANKS[-1] if num_gpus is None else num_gpus // settings.pp_size
    for ranks in tensor_ranks(model):
        if settings.tp_size < ranks <= most and experts % ranks == 0:
            yield {"tp-size": str(ranks)}
