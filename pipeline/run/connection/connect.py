"""Connect the driver to Ray: join the cluster of the run file, or start a private Ray."""

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path

import ray

from pipeline.errors import RayLostError
from pipeline.run.connection.joined import join_ray
from pipeline.run.connection.private import start_ray
from schemas.config.run_file import RunFile

# Ray puts the driver's current folder at the head of its workers' import path. A user's folder may
# have a `pipeline` of its own, which workers would import.
_FOLDER_OF_OUR_PACKAGES = Path(__file__).resolve().parents[3]


def cluster_address(config: RunFile) -> str | None:
    """Return the address of the cluster that the run joins; None for a private Ray."""
    return config.cluster.address or os.environ.get("RAY_ADDRESS")


def connect(config: RunFile, log: Callable[[str], None]) -> str | None:
    """Return the address of Ray's dashboard; None for a private Ray, which has none.

    Raises ConfigError for a cluster that cannot be joined, and RayLostError when no private Ray
    starts: nothing of it is left then.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's default is 15: workers would get a thirtieth of a core that an engine uses too.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with contextlib.chdir(_FOLDER_OF_OUR_PACKAGES):
        return _connect(config, log)


def _connect(config: RunFile, log: Callable[[str], None]) -> str | None:
    if address := cluster_address(config):
        return join_ray(address)
    engine = config.engine
    try:
        missing = start_ray(
            num_cpus=engine.num_workers and math.ceil(engine.cpus * engine.num_workers)
        )
    except Exception as error:  # Ray documents no list of them
        ray.shutdown()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RayLostError(
            f"Ray does not start on this machine: {reason}; the same command resumes"
        ) from error
    if missing:
        log(f"event=warning {without(missing)}")
    return None


def without(missing: tuple[str, ...]) -> str:
    """Return what follows from names that Ray's start lacks."""
    return (
        f"Ray {ray.__version__} lacks {', '.join(missing)}, with which its private start is kept "
        "small and on 127.0.0.1: it may start more services, and listen on other addresses; the "
        "run's own token guards it all the same"
    )
