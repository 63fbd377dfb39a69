"""Real data for the ``tiny`` variants, made on the spot."""
