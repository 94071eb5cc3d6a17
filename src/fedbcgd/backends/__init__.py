"""Backends bring tasks to clients and uploads to the server. They know nothing of algorithms."""

from fedbcgd.backends.inprocess import InProcess
from fedbcgd.backends.workers.backend import Workers
from fedbcgd.engine.backend import Backend

__all__ = ["Backend", "InProcess", "Workers"]
