"""Federated fine-tuning with adapters (LoRA): the body is frozen, and only the adapters are divided, trained and sent.

    python examples/lora.py

A small vision transformer is first trained in one place, on 2,000 of the images in the package. Then 50 clients with data of
their own fine-tune it: once with low-rank adapters beside its layers, once whole. What is not trained is never uploaded, and
nothing has to be said for that: parameters with `requires_grad = False` are left out. `peft.get_peft_model` works the same.
"""

import numpy as np
import torch
from torch import Tensor, nn

import fedbcgd
from fedbcgd.data import dirichlet, fashion_mnist, split
from fedbcgd.models.vit import ViT


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices, which starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def with_adapters(model: ViT, rank: int = 4) -> ViT:
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv, block.attn.proj = LoRA(block.attn.qkv, rank), LoRA(block.attn.proj, rank)
        block.mlp.fc1, block.mlp.fc2 = LoRA(block.mlp.fc1, rank), LoRA(block.mlp.fc2, rank)
    model.head.requires_grad_(True)  # the shared block
    return model


def main() -> None:
    torch.manual_seed(0)
    train, test = (images.shown_as(resize=32) for images in fashion_mnist())
    public, private = train.subset(torch.arange(0, 2000)), train.subset(torch.arange(2000, 10_000))
    labels = private.labels[private.rows].numpy()
    clients = split(private, [np.asarray(part) for part in dirichlet(labels, 50, rho=0.3, seed=0)])

    model = ViT(10, (1, 32, 32), patch=8, dim=64, depth=3, heads=2)
    print("training the body in one place …")
    base = fedbcgd.simulate(
        model,
        [public],
        "central",
        test=test,
        evaluate_every=5,
        rounds=10,
        local_epochs=1,
        lr=0.03,
        client_momentum=0.9,
        batch_size=10,
    )
    print(f"before: accuracy {base.final['test_accuracy']:.4f}")

    common = {
        "test": test,
        "evaluate_every": 5,
        "rounds": 20,
        "cohort": 10,
        "blocks": 4,
        "batch_size": 20,
        "lr": 0.05,
        "seed": 0,
    }
    whole = fedbcgd.simulate(base.module, clients, "fedbcgd", **common)
    adapted = fedbcgd.simulate(with_adapters(base.module), clients, "fedbcgd", **common)
    for name, result in (("whole", whole), ("adapters", adapted)):
        per_client = result.ledger.upload_max_bytes / 1000
        print(
            f"{name:<9} d = {result.ledger.dim:>8,}   accuracy {result.final['test_accuracy']:.4f}   "
            f"at most {per_client:,.1f} kB a client and round"
        )


if __name__ == "__main__":
    main()
