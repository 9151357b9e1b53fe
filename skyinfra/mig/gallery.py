"""Pages of HTML with all complete layouts of a GPU model drawn. The same GPU gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from skyinfra.mig.drawing import EXPECTED, picture
from skyinfra.mig.geometry import Geometry
from skyinfra.mig.grid import Layout
from skyinfra.mig.layout import text
from skyinfra.mig.layouts import maximal_layouts, maximal_multisets, multisets
from skyinfra.mig.svg import STYLE, bars, patterns

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
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .875rem; }}
th, td {{ text-align: left; white-space: nowrap; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid var(--rule); }}
main {{ display: grid; gap: 1rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }}
article {{ padding: .75rem; border: 1px solid var(--rule); border-radius: .5rem; background: var(--card); }}
article p {{ margin: 0; font-size: .8125rem; color: var(--pale); }}
article svg {{ display: block; width: 100%; max-width: 30rem; margin-top: .5rem; }}
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(geometry: Geometry, profiles: Sequence[str]) -> str:
    """An HTML page with every layout of *profiles* beside whose partitions nothing more fits; complete in itself.

    Raises UnknownProfile, and MigNotSupported where the placements of this GPU are unknown.
    """
    layouts = maximal_layouts(geometry, profiles)
    maximal = set(maximal_multisets(geometry, profiles))
    order = multisets(layouts, geometry)
    named = [(names, layout) for layout in layouts for names in multisets([layout], geometry)]
    named.sort(key=lambda each: order.index(each[0]))
    products = f"{', '.join(geometry.products)}; driver {geometry.min_driver or 'unknown'} or later."
    counted = (
        f"{len(layouts)} layouts beside whose partitions nothing more fits, of {len(order)} combinations of profiles"
    )
    parts = [
        '<p><a href="index.html">All models</a></p>',
        f"<h1>{geometry.model}</h1>",
        f"<p>{escape(products)}</p>",
        f"<p>{counted}. The upper bar is the memory, on which a partition has a place; the lower one the compute",
        f"slices, which have none. <code>skyinfra mig show {geometry.model} LAYOUT</code> draws one larger.</p>",
        _table(("profile", "memory", "slices", "SM", "max", "starts at"), _profiles(geometry, profiles)),
    ]
    if any(geometry.profile(name).expected for name in profiles):
        parts.append(f'<p class="note">Note: {EXPECTED}.</p>')
    cards = (_card(names, layout, geometry, complete=names in maximal) for names, layout in named)
    body = "\n".join([patterns(), *parts, "<main>", *cards, "</main>"])
    return _PAGE.format(title=f"{geometry.model}: MIG layouts", style=STYLE, body=body)


def index(geometries: Iterable[Geometry]) -> str:
    """Returns an HTML page that lists the pages of these GPU models, which lie beside it as MODEL.html."""
    rows = [(f'<a href="{each.model}.html">{each.model}</a>', escape(", ".join(each.products))) for each in geometries]
    return _PAGE.format(title="MIG layouts", style="", body=f"<h1>MIG layouts</h1>\n{_table(('model', 'GPUs'), rows)}")


def _profiles(geometry: Geometry, names: Iterable[str]) -> Iterable[tuple[str, ...]]:
    for profile in map(geometry.profile, names):
        starts = " ".join(map(str, profile.starts or ()))
        numbers = (profile.compute_slices, profile.sm or "unknown", profile.max_count or "unknown")
        yield profile.name, f"{profile.memory_gb} GB", *map(str, numbers), starts


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table that scrolls by itself where the screen is narrow. *rows*: cells as HTML."""
    head = "".join(f"<th>{column}</th>" for column in columns)
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in [head, *lines])
    return f'<div class="scroll" tabindex="0" role="region" aria-label="profiles"><table>\n{body}\n</table></div>'


def _card(names: Sequence[str], layout: Layout, geometry: Geometry, *, complete: bool) -> str:
    shown = picture(layout, geometry)
    words = f"{len(layout)} partition{'' if len(layout) == 1 else 's'}"
    words += "" if complete else "; more fits when placed otherwise"
    return f"<article><h2>{text(names)}</h2><p>{words}</p>{bars(shown)}</article>"
