"""The step latency predictor (PatchedServe section 6.1.2): fitting, its file, correction while serving. No torch."""
