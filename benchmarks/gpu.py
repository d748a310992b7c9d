"""On a CUDA card: step time against peak memory for eager, block checkpointing and rematch, model by model.

    python benchmarks/gpu.py [--only REGEX] [--peers block,amb] [--points keep,block*1.5,60] [--limit 15] [--rounds 10]

Llama 1B (transformers, 8 x 2048 tokens, bf16), GPT-2 small (transformers, 16 x 1024 tokens, bf16 autocast, dropout),
ViT-L/16 (torchvision, 64 images, bf16 autocast) and ResNet-50 (torchvision, 128 images, tf32). Peers are plain eager,
`torch.utils.checkpoint` around every block and every second one, selective checkpointing that saves matrix products,
PyTorch's `activation_memory_budget` under aot_eager (no fusion, so that schedules are compared), and the batch in two
halves. rematch runs with everything kept, at each peer's own peak ("block", or a multiple of it), at percentages of
eager's peak and at the least budget that its refusal names. Steps of eager and of
rematch are taken in turns, each waited for, and medians compared; `flowing` is the time of a step when ten are queued
without waiting, as training does. Outputs are dropped before backward. Rows are kept as JSON as they come, and a run
that was stopped goes on where it was; the chart and the table come last. `--tiny` has small models for any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import rematch
from rematch.api import as_arguments
from rematch.files import write_text
from rematch.report.charts import Panel, draw_curves
from rematch.trial import Trial, alternate, same_outcome
from rematch.units import extra_pct

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_QUEUED = 10  # steps that are not waited for
_FIRST_STEPS = 4  # blocks are captured and learned in the first ones; what comes then is what trains


@dataclass(frozen=True)
class Setting:
    """A model as people train it; `blocks` are what block checkpointing goes around."""

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[], Any]
    loss: Callable[[Any], torch.Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16)


def tokens(vocabulary: int, *shape: int) -> dict[str, torch.Tensor]:
    made = torch.randint(0, vocabulary, shape, device=DEVICE)
    return {"input_ids": made, "labels": made}


def llama(depth: int = 16, width: int = 2048, batch: int = 8, length: int = 2048) -> Setting:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Setting(
        f"Llama {depth} x {width}, {batch} x {length}, bf16",
        lambda: LlamaForCausalLM(config).to(torch.bfloat16),
        lambda: tokens(32000, batch, length),
        lambda output: output.loss,
        lambda model: list(model.model.layers),
    )


def gpt2(depth: int = 12, width: int = 768, batch: int = 16, length: int = 1024) -> Setting:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=depth, n_embd=width, n_head=width // 64, n_positions=length, use_cache=False)
    config.loss_type = "ForCausalLM"
    return Setting(
        f"GPT-2 {depth} x {width}, {batch} x {length}, bf16 autocast",
        lambda: GPT2LMHeadModel(config),
        lambda: tokens(50257, batch, length),
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


def settings(tiny: bool) -> Iterator[Setting]:
    if tiny:
        yield llama(2, 256, 2, 64)
        yield gpt2(2, 128, 2, 64)
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
            yield Trial(model, setting.loss, setting.context)
    elif name == "micro":
        yield MicroBatches(model, setting.loss, setting.context)
    else:
        with torch._functorch.config.patch(activation_memory_budget=0.5):
            yield Trial(torch.compile(model, backend="aot_eager"), setting.loss, setting.context)


@dataclass(frozen=True)
class Row:
    """One way to train one model. Times are milliseconds, memory is MiB."""

    model: str
    method: str  # "eager", a peer or "rematch"
    point: str = ""  # where on rematch's curve
    failure: str | None = None
    step_ms: float = 0.0
    flowing_ms: float = 0.0
    eager_ms: float = 0.0  # of the steps taken in turns with these
    peak_mib: float = 0.0
    budget_mib: float | None = None
    predicted_mib: float | None = None
    predicted_pct: float | None = None
    bound_pct: float | None = None
    measured_pct: float | None = None
    engine: str = ""
    plan_seconds: float = 0.0
    equal: bool | None = None  # loss and gradients of a step to the bit; None where eager does not repeat itself
    host_mib: float = 0.0  # that the plan moves to host memory
    stall_pct: float = 0.0  # of a plain step, that the plan waits for copies


def flowing_ms(trial: Trial, sample: Any) -> float:
    """The time of a step among several that nobody waits for."""
    started = time.perf_counter()
    for _ in range(_QUEUED):
        trial.step(sample)
    trial.timed_step(sample)
    return (time.perf_counter() - started) / (_QUEUED + 1) * 1e3


def measured(setting: Setting, method: str, trial: Trial, eager: Trial, sample: Any, rounds: int, **known: Any) -> Row:
    alternate([eager, trial], sample, rounds=2)
    eager_ms, step_ms = (statistics.median(taken) * 1e3 for taken in alternate([eager, trial], sample, rounds))
    return Row(
        model=setting.name,
        method=method,
        step_ms=step_ms,
        flowing_ms=flowing_ms(trial, sample),
        eager_ms=eager_ms,
        peak_mib=trial.peak_bytes(sample) / 2**20,
        measured_pct=extra_pct(step_ms, eager_ms),
        **known,
    )


def budget_of(point: str, rows: list[Row]) -> int:
    """Bytes of a point: of eager's peak, of a peer's, or "least"."""
    peak = {row.method: row.peak_mib * 2**20 for row in rows if row.failure is None}
    if point == "keep":
        return int(1.02 * peak["eager"])
    if point == "least":
        return int(0.02 * peak["eager"])
    name, _, factor = point.partition("*")
    if name in PEERS:
        return int(float(factor or 1) * peak[PEERS[name]])
    return int(float(point) / 100 * peak["eager"])


def within(
    setting: Setting, model: nn.Module, sample: Any, budget: int, limit: float, **options: Any
) -> tuple[nn.Module, int]:
    """The model inside the budget, or inside the least one that its refusal names; and that budget.

    `options` are what `rematch.remat` takes besides.
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
                **options,
            )

    try:
        return planned(budget), budget
    except rematch.BudgetInfeasible as refusal:
        if refusal.feasible_from_bytes is None:
            raise
        return planned(refusal.feasible_from_bytes), refusal.feasible_from_bytes


