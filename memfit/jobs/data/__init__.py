"""Input of the built-in jobs: a seed and a count go in; speech, mel frames, spectrograms and talking faces come out.

It is synthesised on the spot, so nothing is downloaded.
"""
