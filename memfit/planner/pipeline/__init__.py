"""Stages of a pipeline: what each module costs goes in, where the nets are cut comes out."""
