"""Measurements of one model on this machine: step latencies, change of blocks, edits."""
