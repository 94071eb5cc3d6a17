"""Carriers bring tasks to clients and uploads to the server. They know nothing of algorithms."""

from fedbcgd.carriers.carrier import Carrier
from fedbcgd.carriers.inprocess import InProcess
from fedbcgd.carriers.workers import Workers

__all__ = ["Carrier", "InProcess", "Workers"]
