"""Sets of images: generated ones, references, and the real ones that captions belong to."""
