"""Files that submit a planned run: run file, RayJob, Slurm job, SkyPilot task, plain Ray."""
