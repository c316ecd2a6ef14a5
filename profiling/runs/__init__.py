"""One served or simulated trace from end to end: settings, calibration, the run, its results."""
