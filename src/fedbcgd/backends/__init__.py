"""Carriers bring tasks to clients and uploads to the server. They know nothing of algorithms."""

from fedbcgd.backends.inprocess import InProcess
from fedbcgd.backends.workers.backend import Workers
from fedbcgd.engine.backend import Carrier

__all__ = ["Carrier", "InProcess", "Workers"]
