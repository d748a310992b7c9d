"""Measuring: what it finds, what it remembers, and that nobody notices it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import rematch
from rematch.capture.aten import aten
from rematch.capture.cost import Call, Profile
from rematch.capture.measure import measuring
from rematch.capture.memory import PeakMemory
from rematch.errors import RematchError
from tests.training import same_bits

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def costs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that no other test fills."""
    folder = tmp_path / "costs"
    monkeypatch.setenv("REMATCH_CACHE", str(folder))
    yield folder
    torch._dynamo.reset()


def _call(target: Any, *args: Any) -> Call:
    """The call as a capture makes it, of tensors that have no contents."""
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
    return Call.made(target, fakes, {})


def _product(rows: int = 3) -> Call:
    return _call(aten.mm.default, torch.rand(rows, 4), torch.rand(4, 5))


def _wrong_product() -> Call:
    return _call(aten.mm.default, torch.rand(3, 4), torch.rand(3, 4))


def _profiled(*calls: Call) -> tuple[list[Profile], list[str]]:
    """The profiles of the calls, and the operators that had to be measured for them."""
    measured: list[str] = []
    with measuring(CPU, measured.append) as measurer:
        profiles = [measurer.profile(call) for call in calls]
    return profiles, measured


# What it finds


def test_a_kernel_is_described_by_what_it_really_returns() -> None:
    (product,), _ = _profiled(_product())
    (result,) = product.results
    assert result is not None
    assert (result.shape, result.stride, result.dtype, result.storage_bytes) == ((3, 5), (5, 1), "float32", 60)
    assert result.alias is None
    assert product.cost.seconds > 0
    assert product.cost.flops == 2 * 3 * 4 * 5


def test_results_that_share_a_storage_say_so() -> None:
    x = torch.rand(2, 6)
    (split, relu), _ = _profiled(_call(aten.split.Tensor, x, 3, 1), _call(aten.relu_.default, x))
    assert [result.alias for result in split.results if result] == [0, 0]
    assert [result.offset for result in split.results if result] == [0, 3]
    assert [result.alias for result in relu.results if result] == [0]


def test_workspace_is_what_a_kernel_holds_beyond_its_results() -> None:
    x = torch.rand(64, 64)
    (logsumexp, copied), _ = _profiled(_call(aten.logsumexp.default, x, [0]), _call(aten.clone.default, x))
    assert logsumexp.cost.workspace_bytes >= x.nbytes
    assert copied.cost.workspace_bytes == 0


def test_a_lazily_conjugated_argument_is_copied_first() -> None:
    x = torch.rand(2, 64, 64, dtype=torch.complex64)
    (plain, conjugated), _ = _profiled(_call(aten.bmm.default, x, x), _call(aten.bmm.default, x, x.conj()))
    assert conjugated.cost.workspace_bytes >= plain.cost.workspace_bytes + x.nbytes


@pytest.mark.parametrize("start", [0, 4])
def test_a_scatter_copies_all_of_the_tensor_that_its_first_argument_is_part_of(start: int) -> None:
    part = torch.rand(8, 5)[start : start + 2]
    (scatter,), _ = _profiled(_call(aten.slice_scatter.default, part, torch.rand(2, 1), 1, 0, 1))
    assert [result.storage_bytes for result in scatter.results if result] == [8 * 5 * 4]


def test_an_operator_that_fails_is_named_with_its_arguments() -> None:
    with pytest.raises(RematchError, match=r"aten\.mm\.default could not be measured on cpu.*float32\[3, 4\]"):
        _profiled(_wrong_product())


# What it remembers


def test_a_call_is_measured_once_ever() -> None:
    first, measured = _profiled(_product(), _product())
    assert measured == ["aten.mm.default"]
    again, measured_again = _profiled(_product())
    assert measured_again == []
    assert again == first[:1]
    assert _profiled(_product(rows=7))[1] == ["aten.mm.default"], "other shapes are another call"


def test_the_second_capture_of_a_module_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.rand(3, 4)
    plans = [rematch.plan(model, x, budget="100%", progress=False)]
    monkeypatch.setattr("rematch.capture.measure._measure", None)
    plans.append(rematch.plan(model, x, budget="100%", progress=False))
    assert plans[0].figures.baseline_seconds == plans[1].figures.baseline_seconds


def test_what_was_learnt_before_an_error_is_kept() -> None:
    with pytest.raises(RematchError), measuring(CPU) as measurer:
        measurer.profile(_product())
        measurer.profile(_wrong_product())
    assert _profiled(_product())[1] == []


def test_two_processes_add_to_the_same_file() -> None:
    with measuring(CPU) as one, measuring(CPU) as other:
        one.profile(_product(rows=2))
        other.profile(_product(rows=3))
    assert _profiled(_product(rows=2), _product(rows=3))[1] == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 3}', '{"key": {"cost": null}}', "\x00"])
def test_a_damaged_file_is_replaced(costs_folder: Path, content: str) -> None:
    expected, _ = _profiled(_product())
    (file,) = costs_folder.iterdir()
    file.write_text(content)
    assert _profiled(_product())[1] == ["aten.mm.default"]
    replaced, measured = _profiled(_product())
    assert measured == []
    assert replaced[0].results == expected[0].results


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path / "file" / "costs"))
    for _ in range(2):
        _, measured = _profiled(_product())
        assert measured == ["aten.mm.default"]


def test_measurements_hold_for_the_settings_they_were_made_with(costs_folder: Path) -> None:
    _profiled(_product())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert _profiled(_product())[1] == ["aten.mm.default"]
    finally:
        torch.set_num_threads(threads)
    assert len(list(costs_folder.iterdir())) == 2


# That nobody notices


def test_measuring_leaves_no_trace_in_the_model_or_the_generator() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU())
    x = torch.rand(8, 4, requires_grad=True)
    model(x).sum().backward()
    gradients = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    tensors = {**model.state_dict(), **gradients, "x.grad": x.grad}
    before = copy.deepcopy(tensors)
    versions = {name: tensor._version for name, tensor in tensors.items()}
    random = torch.get_rng_state()
    rematch.plan(model, x, budget="100%", loss=lambda y: y.square().mean(), progress=False)
    assert all(same_bits(tensors[name], before[name]) for name in tensors)
    assert {name: tensor._version for name, tensor in tensors.items()} == versions
    assert torch.equal(torch.get_rng_state(), random)


def test_an_embedding_can_be_measured() -> None:
    """Its indices are taken to be zero, which is in range of any table."""
    (found,), _ = _profiled(_call(aten.embedding.default, torch.rand(2, 3), torch.zeros(5, dtype=torch.long)))
    assert [result.shape for result in found.results if result] == [(5, 3)]


def test_measures_while_the_user_profiles() -> None:
    product, wrong = _product(1000), _wrong_product()
    with PeakMemory(CPU) as used, measuring(CPU) as measurer:
        profile = measurer.profile(product)
        with pytest.raises(RematchError, match="could not be measured"):
            measurer.profile(wrong)
    assert profile.results[0] is not None and profile.results[0].storage_bytes == 4 * 1000 * 5
    assert used.peak_bytes < 4 * 1000 * 5, "what is measured is not part of the user's profile"
