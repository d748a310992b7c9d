"""Link speeds: measured once on a machine, remembered, and looked up for devices that are not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rematch import trace
from rematch.capture import link as measuring
from rematch.capture.devices import find_device, known_devices
from rematch.capture.link import link_to, measured_speeds
from rematch.errors import DeviceError
from rematch.graph import Link

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_COPY_BYTES", 2**16)
    return tmp_path


def test_a_link_is_measured_once_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    first = link_to(CPU, host_bytes=2**30)
    assert min(first.speeds) > 1e6
    assert first.host_bytes == 2**30
    monkeypatch.setattr(measuring, "_measure", None)  # calling it would raise
    assert link_to(CPU, host_bytes=5) == Link(*first.speeds, host_bytes=5)
    assert link_to("cpu", host_bytes=5) == link_to(CPU, host_bytes=5)


def test_an_entry_that_no_link_can_have_is_measured_again(folder: Path) -> None:
    measured_speeds(CPU)
    path = folder / "links.json"
    (key,) = json.loads(path.read_text())
    speeds = {"out_bytes_per_second": 0.0, "in_bytes_per_second": 1e9, "both_bytes_per_second": 1e9}
    path.write_text(json.dumps({key: speeds}))
    assert measured_speeds(CPU).out_bytes_per_second > 1e6


def test_real_tensors_are_copied_while_a_mode_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    seen: list[torch.Tensor] = []
    buffer = measuring._host_buffer
    monkeypatch.setattr(measuring, "_host_buffer", lambda device: seen.append(buffer(device)) or seen[-1])
    with FakeTensorMode():
        measured_speeds(CPU)
    assert seen
    assert not any(isinstance(tensor, FakeTensor) for tensor in seen)


def test_the_table_has_links_for_devices_that_are_not_here() -> None:
    assert link_to("h200", host_bytes=7) == Link(55e9, 55e9, host_bytes=7)
    assert find_device("h200").link == measuring.LinkSpeeds(55e9, 55e9, 44e9)
    for name in known_devices():
        assert min(link_to(name, host_bytes=0).speeds) > 1e6
    assert link_to("a100", host_bytes=0).out_bytes_per_second == 27.5e9
    with pytest.raises(DeviceError, match="unknown device"):
        link_to("h2000", host_bytes=0)


def test_values_without_data_can_move_where_real_ones_can() -> None:
    """A module on the "meta" device is planned for a device that is not here, and what moves there is the same."""
    movable = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
            sample = torch.zeros(512, 64)
        graph = trace(net, sample, loss=lambda output: output.square().mean(), device="h200")
        movable.append([value.name for value in graph.values if value.movable and not value.resident])
    assert movable[0] == movable[1] != []
