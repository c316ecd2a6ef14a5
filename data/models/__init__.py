"""Trained models that ship with the package, each an ordinary diffusers or transformers folder with a card."""
