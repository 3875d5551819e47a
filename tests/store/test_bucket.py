"""A run's folder in an object store: what no rename, no append and no lock are made up for with.

Crashes and races are tried on a store in memory, where each request is a step; the requests
themselves go to a real S3-compatible server.
"""

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Barrier, Thread
from typing import Any, Literal

import pyarrow as pa
import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from jobs import export, regenerate
from pipeline.dataset.run_record import read_manifest
from pipeline.dataset.sources.files import list_input
from pipeline.errors import ConfigError, RayLostError, ResumeError
from pipeline.store import lock
from pipeline.store.bucket import StoreFolder, open_folder
from pipeline.store.folder import Folder, LocalFolder
from pipeline.store.object_store import Entry, Store
from pipeline.store.run_folder import DATA, LOCK_FILE, MANIFEST_FILE, STAGING
from schemas.completion import Completion
from schemas.config.requests import PromptsConfig
from schemas.config.running import WorkConfig
from tests.dataset.test_crashes import (
    EXPECTED,
    before_publishing,
    before_taking_back,
    finish,
    journaling,
    publishing,
    safe_rows,
    taking_back,
)
from tests.fakes.output_folder import (
    assert_in_order,
    begun,
    published,
    recovered,
    staged,
    visible_ids,
)

Build = Callable[..., Completion]
When = Literal["before", "after"]


class CrashError(Exception):
    """The machine stops here."""


