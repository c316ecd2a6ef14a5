"""Measurements that drive the engine and write tables into the workspace, such as standalone latencies."""
