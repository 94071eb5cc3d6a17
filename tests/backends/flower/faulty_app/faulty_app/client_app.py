"""The ClientApp: one line."""

import os

import fedbcgd.flower
from faulty_app.task import load_data, make_model

app = fedbcgd.flower.client_app(make_model, load_data, folder=os.environ["FEDBCGD_STATE"])
