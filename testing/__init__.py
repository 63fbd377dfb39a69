"""What tests and bench share: nets, jobs that fail, and the parts that disturb a run. Imports memfit alone."""
