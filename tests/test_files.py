"""Files are written whole or not at all."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
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


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_permissions_are_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    write_text(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", mode)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything: run as another user")
def test_a_protected_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o400)
    for write in (lambda: write_text(path, "new"), lambda: require_writable(path)):
        with pytest.raises(FormatError, match="permission denied"):
            write()
    assert path.read_text() == "old"


def test_a_name_that_is_too_long_is_found_before_the_work(tmp_path: Path) -> None:
    require_writable(tmp_path / ("x" * 250))
    write_text(tmp_path / ("x" * 250), "text")
    with pytest.raises(FormatError, match="file name too long"):
        require_writable(tmp_path / ("x" * 300))


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_killed_process_leaves_the_old_file_and_at_most_a_hidden_one(tmp_path: Path, unnamed: bool) -> None:
    """Killed when everything is written and nothing renamed: the worst moment."""
    path = tmp_path / "file"
    path.write_text("old")
    forget = "" if unnamed else "del os.O_TMPFILE\n"
    code = f"import os, signal\n{forget}os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
    code += f"from rematch.files import write_text\nwrite_text({str(path)!r}, 'new')"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    left = [name for name in os.listdir(tmp_path) if name != "file"]
    assert all(name.startswith(".") and name.endswith(".partial") for name in left)
    if unnamed and hasattr(os, "O_TMPFILE"):
        assert left == []
