"""Scheduling policies and their inputs, shared by the engine and the simulator. No torch."""
