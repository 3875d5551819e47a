"""SGLang by release: its flags, defaults, refusals, log lines and metrics."""
