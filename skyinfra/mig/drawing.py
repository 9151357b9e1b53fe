"""Layouts as text: two lines for a message, and the whole picture of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from skyinfra.mig import palette
from skyinfra.mig.drivers import required_driver
from skyinfra.mig.geometry import Geometry, Profile
from skyinfra.mig.grid import Compute, Grid, Layout, Placement, written
from skyinfra.mig.palette import Tone

# A piece of a line, and the index of the segment that it belongs to.
Cell: TypeAlias = tuple[str, int | None]

_MARGIN = 8
EXPECTED = "the places are expected from the driver's source; they were not seen on this part"

# The media engines and the graphics of a profile, by its attributes.
_MARKS = {"+me": "media", "+me.all": "all media", "-me": "no media", "+gfx": "graphics"}


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the grid, in placement units: one GPU instance, or free room (profile None).

    compute: the compute instances that share it; empty where a single one fills it.
    """

    start: int
    size: int
    profile: Profile | None
    compute: tuple[Compute, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """One GPU with a layout.

    segments: cover the whole grid. fitting: the profiles of which one more fits. missing: the profiles that were wanted
    and have no place, with how many of each.
    """

    geometry: Geometry
    segments: tuple[Segment, ...]
    fitting: tuple[str, ...]
    missing: tuple[tuple[Profile, int], ...] = ()

    @property
    def placed(self) -> tuple[Profile, ...]:
        """The profiles of the partitions, in the order of the grid."""
        return tuple(segment.profile for segment in self.segments if segment.profile)

    @property
    def layout(self) -> Layout:
        """The partitions, by the names of the geometry."""
        here = ((each.profile, each) for each in self.segments)
        return tuple(Placement(p.name, each.start, each.size, compute=each.compute) for p, each in here if p)

    @property
    def compute_used(self) -> int:
        """Compute slices in partitions."""
        return sum(profile.compute_slices for profile in self.placed)

    @property
    def compute_free(self) -> int:
        """Compute slices in no partition."""
        return (self.geometry.compute_slices or 0) - self.compute_used

    @property
    def memory_used(self) -> int:
        """Memory slices in partitions."""
        return sum(profile.memory_slices or 0 for profile in self.placed)

    @property
    def memory_used_gb(self) -> int:
        """Memory in partitions, in the GB of the profile names."""
        return sum(profile.memory_gb for profile in self.placed)

    @property
    def sm_used(self) -> int | None:
        """Streaming multiprocessors in partitions; None where one of them is not known."""
        known = [profile.sm for profile in self.placed if profile.sm is not None]
        return sum(known) if len(known) == len(self.placed) else None


def picture(layout: Sequence[Placement], geometry: Geometry, missing: Iterable[tuple[str, int]] = ()) -> Picture:
    """Returns the picture of a GPU with *layout* on it, and the profiles that are *missing* beside it.

    Raises UnknownProfile, and MigNotSupported where the placements of this GPU are unknown.
    """
    lacking = tuple((geometry.profile(name), count) for name, count in missing)
    return Picture(geometry, _segments(layout, geometry), Grid.of(layout, geometry).fitting(), lacking)


def draw(layout: Sequence[Placement], geometry: Geometry) -> str:
    """Two lines: the placement units of the GPU, and the instance in each of them.

        memory   0       1       2       3       4       5       6       7
                |3g.40gb                        |1g.10gb|       |1g.10gb|       |

    Free units are blank. The line width follows the longest name.
    """
    units = geometry.placement_units or 0
    bars = "".join(text for text, _ in strip(layout, units))
    return f"{_ruler(geometry, _strip_cell(layout))}\n{' ' * _MARGIN}{bars}"


def strip(layout: Sequence[Placement], units: int, width: int | None = None) -> list[Cell]:
    """One line: the instance in each of a GPU's *units*. Free units are blank.

    Join the texts for plain text; the index is that of the placement in *layout*, for the colour of the cell. width:
    names are cut for a line of so many characters, down to three for each unit.
    """
    cell = _narrowed(_strip_cell(layout), units, width, least=3)
    line: list[Cell] = [("|", None)]
    for _, size, index in _spans(layout, units):
        name = "" if index is None else layout[index].name
        line += [(_padded(name, size * cell - 1), index), ("|", None)]
    return line


def boxes(shown: Picture, width: int | None = None) -> list[list[Cell]]:
    """The grid as lines of cells: units, then a box for every segment with profile, memory, slices, SMs and mark.

    Join the texts of a line's cells for plain text; the index is that of the segment, for the colour of the cell.
    width: texts are cut for lines of so many characters, down to six for each unit.
    """
    columns = labels(shown)
    cell = _width((s.size, text) for s, column in zip(shown.segments, columns, strict=True) for text in column)
    cell = _narrowed(cell, shown.geometry.placement_units or 1, width and width - _MARGIN, least=6)
    rooms = [segment.size * cell - 1 for segment in shown.segments]
    rule = "+" + "".join("-" * room + "+" for room in rooms)
    named = "slices" if shown.geometry.placement_units == shown.geometry.memory_slices else "units"
    lines: list[list[Cell]] = [[(_ruler(shown.geometry, cell), None)], [(f"{named:<{_MARGIN}}{rule}", None)]]
    for row in range(len(columns[0])):
        line: list[Cell] = [(" " * _MARGIN + "|", None)]
        for index, (column, room) in enumerate(zip(columns, rooms, strict=True)):
            line += [(_padded(column[row], room), index if shown.segments[index].profile else None), ("|", None)]
        lines.append(line)
    return [*lines, [(" " * _MARGIN + rule, None)]]


def compute_bar(shown: Picture, width: int | None = None) -> list[list[Cell]]:
    """Two lines of cells: the compute slices of each partition, and those that are free. They have no fixed places.

    width: as for `boxes`.
    """
    shares: list[tuple[str, int, int | None]] = []
    for at, segment in enumerate(shown.segments):
        if segment.profile:
            divided = [(f"{each.size}c", each.size) for each in segment.compute]
            idle = segment.profile.compute_slices - sum(size for _, size in divided)
            rest = [("idle" if divided else segment.profile.name, idle)] if idle else []
            shares += [(name, size, at) for name, size in [*divided, *rest]]
    if shown.compute_free > 0:
        shares.append(("free", shown.compute_free, None))
    cell = _width((slices, name) for name, slices, _ in shares)
    cell = _narrowed(cell, sum(slices for _, slices, _ in shares) or 1, width and width - _MARGIN, least=3)
    lines: list[list[Cell]] = [[(f"{'compute':<{_MARGIN}}|", None)], [(f"{'slices':<{_MARGIN}}|", None)]]
    for name, slices, index in shares:
        for line, text in zip(lines, (name, str(slices)), strict=True):
            line += [(_padded(text, slices * cell - 1), index), ("|", None)]
    return lines


def left_out(shown: Picture) -> str:
    """One line: the profiles that have no place, crossed out; empty where there are none."""
    if not shown.missing:
        return ""
    cell = _width((profile.size or 1, f"x {written({profile.name: count})} x") for profile, count in shown.missing)
    drawn = (f"x {written({p.name: count})} ".ljust((p.size or 1) * cell - 1, "x") for p, count in shown.missing)
    return f"{'left out':<{_MARGIN}}|{'|'.join(drawn)}|"


def facts(shown: Picture) -> list[tuple[str, str]]:
    """Returns the used and the free resources, as pairs of a word and a sentence."""
    geometry = shown.geometry
    compute = f"{shown.compute_used} of {geometry.compute_slices} slices"
    if len(shown.placed) > 1:
        compute += f" ({' + '.join(str(profile.compute_slices) for profile in shown.placed)})"
    known = [profile.sm for profile in shown.placed if profile.sm is not None]
    if known:
        compute += f", {sum(known)} SM"
        if shown.sm_used is None:
            compute += f" in {len(known)} of {len(shown.placed)} partitions, unknown in the others"
    memory = f"{shown.memory_used} of {geometry.memory_slices} slices, {shown.memory_used_gb} GB in partitions"
    pairs = [("compute", compute), ("memory", memory), *_shares(shown)]
    pairs.append(("fits", ", ".join(shown.fitting) or "nothing more"))
    needed = required_driver((profile.name for profile in shown.placed), geometry)
    pairs.append(("driver", "unknown" if needed is None else f"{needed} or later"))
    if any(profile.expected for profile in shown.placed):
        pairs.append(("note", EXPECTED))
    return pairs


def _shares(shown: Picture) -> list[tuple[str, str]]:
    """Says of each GPU instance with compute instances who shares its memory, and what nobody has of it."""
    found = []
    for segment in shown.segments:
        if segment.profile and segment.compute:
            profile, count = segment.profile, len(segment.compute)
            who = (f"{count} slots share" if count > 1 else "1 slot has") + f" the {profile.memory_gb} GB"
            idle = profile.compute_slices - sum(each.size for each in segment.compute)
            unused = f"; {idle} of its compute slices in no slot" if idle else ""
            found.append(("shared", f"{who} of {profile.name} at {segment.start}: {sharing(segment)}{unused}"))
    return found


def tone(profile: Profile, geometry: Geometry) -> Tone:
    """Returns the look of a profile of this GPU: equal for profiles of one size, whatever their attributes."""
    return palette.tone(profile.name, profile.size, geometry.placement_units)


def mark(profile: Profile) -> str:
    """A word for what the attributes of the profile give or take: "media", "graphics"; empty for a plain one."""
    return _MARKS.get(profile.attributes, profile.attributes)


def render(shown: Picture) -> str:
    """Returns the whole picture as plain text."""
    drawn = ["".join(text for text, _ in line).rstrip() for line in [*boxes(shown), *compute_bar(shown)]]
    drawn += filter(None, [left_out(shown)])
    return "\n".join(drawn + [f"{word:<{_MARGIN}} {sentence}" for word, sentence in facts(shown)])


def _segments(layout: Sequence[Placement], geometry: Geometry) -> tuple[Segment, ...]:
    return tuple(
        Segment(start, size, None)
        if index is None
        else Segment(start, size, geometry.profile(layout[index].profile), layout[index].compute)
        for start, size, index in _spans(layout, geometry.placement_units or 0)
    )


def _spans(layout: Sequence[Placement], units: int) -> list[tuple[int, int, int | None]]:
    """Start, size and placement of every stretch of the grid; no placement where it is free."""
    found: list[tuple[int, int, int | None]] = []
    at = 0
    for index, placement in sorted(enumerate(layout), key=lambda each: each[1].start):
        if placement.start > at:
            found.append((at, placement.start - at, None))
        found.append((placement.start, placement.size, index))
        at = placement.start + placement.size
    if at < units:
        found.append((at, units - at, None))
    return found


def labels(shown: Picture) -> list[list[str]]:
    """The lines in the box of each segment: name, memory, slices, SMs, mark, compute instances; "free" in free room.

    All have as many lines: SMs where one partition's are known, marks where one has attributes.
    """
    columns = [[*_labels(segment.profile), sharing(segment)] for segment in shown.segments]
    kept = [row for row in range(len(columns[0])) if any(column[row].strip("? SM") for column in columns)]
    return [[column[row] for row in kept] for column in columns]


def sharing(segment: Segment) -> str:
    """Returns the compute instances that share a segment: "2c+1c", "1c*3"; empty where there are none."""
    return written(f"{size}c" for size in sorted((each.size for each in segment.compute), reverse=True))


def _labels(profile: Profile | None) -> list[str]:
    if profile is None:
        return ["free", "", "", "", ""]
    slices = f"{profile.compute_slices} slice" + ("s" if profile.compute_slices > 1 else "")
    return [profile.name, f"{profile.memory_gb} GB", slices, f"{profile.sm or '?'} SM", mark(profile)]


def _strip_cell(layout: Sequence[Placement]) -> int:
    return _width((placement.size, placement.name) for placement in layout)


def _width(texts: Iterable[tuple[int, str]]) -> int:
    """Returns the width of a placement unit, so that every text has room in its units."""
    return max([4, *(-(-(len(text) + 1) // size) for size, text in texts)])


def _narrowed(cell: int, units: int, width: int | None, *, least: int) -> int:
    """The width of a placement unit where all of them have *width* characters together, but not less than *least*."""
    return cell if width is None or units * cell + 1 <= width else max(least, (width - 1) // units)


def _padded(text: str, room: int) -> str:
    """*text* in the width *room*; one that is too long to its first dot or blank, or cut."""
    heads = (text, text.partition(".")[0], text.partition(" ")[0])
    return next((head for head in heads if len(head) <= room), text[:room]).ljust(room)


def _ruler(geometry: Geometry, cell: int) -> str:
    head = "".join(f"{unit:<{cell}}" for unit in range(geometry.placement_units or 0))
    return f"{'memory':<{_MARGIN}} {head.rstrip()}"
