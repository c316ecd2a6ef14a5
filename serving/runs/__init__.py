"""Runs from end to end: the trace and its SLOs, step latencies, the run itself, and its files.

This folder serves a trace with one model. `cascade` serves with two, `simulated` on the virtual clock, and `http`
assembles the batch server.
"""
