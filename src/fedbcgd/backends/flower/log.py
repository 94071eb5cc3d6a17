"""The logger of server and clients."""

import logging

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own
