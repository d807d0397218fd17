"""Charts over the time of the step: calls by process, and trajectories in lanes. Both have the same axis and
zoom.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stepscope_report.charts import Flight, Gantt, Group, Lanes, Mark, Row
from stepscope_report.formatting import count, duration
from stepscope_report.html import Colours, Html, join, legend, percent, section, tag, text

LANE = 13
"""Least height in pixels at which a lane shows names."""
TALL = 600
"""Height in pixels that all lanes of a chart should take together. A lane is at least `LANE` and at most
three times `LANE` high."""
NAMED = 0.06
"""Least share of the chart's width at which a mark shows its name."""
LABELLED_STRIP = 9
"""Least height in pixels of a strip at which every row shows its name. In lower strips, about one name in 64
pixels is shown, and the other names are shown under the pointer."""
EARLY = 1000
"""A call is drawn as begun before the step if it began at least 1 / `EARLY` of the step's duration
earlier."""


def gantt(chart: Gantt, colours: Colours, path: Sequence[Mark] = ()) -> Html:
    """Return the chart of the calls of each process, with the critical path on top."""
    lanes = sum(max(len(row.lanes), 1) for group in chart.groups if not group.strips for row in group.rows)
    height = max(LANE, min(3 * LANE, TALL // max(lanes, 1)))
    groups = [*_path(path, height, chart.window_ns, colours)] if path else []
    groups += [part for group in chart.groups for part in _group(group, height, chart.window_ns, colours)]
    marks = [mark for group in chart.groups for row in group.rows for lane in row.lanes for mark in lane]
    body = tag("div", axis(chart.window_ns), *groups, class_="chart", id="gantt", data_ns=chart.window_ns)
    note = (
        f"{count(chart.marks, 'mark')} for {count(chart.spans, 'span')}: calls of one stage in one process "
        f"that overlap are one mark, and so are neighbours shorter than {duration(chart.shortest_ns)}."
    )
    return section("when", "Who ran what, when", _legend(marks, chart.window_ns, colours), body, note=note)


def _legend(marks: Sequence[Mark], window_ns: int, colours: Colours, flights: Sequence[Flight] = ()) -> Html:
    """Return the legend of a chart: its stages, and the signs that occur on its marks and frames."""
    drawn: tuple[Mark | Flight, ...] = (*marks, *flights)
    signs = (
        ("early", "began before the step", any(_is_early(one.start_ns, window_ns) for one in drawn)),
        ("open", "no end recorded", any(one.open for one in drawn)),
        ("bad", "failed", any(_is_failed(mark) for mark in marks)),
    )
    stages = colours.legend({mark.label for mark in marks})
    used = [(sign, name) for sign, name, is_used in signs if is_used]
    return join(stages, legend(used)) if used else stages


def _is_early(start_ns: int, window_ns: int) -> bool:
    return start_ns < 0 and -start_ns * EARLY >= window_ns


def _is_failed(mark: Mark) -> bool:
    return mark.failed == mark.spans


def _path(path: Sequence[Mark], height: int, window_ns: int, colours: Colours) -> Iterator[Html]:
    yield tag("h3", "critical path", tag("small", "what the step waited for at each moment"))
    row = Row(name="critical path", host="all hosts", aligned=True, lanes=(tuple(path),))
    yield _row(row, height, window_ns, colours, named=False)


def _group(group: Group, lane: int, window_ns: int, colours: Colours) -> Iterator[Html]:
    remarks = [count(group.processes, "process")]
    if group.strips:
        remarks.append("one strip each, of the most specific stage at each instant")
    if len(group.rows) < group.processes:
        remarks.append(f"{len(group.rows):,} drawn, evenly chosen, and the slowest of each stage")
    yield tag("h3", group.role, tag("small", "; ".join(remarks)))
    strip = max(2, min(10, 640 // max(len(group.rows), 1)))  # so low that one or two screens show all strips
    height = strip if group.strips else lane
    every = 1 if height >= LABELLED_STRIP else 1 << (64 // height).bit_length() - 1
    for at, row in enumerate(group.rows):
        yield _row(row, height, window_ns, colours, named=at % every == 0)


def _row(row: Row, height: int, window_ns: int, colours: Colours, *, named: bool) -> Html:
    pixels = max(len(row.lanes), 1) * height
    if not row.aligned:
        why = f"{row.name}: unaligned. It ran on {row.host}, whose clock was not measured: not drawn"
        track = tag("div", tag("span", "unaligned: not drawn") if height >= LABELLED_STRIP else "",
                    class_="track unaligned", data_t=why)  # fmt: skip
    else:
        marks = (
            _mark(mark, at * height, height, window_ns, colours, f"{row.name}: ")
            for at, lane in enumerate(row.lanes)
            for mark in lane
        )
        track = zoomed(marks)
    classes = "row" if height >= LANE else "row strip"
    label = tag("span", row.name if named else "", class_="name", data_t=f"{row.name} on {row.host}")
    return tag("div", label, track, class_=classes, style=f"height:{pixels}px;--tall:{height - 1}px")


def zoomed(marks: Iterable[Html], kind: str = "track") -> Html:
    """Return the part of a row that the page's script zooms."""
    return tag("div", tag("div", *marks, class_="zoom"), class_=kind)


def _mark(mark: Mark, top: int, height: int, window_ns: int, colours: Colours, whose: str) -> Html:
    """Return one mark. The markup is written without `tag`, because a page has thousands of marks."""
    left_ns, right_ns = max(mark.start_ns, 0), min(mark.end_ns, window_ns)
    if right_ns < left_ns:
        left_ns, right_ns = (0, 0) if right_ns < 0 else (window_ns, window_ns)
    kind = f"m {colours.of(mark.label)}" + " bad" * _is_failed(mark) + " open" * mark.open
    kind += " early" * _is_early(mark.start_ns, window_ns)
    width = percent(right_ns - left_ns, window_ns)
    inner = ""
    if height >= LANE and right_ns - left_ns >= NAMED * window_ns:
        inner = text(mark.label[1])
    return Html(
        f'<i class="{kind}" style="left:{percent(left_ns, window_ns)};width:{width};top:{top}px;'
        f'height:{_thick(height)}px" data-t="{text(whose + _said(mark, window_ns))}">{inner}</i>'
    )


def _thick(height: int) -> int:
    """Return the height in pixels of a mark: one less than the height of its lane, if there is room."""
    return height - 1 if height > 4 else height


def _said(mark: Mark, window_ns: int) -> str:
    text = f"{' '.join(mark.label)}, {_when(mark, window_ns)}"
    if mark.spans > 1:
        text += f"; {mark.spans:,} pieces"
    if mark.gaps_ns:
        text += f", {duration(mark.gaps_ns)} of it between them"
    if mark.at_once > 1:
        text += f", up to {mark.at_once:,} at once"
    return (
        text
        + ("; no end recorded" if mark.open else "")
        + (f"; {mark.failed:,} failed" if mark.failed else "")
    )


def _when(drawn: Mark | Flight, window_ns: int) -> str:
    """Return `3.40 s from 1.20 s`, or `3.40 s, began 1.20 s before the step`."""
    took, start_ns = duration(drawn.end_ns - drawn.start_ns), drawn.start_ns
    if _is_early(start_ns, window_ns):
        return f"{took}, began {duration(-start_ns)} before the step"
    return f"{took} from {duration(start_ns)}"


def lanes(chart: Lanes, window_ns: int, colours: Colours) -> Html:
    """Return the chart of trajectories in lanes, with the number in flight on top."""
    height = max(2, min(LANE, 480 // max(len(chart.lanes), 1)))
    tracks = [_lane(lane, height, window_ns, colours) for lane in chart.lanes]
    flights = [flight for lane in chart.lanes for flight in lane]
    marks = [mark for flight in flights for mark in flight.marks]
    body = tag(
        "div", axis(window_ns), _in_flight(chart.in_flight), *tracks,
        class_="chart", id="lanes", data_ns=window_ns,
    )  # fmt: skip
    key = _legend(marks, window_ns, colours, flights)
    return section("trajectories", "Trajectories", key, body, note=_lanes_note(chart))


def _lanes_note(chart: Lanes) -> str:
    note = (
        f"{count(chart.trajectories, 'trajectory')} in {count(chart.needed, 'lane')}, as many as ran "
        f"at once. Each shows the most specific stage at each instant; {count(chart.marks, 'mark')}, "
        f"neighbours shorter than {duration(chart.shortest_ns)} are one."
    )
    if len(chart.lanes) < chart.needed:
        note += (
            f" {len(chart.lanes):,} lanes are drawn, evenly chosen, and those of the slowest trajectories."
        )
    return note


def _lane(lane: Sequence[Flight], height: int, window_ns: int, colours: Colours) -> Html:
    marks = [_frame(flight, height, window_ns) for flight in lane]
    marks += [
        _mark(mark, 0, height, window_ns, colours, f"{flight.trajectory}: ")
        for flight in lane
        for mark in flight.marks
    ]
    name, place = tag("span", class_="name"), f"height:{height}px"
    return tag("div", name, zoomed(marks), class_="row strip", style=place)


def _frame(flight: Flight, height: int, window_ns: int) -> Html:
    """Return the frame behind a trajectory's marks. The frame shows that the gaps between the marks
    belong to the trajectory.
    """
    left_ns, right_ns = max(flight.start_ns, 0), min(flight.end_ns, window_ns)
    place = f"left:{percent(left_ns, window_ns)};width:{percent(max(right_ns - left_ns, 0), window_ns)}"
    hover = f"{flight.trajectory}: {_when(flight, window_ns)}{'; no end recorded' * flight.open}"
    kind = "frame" + " open" * flight.open + " early" * _is_early(flight.start_ns, window_ns)
    return tag("i", class_=kind, style=f"{place};height:{_thick(height)}px", data_t=hover)


def _in_flight(curve: Sequence[float]) -> Html:
    top = max([*curve, 1.0])
    width = 100 / len(curve)
    bars = [
        tag(
            "i",
            class_="m flight",
            style=f"left:{at * width:.4g}%;width:{1.1 * width:.4g}%;height:{100 * value / top:.3g}%",
            data_t=f"{value:.1f} trajectories in flight",
        )
        for at, value in enumerate(curve)
        if value
    ]
    label = tag("span", f"in flight, up to {top:.0f}", class_="name")
    track = zoomed(bars, "track curve")
    return tag("div", label, track, class_="row", style="height:56px", id="in-flight")


def axis(window_ns: int) -> Html:
    """Return the row of times on top of a chart."""
    marks = (
        tag("b", duration(at_ns), style=f"left:{percent(at_ns, window_ns)}") for at_ns in ticks(window_ns)
    )
    return tag("div", tag("span", class_="name"), zoomed(marks), class_="row axis")


def ticks(window_ns: int) -> list[int]:
    """Return round times from 0 on, at most 11."""
    if window_ns <= 0:
        return [0]
    size = 1
    while window_ns // size > 100:
        size *= 10
    every = next(size * by for by in (1, 2, 5, 10) if window_ns // (size * by) <= 10)
    return list(range(0, window_ns + 1, every))
