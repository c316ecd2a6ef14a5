"""Model cascades, in which a light and a heavy model serve together: DiffServe. Only `worker` imports torch."""
