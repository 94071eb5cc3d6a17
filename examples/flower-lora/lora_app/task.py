"""A pretrained body, which every site has in a file, and adapters, which are all that is trained and sent."""

from functools import cache

import torch
from torch import Tensor, nn

from fedbcgd.data.embedded import fashion_mnist
from fedbcgd.models.vit import ViT

load_images = cache(fashion_mnist)


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices, which starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def make_body() -> ViT:
    """A small vision transformer."""
    torch.manual_seed(0)
    return ViT(10, (1, 28, 28), patch=7, dim=32, depth=2, heads=2)


def make_model(body: str) -> ViT:
    """The pretrained body in this file, frozen, with adapters and a head that are trained."""
    model = make_body()
    if body:
        model.load_state_dict(torch.load(body, weights_only=True))
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv, block.mlp.fc1 = LoRA(block.attn.qkv), LoRA(block.mlp.fc1)
    model.head.requires_grad_(True)
    return model


def load_data(client: int) -> tuple[Tensor, Tensor]:
    """This client's images."""
    images, _ = load_images()
    rows = torch.arange(client, len(images.labels), 50)[:100]
    return images.images[rows].float() / 255, images.labels[rows]
