"""Requests, models, samplers, policies, the three-stage engine (prepare, denoise, postprocess) and trace replay.

The denoise stage is a `Stepper` (`core.stepper`): the patch engine in `patched`, or plain diffusers in `plain`.

Policies, the request life cycle and the metrics import no torch, so that a simulator can run them on a virtual clock.
"""
