"""Real input for the built-in jobs: speech, mel frames, spectrograms."""
