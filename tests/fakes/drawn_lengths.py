"""Random output lengths of a given distribution."""

import math
from random import Random

from pipeline.planner.lengths.shapes import LengthShape, SampledLengths


def sampled_length(shape: LengthShape, random: Random) -> float:
    if isinstance(shape, SampledLengths):
        return random.choices(shape.bin_means, shape.weights)[0]
    return min(math.exp(random.gauss(shape.mu, shape.sigma)), float(shape.limit_tokens))
