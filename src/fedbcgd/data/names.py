"""Names that configurations use, where nothing heavy is imported."""

EMBEDDED = "embedded"  # the images in the package
QUADRATICS = "quadratics"