def ours(
    setting: Setting,
    model: nn.Module,
    sample: Any,
    point: str,
    rows: list[Row],
    limit: float,
    rounds: int,
    method: str = "rematch",
    **options: Any,
) -> Row:
    eager = Trial(model, setting.loss, setting.context)
    started = time.perf_counter()
    inside, budget = within(setting, model, sample, budget_of(point, rows), limit, **options)
    plan_seconds = time.perf_counter() - started
    trial = Trial(inside, setting.loss, setting.context)
    for _ in range(_FIRST_STEPS):
        trial.step(sample)
    comparable = "chunk_loss" not in options and same_outcome(eager, eager, sample)
    equal = same_outcome(trial, eager, sample) if comparable else None
    plan = rematch.plans_of(inside)[-1]
    figures = plan.figures
    return measured(
        setting,
        method,
        trial,
        eager,
        sample,
        rounds,
        point=point,
        budget_mib=budget / 2**20,
        predicted_mib=(figures.peak_bytes or 0) / 2**20,
        predicted_pct=figures.overhead_pct,
        bound_pct=figures.lower_bound_pct,
        engine=plan.engine if plan.recomputed or plan.moved else "plain",
        host_mib=plan.moved.host_bytes / 2**20 if plan.moved else 0.0,
        stall_pct=100 * plan.moved.stall_seconds / figures.baseline_seconds if plan.moved else 0.0,
        plan_seconds=plan_seconds,
        equal=equal,
    )


