"""Launches of one SGLang engine: the first one, what each measured, what follows on a failure.

The first launch comes from the run file and the node's cards: flags of the run file are kept, and
what they leave open is planned for the card. The history is what the ladder reads; calibrations
are what later launches use. Nothing is started here: logs, figures and readings are passed in.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipeline.engines.gpus import Card, planned_card, shared_cards
from pipeline.engines.ladder import ENDS_WINDOW_S, Again, Stop, has_ended_too_often, next_step
from pipeline.engines.options import best_option, engine_trial
from pipeline.engines.remedies import (
    CRASH_KINDS,
    MENDED_BY_FLAGS,
    LadderBasis,
    PlanPrice,
    Step,
    Tried,
    running_requests,
)
from pipeline.errors import PlanError
from pipeline.planner.cards import gpu_of, speed_known
from pipeline.planner.memory.plan import ExpectedLengths, plan_launch
from pipeline.planner.rate.ranking import Load, plan_tokens_per_s, ranking_rate
from pipeline.planner.rate.search import Candidate, HardwareOption, SearchQuery, best_plans
from pipeline.planner.sglang.calibration import (
    Difference,
    LogReadings,
    calibration_from_json,
    calibration_json,
    calibration_of,
    differences,
)
from pipeline.planner.sglang.failures import Cause, figures
from pipeline.planner.sglang.flags import LaunchFlags, parse_launch_line, spelled_for
from pipeline.planner.sglang.layout import layout_name, tensor_ranks_of
from pipeline.planner.sglang.releases import rules_for
from pipeline.run_file import (
    needed_context_tokens,
    plan_base,
    run_load,
    run_model,
    search_limits,
    users_flags,
)
from pipeline.store.folder import Folder
from pipeline.store.run_folder import CALIBRATIONS
from schemas.config.run_file import RunFile
from schemas.plan import Calibration, EngineTrial, Gpu, LaunchPlan, ModelFacts
from schemas.prompt import Longest
from schemas.units import GIB


@dataclass(slots=True, kw_only=True)
class LaunchHistory:
    """The configuration of one engine, over all its starts in this session."""

    config: RunFile
    folder: Folder
    log: Callable[[str], None]
    release: str | None = None
    longest_prompts: Longest | None = None
    """Longest prompts by number of turns; None if unknown."""
    flags: LaunchFlags | None = None
    basis: LadderBasis | None = None
    _tried: tuple[Tried, ...] = ()
    _ends: tuple[Tried, ...] = ()
    """Ends of the last hours, those included that are forgotten because the engine worked since."""
    _calibrations: "Calibrations | None" = None
    trial: EngineTrial | None = None
    """Plans that the first launch chose from; None where there is no choice, or no trial."""
    _former: LaunchFlags | None = None
    """Flags to return to when those that are tried fail."""
    _former_name: str | None = None
    """Name of their plan."""
    _is_up: bool = False
    """True once the current flags have come up."""

    @property
    def is_begun(self) -> bool:
        return self.flags is not None

    @property
    def card(self) -> str | None:
        """The planner's name of the card that is planned for."""
        gpu = self.basis.gpu if self.basis is not None else None
        return gpu.name if gpu is not None else None

    @property
    def text(self) -> str:
        """The launch flags, as a row's `plan` column keeps them."""
        return " ".join(self.arguments())

    def arguments(self) -> list[str]:
        """Return the launch flags without the model, in the spelling of the engine's release."""
        assert self.flags is not None
        words = list(self.flags.argv())
        if self.flags.model_path:
            words = words[2:]
        for flag in self.flags.set_aside:
            words += _words_of_unknown_flag(flag)
        numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", self.release or "")
        if numbers is None:
            return words
        return list(spelled_for(words, (int(numbers[1]), int(numbers[2]), int(numbers[3]))))

    # -- the first launch

    def begin(self, cards: tuple[Card, ...]) -> None:
        """Choose the first flags, on the cards as they are before anything is loaded."""
        self.basis, unplanned = ladder_basis(self.config, cards, self.release, self.longest_prompts)
        self._calibrations = self._saved_calibrations(self.basis)
        most = self.config.engine.trial_plans
        first = first_launch(self.config, self.basis, unplanned, self._calibration, most=most)
        self.flags = first.flags
        if most > 1:
            self._begin_trial(self.basis, first.plans)
        for card in shared_cards(cards):
            self.log(
                f"event=gpu_shared index={card.index} free_mib={card.free_mib} "
                f"total_mib={card.total_mib}"
            )
        self._log_short_context(self.basis)
        if self.config.engine.plan == "off":
            return
        if first.unplanned:
            self.log(f"event=unplanned reason={first.unplanned!r}")
        else:
            self.log(f"event=planned gpu={self.card!r} flags={self.text!r}")

    def _saved_calibrations(self, basis: LadderBasis) -> "Calibrations | None":
        if basis.model is None or basis.gpu is None:
            return None
        calibrations = Calibrations(
            folder=self.folder,
            log=self.log,
            model=basis.model,
            gpu=basis.gpu,
            version=basis.version,
            lengths=basis.lengths,
        )
        calibrations.load(layout_name(users_flags(self.config), basis.num_gpus))
        return calibrations

    def _log_short_context(self, basis: LadderBasis) -> None:
        """Log that the run file's context may refuse rows; it is kept all the same."""
        given = users_flags(self.config).number("context-length")
        enough = basis.least_context_tokens
        if given is not None and enough is not None and given < enough:
            self.log(
                f"event=context_short context_tokens={given} enough_tokens={enough} "
                "why='the longest prompt, by its bytes, and its token budget may not fit; "
                "a row that does not fit is refused'"
            )

    # -- other flags

    def _begin_trial(self, basis: LadderBasis, plans: Sequence[LaunchPlan]) -> None:
        """Note what may be tried, and begin with the best of an earlier session."""
        trial = engine_trial(basis, plans, run_load(self.config))
        if trial is None:
            return
        best = best_option(self.folder, trial) or trial.options[0]
        self.trial = replace(trial, running=best.name)
        self.flags = _as_planned(users_flags(self.config), best.words)

    def try_plan(self, words: Sequence[str]) -> None:
        """Take other flags for the next start; return to the present ones if they fail."""
        assert self.flags is not None
        flags = _as_planned(users_flags(self.config), tuple(words))
        context = self.flags.number("context-length")
        if context is not None:
            # Lengthened for the chat template, or cut by a step down.
            flags = flags.changed({"context-length": str(context)})
        self._former, self.flags, self._is_up = self.flags, flags, False
        if self.trial is not None:
            self._former_name = self.trial.running
            self.trial = replace(self.trial, running=" ".join(words))
        self.log(f"event=trial_start flags={self.text!r}")

    def _returns_to_former(self, cause: Cause) -> bool:
        """Return to the flags before those that are tried, if these are to blame, or may be."""
        is_theirs = not self._is_up or cause.kind in (*MENDED_BY_FLAGS, *CRASH_KINDS)
        if self._former is None or not is_theirs:
            return False
        self.flags, self._former = self._former, None
        if self.trial is not None:
            failed = (*self.trial.failed, *filter(None, [self.trial.running]))
            self.trial = replace(self.trial, running=self._former_name, failed=failed)
        self.log(f"event=trial_failed cause={cause.summary!r} flags={self.text!r}")
        return True

    # -- what comes of a start

    def lengthen_context(self, trial_tokens: int | None) -> bool:
        """Lengthen the context by what a short question needed; return whether that is necessary.

        The tokens that the chat template adds are assumed until an engine has counted them.
        """
        basis, flags = self.basis, self.flags
        assert basis is not None
        assert flags is not None
        needed = needed_context_tokens(
            self.config, basis.model, self.longest_prompts, template_tokens=trial_tokens or 0
        )
        current = flags.number("context-length")
        if needed is None or current is None:
            return False
        self.basis = replace(basis, least_context_tokens=needed)
        # The run file's context is the most; a step down may have cut it.
        most = users_flags(self.config).number("context-length") or needed
        context = min(needed, most)
        if context <= current:
            return False
        self.flags = flags.changed({"context-length": str(context)})
        self.log(
            f"event=context_lengthened context_tokens={context} had_tokens={current} "
            f"why='a short question has {trial_tokens} tokens with the chat template'"
        )
        return True

    def note_up(self, log_text: str, info: Mapping[str, Any]) -> int:
        """Note the figures of an engine that runs; return the requests to keep in flight."""
        assert self.flags is not None
        self._is_up = True
        reported, logged = server_figures(info), figures(log_text)
        self.release = reported.release or self.release
        if self._calibrations is not None and logged is not None:
            self._calibrations.learn(logged, self.flags)
        effective = reported.effective_running_requests
        if effective is None and logged is not None and logged.max_running_requests:
            effective = logged.max_running_requests * _num_dp_ranks(self.flags)
        engine, wanted = self.config.engine, self.flags.number("max-running-requests")
        if effective is not None and wanted is not None and effective < wanted:
            self.log(f"event=requests_capped wanted={wanted} effective={effective}")
        given = "max_running_requests" in engine.model_fields_set
        limits = [wanted, effective, engine.max_running_requests if given else None]
        # The run file's default counts where neither the launch nor the engine gives a limit.
        return min(filter(None, limits), default=engine.max_running_requests)

    def note_served(self) -> None:
        """Forget failures of the surroundings: the engine has answered since."""
        kept = (*MENDED_BY_FLAGS, *CRASH_KINDS)
        self._tried = tuple(one for one in self._tried if one.cause.kind in kept)

    def note_end(self, cause: Cause, log_text: str, *, now_s: float) -> Again | Step | Stop:
        """Return what follows on an engine's end; a step changes the flags at once."""
        assert self.flags is not None
        assert self.basis is not None
        if self._returns_to_former(cause):
            return Again(wait_s=0.0, reason="the flags before worked")
        end = Tried(flags=self.flags, cause=cause, ended_s=now_s)
        self._tried = (*filter(partial(_still_counts, now_s=now_s), self._tried), end)
        self._ends = (*(one for one in self._ends if now_s - one.ended_s <= ENDS_WINDOW_S), end)
        logged, calibration = figures(log_text), self._calibration
        if self._calibrations is not None and logged is not None:
            calibration = self._calibrations.measured(logged, self.flags) or calibration
        answer = next_step(
            self._tried,
            self.basis,
            calibration,
            ends_too_often=has_ended_too_often(self._ends, now_s=now_s),
        )
        for line in cause.evidence:
            self.log(f"event=evidence line={line!r}")
        match answer:
            case Step() if self.config.engine.plan == "off":
                answer = Stop(reason=f"{cause.summary}; engine.plan: off keeps its flags")
            case Step():
                self.flags = answer.flags
                if self.trial is not None:
                    self.trial = replace(self.trial, running=None)
                self.log(
                    f"event=step_down cause={cause.kind} change={answer.change!r} "
                    f"price={answer.price!r}"
                )
            case Again():
                self.log(f"event=start_again cause={cause.kind} wait_s={answer.wait_s:g}")
            case Stop():
                self.log(f"event=given_up cause={cause.kind} reason={answer.reason!r}")
        return answer

    @property
    def _calibration(self) -> Calibration | None:
        return self._calibrations.current if self._calibrations is not None else None


