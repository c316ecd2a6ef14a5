"""Assembly of the batch server, and the load that benchmarks send to a server."""
