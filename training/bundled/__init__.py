"""Training of the bundled models: autoencoder, text encoders, the judge and both generators, one resumable recipe."""
