"""Quality gates: bounds on the figures of any result file, judged by intervals."""
