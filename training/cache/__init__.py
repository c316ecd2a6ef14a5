"""The cache predictor (PatchedServe section 5.2): samples from block profiles, the random forest and its file."""
