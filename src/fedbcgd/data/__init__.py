"""Data sets, their partition over clients, and the images that are part of the package."""

from fedbcgd.data.embedded import fashion_mnist
from fedbcgd.data.images import Images
from fedbcgd.data.partition import dirichlet, iid, label_counts
from fedbcgd.data.sources import Source, as_source, split

__all__ = ["Images", "Source", "as_source", "dirichlet", "fashion_mnist", "iid", "label_counts", "split"]
