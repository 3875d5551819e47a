"""Run file: defaults, overrides, and one line per mistake."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline.errors import ConfigError
from schemas.config.quality import QualityConfig
from schemas.config.reader import parse_run_file, read_run_file, run_file_of, stored_run_file
from schemas.config.requests import SamplingConfig
from schemas.config.run_file import RunFile
from schemas.config.section import is_url

LEAST = "prompts: {path: p.parquet}\nmodel: m\noutput: {folder: out}\n"

Read = Callable[..., RunFile]
Mistakes = Callable[..., list[str]]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.fixture
def read(run_file: Path) -> Read:
    """Return a reader of the minimal run file with `more` appended, and overrides."""

    def read_it(more: str = "", *overrides: str) -> RunFile:
        run_file.write_text(LEAST + more)
        return read_run_file(run_file, overrides)

    return read_it


@pytest.fixture
def mistakes(run_file: Path, read: Read) -> Mistakes:
    """Return a reader of the error's lines, without the file name before each."""

    def lines_of(more: str = "", *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            read(more, *overrides)
        lines = str(caught.value).split("\n")
        assert all(line.startswith((f"{run_file}:", "--set ")) for line in lines)
        return [line.removeprefix(f"{run_file}:").removeprefix(" ") for line in lines]

    return lines_of


# -- valid run files


@pytest.mark.parametrize("word", ["off", "'off'", "auto"])
def test_plan_is_given_by_its_word(read: Read, word: str) -> None:
    # YAML makes a switch of `off`.
    assert read(f"engine: {{plan: {word}}}\n").engine.plan == word.strip("'")


def test_minimal_run_file_has_the_documented_defaults(read: Read) -> None:
    config = read()
    assert (config.thinking, config.samples_per_prompt) == (True, 1)
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 4096, "seed": 7}
    assert config.sampling.model_dump(exclude_none=True) == given
    assert config.prompts.column is None
    assert config.prompts.id_column is None
    assert config.prompts.keep_columns == []
    assert config.prompts.limit is None
    assert (config.engine.kind, config.engine.count) == ("embedded", 1)
    assert config.engine.max_running_requests == 16
    assert config.output.flush_interval_s is None


def test_full_run_file_is_valid(run_file: Path) -> None:
    run_file.write_text(
        """
prompts:
  path: prompts.parquet          # file, folder, saved data set or hub name
  column: null
  id_column: id
  keep_columns: [category]
  limit: null
model: Qwen/Qwen3.6-27B
thinking: true
sampling: {temperature: 0.6, top_p: 0.95, top_k: 20, max_tokens: 4096, seed: 7}
samples_per_prompt: 1
engine:
  kind: embedded
  count: 2
  max_running_requests: 16
  base_urls: []
output:
  folder: out/demo
  flush_interval_s: 15
"""
    )
    config = read_run_file(run_file)
    assert config.prompts.keep_columns == ["category"]
    assert config.engine.num_workers == 2
    assert config.output.flush_interval_s == 15.0


def test_frozen_run_file_refuses_a_change(read: Read) -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().model = "other"


def test_endpoint_run_has_a_worker_for_each_url(read: Read) -> None:
    urls = "[http://127.0.0.1:30000/v1, https://host/v1]"
    engine = read(f"engine: {{kind: endpoint, count: 7, base_urls: {urls}}}").engine
    assert engine.num_workers == 2
    assert engine.gpus_per_worker == 0


def test_sglang_may_be_started_by_a_command_of_any_kind(read: Read) -> None:
    engine = read("engine: {kind: sglang, command: [docker, run, image], pass_env: [HF_TOKEN]}")
    assert engine.engine.command == ["docker", "run", "image"]
    assert (engine.engine.plan, engine.engine.pass_env) == ("auto", ["HF_TOKEN"])


def test_sglang_worker_uses_one_gpu_by_default(read: Read) -> None:
    sglang = "engine: {kind: sglang, python: /venv/bin/python}"
    assert read(sglang).engine.gpus_per_worker == 1
    assert read(sglang, "engine.gpus=4").engine.gpus_per_worker == 4
    assert read(sglang, "engine.gpus=0").engine.gpus_per_worker == 0


def test_engines_without_a_count_are_counted_by_their_gpus(read: Read, mistakes: Mistakes) -> None:
    sglang = "engine: {kind: sglang, python: /venv/bin/python, count: null}"
    assert read(sglang).engine.num_workers is None
    assert mistakes("engine: {kind: embedded, count: null}") == [
        "engine.count: found null, but these engines use no GPUs to count by; give a number"
    ]


