"""One SGLang engine over its launches: what it runs, what it learned, what it tries next.

Keeps the history that the ladder reads and the calibrations that later launches use. It starts
nothing and asks nothing: logs, figures and readings are handed in.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.engines.first_launch import first_launch, launch_setting
from pipeline.engines.gpus import Card, shared_cards
from pipeline.engines.ladder import Again, Stop, next_step
from pipeline.engines.remedies import MENDED_BY_FLAGS, LadderBasis, PlanPrice, Step, Tried
from pipeline.errors import PlanError
from pipeline.planner.memory.plan import plan_launch
from pipeline.planner.sglang.calibration import (
    Difference,
    LogReadings,
    calibration_from_json,
    calibration_json,
    calibration_of,
    differences,
)
from pipeline.planner.sglang.failures import Cause, figures
from pipeline.planner.sglang.flags import LaunchFlags, spelled_for
from pipeline.planner.sglang.layout import layout_name
from pipeline.planner.sglang.releases import rules_for
from pipeline.run_file import needed_context_tokens, users_flags
from pipeline.store.folder import Folder
from pipeline.store.run_folder import CALIBRATIONS
from schemas.config import RunFile
from schemas.plan import Calibration, LaunchPlan
from schemas.prompt import Longest
from schemas.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """What `/server_info` says of an engine that runs."""

    release: str | None
    effective_running_requests: int | None
    """Over all data-parallel ranks."""


def server_figures(info: Mapping[str, Any]) -> ServerFigures:
    """The engine's own figures; the flat `max_running_requests` is only what was asked for."""
    states = info.get("internal_states")
    ranks = [state for state in states if isinstance(state, dict)] if states else []
    each = [state.get("effective_max_running_requests_per_dp") for state in ranks]
    known = [value for value in each if isinstance(value, int) and value > 0]
    version = info.get("version")
    return ServerFigures(
        release=version if isinstance(version, str) else None,
        effective_running_requests=sum(known) if known and len(known) == len(ranks) else None,
    )


