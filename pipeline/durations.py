"""A length of time as people say it."""


def duration(seconds: float | None) -> str:
    """For people: 42 s, 3 min, 5.2 h, 1.8 days."""
    if seconds is None:
        return "not known yet"
    for size_s, unit, digits in ((86_400, "days", 1), (3_600, "h", 1), (60, "min", 0)):
        if seconds >= 1.5 * size_s:
            return f"{seconds / size_s:.{digits}f} {unit}"
    return f"{seconds:.0f} s"
