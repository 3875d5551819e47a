"""A forecast of round figures, and a steady reading that agrees with it."""

from pipeline.live.forecast import Forecast
from schemas.estimate import LiveReading


def rate_at(running: float) -> float:
    """Predict tokens/s: 32 ms per token alone, 0.5 ms more for each other running request."""
    return running / (0.032 + 0.0005 * running)


FORECAST = Forecast(
    running_requests=80.0,
    # 80 / 0.072 = 1,111 tokens/s.
    tokens_per_s_at=rate_at,
    accept_length=None,
    prefill_share=0.05,
    # 1,111 / 2,500 requests/s of 512 prompt tokens: 228 prompt tokens/s.
    prefill_s_per_token=0.05 / 228,
    mean_residence_s=180.0,
    rate_log_sd=0.2,
    step_log_sd=0.2,
    accept_log_sd=0.12,
)


def steady_reading(**changes: object) -> LiveReading:
    """Return a quarter of an hour that agrees with the forecast, with these changes."""
    values = {
        "engine": "worker-0", "start_s": 600.0, "end_s": 1500.0, "engine_age_s": 180.0,
        "cap_requests": 80, "running_requests": 80.0, "tokens_per_s": rate_at(80),
        "accept_length": None, "prompt_tokens_per_s": 228.0, **changes,
    }  # fmt: skip
    return LiveReading(**values)  # type: ignore[arg-type]
