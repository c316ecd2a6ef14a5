"""Images of a cascade: examples for its discriminator, its bank, and the quality of served images."""
