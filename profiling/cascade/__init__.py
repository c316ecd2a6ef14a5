"""What a cascade needs to know of its two models on a machine."""
