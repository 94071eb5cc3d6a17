"""`fedbcgd reproduce` and `fedbcgd theory`, which are in `fedbcgd.paper.cli`."""

from fedbcgd.cli import app
from fedbcgd.paper.cli import register

register(app)