def test_no_more_engines_can_be_awaited_than_are_started(read: Read, mistakes: Mistakes) -> None:
    assert read("engine: {count: 3}", "cluster.min_engines=3").cluster.min_engines == 3
    assert mistakes("engine: {count: 3}", "cluster.min_engines=4") == [
        "cluster.min_engines: found 4; expected at most the run's 3 engines"
    ]


def test_whole_number_is_taken_where_a_fraction_is_allowed(read: Read) -> None:
    assert read("sampling: {temperature: 1}").sampling.temperature == 1.0


def test_chat_template_kwargs_may_hold_any_json_value(read: Read) -> None:
    kwargs = read("chat_template_kwargs: {a: 1, b: true, c: x, d: 1.5, e: null, f: [1, {g: 2}]}")
    assert kwargs.chat_template_kwargs == {
        "a": 1,
        "b": True,
        "c": "x",
        "d": 1.5,
        "e": None,
        "f": [1, {"g": 2}],
    }


def test_run_file_may_begin_with_a_byte_order_mark(run_file: Path) -> None:
    run_file.write_bytes(b"\xef\xbb\xbf" + LEAST.encode())
    assert read_run_file(run_file).model == "m"


def test_run_file_may_merge_one_section_into_another(run_file: Path) -> None:
    run_file.write_text(
        "prompts: {path: p}\nmodel: m\noutput: &o {folder: out}\nsampling: {seed: 1}\n"
    )
    assert read_run_file(run_file, ["output={<<: {folder: a}, folder: b}"]).output.folder == "b"


# -- overrides


def test_override_beats_the_file(read: Read) -> None:
    config = read("sampling: {max_tokens: 5, top_k: 3}", "sampling.max_tokens=512")
    assert (config.sampling.max_tokens, config.sampling.top_k) == (512, 3)


def test_override_makes_the_section_that_is_not_there(read: Read) -> None:
    assert read("", "engine.env.OMP_NUM_THREADS='1'").engine.env == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("thinking=false", "thinking", False),
        ("prompts.limit=null", "prompts.limit", None),
        ("prompts.limit=", "prompts.limit", None),
        ("prompts.keep_columns=[a, b]", "prompts.keep_columns", ["a", "b"]),
        ("prompts.path=a=b.parquet", "prompts.path", "a=b.parquet"),
        ("prompts.system_prompt='Be brief: yes'", "prompts.system_prompt", "Be brief: yes"),
        ("sampling.temperature=0.5", "sampling.temperature", 0.5),
        (" model = other", "model", "other"),
    ],
)
def test_override_is_read_as_yaml(read: Read, override: str, field: str, value: object) -> None:
    found: object = read("", override)
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value


def test_override_replaces_a_whole_section(read: Read) -> None:
    sampling = read("sampling: {top_k: 3}", "sampling={seed: 1}").sampling
    assert (sampling.seed, sampling.top_k) == (1, 20)


def test_later_override_wins(read: Read) -> None:
    assert read("", "model=a", "model=b").model == "b"


@pytest.mark.parametrize("override", ["model", "=x", "prompts.=x", ".path=x", "prompts..path=x"])
def test_override_without_key_and_value_is_refused(mistakes: Mistakes, override: str) -> None:
    assert mistakes("", override) == [
        f"--set {override}: expected key=value, for example sampling.top_p=0.9"
    ]


@pytest.mark.parametrize("value", ["[1", "2026-02-30", "{a: 1, a: 2}", "!!python/name:os.system"])
def test_override_whose_value_is_not_yaml_is_refused(mistakes: Mistakes, value: str) -> None:
    assert mistakes("", f"model={value}") == [f"--set model={value}: the value is not valid YAML"]


def test_override_below_a_value_that_is_no_section_is_refused(mistakes: Mistakes) -> None:
    assert mistakes("", "model.name=x") == ["--set model.name=x: model is 'm' (str), not a section"]


def test_override_of_an_unknown_key_names_the_nearest(mistakes: Mistakes) -> None:
    assert mistakes("", "sampling.max_token=5") == [
        "sampling.max_token: unknown key; did you mean 'max_tokens'?"
    ]


