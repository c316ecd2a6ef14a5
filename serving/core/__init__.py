"""What all stages of serving share: state and record of a request, prepared requests, step rows, figures of a run."""
