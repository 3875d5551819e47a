"""The dry run: read and check the whole input; start and write nothing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa

from pipeline.chat_template.preview import ShownPrompt, kind_of, shown_prompts
from pipeline.chat_template.run_facts import facts_of_run, find_facts, thinking_warnings
from pipeline.chat_template.turns import fitted_prompt
from pipeline.dataset.done_rows import DoneRows
from pipeline.dataset.frozen import frozen_prompts
from pipeline.dataset.lengths import expected_lengths
from pipeline.dataset.prompts import InputColumns, history, input_fingerprint, read_prompts
from pipeline.dataset.run_record import check_columns, check_identity, read_manifest, read_run
from pipeline.engines.served import chat_template, token_counter
from pipeline.errors import ConfigError
from pipeline.models.tokenizer import TokenCounter
from pipeline.run.ledger import DONE
from pipeline.run.session import run_identity
from pipeline.run.start_check import DiskSpace, disk_space
from pipeline.run_file import given_context_tokens, users_flags
from pipeline.store.folder import Folder
from schemas.chat_template import TemplateFacts
from schemas.config.run_file import RunFile
from schemas.prompt import Prompt, tools_text

_BATCH_ROWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Counts of the whole input."""

    column: str
    shape: str
    system_column: str | None
    row_settings: dict[str, str]
    """Setting of single rows → column that it is read from."""
    left_out: tuple[str, ...]
    """Files of the input that are not read, one line per reason."""
    unread_columns: tuple[str, ...]
    """Columns of the input that no key of the run file uses."""
    rows_total: int
    """Prompts times samples."""
    rows_done: int
    turns: int
    prompt_tokens: int
    """Tokens of the first request of every row without a problem."""
    token_method: str
    is_exact: bool
    """The tokens are those of the model's own tokenizer."""
    context_tokens: int | None
    """Context length of the engines, if the run file gives it."""
    prompts_without_room: int
    """Prompts that exceed the context together with `sampling.max_tokens`."""
    problems: dict[str, tuple[int, str]]
    """Kind of problem → number of prompts, and the text of one."""
    tools_column: str | None
    prompts_with_tools: int
    prompts_with_original_history: int
    """Prompts whose later turns see the source's own answers."""
    disk: DiskSpace | None
    """Free disk of the output folder; None for an object store."""
    template: TemplateFacts
    why_no_template: str
    """Reason why the model's chat template is not at hand; empty if it is."""
    prompts_refitted: int
    """Prompts whose system turns are sent otherwise than they are in the input."""
    shown: tuple[ShownPrompt, ...]
    """A prompt of each kind, as the model sees it."""
    warnings: tuple[str, ...]
    can_ask: bool
    """False if no row can be generated."""


def dry_run(config: RunFile, folder: Folder) -> DryRun:
    """Count the input. Raises ConfigError for a bad one, ResumeError for another run's folder."""
    stream, samples = read_prompts(config.prompts), config.samples_per_prompt
    fingerprint = input_fingerprint(config.prompts)
    frozen = frozen_prompts(folder, fingerprint) if fingerprint else None
    done = _published_rows(config, folder, frozen.columns if frozen else stream.columns)
    found = find_facts(config, chat_template(config))
    facts = facts_of_run(read_run(folder), found.facts, accept_drift=False)
    counter = token_counter(config)
    sums = _Sums(counter=counter, context_tokens=given_context_tokens(config))
    ids = list(_ids(_fitted(stream.prompts, sums, config, facts), sums, config))
    if not sums.num_prompts:
        raise ConfigError(f"prompts.path: {config.prompts.path} has no rows")
    states = bytearray(sums.num_prompts * samples)
    samples_of_kinds = tuple(sums.samples.values())
    shown = shown_prompts(samples_of_kinds, found.template, facts, config, counter.count_text)
    rows_done, _ = done.mark(iter(ids), states, samples=samples, done=DONE)
    return DryRun(
        column=stream.columns.column,
        shape=stream.columns.shape,
        system_column=stream.columns.system_column,
        row_settings=stream.columns.row_settings or {},
        left_out=stream.left_out,
        unread_columns=stream.unread_columns,
        rows_total=sums.num_prompts * samples,
        rows_done=rows_done,
        turns=sums.turns * samples,
        prompt_tokens=sums.prompt_tokens * samples,
        token_method=counter.method,
        is_exact=counter.is_exact,
        context_tokens=sums.context_tokens,
        prompts_without_room=sums.prompts_without_room,
        problems=sums.problems,
        tools_column=stream.columns.tools_column,
        prompts_with_tools=sums.prompts_with_tools,
        prompts_with_original_history=sums.prompts_with_original_history,
        disk=disk_space(folder, sums.expected_tokens(config) * samples),
        template=facts,
        why_no_template=found.why_none,
        prompts_refitted=sums.prompts_refitted,
        shown=shown,
        warnings=tuple(_warnings(config, facts, shown, sums)),
        can_ask=sums.can_ask,
    )