def _still_counts(one: Tried, now_s: float) -> bool:
    """Forget a crash of hours ago: another one since says nothing of the configuration."""
    return one.cause.kind not in CRASH_KINDS or now_s - one.ended_s <= ENDS_WINDOW_S


# --- calibrations -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Calibrations:
    """Figures that the run's engines measured, by model, card, release and layout."""

    folder: Folder
    log: Callable[[str], None]
    model: ModelFacts
    gpu: Gpu
    version: str | None
    lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    current: Calibration | None = None

    def load(self, layout: str) -> None:
        """Load the figures of an earlier engine of this run in this layout, if any."""
        name = self._file_name(layout)
        if not self.folder.exists(name):
            return
        try:
            self.current = calibration_from_json(json.loads(self.folder.read(name)))
        except (json.JSONDecodeError, PlanError) as error:
            self.log(f"event=warning {name} is ignored: {error}")

    def measured(self, logged: LogReadings, flags: LaunchFlags) -> Calibration | None:
        """Return the memory figures of a launch's log, or None where it has none."""
        if logged.weights_gib is None and logged.free_before_load_gib is None:
            return None
        measured = calibration_of(
            logged,
            model=self.model.name,
            gpu=self.gpu.name,
            release=self._release,
            layout=layout_name(flags),
        )
        # The graphs of a launch that failed may be only some of its graphs.
        return replace(measured, graph_bytes=None)

    def learn(self, logged: LogReadings, flags: LaunchFlags) -> None:
        """Keep what an engine that runs measured; log once how far the plan was off."""
        measured, plan = self.measured(logged, flags), self._plan(flags)
        if measured is None or plan is None:
            return
        self.current = measured
        name = self._file_name(layout_name(flags))
        if self.folder.exists(name):
            return
        self.folder.make(CALIBRATIONS)
        text = json.dumps(calibration_json(measured), indent=1)
        self.folder.write_whole(name, text.encode())
        self._log_differences(beyond_uncertainty(plan, differences(plan, logged)))

    def _log_differences(self, items: tuple[Difference, ...]) -> None:
        if not items:
            return
        self.log(f"event=plan_off {'figure':<24}{'forecast':>14}{'logged':>14}{'off by':>10}")
        for item in items:
            self.log(
                f"event=plan_off {item.name:<24}{item.forecast:>14,.2f}{item.logged:>14,.2f}"
                f"{item.percent():>+8.1f} %"
            )

    def _plan(self, flags: LaunchFlags) -> LaunchPlan | None:
        plan = plan_launch(
            self.model,
            self.gpu,
            flags,
            version=self.version,
            lengths=self.lengths,
            calibration=self.current,
        )
        return plan if isinstance(plan, LaunchPlan) else None

    @property
    def _release(self) -> str:
        return rules_for(self.version)[0].label

    def _file_name(self, layout: str) -> str:
        key = f"{self.model.name}|{self.gpu.name}|{self._release}|{layout}"
        readable = f"{self.model.name}-{self.gpu.name}-{self._release}-tp{layout}"
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", readable)[:120]
        return f"{CALIBRATIONS}/{stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def beyond_uncertainty(plan: LaunchPlan, items: tuple[Difference, ...]) -> tuple[Difference, ...]:
    """Return the differences that the plan's stated uncertainty does not cover."""
    gib = plan.uncertainty_bytes / GIB
    share = plan.uncertainty_tokens / max(1, plan.capacity.max_total_num_tokens)
    allowed = {
        "free_before_load_gib": gib,
        "weights_gib": gib,
        "draft_weights_gib": gib,
        "max_total_num_tokens": float(plan.uncertainty_tokens),
    }
    return tuple(
        item
        for item in items
        if abs(item.forecast - item.logged)
        > allowed.get(item.name, max(1.0, share * abs(item.logged)))
    )


