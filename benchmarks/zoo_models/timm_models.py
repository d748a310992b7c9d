"""Image models of timm, which needs torchvision."""

from __future__ import annotations

from typing import Any

import torch

from .base import Example, Family, mean_square

family = Family("timm", needs=("torchvision", "timm"))


def classifier(name: str, *, size: int = 64, **settings: Any) -> Example:
    """`timm.create_model` with random weights."""
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=8, **settings)
    return Example(model.train(), torch.randn(2, 3, size, size), mean_square)


family.add("timm-resnet18", classifier, "resnet18")
family.add("timm-efficientnet-b0", classifier, "efficientnet_b0", drop_path_rate=0.2)
family.add("timm-mobilenetv3-small", classifier, "mobilenetv3_small_050")
family.add("timm-vit-tiny", classifier, "vit_tiny_patch16_224", img_size=64)
family.add("timm-convnext-atto", classifier, "convnext_atto", drop_path_rate=0.1)
family.add("timm-mixer", classifier, "mixer_s32_224", size=224)
family.add("timm-densenet121", classifier, "densenet121")
family.add("timm-regnety", classifier, "regnety_002")
