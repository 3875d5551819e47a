"""The constants of `step_time`, as fitted."""

from pipeline.planner.step_time import Kernels

FITTED = Kernels()
