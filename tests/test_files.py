"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rematch.errors import FormatError
from rematch.files import read_json, require_writable, write_text


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_text(path, '"\u00e9"')
    write_text(path, "[1]")
    assert read_json(path) == [1]
    assert os.listdir(tmp_path) == ["file.json"]


def test_a_new_file_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "")
    (tmp_path / "plain").write_text("")
    ours, plain = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain"))
    assert ours == plain


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FormatError, match=r"cannot write .*: no space left on device"):
        write_text(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "words"), [("absent/file", "no such file"), ("", "is a directory")])
def test_where_nothing_can_be_written(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(FormatError, match=f"cannot write .*{words}"):
        write_text(tmp_path / name, "text")
    assert os.listdir(tmp_path) == []


def test_a_pipe_is_written_into_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        require_writable(pipe)
        write_text(pipe, "text")
        assert os.read(reader, 99) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]
