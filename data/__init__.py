"""Shared types and shipped files: error types, files and workspace, resolutions, requests, traces, table schemas,
prompts and the bundled models. It imports no torch at module level.
"""
