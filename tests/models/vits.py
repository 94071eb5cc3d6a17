"""Small vision transformers for tests of pretrained weights."""

import pytest
import torch
from torch import nn

from fedbcgd import UserError
from fedbcgd.models.pretrained import load_pretrained
from fedbcgd.models.vit import ViT

SHAPE = (3, 32, 32)


def small(classes=5, seed=0, **changes):
    """Make a model with weights from a wide normal; the initial ones are so small that mistakes would not show."""
    torch.manual_seed(seed)
    model = ViT(classes, **{"shape": SHAPE, "patch": 8, "dim": 12, "depth": 2, "heads": 3} | changes)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def body(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if not name.startswith("head.")}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def classical(model):
    """Return the body under the names of Hugging Face's files."""
    inside = {
        "norm1": "layernorm_before",
        "attn.proj": "attention.output.dense",
        "norm2": "layernorm_after",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    out = {
        "embeddings.cls_token": model.cls_token,
        "embeddings.position_embeddings": model.pos_embed,
        "embeddings.patch_embeddings.projection.weight": model.patch_embed.proj.weight,
        "embeddings.patch_embeddings.projection.bias": model.patch_embed.proj.bias,
        "layernorm.weight": model.norm.weight,
        "layernorm.bias": model.norm.bias,
    }
    for i, layer in enumerate(model.blocks):
        for kind in ("weight", "bias"):
            for ours, theirs in inside.items():
                out[f"encoder.layer.{i}.{theirs}.{kind}"] = layer.get_parameter(f"{ours}.{kind}")
            parts = layer.get_parameter(f"attn.qkv.{kind}").chunk(3)
            for part, value in zip(("query", "key", "value"), parts, strict=True):
                out[f"encoder.layer.{i}.attention.attention.{part}.{kind}"] = value
    return {name: p.detach().clone() for name, p in out.items()}


def check_refused(path, message, model=None):
    """Check that loading raises a UserError and leaves the model unchanged; return the message."""
    model = model or small(seed=1)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(UserError, match=message) as caught:
        load_pretrained(model, path)
    assert same(model.state_dict(), before)
    return str(caught.value)
