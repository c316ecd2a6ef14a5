"""Runs of a cascade, simulated and served: its deployment, the run in worker processes, and the files of a run."""
