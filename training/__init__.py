"""Training of the bundled models and of the predictors: resumable and seeded, with one command per part."""
