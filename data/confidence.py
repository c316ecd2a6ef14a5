"""How sure the intervals of all figures are. No torch."""

from statistics import NormalDist

CONFIDENCE = 0.95
Z95 = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Standard deviations of a normal distribution on either side of its mean that hold as much."""
