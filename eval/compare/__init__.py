"""Paired comparisons: two configurations drew the same prompts with the same seeds."""
