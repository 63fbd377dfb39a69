"""memfit beside Transformers' Trainer, Lightning and Accelerate."""
