"""Units, and the normal quantile of the 80 % band."""

GIB = 1 << 30
MIB = 1 << 20
SECONDS_PER_DAY = 86_400
# The p90 of a standard normal: a band from p10 to p90 ends this many standard deviations out.
P90_SDS = 1.2816