@dataclass(slots=True, kw_only=True)
class LaunchHistory:
    """The configuration of one engine, over all its starts in this session."""

    config: RunFile
    folder: Folder
    log: Callable[[str], None]
    release: str | None = None
    longest_prompts: Longest | None = None
    """The run's prompts by their turns, where they are known."""
    rate: PlanPrice | None = None
    """What a plan is worth to the ladder, in `rate_unit`. None: tokens/s where they are known."""
    rate_unit: str = "requests at once"
    flags: LaunchFlags | None = None
    setting: LadderBasis | None = None
    _tried: tuple[Tried, ...] = ()
    _calibration: Calibration | None = None
    _told: set[str] = field(default_factory=set)

    @property
    def is_begun(self) -> bool:
        return self.flags is not None

    def begin(self, cards: tuple[Card, ...]) -> None:
        """Choose the first flags, on the cards as they are before anything is loaded."""
        self.setting, unplanned = launch_setting(
            self.config, cards, self.release, self.longest_prompts
        )
        if self.rate is not None:
            self.setting = replace(self.setting, price=self.rate, price_unit=self.rate_unit)
        self._calibration = self._kept(users_flags(self.config))
        first = first_launch(self.config, self.setting, unplanned, self._calibration)
        self.flags = first.flags
        for card in shared_cards(cards):
            self.log(
                f"event=gpu_shared index={card.index} free_mib={card.free_mib} "
                f"total_mib={card.total_mib}"
            )
        self._tell_short_context()
        if self.config.engine.plan == "off":
            return
        if first.unplanned:
            self.log(f"event=unplanned reason={first.unplanned!r}")
        else:
            assert self.setting.gpu is not None
            self.log(f"event=planned gpu={self.setting.gpu.name!r} flags={self.text!r}")

    @property
    def text(self) -> str:
        """What runs, as a row's `plan` column keeps it."""
        return " ".join(self.arguments())

    def arguments(self) -> list[str]:
        """The launch flags without the model, in the spelling of the engine's release."""
        assert self.flags is not None
        words = list(self.flags.argv())
        if self.flags.model_path:
            words = words[2:]
        for aside in self.flags.set_aside:
            words += _aside_words(aside)
        release = self._release_numbers()
        return list(spelled_for(words, release)) if release else words

    @property
    def wanted_requests(self) -> int | None:
        """What the launch asks for; the engine's effective figure may be less. None: nothing."""
        return self.flags.number("max-running-requests") if self.flags else None

    def _tell_short_context(self) -> None:
        """The run file's context stands, and a row that has no room in it ends as an error row."""
        assert self.setting is not None
        given = users_flags(self.config).number("context-length")
        enough = self.setting.least_context_tokens
        if given is not None and enough is not None and given < enough:
            self.log(
                f"event=context_short context_tokens={given} enough_tokens={enough} "
                "why='the longest prompt by its bytes and its budget; what has no room is refused'"
            )

    # -- what comes of a start

    def lengthen_context(self, trial_tokens: int | None) -> bool:
        """Whether another start is due, with a longer context, by what a short question took.

        What the chat template adds is assumed until an engine has counted it.
        """
        setting, flags = self.setting, self.flags
        assert setting is not None
        assert flags is not None
        needed = needed_context_tokens(
            self.config, setting.model, self.longest_prompts, template_tokens=trial_tokens or 0
        )
        has = flags.number("context-length")
        if needed is None or has is None:
            return False
        self.setting = replace(setting, least_context_tokens=needed)
        # The run file's own is not gone beyond; a step down may have cut it.
        most = users_flags(self.config).number("context-length") or needed
        context = min(needed, most)
        if context <= has:
            return False
        self.flags = flags.changed({"context-length": str(context)})
        self.log(
            f"event=context_lengthened context_tokens={context} had_tokens={has} "
            f"why='a short question took {trial_tokens} tokens'"
        )
        return True

    def note_up(self, log_text: str, info: Mapping[str, Any]) -> int:
        """Note the figures of an engine that runs; returns the requests to keep in flight."""
        told = server_figures(info)
        self.release = told.release or self.release
        found = figures(log_text)
        self._learn(found)
        effective = told.effective_running_requests
        if effective is None and found is not None and found.max_running_requests:
            effective = found.max_running_requests * self._num_dp_ranks()
        engine, wanted = self.config.engine, self.wanted_requests
        if effective is not None and wanted is not None and effective < wanted:
            self.log(f"event=requests_capped wanted={wanted} effective={effective}")
        given = "max_running_requests" in engine.model_fields_set
        known = [wanted, effective, engine.max_running_requests if given else None]
        # Where neither the launch nor the engine tells a figure, the run file's default stands.
        return min((one for one in known if one), default=engine.max_running_requests)

    def note_served(self) -> None:
        """It has answered: what was nobody's fault before is over."""
        self._tried = tuple(one for one in self._tried if one.cause.kind in MENDED_BY_FLAGS)

    def note_end(self, cause: Cause, log_text: str) -> Again | Step | Stop:
        """What to do about an engine's end; a step is taken over at once."""
        assert self.flags is not None
        assert self.setting is not None
        self._tried += (Tried(flags=self.flags, cause=cause),)
        measured = self._measured(figures(log_text)) or self._calibration
        answer = next_step(self._tried, self.setting, measured)
        for line in cause.evidence:
            self.log(f"event=evidence line={line!r}")
        match answer:
            case Step() if self.config.engine.plan == "off":
                answer = Stop(reason=f"{cause.summary}; engine.plan: off keeps its flags")
            case Step():
                self.flags = answer.flags
                self.log(
                    f"event=step_down cause={cause.kind} change={answer.change!r} "
                    f"price={answer.price!r}"
                )
            case Again():
                self.log(f"event=start_again cause={cause.kind} wait_s={answer.wait_s:g}")
            case Stop():
                self.log(f"event=given_up cause={cause.kind} reason={answer.reason!r}")
        return answer

    # -- calibration

    def _learn(self, found: LogReadings | None) -> None:
        """Keep what an engine that runs measured, and tell once where the plan lay off."""
        measured = self._measured(found)
        plan = self._forecast(self._calibration)
        if measured is None or plan is None or found is None:
            return
        name = self._calibration_name(measured, layout_name(self.flags) if self.flags else "1")
        first_here = not self.folder.exists(name)
        if first_here:
            self.folder.make(CALIBRATIONS)
            text = json.dumps(calibration_json(measured), indent=1)
            self.folder.write_whole(name, text.encode())
        self._calibration = measured
        off = beyond_uncertainty(plan, differences(plan, found))
        if first_here and off:
            self.log(f"event=plan_off {'figure':<24}{'forecast':>14}{'logged':>14}{'off by':>10}")
            for item in off:
                self.log(
                    f"event=plan_off {item.name:<24}{item.forecast:>14,.2f}{item.logged:>14,.2f}"
                    f"{item.percent():>+8.1f} %"
                )

    def _measured(self, found: LogReadings | None) -> Calibration | None:
        setting = self.setting
        if found is None or setting is None or setting.model is None or setting.gpu is None:
            return None
        if found.weights_gib is None and found.free_before_load_gib is None:
            return None
        release = rules_for(setting.version)[0].label
        measured = calibration_of(
            found,
            model=setting.model.name,
            gpu=setting.gpu.name,
            release=release,
            layout=layout_name(self.flags) if self.flags else "1",
        )
        return replace(measured, graph_bytes=None)

    def _kept(self, flags: LaunchFlags) -> Calibration | None:
        """What an earlier engine of this run measured for this model, card and release."""
        setting = self.setting
        if setting is None or setting.model is None or setting.gpu is None:
            return None
        wanted = Calibration(
            model=setting.model.name,
            gpu=setting.gpu.name,
            release=rules_for(setting.version)[0].label,
            free_before_load_bytes=None,
            weights_bytes=None,
            draft_weights_bytes=None,
            graph_bytes=None,
        )
        name = self._calibration_name(wanted, layout_name(flags, setting.num_gpus))
        if not self.folder.exists(name):
            return None
        try:
            return calibration_from_json(json.loads(self.folder.read(name)))
        except (json.JSONDecodeError, PlanError) as error:
            self.log(f"event=warning {name} is left aside: {error}")
            return None

    def _calibration_name(self, of: Calibration, layout: str) -> str:
        key = f"{of.model}|{of.gpu}|{of.release}|{layout}"
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{of.model}-{of.gpu}-{of.release}-tp{layout}")
        return f"{CALIBRATIONS}/{stem[:120]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"

    def _forecast(self, calibration: Calibration | None) -> LaunchPlan | None:
        setting, flags = self.setting, self.flags
        if setting is None or setting.model is None or setting.gpu is None or flags is None:
            return None
        plan = plan_launch(
            setting.model, setting.gpu, flags, version=setting.version, lengths=setting.lengths,
            calibration=calibration,
        )  # fmt: skip
        return plan if isinstance(plan, LaunchPlan) else None

    def _num_dp_ranks(self) -> int:
        flags = self.flags
        return max(
            1, (flags.number("dp-size") or flags.number("attn-dp-size") or 1) if flags else 1
        )

    def _release_numbers(self) -> tuple[int, int, int] | None:
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", self.release or "")
        return (int(found[1]), int(found[2]), int(found[3])) if found else None


def beyond_uncertainty(plan: LaunchPlan, found: tuple[Difference, ...]) -> tuple[Difference, ...]:
    """Those of the differences that the plan's stated uncertainty does not cover."""
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
        for item in found
        if abs(item.forecast - item.logged)
        > allowed.get(item.name, max(1.0, share * abs(item.logged)))
    )


def _aside_words(text: str) -> list[str]:
    """A flag that the planner does not know, with its values; a JSON value stays one word."""
    flag, _, rest = text.partition(" ")
    if not rest:
        return [flag]
    return [flag, rest] if rest.startswith(("{", "[")) else [flag, *rest.split(" ")]
