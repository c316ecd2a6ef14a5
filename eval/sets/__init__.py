"""Sets of images: generated images, references, and the real images of captions."""
