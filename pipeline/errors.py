"""Error tree, and who catches each.

An error has one message and no `__init__`, so that it can be pickled between Ray's processes. An
error outside this tree is a bug and ends in a traceback.
"""


class PipelineError(Exception):
    """Root of the errors that this project raises on purpose. Caught only in `jobs`."""


class ConfigError(PipelineError):
    """The run file, the command line or the input is wrong. `jobs` prints it and exits with 2."""


class PlanError(ConfigError):
    """The model, the card and the flags do not fit together. `jobs` prints it and exits with 2."""


class ResumeError(ConfigError):
    """The output folder has another run, or another driver. `jobs` exits with 2."""


class EngineError(PipelineError):
    """The engine is gone or never came up. The worker restarts it and keeps its lease."""


class PortTakenError(EngineError):
    """Another process listens on the engine's port. Nothing was sent; another port is tried."""


class EngineGivenUpError(EngineError):
    """The engine cannot be mended by a restart. The worker ends and reports the cause."""


class EngineUnfitError(EngineGivenUpError):
    """The engine's first answers are not what was requested. The user mends it, or accepts it."""


class RayLostError(PipelineError):
    """Ray, or the coordinator on it, is gone. `jobs` exits with 3: the same command resumes."""


class DriverLostError(PipelineError):
    """Another driver has taken over the output folder. The coordinator stops publishing."""
