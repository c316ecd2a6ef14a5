"""Profiles of a cascade's two models on a machine, and its bank of prompts."""
