"""The three-stage engine (prepare, denoise, postprocess) on the wall clock, and the replay of traces with it."""
