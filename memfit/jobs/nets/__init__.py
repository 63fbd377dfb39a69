"""The nets of the built-in jobs that no library ships, as plain torch modules."""