# --- flags and figures --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """Figures of SGLang's `/server_info` page."""

    release: str | None
    effective_running_requests: int | None
    """Sum over all data-parallel ranks."""


def server_figures(info: Mapping[str, Any]) -> ServerFigures:
    """Read the effective figures; the flat `max_running_requests` only repeats the flag."""
    states = info.get("internal_states")
    ranks = [state for state in states if isinstance(state, dict)] if states else []
    each = [state.get("effective_max_running_requests_per_dp") for state in ranks]
    known = [value for value in each if isinstance(value, int) and value > 0]
    version = info.get("version")
    return ServerFigures(
        release=version if isinstance(version, str) else None,
        effective_running_requests=sum(known) if known and len(known) == len(ranks) else None,
    )


def _num_dp_ranks(flags: LaunchFlags) -> int:
    return max(1, flags.number("dp-size") or flags.number("attn-dp-size") or 1)


def _words_of_unknown_flag(text: str) -> list[str]:
    """Split a flag that the planner does not know from its values; JSON stays one word."""
    flag, _, rest = text.partition(" ")
    if not rest:
        return [flag]
    return [flag, rest] if rest.startswith(("{", "[")) else [flag, *rest.split(" ")]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLaunch:
    """The flags to begin with, and the reason if they were not planned."""

    flags: LaunchFlags
    unplanned: str | None = None
    plans: tuple[LaunchPlan, ...] = ()
    """Distinct plans of the search, the best first."""


