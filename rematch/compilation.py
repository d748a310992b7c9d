"""Where compiled code is kept.

numba keeps what it compiles beside the sources or, if it may not write there, in the user's cache folder. Where it can
use neither (a read-only installation and no home) it refuses to compile at all, so we name a third place before any
compiled module is loaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

_VARIABLE = "NUMBA_CACHE_DIR"


def choose_cache_folder() -> None:
    """Point numba to a folder that can be written, unless it will find one by itself."""
    if _VARIABLE in os.environ or _is_writable(Path(__file__).parent) or _is_writable(_user_folder()):
        return
    chosen = str(_last_resort())
    os.environ[_VARIABLE] = chosen  # for numba, when it is loaded, and for processes started from this one
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = chosen


def _user_folder() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("numba", appauthor=False)


def _last_resort() -> Path:
    """The folder that REMATCH_CACHE names, or one of this user's among temporary files."""
    if os.environ.get("REMATCH_CACHE"):
        named = Path(os.environ["REMATCH_CACHE"]) / "compiled"
        if _is_writable(named):
            return named
    shared = Path(tempfile.gettempdir()) / f"rematch-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        found = shared.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="rematch-"))
    # Code is loaded from there, so it must be a folder of ours that nobody else can write to.
    ours = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    if shared.is_symlink() or not ours:
        return Path(tempfile.mkdtemp(prefix="rematch-"))
    return shared


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, or in the one that it would be made in."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
