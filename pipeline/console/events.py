"""Events of the log: component, level, and the sentence that a terminal shows.

A sentence may use the fields of its event, and `text` for the words after them. A line that lacks
one of these fields is shown as it is.
"""

from dataclasses import dataclass
from logging import ERROR, INFO, WARNING
from typing import Literal

Component = Literal["driver", "coordinator", "worker", "engine", "estimate", "webhook", "export"]


@dataclass(frozen=True, slots=True)
class EventKind:
    """Facts about the events of one name."""

    component: Component | None
    """Part of the run that reports it; None: the command, or the engine of the line's worker."""
    level: int
    sentence: str
    usual_cause: str | None = None
    """Cause for which the event is no warning."""


EVENTS: dict[str, EventKind] = {
    # -- the session
    "session": EventKind("driver", INFO, "{rows:,} rows, {done:,} of them done, in {folder}"),
    "error_rows": EventKind("driver", WARNING, "{rows:,} published rows are error rows: {text}"),
    "reading_prompts": EventKind("driver", INFO, "Read {rows:,} prompts so far"),
    "prompts_read": EventKind("driver", INFO, "Read {rows:,} prompts, {bad_rows:,} of them bad"),
    "input_left_out": EventKind("driver", WARNING, "Not read: {text}"),
    "template": EventKind("driver", INFO, "Thinking and its tags are known from {source}"),
    "mended": EventKind("driver", WARNING, "Repaired the folder: {text}"),
    "drift_accepted": EventKind("driver", WARNING, "Accepted: {text}"),
    "look": EventKind(
        "driver", INFO, "Report     {report}\nStatus     {status}\nDashboard  {dashboard}"
    ),
    "progress": EventKind("driver", INFO, "{rows} rows, {time_left} left"),
    "nothing_to_do": EventKind(None, INFO, "Nothing to do: {text}"),
    "stopped": EventKind("driver", WARNING, "Stopped by {by}"),
    "published": EventKind("driver", INFO, "Every finished row is published: {text}"),
    "unpublished": EventKind("driver", WARNING, "Rows may be lost: {text}"),
    "next": EventKind("driver", INFO, "Next: {command}   # {why}"),
    "error": EventKind("driver", ERROR, "{text}"),
    "warning": EventKind(None, WARNING, "{text}"),
    # -- the cluster
    "node_joined": EventKind("driver", INFO, "Node {node} joined with {gpus:g} GPUs"),
    "node_lost": EventKind("driver", WARNING, "Lost node {node}"),
    "node_leaving": EventKind("driver", WARNING, "{worker} stops: its node will be taken away"),
    "waiting_for_resources": EventKind(
        "driver", WARNING, "No place yet for {workers}: each needs {each_needs}; free: {free}"
    ),
    "waiting_for_folder": EventKind("driver", WARNING, "Waiting: {text}"),
    "worker_ended": EventKind("driver", WARNING, "{worker} ended: {cause}", "no work left"),
    # -- the coordinator
    "worker_silent": EventKind("coordinator", WARNING, "{worker} is silent; its rows are open"),
    "engine_drained": EventKind("coordinator", WARNING, "{worker} is drained: {cause}"),
    "every_engine_over_limit": EventKind(
        "coordinator", WARNING, "Every engine exceeds the limit of {flag}: {share} of the rows"
    ),
    "canary_passed": EventKind("coordinator", INFO, "The canary passed after {rows:,} rows"),
    "canary_failed": EventKind("coordinator", ERROR, "The canary failed after {rows:,} rows"),
    # -- a worker
    "engine_ready": EventKind("worker", INFO, "{worker}: {engine} is ready (release {release})"),
    "engine_failed": EventKind("worker", ERROR, "{worker}: the engine did not start: {cause}"),
    "partials_kept": EventKind(
        "worker", INFO, "{worker}: {rows:,} of {of:,} begun rows are kept, with {tokens:,} tokens"
    ),
    "partials_found": EventKind(
        "coordinator", INFO, "{rows:,} begun rows go on after their {tokens:,} tokens"
    ),
    "partials_dropped": EventKind("coordinator", WARNING, "Rows begin anew: {why}"),
    "engine_doubt": EventKind("engine", WARNING, "{worker}: its answers have {fault}"),
    "engine_fault_accepted": EventKind("engine", WARNING, "{worker}: accepted: {fault}"),
    "mostly_timeouts": EventKind(
        "engine",
        WARNING,
        "{worker}: more requests time out ({timeouts:,}) than are answered ({answers:,}); they may "
        "now take {deadline_s:,} s",
    ),
    "rows_left_to_others": EventKind(
        "worker", INFO, "{worker}: its engine is busy or away; others get its rows for {wait_s} s"
    ),
    "waiting_for_engines": EventKind(
        "worker", WARNING, "{worker} waits for its server, {waited_s:,.0f} s so far: {cause}"
    ),
    "engine_lost": EventKind("worker", WARNING, "{worker} lost its engine: {cause}"),
    "leases_lost": EventKind("worker", WARNING, "{worker} was taken for dead and lost its rows"),
    "journal_published": EventKind(
        "coordinator", INFO, "{rows:,} rows that {worker} had finished are published"
    ),
    "busy_client": EventKind(
        "worker", WARNING, "{worker}: this machine is too busy: {lag_s} s late; its engine is kept"
    ),
    "stale_rows": EventKind("worker", WARNING, "{worker}: others had published {rows:,} rows"),
    # -- an engine
    "planned": EventKind("engine", INFO, "{worker} starts with {flags} on {gpu}"),
    "unplanned": EventKind("engine", WARNING, "{worker} starts without a plan: {reason}"),
    "plan_off": EventKind("engine", INFO, "Beyond the plan's error: {text}"),
    "gpu_shared": EventKind(
        "engine", WARNING, "{worker}: GPU {index} is shared, {free_mib:,} of {total_mib:,} MiB free"
    ),
    "context_short": EventKind(
        "engine", WARNING, "{worker}: a context of {context_tokens:,} tokens may be short: {why}"
    ),
    "context_lengthened": EventKind(
        "engine", INFO, "{worker} lengthens the context to {context_tokens:,} tokens: {why}"
    ),
    "requests_capped": EventKind(
        "engine", WARNING, "{worker} runs {effective:,} requests at once rather than {wanted:,}"
    ),
    "evidence": EventKind("engine", WARNING, "{worker}: {line}"),
    "step_down": EventKind("engine", WARNING, "{worker} starts again with {change} ({cause})"),
    "start_waits": EventKind(
        "engine",
        INFO,
        "{worker} waits for another engine's start on this node, {waited_s:,} s so far",
    ),
    "start_again": EventKind("engine", WARNING, "{worker} starts again in {wait_s:g} s ({cause})"),
    "given_up": EventKind("engine", ERROR, "{worker} gives up: {reason}"),
    "not_continued": EventKind(
        "engine", WARNING, "After a planned stop rows of {model} begin anew: {why}"
    ),
    # -- the trial of plans
    "trial": EventKind("engine", INFO, "{card}: a trial of {plans} plans begins"),
    "trial_change": EventKind(
        "engine",
        INFO,
        "{worker} is to {to} another plan: {plan} (gain {gain_s:,} s, restart {restart_s:,} s)",
    ),
    "trial_read": EventKind(
        "engine",
        INFO,
        "{card}: {tokens_per_s:,} tokens/s (± {error}), forecast {forecast:,}: {plan}",
    ),
    "trial_dropped": EventKind("engine", WARNING, "{card}: no longer tried, because {why}: {plan}"),
    "trial_start": EventKind("engine", INFO, "{worker} starts another plan: {flags}"),
    "trial_failed": EventKind(
        "engine", WARNING, "{worker} returns to its former flags ({cause}): {flags}"
    ),
    "starved": EventKind("engine", WARNING, "{worker} is starved: {why}"),
    # -- beside the run
    "no_estimate": EventKind("estimate", WARNING, "No estimate of the time left: {why}"),
    "deviates_from_plan": EventKind("estimate", WARNING, "{why}"),
    "webhook_lost": EventKind("webhook", WARNING, "Not delivered: {notice}: {why}"),
    "webhook_given_up": EventKind("webhook", WARNING, "Notices not delivered in {after_s:g} s"),
    # -- the export
    "indexed": EventKind("export", INFO, "Indexed {rows:,} rows"),
    "scattered": EventKind("export", INFO, "Sorted into {buckets} of {of} buckets"),
    "file_written": EventKind("export", INFO, "Wrote {name} ({rows:,} rows)"),
    "uploading": EventKind("export", INFO, "Uploading to {to}"),
    "uploaded": EventKind("export", INFO, "Uploaded, commit {commit}"),
}


UNKNOWN = EventKind(None, INFO, "")
"""Kind of a line without an event, or of one that this table lacks."""
