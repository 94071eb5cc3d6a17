"""Backends bring tasks to clients and uploads to the server; they know no algorithm.

`registry.py` lists those of simulations; `flower/` is used through `fedbcgd.flower`.
"""
