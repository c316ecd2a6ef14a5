"""Figures and tables of the papers, measured by our own benchmarks and kept beside the papers' numbers."""
