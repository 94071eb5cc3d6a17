"""Which metric of a run is shown first."""

from collections.abc import Collection

ACCURACIES = ("test_accuracy", "validation_accuracy")


def main_metric(columns: Collection[str]) -> str | None:
    """Return the most telling metric among these columns: an accuracy, else a loss; None if there is neither."""
    return next((name for name in (*ACCURACIES, "test_loss", "train_loss") if name in columns), None)


def accuracy_column(columns: Collection[str]) -> str | None:
    """Return the accuracy among these columns; None if there is none."""
    return next((name for name in ACCURACIES if name in columns), None)
