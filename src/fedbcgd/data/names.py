"""Names of data sets in configurations, in a module that imports nothing heavy."""

EMBEDDED = "embedded"  # the images in the package
QUADRATICS = "quadratics"
PYTHON = "python"  # the objects that a program gave to `fedbcgd.simulate`
