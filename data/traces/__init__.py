"""Traces: arrival times and parameters of requests, drawn at random or read from files. No torch."""
