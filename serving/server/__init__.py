"""HTTP server: OpenAI's images API over a long-lived engine.

Only `local`, which runs an engine in this process, imports torch.
"""
