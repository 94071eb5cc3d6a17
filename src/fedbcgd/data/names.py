"""Names of data sets in configurations, in a module that imports nothing heavy."""

EMBEDDED = "embedded"  # the images in the package
QUADRATICS = "quadratics"
