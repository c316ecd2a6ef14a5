"""Training of the bundled models and, later, of the predictors: resumable, seeded, one command per part."""