@dataclass(frozen=True, slots=True)
class CrashingStore(Store):
    """Stops at its `crash_at`th change: before it or after it. An object is never half there."""

    crash_at: int = 0
    when: When = "after"
    changes: list[str] = field(default_factory=list)

    def write_whole(self, name: str, data: bytes) -> None:
        self._change(f"write {name}", lambda: Store.write_whole(self, name, data))

    def copy(self, source: str, target: str) -> None:
        self._change(f"copy {source}", lambda: Store.copy(self, source, target))

    def remove(self, name: str) -> None:
        self._change(f"remove {name}", lambda: Store.remove(self, name))

    def _change(self, name: str, act: Callable[[], None]) -> None:
        self.changes.append(name)
        is_here = len(self.changes) == self.crash_at
        if is_here and self.when == "before":
            raise CrashError(name)
        act()
        if is_here:
            raise CrashError(name)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the same folder of a store in memory, each time as another process would."""
    store, root = MemoryFileSystem(), f"bucket{tmp_path}"
    store.makedirs("/bucket", exist_ok=True)

    def opened(kind: type[Store] = Store, **options: Any) -> StoreFolder:  # noqa: ANN401
        filesystem = fs.PyFileSystem(fs.FSSpecHandler(store))
        return StoreFolder(kind("memory://bucket", filesystem, root, **options))

    yield opened
    store.rm("/bucket", recursive=True)


# -- crashes


def before_recovering(folder: Folder, build: Build) -> None:
    """Leave what crashes leave in a store."""
    before_publishing(folder, build)
    published(folder, "p2", [build("r02"), build("r03")])
    staged(folder, "p3", [build("r04"), build("r05", error=True)])
    folder.move(f"{STAGING}/p3.parquet", f"{DATA}/p3.parquet")
    staged(folder, "p4", [build("r06")])
    staged(folder, "p5", [build("r06"), build("r07")])
    published(folder, "p8", [build("r09")])
    folder.remove(f"{DATA}/p8.parquet")
    published(folder, "p9", [build("r10")])
    folder.write_whole(f"{DATA}/p9.parquet", folder.read(f"{DATA}/p9.parquet")[:-9])
    folder.write_whole(f"{STAGING}/p2.parquet", folder.read(f"{DATA}/p2.parquet"))


def recovering(folder: Folder, build: Build) -> None:
    recovered(folder)


Step = Callable[[Folder, Build], None]
STEPS: dict[str, tuple[Step, Step, int]] = {
    "publish": (before_publishing, publishing, 12),
    "journal": (before_publishing, journaling, 9),
    "recover": (before_recovering, recovering, 10),
    "take back errors": (before_taking_back, taking_back, 12),
}
"""The folder before, the step that crashes, and the number of its changes."""


@pytest.mark.parametrize("act", STEPS)
def test_every_change_to_the_store_is_crashed(
    memory: Callable[..., StoreFolder], completion: Build, act: str
) -> None:
    prepare, work, num_changes = STEPS[act]
    prepare(begun(memory()), completion)
    changes: list[str] = []
    work(memory(CrashingStore, changes=changes), completion)
    assert len(changes) == num_changes, changes


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("act", "step"), [(act, step + 1) for act in STEPS for step in range(STEPS[act][2])]
)
def test_crash_in_a_store_loses_nothing_and_doubles_nothing(
    memory: Callable[..., StoreFolder], completion: Build, act: str, step: int, when: When
) -> None:
    prepare, work, _ = STEPS[act]
    prepare(begun(memory()), completion)
    crashing = memory(CrashingStore, crash_at=step, when=when)
    safe = {"r00", "r02", "r03", "r04", "r06"}
    if act != "recover":
        safe = safe_rows(crashing, is_messy=False)
    with pytest.raises(CrashError):
        work(crashing, completion)
    folder = memory()
    if act == "publish":
        ids = visible_ids(folder)
        assert len(set(ids)) == len(ids)
        assert set(read_manifest(folder).parts) <= set(folder.names(DATA))
    recovery = recovered(folder)
    assert_in_order(folder)
    assert safe <= set(visible_ids(folder))
    assert set(recovered(folder).parts) == set(recovery.parts), "a second look changes nothing"
    finish(folder, completion)
    assert_in_order(memory())
    assert visible_ids(memory()) == EXPECTED


# -- appended lines


def test_lines_of_several_writers_are_all_there_in_the_order_of_their_beginnings(
    memory: Callable[..., StoreFolder],
) -> None:
    first, second = memory(), memory()
    first.append_line("lines", b"1\n")
    second.append_line("lines", b"2\n")
    first.append_line("lines", b"3\n")
    assert list(memory().read_lines("lines")) == [b"1", b"3", b"2"]


def test_two_writers_that_begin_at_once_write_two_objects(
    memory: Callable[..., StoreFolder],
) -> None:
    writers, together = [memory() for _ in range(6)], Barrier(6)

    def append(number: int) -> None:
        together.wait()
        for line in range(5):
            writers[number].append_line("lines", b"%d-%d\n" % (number, line))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(append, range(6)))
    expected = {b"%d-%d" % (number, line) for number in range(6) for line in range(5)}
    lines = list(memory().read_lines("lines"))
    assert len(lines) == 30
    assert set(lines) == expected


def test_journal_goes_on_in_another_object_when_one_is_full(
    memory: Callable[..., StoreFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.store.bucket._JOURNAL_OBJECT_BYTES", 100)
    folder = memory()
    lines = [b"%039d" % number for number in range(25)]
    for line in lines:
        folder.append_line("lines", line + b"\n")
    assert len(folder.names("lines")) == 13, "two lines of 40 bytes in each"
    assert list(memory().read_lines("lines")) == lines


def test_replaced_lines_stand_alone_and_take_more(memory: Callable[..., StoreFolder]) -> None:
    folder = memory()
    for line in (b"1\n", b"2\n", b"3\n"):
        folder.append_line("lines", line)
    folder.replace_lines("lines", [b"2", b"3"])
    folder.append_line("lines", b"4\n")
    assert list(memory().read_lines("lines")) == [b"2", b"3", b"4"]
    assert len(folder.names("lines")) == 1


def test_removed_log_of_records_leaves_no_name_in_a_store(bucket: str) -> None:
    folder = open_folder(bucket)
    folder.append_record("staging/log", b"one")
    folder.append_record("staging/log", b"two")
    assert list(open_folder(bucket).read_records("staging/log")) == [b"one", b"two"]
    assert folder.names("staging") == ["log"]
    folder.remove_records("staging/log")
    assert folder.names("staging") == []
    folder.remove_records("staging/log")


def test_folder_of_another_process_is_another_writer(bucket: str) -> None:
    folder = open_folder(bucket)
    folder.append_line("lines", b"1\n")
    copy = pickle.loads(pickle.dumps(folder))
    copy.append_line("lines", b"2\n")
    folder.append_line("lines", b"3\n")
    assert sorted(open_folder(bucket).read_lines("lines")) == [b"1", b"2", b"3"]


# -- the driver's lock


def test_one_of_many_creates_a_file_in_a_store(memory: Callable[..., StoreFolder]) -> None:
    for attempt in range(10):
        together = Barrier(6)

        def create(number: int, together: Barrier = together, name: str = f"lock{attempt}") -> bool:
            folder = memory()
            together.wait()
            return bool(folder.create(name, b"%d" % number))

        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(create, range(6)))
        assert won.count(True) <= 1
        if any(won):
            assert memory().read(f"lock{attempt}") == b"%d" % won.index(True)
        assert memory().names(f"lock{attempt}.claims") == []


@pytest.mark.parametrize("step", [1, 2, 3])
def test_rival_at_any_moment_leaves_one_creator(
    memory: Callable[..., StoreFolder], step: int
) -> None:
    """A rival does all that it has to do between two requests of ours."""
    won: list[bool] = []

    class Interrupted(CrashingStore):
        __slots__ = ()

        def _change(self, name: str, act: Callable[[], None]) -> None:
            self.changes.append(name)
            if len(self.changes) == step:
                won.append(bool(memory().create("lock", b"rival")))
            act()

    won.append(bool(memory(Interrupted).create("lock", b"ours")))
    assert won.count(True) == 1
    assert memory().read("lock") == (b"rival" if won[0] else b"ours")


def test_claim_that_a_dead_process_left_is_no_lock_for_ever(
    memory: Callable[..., StoreFolder],
) -> None:
    memory().write_whole(f"{LOCK_FILE}.claims/dead", b"")
    slept: list[float] = []
    ours = lock.this_process()
    lock.acquire(memory(), ours, slept.append)
    lock.check_held(memory(), ours.token)
    assert sum(slept) <= 4 * StoreFolder.settle_s
    lock.release(memory(), ours)
    slept.clear()
    lock.acquire(memory(), ours, slept.append)
    assert slept == [], "the next start waits for no dead one"


def test_second_driver_is_refused_while_the_first_lives(memory: Callable[..., StoreFolder]) -> None:
    lock.acquire(memory(), lock.this_process(), lambda _: None)
    with pytest.raises(ResumeError, match="another driver"):
        lock.acquire(memory(), lock.this_process(), lambda _: None)


def test_lock_that_cannot_be_given_back_hides_no_error(
    memory: Callable[..., StoreFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.store.object_store.sleep", lambda _: None)
    store, holder = memory()._store, lock.this_process()
    flaky = Flaky(store._filesystem, 0)
    folder, lines = StoreFolder(Store(store.where, flaky, store._root)), list[str]()
    holding = lock.holding(folder, holder, sleep=lambda _: None, log=lines.append)

    def run() -> None:
        with holding:
            flaky.failures = 1000
            raise RayLostError("the coordinator is gone")

    with pytest.raises(RayLostError, match="gone"):
        run()
    assert len(lines) == 1
    assert lines[0].startswith("event=warning the driver's lock cannot be removed: memory://")


def test_signal_that_comes_as_soon_as_the_lock_stands_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, acquire = LocalFolder(tmp_path), lock.acquire

    def interrupted(folder: Folder, holder: lock.Holder, sleep: object) -> None:
        acquire(folder, holder, lambda _: None)
        raise SystemExit(130)

    monkeypatch.setattr(lock, "acquire", interrupted)
    with (
        pytest.raises(SystemExit),
        lock.holding(folder, lock.this_process(), sleep=lambda _: None, log=lambda _: None),
    ):
        raise AssertionError("not reached")
    assert not folder.exists(LOCK_FILE)


# -- what is not there, and stores that cannot be used


def test_folder_opens_by_path_and_by_url(tmp_path: Path, bucket: str) -> None:
    assert open_folder(tmp_path) == open_folder(f"file://{tmp_path}") == LocalFolder(tmp_path)
    assert open_folder(bucket).where == bucket


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gopher://x/y", "expected s3://, gs:// or abfs://"),
        ("s3://", "it names no bucket"),
        ("s3://bucket/a b?region=us-east-1", "found ' ' in the URL; expected it written %20"),
        ("s3://bucket/a%?region=us-east-1", "found '%' in the URL; expected it written %25"),
        ("s3://bucket/ä?region=us-east-1", "found 'ä' in the URL; expected it written %C3%A4"),
    ],
)
def test_url_of_no_store_is_one_line(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match="not a store that can be opened") as refused:
        open_folder(url)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:verysecret@bucket/run?region=us-east-1",
        "s3://AKIAKEY@bucket/run?region=us-east-1",
        "s3://bucket/run?region=us-east-1&secret_key=verysecret",
        "s3://bucket/run?endpoint_override=http%3A%2F%2FAKIAKEY%3Averysecret%40host&region=x",
        "s3://bucket/a run?secret_key=verysecret",
        "abfs://account:verysecret@container/run",
        "abfs://container@account.dfs.core.windows.net/run?sas_token=verysecret",
        "https://AKIAKEY:verysecret@host/run",
        "https://host/run?X-Amz-Signature=verysecret",
    ],
)
def test_key_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_folder(url)
    assert "AKIAKEY" not in str(refused.value)
    assert "verysecret" not in str(refused.value)


def test_key_in_a_url_is_told_where_to_put_it() -> None:
    with pytest.raises(ConfigError, match="expected it in the environment: AWS_ACCESS_KEY_ID"):
        open_folder("s3://AKIAKEY:verysecret@bucket/run?region=us-east-1")


def test_bucket_that_is_not_there_is_one_line(bucket: str) -> None:
    with pytest.raises(ConfigError, match="there is no bucket 'nowhere'"):
        open_folder(bucket.replace("s3://sets/", "s3://nowhere/")).make()


@pytest.mark.parametrize("is_confined", [True, False])
def test_key_that_is_good_for_the_prefix_alone_will_do(
    memory: Callable[..., StoreFolder], *, is_confined: bool
) -> None:
    store = memory()._store

    class Denying:
        def get_file_info(self, path: str) -> object:
            if path == store.bucket or not is_confined:
                raise OSError("AWS Error ACCESS_DENIED during HeadBucket operation")
            return store._filesystem.get_file_info(path)

    folder = StoreFolder(Store(store.where, Denying(), store._root))
    if is_confined:
        folder.make()
        return
    with pytest.raises(ConfigError, match=r"cannot be used: .*ACCESS_DENIED"):
        folder.make()


class Flaky:
    """A file system that fails some times with what a busy store answers."""

    def __init__(self, filesystem: object, failures: int) -> None:
        self._filesystem, self.failures = filesystem, failures

    def __getattr__(self, name: str) -> object:
        if self.failures:
            self.failures -= 1
            raise OSError("AWS Error SLOW_DOWN during PutObject operation: reduce your rate")
        return getattr(self._filesystem, name)


@pytest.mark.parametrize("failures", [1, 6])
def test_request_that_fails_is_tried_again(
    memory: Callable[..., StoreFolder], monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("pipeline.store.object_store.sleep", slept.append)
    store = memory()._store
    flaky = StoreFolder(Store(store.where, Flaky(store._filesystem, failures), store._root))
    flaky.append_line(MANIFEST_FILE, b"one\n")
    assert list(memory().read_lines(MANIFEST_FILE)) == [b"one"]
    assert len(slept) == failures


def test_who_works_on_a_run_waits_longer_for_its_store(
    bucket: str, memory: Callable[..., StoreFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("pipeline.store.object_store.sleep", slept.append)
    store = memory()._store
    flaky = Flaky(store._filesystem, 60)
    StoreFolder(Store(store.where, flaky, store._root, 600.0)).write_whole("a", b"there")
    assert memory().read("a") == b"there"
    assert len(slept) == 60
    assert 400 < sum(slept) < 600
    working = open_folder(bucket, patience_s=600.0)
    assert pickle.loads(pickle.dumps(working))._store.patience_s == 600.0


def test_store_that_stays_away_is_one_line(
    memory: Callable[..., StoreFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.store.object_store.sleep", lambda _: None)
    store = memory()._store
    away = StoreFolder(Store(store.where, Flaky(store._filesystem, 1000), store._root))
    with pytest.raises(ConfigError, match=r"memory://bucket: cannot be used: .*SLOW_DOWN"):
        away.read("run.json")


def test_store_that_keeps_silent_is_not_waited_for_as_often(
    memory: Callable[..., StoreFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that waits hears no worker: it is to be heard within their leases."""
    now_s = [0.0]

    def later(seconds: float) -> None:
        now_s[0] += seconds

    class Silent(Flaky):
        def __getattr__(self, name: str) -> object:
            later(9.0)
            return super().__getattr__(name)

    monkeypatch.setattr("pipeline.store.object_store.monotonic", lambda: now_s[0])
    monkeypatch.setattr("pipeline.store.object_store.sleep", later)
    store = memory()._store
    away = StoreFolder(Store(store.where, Silent(store._filesystem, 1000), store._root))
    with pytest.raises(ConfigError, match="cannot be used"):
        away.size_bytes("run.json")
    assert now_s[0] <= WorkConfig().lease_ttl_s / 2


