"""The images of a cascade: what its discriminator learns from, its bank, and the quality of what was served."""
