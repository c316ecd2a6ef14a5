"""Quality of images that the engine drew: metrics, paired comparisons, quality gates, reports and model cards."""
