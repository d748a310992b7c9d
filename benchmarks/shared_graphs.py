"""Every collected benchmark graph loads, and its plain no-recomputation peak is the one stored in the file.

`python benchmarks/shared_graphs.py --graphs DIR` prints a row for each graph and exits with 1 if one does not agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rematch.errors import RematchError
from rematch.graph import baseline, simulate
from rematch.graph.formats import load_graph


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True, metavar="DIR", help="folder of benchmark graphs")
    paths = sorted(parser.parse_args().graphs.glob("*.json"))
    graphs = [path for path in paths if "nodes" in json.loads(path.read_text())]
    print(f"{'graph':<26} {'operators':>9} {'targets':>7} {'resident':>13} {'stored peak':>15} {'plain peak':>15}")
    agreeing = sum([report(path) for path in graphs])
    print(f"{agreeing} of {len(graphs)} graphs agree")
    return 0 if graphs and agreeing == len(graphs) else 1


def report(path: Path) -> bool:
    """Print the row of one graph; whether its peak agrees."""
    try:
        full, plain = load_graph(path), load_graph(path, plain=True).graph
        peak = simulate(plain, baseline(plain)).checked().peak_bytes
        simulate(full.graph, baseline(full.graph)).checked()
    except RematchError as error:
        print(f"{path.stem:<26} {error}")
        return False
    stored = json.loads(path.read_text())["peak_no_remat"]
    print(
        f"{path.stem:<26} {len(plain.ops):>9,} {len(full.graph.targets):>7} {full.graph.resident_bytes:>13,} "
        f"{stored:>15,} {peak:>15,}{'' if peak == stored else '  DIFFERS'}"
    )
    for note in full.notes:
        print(f"    {note}")
    return bool(peak == stored)


if __name__ == "__main__":
    sys.exit(main())