# -- keys


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("sampler: {}", "sampler: unknown key; did you mean 'sampling'?"),
        ("engine: {knid: embedded}", "engine.knid: unknown key; did you mean 'kind'?"),
        ("sampling: {top-k: 1}", "sampling.top-k: unknown key; did you mean 'top_k'?"),
        ("samples-per-prompt: 2", "samples-per-prompt: unknown key; did you mean"),
        ("retry: {zzz: 1}", "retry.zzz: unknown key; known keys: max_attempts, backoff_initial_s"),
    ],
)
def test_unknown_key_is_named_with_the_nearest_known_one(
    mistakes: Mistakes, more: str, line: str
) -> None:
    [found] = mistakes(more)
    assert found.startswith(line)


@pytest.mark.parametrize("field", ["prompts.path", "model", "output.folder"])
def test_key_without_a_default_is_missed_by_name(run_file: Path, field: str) -> None:
    values = yaml.safe_load(LEAST)
    section, _, key = field.rpartition(".")
    del (values[section] if section else values)[key]
    run_file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as caught:
        read_run_file(run_file)
    assert str(caught.value) == f"{run_file}: {field}: missing; this key has no default"


def test_key_that_is_not_text_is_refused(mistakes: Mistakes) -> None:
    assert mistakes("sampling: {1: 2}") == ["sampling.1: found 1 (int); keys should be strings"]
    assert mistakes("engine: {env: {1: a}}") == [
        "engine.env.1: found 1 (int); it should be a valid string"
    ]


# -- values


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("sampling.max_tokens=many", "sampling.max_tokens: found 'many' (str); it should be a"),
        ("sampling.max_tokens=4.5", "sampling.max_tokens: found 4.5 (float); it should be a"),
        ("sampling.max_tokens=true", "sampling.max_tokens: found True (bool); it should be a"),
        ("sampling.top_p='0.9'", "sampling.top_p: found '0.9' (str); it should be a valid num"),
        ("thinking=1", "thinking: found 1 (int); it should be a valid boolean"),
        ("model=7", "model: found 7 (int); it should be a valid string"),
        ("model=null", "model: found null; it should be a valid string"),
        ("engine.kind=vllm", "engine.kind: found 'vllm' (str); it should be 'embedded', 'endpo"),
        ("prompts.shape=chat", "prompts.shape: found 'chat' (str); it should be 'messages', '"),
        ("prompts.keep_columns=a", "prompts.keep_columns: found 'a' (str); it should be a va"),
        ("prompts.keep_columns=[a, 1]", "prompts.keep_columns.1: found 1 (int); it should be"),
        ("engine.env={A: 1}", "engine.env.A: found 1 (int); it should be a valid string"),
        ("engine=null", "engine: found null; it should be a section with keys of its own"),
        ("prompts=[a]", "prompts: found ['a'] (list); it should be a section with keys of its"),
    ],
)
def test_value_of_the_wrong_type_is_one_line(mistakes: Mistakes, override: str, line: str) -> None:
    [found] = mistakes("", override)
    assert found.startswith(line)


def test_template_kwarg_that_is_no_json_value_is_one_line(mistakes: Mistakes) -> None:
    [line] = mistakes("chat_template_kwargs: {since: 2026-01-01}")
    assert line.startswith("chat_template_kwargs.since: found datetime.date(2026, 1, 1) (date)")


def test_long_value_is_cut_in_the_message(mistakes: Mistakes) -> None:
    [line] = mistakes("", f"thinking={'x' * 500}")
    assert "..." in line
    assert len(line) < 150


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("sampling.temperature", [0, 2], [-0.1, 2.1, ".nan"]),
        ("sampling.top_p", [0.01, 1], [0, 1.01]),
        ("sampling.top_k", [-1, 0, 2**31 - 1], [-2, 2**31]),
        ("sampling.min_p", [0, 1], [-0.1, 1.1]),
        ("sampling.presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("sampling.repetition_penalty", [0.1, 2], [0, 2.1]),
        ("sampling.frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("sampling.max_tokens", [1, 2**31 - 1], [0, 2**31]),
        ("sampling.seed", [0, 2**63 - 1], [-1, 2**63]),
        ("samples_per_prompt", [1], [0]),
        ("prompts.limit", [1], [0]),
        ("engine.count", [1], [0]),
        ("engine.max_running_requests", [1, 4096], [0, 4097]),
        ("engine.context_length", [16], [15]),
        ("engine.cpus", [0], [-1]),
        ("cluster.min_engines", [1], [0]),
        ("engine.max_restarts", [0], [-1]),
        ("retry.max_attempts", [1], [0]),
        ("work.shard_rows", [1], [0]),
        ("work.lease_ttl_s", [2], [1.9]),
        ("output.flush_interval_s", [0.1], [0]),
    ],
)
def test_figure_outside_its_bounds_is_refused(
    read: Read, mistakes: Mistakes, field: str, allowed: list[object], refused: list[object]
) -> None:
    for value in allowed:
        read("", f"{field}={value}")
    for value in refused:
        [line] = mistakes("", f"{field}={value}")
        assert line.startswith(f"{field}: found ")
        assert "than" in line or "finite number" in line


