"""The commands about the paper; `fedbcgd.paper.cli` has them."""

from fedbcgd.cli import app
from fedbcgd.paper.cli import register

register(app)
