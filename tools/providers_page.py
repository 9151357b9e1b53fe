"""Writes the tables of docs/providers.md from the data files of the providers: ``python -m tools.providers_page``."""

from __future__ import annotations

from pathlib import Path

from skyinfra.providers import Data, kinds, read

PAGE = Path(__file__).resolve().parents[1] / "docs" / "providers.md"
BEGIN, END = "<!-- begin: python -m tools.providers_page -->\n", "<!-- end -->\n"
BEGIN_VERIFIED = "<!-- begin: verified, python -m tools.providers_page -->\n"
_COLUMNS = (
    "provider",
    "nodes",
    "set up by",
    "the runner arrives",
    "MIG by",
    "spot",
    "notice",
    "groups",
    "RDMA",
    "the head is found by",
    "tested",
)
_VERIFIED = (
    "provider",
    "images and drivers by",
    "names by",
    "errors: causes, quotations",
    "applied by",
    "against",
    "last",
)
_FORMS = {"node.json": "their configuration", "script": "a startup script", "container": "the entry of the container"}
_BY = {"tenant": "the node's runner", "provider": "the provider", "nobody": "nobody"}
_DELIVERY = {
    "bucket": "from a bucket",
    "metadata": "in the metadata",
    "ssh": "over SSH",
    "index": "from an index",
    "mount": "from this machine",
}


def table() -> str:
    """The table, a row for each provider."""
    return _written(_COLUMNS, [_row(read(kind)) for kind in kinds()])


def verified() -> str:
    """The table of what is proven, a row for each provider."""
    return _written(_VERIFIED, [_verified(read(kind)) for kind in kinds()])


def _written(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ("---",) * len(columns), *rows))


def _verified(data: Data) -> tuple[str, ...]:
    facts, quotes = data.verified, sum(len(row.get("quotes", ())) for row in data.errors)
    errors = f"{len(data.errors)}, {quotes}" if data.errors else "none of an API"
    applied = (
        (facts.applied, facts.against, facts.date) if facts.applied else ("never; the mock of its schema alone", "", "")
    )
    return (f"`{data.kind}`", facts.images, facts.names, errors, *applied)


def _row(data: Data) -> tuple[str, ...]:
    traits = data.traits
    return (
        f"`{data.kind}`",
        data.about.nodes,
        _FORMS.get(data.boot.form, data.boot.form),
        _DELIVERY[data.boot.delivery],
        _BY[traits.partitioned_by],
        {"no": "no", "flag": "yes", "bid": "by a bid"}[traits.spot],
        "yes" if traits.preemption_notice else "no",
        "yes" if traits.groups else "no",
        ", ".join(sorted({row.network for row in data.fabrics if row.network})) or "no",
        data.about.head,
        data.about.tested,
    )


def written(page: str) -> str:
    """*page* with the tables as they are now."""
    for begin, content in ((BEGIN, table()), (BEGIN_VERIFIED, verified())):
        before, _, rest = page.partition(begin)
        page = before + begin + content + END + rest.partition(END)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
