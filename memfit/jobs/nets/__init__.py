"""The nets of the built-in jobs."""
