"""The zoo: public models and odd modules of ours, trained inside a budget and compared with plain training.

    python benchmarks/zoo.py [--only REGEX] [--family REGEX] [--again [OUTCOME ...]] [--jobs N] [--limit S] [--list]

Each model is built small with random weights, in a process of its own, on one thread; nothing is downloaded. Results
are kept in `benchmarks/results/zoo.json` as they come, so that a run can be stopped and continued: what is there is not
run again unless `--again` says so, for all models or for those with the outcomes named. The page `docs/models.md` is
written from them.

Libraries come with the extra `zoo` (`make bench-zoo` installs it): transformers, diffusers, peft and PyTorch Geometric.
timm is not part of it because torchvision does not load beside every build of torch; where both are installed and
work, their models run too. A model whose library is missing is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import date
from importlib import metadata
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from zoo_models import ENTRIES, Entry
from zoo_models.judge import CRASHED, OUTCOMES, TIMED_OUT, Verdict, judge
from zoo_models.page import written

from rematch.files import read_json, write_text

HERE = Path(__file__).parent
LIBRARIES = ("torch", "transformers", "diffusers", "peft", "torch_geometric", "timm")


def main() -> None:
    options = parsed()
    path = options.results / "zoo.json"
    results: dict[str, Any] = read_json(path) if path.exists() else {}
    chosen = [entry for entry in ENTRIES.values() if wanted(entry, options, results)]
    if options.list:
        print("\n".join(f"{entry.family:18} {entry.name}" for entry in chosen))
        return
    processes = prepared_processes()
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            for entry, result in pool.map(lambda entry: (entry, run(entry, options, processes)), chosen):
                results[entry.name] = result
                write_text(path, json.dumps(dict(sorted(results.items())), indent=1) + "\n")
                print(line(entry.name, result), flush=True)
    finally:
        if results and options.page:
            write_text(options.page, written(results, ENTRIES, options.limit))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name this regular expression finds")
    parser.add_argument("--family", default="", help="families whose name this regular expression finds")
    parser.add_argument("--again", nargs="*", choices=OUTCOMES, help="run again what is there: all, or by outcome")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds of solving for each budget")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for a model, all in all")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where zoo.json is")
    parser.add_argument("--page", type=Path, help="the page to write; default docs/models.md with the default results")
    parser.add_argument("--list", action="store_true", help="only say which models would run")
    options = parser.parse_args()
    if options.page is None and options.results == HERE / "results":
        options.page = HERE.parent / "docs" / "models.md"
    return options


def wanted(entry: Entry, options: argparse.Namespace, results: dict[str, Any]) -> bool:
    """Whether the model is asked for, and new or to be run again."""
    if not re.search(options.only, entry.name) or not re.search(options.family, entry.family):
        return False
    if entry.name not in results or options.again == []:
        return True
    return options.again is not None and results[entry.name]["outcome"] in options.again


def prepared_processes() -> ForkServerContext:
    """Processes that begin with what every model needs already imported; one thread, no network, no warnings."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    os.environ.update(one_thread | quiet)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zoo_models.judge", "rematch.execute.runner", "torch._dynamo", "transformers"])
    return context


def run(entry: Entry, options: argparse.Namespace, processes: ForkServerContext) -> dict[str, Any]:
    """Judge one model in a process of its own."""
    started = time.perf_counter()
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=report, args=(entry.name, options.limit, sender))
    process.start()
    sender.close()
    if not receiver.poll(options.timeout):
        process.kill()
        verdict = Verdict(TIMED_OUT, f"not ready after {options.timeout:g} s")
    else:
        try:
            verdict = receiver.recv()
        except EOFError:
            process.join()
            verdict = Verdict(CRASHED, f"the process ended with {process.exitcode}")
    process.join()
    kept = {name: value for name, value in asdict(verdict).items() if value not in (None, "")}
    return {
        **kept,
        "seconds": round(time.perf_counter() - started, 1),
        "date": date.today().isoformat(),
        "versions": versions(),
    }


def report(name: str, limit: float, sender: Connection) -> None:
    """What the process of one model does; what the model prints is lost."""
    import torch

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)
    sender.send(judge(ENTRIES[name], time_limit=limit))


def versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[library] = metadata.version(library)
    return found


def line(name: str, result: dict[str, Any]) -> str:
    """What the terminal shows of a model."""
    peak, budget = result.get("peak_bytes"), result.get("budget_bytes")
    kept = f"{100 * peak / budget:5.1f} % of {result['budget']}" if peak and budget else ""
    ratio = f"{result['time_ratio']:.2f}x" if "time_ratio" in result else ""
    found = f"{result['outcome']:14} {result.get('engine', ''):8} {kept:18} {ratio:6} {result['seconds']:5.0f} s"
    return f"{name:30} {found}  {result.get('reason', '')[:140]}"


if __name__ == "__main__":
    main()
