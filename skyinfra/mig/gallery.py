"""Pages of HTML with all complete layouts of a GPU model drawn. The same GPU gives the same bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from skyinfra.mig import palette
from skyinfra.mig.drawing import EXPECTED, mark, picture, tone
from skyinfra.mig.geometry import Geometry, Profile
from skyinfra.mig.grid import Layout
from skyinfra.mig.layout import text
from skyinfra.mig.layouts import maximal_layouts, maximal_multisets, multisets, plain_profiles
from skyinfra.mig.svg import STYLE, bars, patterns

# The PCI id at the end of a product's name, and what other programs call it.
_ID = re.compile(r" [0-9A-F]{4}(?: \([^()]*\))?$")
_TITLE = "MIG layouts"
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --ink: #1b1f24; --pale: #59636e; --ground: #f6f8fa; --card: #ffffff; --rule: #d1d9e0; --link: #0550ae; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6edf3; --pale: #9198a1; --ground: #010409; --card: #0d1117; --rule: #3d444d; --link: #79b8ff; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 90rem; color: var(--ink); background: var(--ground);
  font: 1rem/1.5 system-ui, sans-serif; }}
a {{ color: var(--link); }}
h1 {{ font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1rem; margin: 0; font-family: ui-monospace, monospace; overflow-wrap: anywhere; }}
p {{ margin: .5rem 0; max-width: 60rem; }}
.note {{ color: var(--pale); }}
table {{ border-collapse: collapse; font-size: .875rem; }}
th, td {{ text-align: left; white-space: nowrap; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid var(--rule); }}
article {{ padding: .75rem; border: 1px solid var(--rule); border-radius: .5rem; background: var(--card); }}
article p {{ margin: 0; font-size: .8125rem; color: var(--pale); }}
article svg {{ display: block; width: 100%; max-width: 30rem; margin-top: .5rem; }}
nav {{ display: flex; flex-wrap: wrap; gap: .25rem .5rem; }}
.look {{ display: inline-block; width: 1.5rem; height: 1rem; margin-right: .5rem; vertical-align: -.125rem;
  border: 1px solid var(--ink); border-radius: .1875rem; }}
section > h2, summary {{ font: 600 1.125rem/1.4 system-ui, sans-serif; margin-top: 1.5rem; }}
summary {{ cursor: pointer; }}
a.card {{ color: inherit; text-decoration: none; }}
a.card h2 {{ color: var(--link); text-decoration: underline; font-family: inherit; font-size: 1.125rem; }}
.cards {{ display: grid; gap: 1rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }}
@media (max-width: 30rem) {{
  .table {{ display: block; }} .table thead {{ display: none; }}
  .table tbody, .table tr {{ display: block; }}
  .table tr {{ padding: .5rem 0; border-bottom: 1px solid var(--rule); }}
  .table td {{ display: inline-block; border: 0; padding: 0 .75rem 0 0; white-space: normal; }}
  .table td[data-name]::before {{ content: attr(data-name) " "; color: var(--pale); }}
  .table td:first-child {{ display: block; font-weight: 600; }}
}}
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def pages(
    geometries: Sequence[Geometry],
    profiles: Mapping[str, Sequence[str]],
    names: Mapping[str, str],
    *,
    home: tuple[str, str] | None = None,
) -> dict[str, str]:
    """Returns the HTML pages by the names of their files: a list of these GPU models, and a page of each.

    profiles: by model, those whose layouts are drawn together; each of the others has layouts of its own below them.
    names: by model, what users write. home: the address and the name of a page above the list.
    Raises UnknownProfile, and MigNotSupported where the placements of a GPU are unknown.
    """
    found = {f"{each.model}.html": page(each, profiles[each.model], names[each.model], home) for each in geometries}
    return {"index.html": index(geometries, names, home), **found}


def page(geometry: Geometry, profiles: Sequence[str], name: str, home: tuple[str, str] | None = None) -> str:
    """Returns an HTML page with the layouts beside whose partitions nothing more fits; complete in itself."""
    layouts = maximal_layouts(geometry, profiles)
    order = multisets(layouts, geometry)
    counted = (
        f"{len(layouts)} layouts beside whose partitions nothing more fits, of {len(order)} combinations of profiles"
    )
    others = [profile for profile in geometry.profiles if profile.name not in profiles]
    parts = [
        patterns(),
        _way([*([home] if home else []), ("index.html", _TITLE)], name),
        "<main>",
        f"<h1>{escape(name)}</h1>",
        f"<p>{escape(_products(geometry))}; driver {geometry.min_driver or 'unknown'} or later.</p>",
        f"<p>{counted}. The upper bar is the memory, on which a partition has a place; the lower one the compute",
        f"slices, which have none. <code>skyinfra mig show {escape(name)} LAYOUT</code> draws one larger.</p>",
        _table(("profile", "memory", "slices", "SM", "max", "starts at"), _profiles(geometry)),
    ]
    if any(profile.expected for profile in geometry.profiles):
        parts.append(f'<p class="note">Note: {EXPECTED}.</p>')
    parts.append(_cards(_named(layouts, geometry), geometry, set(maximal_multisets(geometry, profiles))))
    parts += [_others(profile, geometry, profiles) for profile in others]
    body = "\n".join([*parts, "</main>"])
    return _PAGE.format(title=f"{escape(name)}: {_TITLE}", style=STYLE + palette.css(), body=body)


def index(geometries: Iterable[Geometry], names: Mapping[str, str], home: tuple[str, str] | None = None) -> str:
    """Returns an HTML page that shows a layout of each of these GPU models, whose pages lie beside it."""
    cards = []
    for each in geometries:
        layouts = maximal_layouts(each, plain_profiles(each))
        # The one with most kinds of profiles, and of those with most partitions.
        shown = max(layouts, key=lambda layout: (len({place.profile for place in layout}), len(layout)))
        words = f"{_products(each)}. {len(each.profiles)} profiles, {len(layouts)} layouts and more."
        cards.append(
            f'<a class="card" href="{each.model}.html"><article><h2>{escape(names[each.model])}</h2>'
            f"<p>{escape(words)}</p>{bars(picture(shown, each))}</article></a>"
        )
    way = _way([home], _TITLE) if home else ""
    text = "<p>Each GPU with one of its layouts; its page draws them all.</p>"
    body = "\n".join(
        [patterns(), way, "<main>", f"<h1>{_TITLE}</h1>", text, '<div class="cards">', *cards, "</div>", "</main>"]
    )
    return _PAGE.format(title=_TITLE, style=STYLE, body=body)


def _way(above: Iterable[tuple[str, str]], here: str) -> str:
    links = [f'<a href="{escape(url)}">{escape(words)}</a> <span aria-hidden="true">/</span>' for url, words in above]
    return f'<nav aria-label="pages above">{" ".join(links)} <span aria-current="page">{escape(here)}</span></nav>'


def _products(geometry: Geometry) -> str:
    return ", ".join(dict.fromkeys(_ID.sub("", product) for product in geometry.products))


def _named(layouts: Iterable[Layout], geometry: Geometry) -> list[tuple[tuple[str, ...], Layout]]:
    """Returns the layouts with the names of their profiles, those of one combination together."""
    found = [(multisets([layout], geometry)[0], layout) for layout in layouts]
    order = {names: place for place, names in enumerate(multisets([layout for _, layout in found], geometry))}
    return sorted(found, key=lambda each: order[each[0]])


def _cards(named: Iterable[tuple[Sequence[str], Layout]], geometry: Geometry, maximal: set[tuple[str, ...]]) -> str:
    cards = (_card(names, layout, geometry, complete=tuple(names) in maximal) for names, layout in named)
    return "\n".join(['<div class="cards">', *cards, "</div>"])


def _others(profile: Profile, geometry: Geometry, profiles: Sequence[str]) -> str:
    """Returns a folded part with one layout of each maximal combination that has this profile."""
    among = [*profiles, profile.name]
    maximal = {names for names in maximal_multisets(geometry, among) if profile.name in names}
    firsts: dict[tuple[str, ...], Layout] = {}
    for names, layout in _named(maximal_layouts(geometry, among), geometry):
        if names in maximal:
            firsts.setdefault(names, layout)
    word = mark(profile) or f"{profile.memory_gb} GB in {profile.compute_slices} compute slice"
    title = f"With {profile.name} ({word}): {len(firsts)} combination{'' if len(firsts) == 1 else 's'}"
    return f"<details open><summary>{escape(title)}</summary>{_cards(firsts.items(), geometry, maximal)}</details>"


def _profiles(geometry: Geometry) -> Iterable[tuple[str, ...]]:
    for profile in geometry.profiles:
        starts = " ".join(map(str, profile.starts or ()))
        numbers = (profile.compute_slices, profile.sm or "unknown", profile.max_count or "unknown")
        look = f'<span class="look {tone(profile, geometry).css_class}"></span>'
        yield f"{look}{profile.name}", f"{profile.memory_gb} GB", *map(str, numbers), starts


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table, which a narrow screen shows as a list. *rows*: cells as HTML."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = []
    for row in rows:
        cells = [f"<td>{row[0]}</td>"]
        cells += [f'<td data-name="{name}">{cell}</td>' for name, cell in zip(columns[1:], row[1:], strict=True)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join(['<table class="table">', f"<thead><tr>{head}</tr></thead>", "<tbody>", *body, "</tbody></table>"])


def _card(names: Sequence[str], layout: Layout, geometry: Geometry, *, complete: bool) -> str:
    shown = picture(layout, geometry)
    words = f"{len(layout)} partition{'' if len(layout) == 1 else 's'}"
    words += "" if complete else "; more fits when placed otherwise"
    return f"<article><h2>{text(names)}</h2><p>{words}</p>{bars(shown)}</article>"
