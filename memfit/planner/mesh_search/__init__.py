"""Mesh search: a job, a global batch and a cluster go in, the mesh with the least time that fits comes out, with its
plan and the meshes beside it.
"""
