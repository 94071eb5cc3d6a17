"""Carriers bring tasks to clients and uploads to the server. They know nothing of algorithms."""

from fedbcgd.carriers.carrier import Carrier
from fedbcgd.carriers.inprocess import InProcess

__all__ = ["Carrier", "InProcess"]
