"""Sweeps over systems, request rates and seeds (PatchedServe figure 11), on the engine or in the simulator."""
