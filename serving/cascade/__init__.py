"""A light and a heavy model that serve together: DiffServe. No torch but in `worker` and `cluster`."""
