"""Prompts: the bundled captions, or a file of the user's."""
