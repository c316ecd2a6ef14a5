"""The discriminator of a cascade, which decides whether an image of the light model is good enough."""
