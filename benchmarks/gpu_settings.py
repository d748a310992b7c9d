"""The four models of the benchmarks on a card, and what is done with any model there.

`settings(tiny=False)`: Llama 1B (transformers, 8 x 2048 tokens, bf16), GPT-2 small (transformers, 16 x 1024 tokens,
bf16 autocast, dropout), ViT-L/16 (torchvision, 64 images, bf16 autocast) and ResNet-50 (torchvision, 128 images, tf32).
`peer` trains one of them with less memory as others do, `within` as rematch does. `gpu_more.py` has more models.
"""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import rematch
from rematch.api import as_arguments
from rematch.trial import Trial

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EAGER = "eager"
_QUEUED = 6  # steps that are not waited for
_FULL_BYTES = 4 << 30  # a card with less left is full


@dataclass(frozen=True)
class Setting:
    """A model as people train it; `blocks` are what block checkpointing goes around."""

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[], Any]
    loss: Callable[[Any], torch.Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def made(self) -> tuple[nn.Module, Any]:
        """The model, always with the same weights, and its input."""
        torch.set_float32_matmul_precision("high")  # tf32 where nothing is cast
        torch.backends.cudnn.allow_tf32 = True
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = self.build().to(DEVICE).train()
        return model, self.sample()

    def trial(self, model: nn.Module) -> Trial:
        return Trial(model, self.loss, self.context)


def by_name(settings: Iterable[Setting], name: str) -> Setting:
    return next(setting for setting in settings if setting.name == name)


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16)


def tokens(vocabulary: int, *shape: int) -> dict[str, torch.Tensor]:
    made = torch.randint(0, vocabulary, shape, device=DEVICE)
    return {"input_ids": made, "labels": made}