@pytest.mark.parametrize("error", [pa.ArrowException("Unknown error: no token"), OSError()])
def test_whatever_a_store_raises_is_one_line(
    memory: Callable[..., StoreFolder], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Azure without a login raises no OSError."""
    monkeypatch.setattr("pipeline.store.object_store.sleep", lambda _: None)

    class Failing:
        def __getattr__(self, name: str) -> object:
            raise error

    store = memory()._store
    failing = StoreFolder(Store(store.where, Failing(), store._root))
    with pytest.raises(ConfigError, match="memory://bucket: cannot be used: "):
        failing.read("run.json")


def test_prompts_at_a_wrong_endpoint_are_told_of_at_once(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that closes every connection: three tries of the library, and none of ours."""
    slept: list[float] = []
    monkeypatch.setattr("pipeline.store.object_store.sleep", slept.append)
    num_asked = [0]

    class Closes(BaseRequestHandler):
        def handle(self) -> None:
            num_asked[0] += 1

    with ThreadingTCPServer(("127.0.0.1", 0), Closes) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"s3://sets/in?endpoint_override=http%3A%2F%2F127.0.0.1%3A{server.server_address[1]}"
        with pytest.raises(ConfigError, match="cannot be used"):
            list_input(PromptsConfig(path=f"{url}&region=us-east-1"))
        server.shutdown()
    assert slept == []
    assert num_asked[0] <= 6


def test_resume_asks_for_no_object_of_a_listed_part(
    memory: Callable[..., StoreFolder], completion: Build
) -> None:
    folder = begun(memory())
    for number in range(5):
        published(folder, f"p{number}", [completion(f"r{number:02d}")])
    asked: list[str] = []

    class Asked(Store):
        __slots__ = ()

        def entry(self, name: str) -> Entry | None:
            asked.append(name)
            return Store.entry(self, name)

        def open_input(self, name: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
            asked.append(name)
            return Store.open_input(self, name)

    recovery = recovered(memory(Asked))
    assert len(recovery.parts) == 5
    assert [name for name in asked if name.startswith(DATA)] == []


def test_commands_tell_that_the_bucket_is_not_there(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bucket.replace("s3://sets/", "s3://nowhere/")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    run_file = tmp_path / "run.yaml"
    values = {
        "prompts": {"path": str(tmp_path / "p.jsonl")},
        "model": "Qwen/Qwen3-8B",
        "engine": {"kind": "endpoint", "base_urls": ["http://127.0.0.1:1/v1"]},
        "output": {"folder": folder},
    }
    run_file.write_text(yaml.safe_dump(values))
    assert regenerate.main([str(run_file), "--dry-run"]) == 2
    assert export.main([folder, "--to", str(tmp_path / "export")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert [": there is no bucket 'nowhere'" in line for line in told.err.splitlines()] == [
        True
    ] * 2


def test_endpoint_may_come_from_the_environment(
    bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder(bucket).write_whole("a", b"there")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert open_folder(bucket.partition("?")[0]).read("a") == b"there"
