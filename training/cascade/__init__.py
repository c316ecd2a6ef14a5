"""The discriminator of a cascade: which light images pass for real ones."""
