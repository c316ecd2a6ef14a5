"""Traces: when requests arrive and what they ask for, drawn at random or read from files. No torch."""
