"""Foundations of all stages of serving: state and record of a request, prepared requests, step rows, run metrics."""