def ladder_basis(
    config: RunFile, cards: Sequence[Card], release: str | None, longest: Longest | None = None
) -> tuple[LadderBasis, str | None]:
    """Return what plans are based on, and the reason where none can be made."""
    reasons = []
    try:
        model: ModelFacts | None = run_model(config)
    except PlanError as error:
        model, reasons = None, [str(error)]
    gpu = _gpu(config, tuple(cards))
    if gpu is None:
        reasons.append("no card is known: neither NVML nor nvidia-smi nor `hardware` names one")
    price, price_unit = _price(config, model, gpu)
    basis = LadderBasis(
        model=model,
        gpu=gpu,
        num_gpus=max(1, config.engine.gpus_per_worker or len(cards)),
        version=release or config.planner.sglang_version,
        lengths=run_load(config).expected(),
        least_context_tokens=needed_context_tokens(config, model, longest),
        may_change_state_dtype=config.planner.allow_state_dtype,
        users_flags=frozenset(name for name, _ in users_flags(config).values),
        price=price,
        price_unit=price_unit,
    )
    return basis, "; ".join(reasons) or None


def first_launch(
    config: RunFile,
    basis: LadderBasis,
    unplanned: str | None,
    calibration: Calibration | None,
    *,
    most: int = 1,
) -> FirstLaunch:
    """Choose the best launch of one engine on its cards; the run file's where none fits."""
    given = users_flags(config)
    if config.engine.plan == "off" or unplanned or basis.model is None or basis.gpu is None:
        return FirstLaunch(flags=given, unplanned=unplanned)
    try:
        # A context chosen for its memory would refuse long rows.
        base = plan_base(config, basis.least_context_tokens or basis.model.context_length)
        if calibration is not None and not base.has("tp-size"):
            # Measured figures hold for one layout only.
            base = base.changed({"tp-size": str(tensor_ranks_of(base, basis.num_gpus))})
        found = best_plans(
            SearchQuery(
                model=basis.model,
                options=(HardwareOption(gpu=basis.gpu, count=basis.num_gpus),),
                limits=search_limits(config),
                base=base,
                version=basis.version,
                calibrations={basis.gpu.name: calibration} if calibration else {},
            ),
            basis.lengths,
            rank=partial(_rank_of_one_engine, load=run_load(config)),
            most=most,
        )
    except PlanError as error:
        bare = plan_base(config, basis.least_context_tokens)
        return FirstLaunch(flags=bare, unplanned=str(error))
    plans = tuple(one.plan for one in found)
    return FirstLaunch(flags=_as_planned(given, plans[0].argv), plans=plans)