def test_empty_model_name_is_refused(mistakes: Mistakes) -> None:
    assert mistakes("", "model=''") == [
        "model: found '' (str); string should have at least 1 character"
    ]


def test_several_mistakes_are_several_lines(mistakes: Mistakes) -> None:
    lines = mistakes("sampling: {top_p: 2, max_tokens: x}\nthinkin: true\nwork: {shard_rows: 0}")
    assert sorted(line.partition(":")[0] for line in lines) == [
        "sampling.max_tokens",
        "sampling.top_p",
        "thinkin",
        "work.shard_rows",
    ]


# -- engines


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("{kind: endpoint}", "engine.base_urls: found none; kind 'endpoint' needs at least one"),
        (
            "{base_urls: [http://a/v1]}",
            "engine.base_urls: not for kind 'embedded'; remove them, or use kind 'endpoint'",
        ),
        (
            "{kind: sglang}",
            "engine.python: found null; kind 'sglang' needs the path of an interpreter",
        ),
        (
            "{kind: sglang, python: /p, command: [c]}",
            "engine.command: found both command and python; give one of them",
        ),
        ("{kind: sglang, command: [c], plan: maybe}", "engine.plan: found 'maybe' (str)"),
    ],
)
def test_engine_without_what_its_kind_needs_is_refused(
    mistakes: Mistakes, engine: str, line: str
) -> None:
    [found] = mistakes(f"engine: {engine}")
    assert found.startswith(line)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:30000/v1", "ftp://host/v1", "http://", "http:///v1", "http://a b/v1", ""]
)
def test_url_that_no_client_can_call_is_refused(mistakes: Mistakes, url: str) -> None:
    [line] = mistakes(f"engine: {{kind: endpoint, base_urls: ['{url}']}}")
    assert line.startswith(f"engine.base_urls: found {url!r}; expected a URL with http:// or")


@pytest.mark.parametrize(
    "url", ["http://me:sk-secret@host/v1", "sk-secret@host/v1", "ftp://me:sk-secret@host"]
)
def test_url_with_a_key_is_refused_and_the_key_not_shown(mistakes: Mistakes, url: str) -> None:
    [line] = mistakes(f"engine: {{kind: endpoint, base_urls: ['{url}']}}")
    assert line == "engine.base_urls: a URL contains a user or key; use api_key_env instead"


@pytest.mark.parametrize("url", ["http://host/v1?key=sk-secret", "http://host/v1#sk-secret"])
def test_url_with_a_query_is_refused_and_not_shown(mistakes: Mistakes, url: str) -> None:
    [line] = mistakes(f"engine: {{kind: endpoint, base_urls: ['{url}']}}")
    assert line == (
        "engine.base_urls: a URL contains '?' or '#'; remove that, and use api_key_env for a key"
    )


@pytest.mark.parametrize("again", ["http://a/v1", "http://a/v1/"])
def test_same_url_twice_is_refused(mistakes: Mistakes, again: str) -> None:
    assert mistakes(f"engine: {{kind: endpoint, base_urls: ['http://a/v1', '{again}']}}") == [
        "engine.base_urls: the same URL is listed twice; list each server once"
    ]


def test_kept_column_named_twice_is_refused(mistakes: Mistakes) -> None:
    assert mistakes("", "prompts.keep_columns=[a, b, a]") == [
        "prompts.keep_columns: 'a' is listed twice; list each column once"
    ]


# -- the file itself


