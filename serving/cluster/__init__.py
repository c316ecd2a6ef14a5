"""Replicas of an engine on Ray Serve: where requests go, and how many replicas there are."""
