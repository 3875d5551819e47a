"""The error tree, and who catches each.

Every error takes one message and defines no `__init__`, so that it survives the trip between
Ray's processes. An error that is not in this tree is a bug of ours and ends in a traceback.
"""


class PipelineError(Exception):
    """Root of the errors that this project raises on purpose. Caught in `jobs` alone."""


class ConfigError(PipelineError):
    """The run file, the command line or the input is wrong. `jobs` prints it and exits with 2."""


class PlanError(ConfigError):
    """The model, the card and the flags do not go together. `jobs` prints it and exits with 2."""


class ResumeError(ConfigError):
    """The output folder holds another run, or another driver has it. `jobs` exits with 2."""


class EngineError(PipelineError):
    """The engine is gone or never came up. The worker restarts it and keeps its lease."""


class EngineGivenUpError(EngineError):
    """No start of this engine will mend it. The worker ends, and the cause is told."""


class LeaseLostError(PipelineError):
    """The coordinator gave the work to another. The worker drops what it was doing."""


class CoordinatorLostError(PipelineError):
    """The coordinator's process is gone. `jobs` exits with 3: the same command resumes."""


class DriverLostError(PipelineError):
    """Another driver took the output folder over. The coordinator stops publishing at once."""
