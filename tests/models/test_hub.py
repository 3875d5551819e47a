"""Files of the hub: where they come from, who gets the token, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import PlanError
from pipeline.models.hub import hub_text
from tests.fakes.hub import Hub, only_hub, serving_hub

FILE = "some/model/config.json"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with only_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def test_token_goes_to_the_hub_and_to_no_other_host(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving_hub() as other:
        other.files["a/b/c"] = b"moved"
        hub.moved[FILE] = f"{other.url}/a/b/c"
        assert hub_text("some/model", "config.json") == "moved"
        assert set(hub.tokens) == {"Bearer hf_secret"}
        assert other.tokens
        assert set(other.tokens) == {None}


def test_file_that_is_fetched_is_found_in_the_cache_afterwards(hub: Hub, tmp_path: Path) -> None:
    hub.files[FILE] = b"text"
    assert hub_text("some/model", "config.json") == "text"
    (cached,) = tmp_path.glob("cache/models--some--model/snapshots/*/config.json")
    assert cached.read_text() == "text"


def test_file_that_is_not_there_is_none(hub: Hub) -> None:
    assert hub_text("some/model", "config.json") is None


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_nothing_is_requested_offline(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(PlanError, match=f"{variable} is set"):
        hub_text("some/model", "config.json")
    assert hub.requested == []


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_hub_that_refuses_or_fails_is_one_line(hub: Hub, status: int) -> None:
    hub.files[FILE], hub.statuses[FILE] = b"{}", status
    with pytest.raises(PlanError, match=f"the hub answers {status} for some/model"):
        hub_text("some/model", "config.json")


def test_hub_that_is_away_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PlanError, match="the hub does not answer: "):
        hub_text("some/model", "config.json")


def test_file_that_is_too_large_is_not_begun(hub: Hub, tmp_path: Path) -> None:
    hub.files[FILE], hub.claimed_bytes[FILE] = b"{}", 1 << 40
    with pytest.raises(PlanError, match="has 1,099,511,627,776 bytes; expected 67,108,864 at most"):
        hub_text("some/model", "config.json")
    assert not list(tmp_path.glob("cache/models--some--model/blobs/*"))


def test_file_that_is_no_text_is_one_line(hub: Hub) -> None:
    hub.files[FILE] = b"\xff\xfe"
    with pytest.raises(PlanError, match=r"the hub does not answer: .*codec can't decode"):
        hub_text("some/model", "config.json")
