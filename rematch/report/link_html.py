"""The link to host memory on a plan's page: when copies run, when computation waits, and host memory over time.

`link_chart(traffic(graph, schedule), seconds=0.2)`
"""

from __future__ import annotations

from collections.abc import Sequence

from rematch.graph.traffic import Span, Traffic, total_seconds
from rematch.report.chart_html import UNITS, chart, number, path, seconds_ticks, steps
from rematch.units import format_bytes, format_seconds

_THINNEST = 0.001  # of the width, which can still be seen


def link_chart(link: Traffic, seconds: float) -> str:
    """A lane for each direction and one for waiting, over `seconds` of time."""
    lanes = (("out", link.out), ("back", link.back), ("waits", link.waits))
    height = UNITS / len(lanes)
    marks = "".join(
        path(f"lane {name}", _blocks(spans, seconds, (lane + 0.15) * height, 0.7 * height))
        for lane, (name, spans) in enumerate(lanes)
    )
    y_ticks = [(1 - (lane + 0.5) / len(lanes), name) for lane, (name, _) in enumerate(lanes)]
    x_ticks, x_unit = seconds_ticks(seconds)
    return chart(
        marks, x_ticks=x_ticks, y_ticks=y_ticks, y_title="link to host memory", x_title=f"time, {x_unit}",
        label=said(link),
    )  # fmt: skip


def said(link: Traffic) -> str:
    """What the lanes show, in words."""
    out, back, waits = (format_seconds(total_seconds(spans)) for spans in (link.out, link.back, link.waits))
    whole = format_seconds(link.seconds)
    return (
        f"Of {whole}, copies out run for {out} and copies back for {back}; computation waits for them for {waits}. "
        f"{format_bytes(link.host[-1][1])} are in host memory at the end."
    )


def host_line(link: Traffic, seconds: float, top_bytes: float) -> str:
    """Bytes in host memory over time, as a line of the chart of device memory."""
    edges = [*(since / seconds for since, _ in link.host), link.seconds / seconds]
    return path("host", steps(edges, [size / top_bytes for _, size in link.host]))


def _blocks(spans: Sequence[Span], seconds: float, top: float, height: float) -> str:
    """A block for each span; spans that touch make one."""
    joined: list[list[float]] = []
    for begin, end in spans:
        if joined and begin <= joined[-1][1] + 1e-9 * seconds:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    return "".join(
        f"M{number(UNITS * begin / seconds)} {number(top)}h{number(UNITS * max(_THINNEST, (end - begin) / seconds))}"
        f"v{number(height)}H{number(UNITS * begin / seconds)}z"
        for begin, end in joined
    )