def _warnings(
    config: RunFile, facts: TemplateFacts, shown: Sequence[ShownPrompt], sums: "_Sums"
) -> Iterator[str]:
    """Yield what the user should know before the run; the share of bad rows comes last."""
    yield from thinking_warnings(config, facts)
    if config.engine.kind == "sglang":
        for flag in users_flags(config).set_aside:
            yield (
                f"engine.flags: {flag} is in no release of SGLang that is known here; SGLang "
                f"refuses flags that it does not have"
            )
    for prompt in shown:
        if prompt.fault is not None:
            yield (
                f"the chat template refuses the {prompt.kind} prompt of row {prompt.row_id}, and "
                f"so will an engine: {prompt.fault}"
            )
    limit, share = config.quality.max_error_share, sums.num_bad / sums.num_prompts
    if limit is not None and share > limit:
        yield (
            f"{share:.1%} of the prompts end as error rows, more than quality.max_error_share "
            f"({limit:.0%}): the canary would stop the run"
        )


def _published_rows(config: RunFile, folder: Folder, columns: InputColumns) -> DoneRows:
    record = read_run(folder)
    if record is None:
        return DoneRows.of(())
    check_columns(record)
    check_identity(record, run_identity(config, columns), accept_drift=False)
    return DoneRows.of(tuple(read_manifest(folder).parts.values()))


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Sums over the prompts, each counted once whatever its samples."""

    counter: TokenCounter
    context_tokens: int | None
    num_prompts: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    prompts_without_room: int = 0
    prompts_refitted: int = 0
    samples: dict[str, Prompt] = field(default_factory=dict)
    """The first prompt of each kind."""
    problems: dict[str, tuple[int, str]] = field(default_factory=dict)
    prompts_with_tools: int = 0
    prompts_with_original_history: int = 0

    def expected_tokens(self, config: RunFile) -> float:
        """Estimate the tokens of a sample of every prompt, prompt and completions."""
        mean = expected_lengths(config).summary.mean_tokens
        return self.prompt_tokens + self.turns * mean

    @property
    def num_bad(self) -> int:
        """Number of prompts that end as error rows."""
        return sum(count for count, _ in self.problems.values()) + self.prompts_without_room

    @property
    def can_ask(self) -> bool:
        """False if no prompt can be generated; counts that are approximated rule none out."""
        without_room = self.prompts_without_room if self.counter.is_exact else 0
        return self.num_bad - self.prompts_without_room + without_room < self.num_prompts

    def add(self, prompt: Prompt, *, max_tokens: int) -> None:
        self.num_prompts += 1
        if prompt.problem is not None:
            count, example = self.problems.get(prompt.problem.kind, (0, prompt.problem.text))
            self.problems[prompt.problem.kind] = (count + 1, example)
            return
        self.samples.setdefault(kind_of(prompt), prompt)
        self.turns += prompt.num_turns
        self.prompts_with_tools += prompt.has_tools
        self.prompts_with_original_history += prompt.originals is not None
        tokens = self.counter.count(history(prompt.messages, []))
        tokens += self.counter.count_text(tools_text(prompt.tools) or "")
        self.prompt_tokens += tokens
        if self.context_tokens is not None:
            self.prompts_without_room += tokens + max_tokens > self.context_tokens


def _fitted(
    prompts: Iterable[Prompt], sums: _Sums, config: RunFile, facts: TemplateFacts
) -> Iterator[Prompt]:
    """Yield the prompts as they are sent, and count those that differ from the input."""
    for prompt in prompts:
        fitted = fitted_prompt(prompt, config, facts)
        sums.prompts_refitted += fitted.messages != prompt.messages
        yield fitted


def _ids(
    prompts: Iterator[Prompt], sums: _Sums, config: RunFile
) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Count the prompts; yield row ids and content hashes in batches."""
    while True:
        row_ids: list[str] = []
        hashes: list[str] = []
        for prompt in islice(prompts, _BATCH_ROWS):
            max_tokens = prompt.settings.max_tokens or config.sampling.max_tokens or 1
            sums.add(prompt, max_tokens=max_tokens)
            row_ids.append(prompt.row_id)
            hashes.append(prompt.content_hash)
        if not row_ids:
            return
        yield pa.array(row_ids, pa.string()), pa.array(hashes, pa.string())
