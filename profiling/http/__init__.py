"""Load that benchmarks send to a server, and the trace that it consists of."""
