"""Backends bring tasks to clients and uploads to the server. They know nothing of algorithms. `registry.py` lists them."""
