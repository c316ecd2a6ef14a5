"""Replicas of an engine on Ray Serve: request routing and autoscaling."""
