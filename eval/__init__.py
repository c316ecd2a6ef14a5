"""Quality metrics, paired comparisons and quality gates on images that the engine made."""