def run(setting: Setting, arguments: argparse.Namespace, rows: list[Row], keep: Callable[[], None]) -> None:
    """Fill in the rows that this model has not yet."""
    done = {(row.method, row.point) for row in rows if row.model == setting.name}
    points = [point for point in arguments.points.split(",") if ("rematch", point) not in done]
    names = [name for name in arguments.peers.split(",") if name and (PEERS[name], "") not in done]
    if not points and not names:
        return
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = setting.build().to(DEVICE).train()
    sample = setting.sample()

    def known() -> list[Row]:
        return [row for row in rows if row.model == setting.name]

    def add(method: str, point: str, work: Callable[[], Row]) -> None:
        rows.append(attempted(setting.name, method, point, work))
        keep()
        print(line(rows[-1]), flush=True)
        tidy()

    eager = Trial(model, setting.loss, setting.context)
    if ("eager", "") not in done:
        add("eager", "", lambda: measured(setting, "eager", eager, eager, sample, arguments.rounds))
    for name in names:
        with peer(name, setting, model) as trial:
            add(
                PEERS[name],
                "",
                lambda name=name, trial=trial: measured(  # type: ignore[misc]
                    setting, PEERS[name], trial, eager, sample, arguments.rounds
                ),
            )
    for point in points:
        add(
            "rematch",
            point,
            lambda point=point: ours(  # type: ignore[misc]
                setting, model, sample, point, known(), arguments.limit, arguments.rounds
            ),
        )


def attempted(model: str, method: str, point: str, work: Callable[[], Row]) -> Row:
    """The row, or one that says why there is none."""
    try:
        return work()
    except Exception as error:
        return Row(model, method, point, failure=f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}")


def tidy() -> None:
    """Leave nothing of one measurement to the next."""
    torch._dynamo.reset()
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.model:40} {row.method} {row.point}: {row.failure}"

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    equal = {True: "equal", False: "NOT EQUAL", None: ""}[row.equal]
    return (
        f"{row.model:40} {row.method:40} {row.point:10} {row.step_ms:7.1f} ms (flowing {row.flowing_ms:7.1f}) @ "
        f"{row.peak_mib:7.0f} MiB  budget {shown(row.budget_mib, '7.0f'):>7} "
        f"predicted {shown(row.predicted_mib, '7.0f'):>7}  "
        f"extra {shown(row.measured_pct, '+.1f'):>6} predicted {shown(row.predicted_pct, '+.1f'):>6} "
        f"bound {shown(row.bound_pct, '+.1f'):>6} %  {row.engine} {row.plan_seconds:.1f} s {equal}"
        + (f"  host {row.host_mib:.0f} MiB, waits {row.stall_pct:.1f} %" if row.host_mib else "")
    )


def chart(rows: list[Row], path: Path, *, logarithmic: bool = False) -> None:
    panels = []
    for model in dict.fromkeys(row.model for row in rows):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.model == model and row.failure is None:
                series.setdefault(row.method, []).append((row.peak_mib / 1024, row.step_ms))
        panels.append(Panel(model, series))
    draw_curves(panels, path, x="peak, GiB (max_memory_allocated)", y="step, ms", columns=2, logarithmic=logarithmic)


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine(),
        "versions": {
            "rematch": rematch.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "limit_seconds": arguments.limit,
        "rounds": arguments.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--points", default="keep,block,block*1.5,60,50,least,second,products,amb,micro,80,40,30")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds to solve for each budget")
    parser.add_argument("--rounds", type=int, default=10, help="steps to time of each kind")
    parser.add_argument("--again", action="store_true", help="forget the rows there are")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "gpu.json"
    torch.set_float32_matmul_precision("high")  # tf32 where nothing is cast
    torch.backends.cudnn.allow_tf32 = True
    rows: list[Row] = []
    if path.exists() and not arguments.again:
        rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]

    def keep() -> None:
        """All rows so far, so that a run that is stopped loses nothing."""
        kept = {**conditions(arguments), "rows": [asdict(row) for row in rows]}
        write_text(path, json.dumps(kept, indent=1))

    for setting in settings(arguments.tiny):
        if re.search(arguments.only, setting.name):
            run(setting, arguments, rows, keep)
            gc.collect()
    chart(rows, arguments.results / "gpu.png")
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
