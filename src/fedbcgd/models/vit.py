"""The vision transformer, its parameters under timm's names so that published weights fit."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.errors import UserError

STD = 0.02  # of the truncated normal that weights are drawn from


class ViT(nn.Module):
    """Pre-norm layers over patches and a class token; no dropout.

    The parameters stand in the order class token, positions, patches, layers, norm, head: cut evenly, the vector's
    first part is the body, and norm and head end it, which the paper shares.
    """

    paper_blocks = 6
    paper_shared = ["norm", "head"]

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        *,
        patch: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_ratio: int = 4,
    ):
        super().__init__()
        channels, height, width = shape
        if patch < 1 or min(height, width) < patch or height % patch or width % patch:
            raise UserError(
                f"{type(self).__name__}: the sides of an image must be multiples of the patch's {patch} pixels, "
                f"given {height}×{width}"
            )
        if heads < 1 or dim % heads:
            raise UserError(f"{type(self).__name__}: dim must be a multiple of heads, given {dim} and {heads}")
        self.shape = (channels, height, width)
        self.grid = (height // patch, width // patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.grid[0] * self.grid[1], dim))
        self.patch_embed = Patches(channels, dim, patch)
        self.blocks = nn.Sequential(*[Layer(dim, heads, mlp_ratio * dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        self._draw()

    def forward(self, x: Tensor) -> Tensor:
        # The convolution would cut off the rest of an image that is a little too large, and say nothing.
        if x.shape[1:] != self.shape:
            given, wanted = ("×".join(map(str, s)) for s in (x.shape[1:], self.shape))
            raise UserError(f"{type(self).__name__}: made for images of {wanted}, given {given}")
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        x = self.blocks(x)
        return self.head(self.norm(x[:, 0]))  # norm goes token by token: only the class token's is needed

    def _draw(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # matrices, the patches' filters, positions and class token
                nn.init.trunc_normal_(parameter, std=STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Patches(nn.Module):
    """One token for each patch: a linear map of its pixels."""

    def __init__(self, channels: int, dim: int, patch: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Layer(nn.Module):
    """Attention, then a perceptron; a "block" of timm, where this package means something else by the word."""

    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Perceptron(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        x = F.scaled_dot_product_attention(query, key, value)
        return self.proj(x.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class ViTBase16(ViT):
    """ViT-B/16. For 224×224×3 images its body holds 85,797,120 parameters, six blocks of 14,299,520."""

    def __init__(self, classes: int = 1000, shape: tuple[int, int, int] = (3, 224, 224)):
        super().__init__(classes, shape, patch=16, dim=768, depth=12, heads=12)


class ViTSmall(ViT):
    """For small images: eight rows of patches, so that 32 and 64 pixels both give 64 tokens."""

    def __init__(
        self,
        classes: int = 10,
        shape: tuple[int, int, int] = (3, 32, 32),
        dim: int = 192,
        depth: int = 6,
        heads: int = 3,
    ):
        _, height, width = shape
        if height < 8 or height % 8:
            raise UserError(f"ViTSmall: the height of an image must be a multiple of 8, given {height}×{width}")
        super().__init__(classes, shape, patch=height // 8, dim=dim, depth=depth, heads=heads)