def llama(
    depth: int = 16,
    width: int = 2048,
    batch: int = 8,
    length: int = 2048,
    masked: bool = False,
    vocabulary: int = 32000,
) -> Setting:
    """`masked`: with an attention mask, of ones, as tokenizers give it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )

    def sample() -> dict[str, torch.Tensor]:
        made = tokens(vocabulary, batch, length)
        return {**made, "attention_mask": torch.ones_like(made["input_ids"])} if masked else made

    return Setting(
        f"Llama {depth} x {width}, {batch} x {length}, bf16" + ", attention mask" * masked,
        lambda: LlamaForCausalLM(config).to(torch.bfloat16),
        sample,
        lambda output: output.loss,
        lambda model: list(model.model.layers),
    )


def gpt2(depth: int = 12, width: int = 768, batch: int = 16, length: int = 1024, vocabulary: int = 50257) -> Setting:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_layer=depth,
        n_embd=width,
        n_head=width // 64,
        n_positions=length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.loss_type = "ForCausalLM"
    return Setting(
        f"GPT-2 {depth} x {width}, {batch} x {length}, bf16 autocast",
        lambda: GPT2LMHeadModel(config),
        lambda: tokens(vocabulary, batch, length),
        lambda output: output.loss,
        lambda model: list(model.transformer.h),
        bf16,
    )


def images(batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, device=DEVICE)


def first_class(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.long, device=DEVICE))


def vit(batch: int = 64) -> Setting:
    from torchvision.models import vit_l_16

    blocks: Callable[[Any], list[nn.Module]] = lambda model: list(model.encoder.layers)  # noqa: E731
    return Setting(f"ViT-L/16, {batch}, bf16 autocast", vit_l_16, lambda: images(batch, 224), first_class, blocks, bf16)


def resnet(batch: int = 128) -> Setting:
    from torchvision.models import resnet50

    def blocks(model: Any) -> list[nn.Module]:
        return [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]

    return Setting(f"ResNet-50, {batch}, tf32", resnet50, lambda: images(batch, 224), first_class, blocks)


def tiny_llama(masked: bool = False) -> Setting:
    return llama(2, 256, 2, 64, masked, vocabulary=1024)


def tiny_gpt2(depth: int = 2, batch: int = 2) -> Setting:
    return gpt2(depth, 128, batch, 64, vocabulary=1024)


def settings(tiny: bool) -> Iterator[Setting]:
    if tiny:
        yield from (tiny_llama(), tiny_gpt2())
        return
    yield from (resnet(), vit(), gpt2(), llama())


Wrapping = Callable[[Callable[..., Any]], Callable[..., Any]]


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Recomputes its inside in backward, as PyTorch's documentation has it."""
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def saving_products(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Recomputes all but matrix products and attention: PyTorch's selective checkpointing."""
    aten = torch.ops.aten
    saved = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default}
    saved |= {
        getattr(aten, name).default
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        )
    }

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def wrapped(blocks: list[nn.Module], wrapping: Wrapping) -> Iterator[None]:
    """The blocks with other forwards."""
    for block in blocks:
        block.__dict__["forward"] = wrapping(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.__dict__["forward"]


@dataclass(frozen=True)
class MicroBatches(Trial):
    """The same batch in two halves, whose gradients add up."""

    def step(self, sample: Any) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        halves = zip(*pytree.tree_map(lambda leaf: leaf.chunk(2), pytree.tree_leaves(sample)), strict=True)
        structure = pytree.tree_structure(sample)
        total = torch.zeros((), device=self.device)
        for half in halves:
            args, kwargs = as_arguments(pytree.tree_unflatten(half, structure))
            with self.context():
                value = self.loss(self.model(*args, **kwargs)) / 2
            value.backward()  # type: ignore[no-untyped-call]
            total += value.detach()
        return total


# The peers by the names that points have; "amb" is the graph's partition alone, without inductor's fusion.
PEERS = {
    "block": "block checkpoint",
    "second": "checkpoint of every second block",
    "products": "selective checkpoint, products saved",
    "amb": "activation_memory_budget 0.5, aot_eager",
    "micro": "two micro-batches",
}


@contextmanager
def peer(name: str, setting: Setting, model: nn.Module) -> Iterator[Trial]:
    """A way to train with less memory that is not ours."""
    blocks = setting.blocks(model)
    wrappings: dict[str, tuple[list[nn.Module], Wrapping]] = {
        "block": (blocks, checkpointed),
        "second": (blocks[::2], checkpointed),
        "products": (blocks, saving_products),
    }
    if name in wrappings:
        with wrapped(*wrappings[name]):
            yield setting.trial(model)
    elif name == "micro":
        yield MicroBatches(model, setting.loss, setting.context)
    else:
        with torch._functorch.config.patch(activation_memory_budget=0.5):
            yield setting.trial(torch.compile(model, backend="aot_eager"))


def flowing_ms(trial: Trial, sample: Any) -> float:
    """The time of a step among several that nobody waits for."""
    started = time.perf_counter()
    for _ in range(_QUEUED):
        trial.step(sample)
    trial.timed_step(sample)
    return (time.perf_counter() - started) / (_QUEUED + 1) * 1e3


def kernels_of(trial: Trial, sample: Any) -> dict[str, tuple[int, float]]:
    """How often each kernel of a step runs, and its microseconds; on a machine without a card, each operator."""
    cuda = DEVICE.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    trial.timed_step(sample)
    with profile(activities=activities, acc_events=True) as profiler:
        trial.timed_step(sample)
    found: dict[str, tuple[int, float]] = {}
    for event in profiler.events():
        on_card = event.device_type == torch.autograd.DeviceType.CUDA
        if on_card if cuda else event.name.startswith("aten::"):
            count, spent = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, spent + event.time_range.elapsed_us()
    return found


def kernel_times(trial: Trial, sample: Any, listed: int = 30) -> dict[str, Any]:
    """What a step's kernels take, as rows have it: `kernel_ms` of all, `kernels` of the longest; none without a card.

    Numbers at the end of names do not tell kernels apart.
    """
    if DEVICE.type != "cuda":
        return {}
    total: dict[str, float] = {}
    for name, (_, spent) in kernels_of(trial, sample).items():
        short = re.sub(r"_\d+$", "", name)[:100]
        total[short] = total.get(short, 0.0) + spent / 1e3
    longest = sorted(total.items(), key=lambda item: -item[1])[:listed]
    return {"kernel_ms": sum(total.values()), "kernels": dict(longest)}


def within(
    setting: Setting, model: nn.Module, sample: Any, budget: int, limit: float, **options: Any
) -> tuple[nn.Module, int]:
    """The model inside the budget, or inside the least one that its refusal names; and that budget.

    `options` are what `rematch.remat` takes besides. Solvers search for the proof as long as there is time (`gap=0`).
    """
    model.zero_grad(set_to_none=True)

    def planned(budget: int) -> nn.Module:
        with setting.context():
            return rematch.remat(
                model,
                sample,
                budget=budget,
                loss=setting.loss,
                time_limit=limit,
                progress=False,
                cache=False,
                gap=0.0,
                **options,
            )

    try:
        return planned(budget), budget
    except rematch.BudgetInfeasible as refusal:
        if refusal.feasible_from_bytes is None:
            raise
        return planned(refusal.feasible_from_bytes), refusal.feasible_from_bytes


def tidy() -> None:
    """Leave nothing of one measurement to the next."""
    torch._dynamo.reset()
    empty_cache()


def empty_cache() -> None:
    """Leave no memory that nobody uses to the allocator."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


# Smaller cards than this one


def least_cap(trial: Trial, sample: Any, budget: int, above: list[float], steps: int) -> float | None:
    """How many percent above the budget the cap must be; None if no cap that was tried is enough."""
    for pct in above:
        trial.model.zero_grad(set_to_none=True)
        try:
            with capped(int(budget * (1 + pct / 100))):
                for _ in range(steps):
                    trial.step(sample)
                torch.cuda.synchronize()
            return pct
        except torch.cuda.OutOfMemoryError as error:
            print(f"capped {pct:g} % above {budget >> 20} MiB: {error}", file=sys.stderr)
            require_room()
    return None


@contextmanager
def capped(cap_bytes: int) -> Iterator[None]:
    """This process may reserve no more; elsewhere than on a card, whatever it likes."""
    if DEVICE.type != "cuda":
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def require_room() -> None:
    """Called when memory ran out under a cap: with a card that others have filled, it says nothing about the cap."""
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < _FULL_BYTES:
        raise RuntimeError(
            f"the card itself is full: {free_bytes >> 20} MiB are left, beside other processes; run with fewer --jobs"
        )
