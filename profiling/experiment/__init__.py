"""Experiments: cells whose sides take turns, each cell measured into a row of figures that is kept at once."""