def _rank_of_one_engine(candidate: Candidate, load: Load) -> float:
    """Rank by one engine, which uses all its cards; copies of it do not count."""
    if not speed_known(candidate.launch.gpu):
        return candidate.requests_a_replica
    return ranking_rate(candidate, load)


def _price(config: RunFile, model: ModelFacts | None, gpu: Gpu | None) -> tuple[PlanPrice, str]:
    """Return the price of a plan and its unit: tokens/s where the card's speed is known."""
    if model is None or gpu is None or not speed_known(gpu):
        return running_requests, "requests at once"
    rate = partial(plan_tokens_per_s, model=model, gpu=gpu, load=run_load(config))
    return rate, "tokens/s"


def _as_planned(given: LaunchFlags, argv: tuple[str, ...]) -> LaunchFlags:
    """Return the planned flags, with the run file's flags that the planner does not know."""
    planned = parse_launch_line(argv)
    return LaunchFlags(
        model_path=given.model_path,
        values=planned.values,
        env=given.env,
        set_aside=given.set_aside,
    )


def _gpu(config: RunFile, cards: tuple[Card, ...]) -> Gpu | None:
    """Return the card that the node reports, else the run file's if it lists one kind alone."""
    measured = planned_card(cards)
    if measured is not None or len(config.hardware) != 1:
        return measured
    entry = config.hardware[0]
    return gpu_of(entry.gpu, entry.memory_gib)
