"""The vision transformer. Its parameters have the names of timm, so that published weights fit."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.errors import UserError

STD = 0.02  # standard deviation of the truncated normal distribution that weights are drawn from


class ViT(nn.Module):
    """Pre-norm transformer layers over patches and a class token, without dropout.

    The parameters are in the order class token, positions, patches, layers, norm, head. So an even division cuts the
    body into blocks and leaves norm and head, which the paper shares, at the end.

    Args:
        classes: how many classes.
        shape: channels, height and width of an image.
        patch: side of a patch in pixels.
        dim: the length of a token.
        depth: the number of layers.
        heads: the number of heads of the attention.
        mlp_ratio: hidden units of a perceptron, as a multiple of `dim`.

    Raises:
        UserError: the sides of the shape are not multiples of `patch`, or `dim` is not a multiple of `heads`.
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
                f"{type(self).__name__}: expected images whose sides are multiples of the patch's {patch} pixels, "
                f"got {height}×{width}"
            )
        if heads < 1 or dim % heads:
            raise UserError(f"{type(self).__name__}: expected dim to be a multiple of heads, got {dim} and {heads}")
        self.shape = (channels, height, width)
        self.classes, self.dim, self.depth, self.heads = classes, dim, depth, heads
        self.grid = (height // patch, width // patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.grid[0] * self.grid[1], dim))
        self.patch_embed = Patches(channels, dim, patch)
        self.blocks = nn.Sequential(*[Layer(dim, heads, mlp_ratio * dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        # The convolution would silently ignore the edge of an image that is slightly too large.
        if x.shape[1:] != self.shape:
            got, expected = ("×".join(map(str, s)) for s in (x.shape[1:], self.shape))
            raise UserError(f"{type(self).__name__}: expected images of {expected}, got {got}")
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        x = self.blocks(x)
        return self.head(self.norm(x[:, 0]))  # the norm is per token, and only the class token is needed

    def _initialise(self) -> None:
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
    """Attention, then a perceptron. (timm calls it a block, a word that has another meaning in this package.)"""

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
    """Multi-head self-attention."""

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
    """Two dense layers with a GELU between them."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class ViTBase16(ViT):
    """ViT-B/16. For 224×224×3 images its body has 85,797,120 parameters, six blocks of 14,299,520."""

    def __init__(self, classes: int = 1000, shape: tuple[int, int, int] = (3, 224, 224)):
        super().__init__(classes, shape, patch=16, dim=768, depth=12, heads=12)


class ViTSmall(ViT):
    """A small ViT for small images: eight rows of patches, so that 32×32 and 64×64 pixels both give 64 tokens."""

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
            raise UserError(f"ViTSmall: expected images whose height is a multiple of 8, got {height}×{width}")
        super().__init__(classes, shape, patch=height // 8, dim=dim, depth=depth, heads=heads)
