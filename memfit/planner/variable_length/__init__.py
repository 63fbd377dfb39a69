"""Variable length: a job's sample lengths go in, the memory of its windows one after the other comes out.

A window's shapes are drawn as ``memfit run`` draws them and replayed through one allocator, fragmentation included.
"""
