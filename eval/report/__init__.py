"""The quality report: the papers' tables, and image pairs, as Markdown, JSON and HTML."""
