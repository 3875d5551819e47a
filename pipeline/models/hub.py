"""Text files of a repository on the Hugging Face hub, such as a config or a chat template."""

import os
from pathlib import Path

from pipeline.errors import PlanError
from pipeline.untrusted.parsing import UNREADABLE, bytes_of, reason

_TIMEOUT_S = 5.0
# assumed: far more than a config, an index or a chat template has
_MOST_BYTES = 64 << 20
# Variables with which huggingface_hub and transformers stay off the network.
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def hub_text(name: str, file: str) -> str | None:
    """Fetch a text file of a repository; None where the repository does not have it.

    The library follows HF_ENDPOINT, and sends HF_TOKEN to no other host. Raises PlanError where the
    hub does not return the file for another reason.
    """
    offline = next((one for one in _OFFLINE if is_switched_on(os.environ.get(one))), None)
    if offline is not None:
        raise PlanError(f"{offline} is set, so nothing is fetched from the hub")
    # Its import would slow the start of every command.
    import httpx2
    from huggingface_hub import errors

    try:
        return bytes_of(_fetched(name, file), most=_MOST_BYTES).decode()
    except errors.GatedRepoError:
        remedy = "accept its terms, and set HF_TOKEN"
        raise PlanError(f"the hub refuses access to {name}: {remedy}") from None
    except errors.LocalEntryNotFoundError as error:
        raise PlanError(f"the hub does not answer: {reason(error)}") from None
    except (errors.EntryNotFoundError, errors.RepositoryNotFoundError):
        return None
    except errors.HfHubHTTPError as error:
        raise PlanError(f"the hub answers {error.response.status_code} for {name}") from None
    except (httpx2.HTTPError, OSError, *UNREADABLE) as error:
        raise PlanError(f"the hub does not answer: {reason(error)}") from None


def _fetched(name: str, file: str) -> Path:
    """Fetch a file into the hub's cache; one that is too large is not begun."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT")
    url = hf_hub_url(name, file, endpoint=endpoint)
    size = get_hf_file_metadata(url, timeout=_TIMEOUT_S, endpoint=endpoint).size or 0
    if size > _MOST_BYTES:
        raise PlanError(
            f"the hub: {file} of {name} has {size:,} bytes; expected {_MOST_BYTES:,} at most"
        )
    return Path(hf_hub_download(name, file, endpoint=endpoint, etag_timeout=_TIMEOUT_S))


def is_switched_on(value: str | None) -> bool:
    """Read a variable as huggingface_hub does. huggingface_hub/constants.py: _is_true, 2.4."""
    return (value or "").upper() in ("1", "ON", "YES", "TRUE")
