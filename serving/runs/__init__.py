"""Served and simulated runs from end to end: the trace and its SLOs, step latencies, the run itself, and its files.

`http` assembles the batch server from the same parts.
"""
