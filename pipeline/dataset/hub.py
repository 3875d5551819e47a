"""Upload an exported data set to the hub. The token comes from the environment."""

import os
from collections.abc import Callable

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from pipeline.errors import ConfigError
from pipeline.store.object_store import Store


def check_push(store: Store, repo_id: str) -> None:
    """Raises ConfigError without a token, for a store that is no folder, and for a bad name."""
    if not os.environ.get("HF_TOKEN"):
        raise ConfigError("--push-to-hub: the environment has no variable HF_TOKEN")
    if not store.is_local:
        raise ConfigError(f"--push-to-hub: {store.where} is no folder on this machine; upload that")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub: {error}") from None


def push(store: Store, repo_id: str, *, log: Callable[[str], None]) -> str:
    """Create the repository, private if it is new, and upload; returns its address.

    The library repeats what fails by chance, and does not send twice what the hub has.
    Raises ConfigError for what `check_push` finds and for a refusal.
    """
    check_push(store, repo_id)
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ["HF_TOKEN"])
    try:
        address = api.create_repo(repo_id, repo_type="dataset", private=True, exist_ok=True)
        log(f"event=uploading to={address}")
        done = api.upload_folder(
            repo_id=repo_id,
            repo_type="dataset",
            folder_path=store.where,
            allow_patterns=["data/*.parquet", "README.md", "export.json", "dropped.jsonl"],
            delete_patterns=["data/*.parquet"],
            commit_message=f"Export to {repo_id}",
        )
    except (HfHubHTTPError, RuntimeError) as error:
        # RuntimeError is the library's for a file that it gave up.
        raise ConfigError(f"--push-to-hub: the hub says: {str(error).splitlines()[0]}") from None
    log(f"event=uploaded commit={done.oid}")
    return str(address)
