"""Integrations: a run of Transformers' Trainer, Lightning or Accelerate goes in, its metrics and predictions come out.

Each module is imported only by who uses that library.
"""
