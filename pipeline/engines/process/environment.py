"""Choose the environment variables that an engine gets.

An engine runs code of others, and its log is kept, so it gets no secret that it has no use for.
"""

import re
from collections.abc import Mapping, Sequence

# Without these a process finds neither its libraries, nor its cards, nor its caches.
_NEEDED_ENV = ("PATH", "HOME", "USER", "LANG", "LC_*", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "CUDA_*",
               "NVIDIA_*", "NO_PROXY", "no_proxy")  # fmt: skip
# Names that secrets have, also in the middle: AWS_SECRET_ACCESS_KEY, RAY_AUTH_TOKEN_PATH.
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|WEBHOOK|SSH_AUTH_SOCK|CONNECTION"
    r"_STRING|(API|ACCESS|ACCOUNT|PRIVATE|SECRET|SAS|AUTH)_?(KEY|TOKEN))(_|$)",
    re.IGNORECASE,
)
_HUB_TOKENS = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN")


def passed_environment(
    environment: Mapping[str, str],
    names: Sequence[str] | None,
    *,
    withheld: Sequence[str] = (),
    has_model: bool = False,
) -> dict[str, str]:
    """Return the variables that an engine gets: those named and needed, else all but secrets.

    Without `names`, secrets are what is `withheld` and what is called like one; the hub's token is
    passed until the model is on disk. PYTHONPATH never is.
    """
    kept = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    if names is None:
        refused = {*withheld, *(_HUB_TOKENS if has_model else ())}
        return {
            name: value
            for name, value in kept.items()
            if name not in refused and (name in _HUB_TOKENS or not _SECRET_NAME.search(name))
        }
    wanted = (*_NEEDED_ENV, *names)
    return {name: value for name, value in kept.items() if _is_named(name, wanted)}


def _is_named(name: str, wanted: Sequence[str]) -> bool:
    return any(
        name.startswith(word[:-1]) if word.endswith("*") else name == word for word in wanted
    )
