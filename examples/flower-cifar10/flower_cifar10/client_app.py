"""The ClientApp: one line."""

import os

import fedbcgd.flower
from flower_cifar10.task import load_data, load_test, make_model

# FEDBCGD_STATE names a folder for the client's state, so that a restarted SuperNode has it; without, it is in memory.
app = fedbcgd.flower.client_app(
    make_model, load_data, load_test=load_test, folder=os.environ.get("FEDBCGD_STATE") or None
)
