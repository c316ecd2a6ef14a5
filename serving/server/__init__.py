"""The batch server: OpenAI's images API over an engine that serves for ever.

Nothing here imports torch but `local`, which drives an engine of this process, and `preview`.
"""
