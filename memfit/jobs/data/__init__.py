"""Real input for the built-in jobs, made on the spot: speech, mel frames, spectrograms, talking faces."""