def test_key_given_twice_is_refused_at_any_depth(mistakes: Mistakes) -> None:
    assert mistakes("model: other") == [
        "line 4, column 1 not valid YAML: the key 'model' is given twice; keep one"
    ]
    assert mistakes("sampling:\n  top_k: 1\n  top_k: 2") == [
        "line 6, column 3 not valid YAML: the key 'top_k' is given twice; keep one"
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just text"])
def test_file_that_is_no_mapping_is_refused(run_file: Path, text: str) -> None:
    run_file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml: found .*; expected a mapping of keys"):
        read_run_file(run_file)


# Nine lines that stand for a billion words.
BOMB = "a0: &a0 [lol]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("more", "fragment"),
    [
        ("work: [1", "line 4, column 9 not valid YAML"),
        ("a: b: c", "line 4, column 5 not valid YAML"),
        ("---\nmodel: n", "line 4, column 1 not valid YAML"),
        ("work: \x01", "not valid YAML: unacceptable character"),
        ("? [a]\n: b", "line 4, column 3 not valid YAML: found unhashable key"),
        ("work: 2026-02-30", "not valid YAML: a value that cannot be read: day is out of range"),
        ("work: !!bool perhaps", "not valid YAML: a value that cannot be read"),
        ("work: " + "[" * 5000, "not valid YAML: nested too deep"),
        (BOMB, "not valid YAML: aliases stand for more than 100,000 values"),
        ("a: &a [*a]", "not valid YAML: aliases stand for more than 100,000 values"),
        ('model2: "\\ud83d"', "line 4, column 9 not valid YAML: text contains half of a surrogate"),
    ],
)
def test_broken_yaml_is_one_line_with_its_place(
    mistakes: Mistakes, more: str, fragment: str
) -> None:
    [line] = mistakes(more)
    assert line.startswith(fragment)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch [{mark}]",
        "!!python/object/new:pathlib.Path [{mark}]",
        "!!python/name:os.system",
        "!!python/module:os",
        "!mine x",
    ],
)
def test_yaml_tag_that_builds_an_object_is_refused(
    tmp_path: Path, mistakes: Mistakes, tag: str
) -> None:
    mark = tmp_path / "made-by-a-tag"
    [line] = mistakes(f"work: {tag.format(mark=mark)}")
    assert "could not determine a constructor for the tag" in line
    assert not mark.exists()


def test_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(ConfigError) as caught:
        read_run_file(missing)
    assert str(caught.value) == f"{missing}: cannot read the run file: No such file or directory"
    with pytest.raises(ConfigError, match="cannot read the run file: Is a directory"):
        read_run_file(tmp_path)


