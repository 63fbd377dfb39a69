"""A person's own training script on the virtual card, in a sandbox: ``memfit trace -- python train.py``."""
