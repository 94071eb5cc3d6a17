"""Networks of the paper."""

from fedbcgd.models.lenet import LeNet5

__all__ = ["LeNet5"]
