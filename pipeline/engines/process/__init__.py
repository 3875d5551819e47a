"""An engine's process: its start under a guard, its environment, its port, its counters."""
