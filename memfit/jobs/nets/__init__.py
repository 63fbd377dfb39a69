"""The nets of the built-in jobs: settings go in, modules with a project's published shapes come out.

Their weights are random: memory depends on shapes alone.
"""
