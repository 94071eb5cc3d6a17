"""FedBCGD on a Flower federation."""
