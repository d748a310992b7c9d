"""Train a ResNet inside a memory budget, after asking how large a batch fits.

    python examples/resnet.py                                              # a small ResNet on random images
    python examples/resnet.py --depths 3 4 6 3 --widths 256 512 1024 2048 --size 224 --budget 8GiB

The second line is ResNet-50. Batch norm keeps one set of running statistics: recomputation does not update them again.
"""

from __future__ import annotations

import argparse

import torch
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

import rematch


def loss_of(output: ImageClassifierOutput) -> torch.Tensor:
    return output.loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a ResNet inside a memory budget.")
    parser.add_argument("--budget", default="9MiB", help='such as "8GiB" or "60%%" of what plain training needs')
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 1], help="blocks in each stage")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64], help="channels of each stage")
    parser.add_argument("--size", type=int, default=64, help="pixels on a side")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="to search for the schedule, at most")
    asked = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stages = {"hidden_sizes": asked.widths, "depths": asked.depths, "embedding_size": asked.widths[0] // 4}
    model = ResNetForImageClassification(ResNetConfig(**stages, num_labels=10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def images(count: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(count)
        pixels = torch.randn(count, 3, asked.size, asked.size, device=device)
        return {"pixel_values": pixels, "labels": torch.randint(10, (count,), device=device)}

    if not asked.budget.endswith("%"):
        options = {"loss": loss_of, "optimizer": optimizer, "close_enough": 0.1, "time_limit": asked.seconds / 10}
        fits = rematch.max_batch(model, images, budget=asked.budget, **options)
        print(f"{asked.budget} hold a batch of {fits.batch}; {fits.without_recomputation} without recomputation")

    batch = images(asked.batch)
    model = rematch.remat(
        model, batch, budget=asked.budget, loss=loss_of, optimizer=optimizer, time_limit=asked.seconds
    )
    print(rematch.plans_of(model)[0])
    for step in range(asked.steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
