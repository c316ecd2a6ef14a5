"""Runs on the virtual clock: files and calibrations of modelled engines, deployments, runs and searches. No torch."""
