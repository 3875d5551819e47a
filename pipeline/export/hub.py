"""Upload of an exported data set to the hub, with the token in HF_TOKEN."""

import os
from collections.abc import Callable

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from pipeline.errors import ConfigError
from pipeline.export.export import CARD_FILE, DROPPED_FILE, RECORD_FILE
from pipeline.store.object_store import Store

_DATA = ("data/*.parquet", "data/*.jsonl", "data/*.jsonl.zst", "data/*.jsonl.gz")


def check_push(store: Store, repo_id: str) -> None:
    """Raise ConfigError without a token, for a store that is not a folder, and for a bad name."""
    if not os.environ.get("HF_TOKEN"):
        raise ConfigError("--push-to-hub: the environment has no variable HF_TOKEN")
    if not store.is_local:
        raise ConfigError(
            f"--push-to-hub: {store.where} is not a folder on this machine; export to one first"
        )
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub: {error}") from None


def push(store: Store, repo_id: str, *, log: Callable[[str], None]) -> str:
    """Create the repository, private if it is new, upload, and return its URL.

    The library retries failed requests, and skips files that the hub has already.
    Raises ConfigError for what `check_push` finds, and when the hub refuses.
    """
    check_push(store, repo_id)
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ["HF_TOKEN"])
    try:
        address = api.create_repo(repo_id, repo_type="dataset", private=True, exist_ok=True)
        log(f"event=uploading to={address}")
        commit = api.upload_folder(
            repo_id=repo_id,
            repo_type="dataset",
            folder_path=store.where,
            allow_patterns=[*_DATA, CARD_FILE, RECORD_FILE, DROPPED_FILE],
            delete_patterns=list(_DATA),
            commit_message=f"Export to {repo_id}",
        )
    except (HfHubHTTPError, RuntimeError) as error:
        # The library raises RuntimeError for a file that it could not upload.
        raise ConfigError(f"--push-to-hub: the hub says: {str(error).splitlines()[0]}") from None
    log(f"event=uploaded commit={commit.oid}")
    return str(address)