def test_file_that_is_not_utf8_is_refused_with_the_byte(run_file: Path) -> None:
    run_file.write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 7"):
        read_run_file(run_file)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("quality.loping={}", "quality.loping: unknown key; did you mean 'looping'?"),
        ("quality.looping.policy=drp", "quality.looping.policy: found 'drp' (str); it should be "),
        ("quality.looping.window=3", "quality.looping.window: unknown key; did you mean"),
        ("quality.temperatures=[]", "quality.temperatures: found [] (list)"),
    ],
)
def test_mistake_in_a_flags_section_is_named(tmp_path: Path, override: str, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{prompts: {path: p}, model: m, output: {folder: o}}")
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_run_file(path, [override])


def test_flag_given_in_part_keeps_its_own_defaults() -> None:
    quality = QualityConfig.model_validate({"empty_answer": {"policy": "retry"}})
    assert quality.empty_answer.max_share == QualityConfig().empty_answer.max_share
    assert quality.empty_answer.policy == "retry"


def test_largest_budget_counts_the_retries_of_cut_turns() -> None:
    values: dict[str, object] = {"prompts": {"path": "p"}, "model": "m", "output": {"folder": "o"}}
    values["sampling"] = {"max_tokens": 100}
    assert RunFile.model_validate(values).most_completion_tokens == 100
    values["quality"] = {"cut_in_answer": {"policy": "retry"}, "max_attempts": 3}
    assert RunFile.model_validate(values).most_completion_tokens == 400


@pytest.mark.parametrize(
    ("quality", "most"),
    [
        # A cut turn that loops is retried for the loop, with a larger budget.
        ({"looping": {"policy": "retry"}}, 400),
        ({"looping": {"policy": "retry", "enabled": False}}, 100),
        (
            {
                "looping": {"policy": "retry"},
                "cut_in_answer": {"enabled": False},
                "cut_in_thinking": {"enabled": False},
            },
            100,
        ),
    ],
)
def test_largest_budget_counts_every_flag_that_retries_a_cut_turn(
    quality: dict[str, object], most: int
) -> None:
    values: dict[str, object] = {"prompts": {"path": "p"}, "model": "m", "output": {"folder": "o"}}
    values |= {"sampling": {"max_tokens": 100}, "quality": quality}
    assert RunFile.model_validate(values).most_completion_tokens == most


def test_largest_budget_fits_the_output_column() -> None:
    values: dict[str, object] = {"prompts": {"path": "p"}, "model": "m", "output": {"folder": "o"}}
    values["sampling"] = {"max_tokens": 2**30}
    values["quality"] = {"cut_in_thinking": {"policy": "retry"}, "max_attempts": 3}
    assert RunFile.model_validate(values).most_completion_tokens == 2**31 - 1


def test_stored_run_file_of_another_release_is_left_out(read: Read) -> None:
    config = read("sampling: {seed: 3}")
    assert stored_run_file(config.model_dump_json().encode()) == config
    assert stored_run_file(b'{"model": "m", "unknown": 1}') is None
    assert stored_run_file(b"not json") is None


def test_place_in_a_store_is_told_from_a_path() -> None:
    assert [is_url(where) for where in ("s3://bucket/run", "/shared/run", "out")] == [
        True, False, False
    ]  # fmt: skip


def test_plain_values_with_mistakes_are_refused_by_their_source() -> None:
    with pytest.raises(ConfigError) as caught:
        run_file_of({"model": 1, "output": {"folder": "o"}}, "readings, its run file")
    assert sorted(str(caught.value).split("\n")) == [
        "readings, its run file: model: found 1 (int); it should be a valid string",
        "readings, its run file: prompts: missing; this key has no default",
    ]


# -- sampling and the request's body


def test_every_sampling_key_may_be_null(read: Read) -> None:
    keys = [name for name in SamplingConfig.model_fields if name != "base"]
    config = read("sampling: {" + ", ".join(f"{key}: null" for key in keys) + "}")
    assert set(config.sampling.model_dump().values()) == {None}
    assert config.sampling.limit_tokens == config.most_completion_tokens == 131_072


def test_sampling_of_the_model_is_a_word_or_a_section(read: Read) -> None:
    assert read("sampling: model").sampling == SamplingConfig(base="model")
    assert read("sampling: {base: model, max_tokens: 9}").sampling.max_tokens == 9
    assert read("", "sampling=model").sampling.base == "model"


def test_stop_is_a_text_or_a_list_and_token_ids_may_be_numbers(read: Read) -> None:
    assert read("sampling: {stop: END}").sampling.stop == ["END"]
    assert read("sampling: {stop: [A, B]}").sampling.stop == ["A", "B"]
    assert read("sampling: {logit_bias: {15: -100, '7': 2}}").sampling.logit_bias == {
        "15": -100.0, "7": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("sampling: {stop: ['']}", "sampling.stop.0: found '' (str); string should have at least"),
        ("sampling: {logit_bias: {the: 1}}", "sampling.logit_bias.the: found 'the' (str); "),
        ("sampling: {logit_bias: {7: 101}}", "sampling.logit_bias.7: found 101 (int); it should"),
        ("request: {temperature: 1}", "request.temperature: the run sets this field; use sampling"),
        ("request: {n: 2}", "request.n: the run sets this field; use samples_per_prompt"),
        ("request: {messages: []}", "request.messages: the run sets this field; use the columns"),
        ("request: {stream: true}", "request.stream: the run sets this field; use none, because"),
        ("request: 3", "request: found 3 (int); it should be a valid dict"),
    ],
)
def test_wrong_parts_of_a_request_are_named(mistakes: Mistakes, text: str, line: str) -> None:
    [found] = mistakes(text)
    assert found.startswith(line)


def test_further_fields_are_read_as_they_are(read: Read) -> None:
    fields = {"custom_params": {"thinking_budget": 2048}, "tool_choice": "auto"}
    assert read("request: {custom_params: {thinking_budget: 2048}, tool_choice: auto}").request == (
        fields
    )


@pytest.mark.parametrize("address", ["junk", "10.0.0.1", "10.0.0.1:99999", "ray://:1", "[::1]", ""])
def test_what_is_no_address_of_ray_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.address: found .*HOST:PORT"):
        parse_run_file(f"{LEAST}cluster: {{address: '{address}'}}", "run.yaml")


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "ray://head:10001", "[::1]:6379"])
def test_address_of_ray_is_kept_as_it_is(address: str) -> None:
    run = parse_run_file(f"{LEAST}cluster: {{address: '{address}'}}", "run.yaml")
    assert run.cluster.address == address
