"""The console of a command that works for long: its log lines and its progress."""
