"""Integrations: a run of Transformers' Trainer, Lightning, Accelerate or DeepSpeed goes in, its metrics come out.

Each module is imported only by who uses that library.
"""
