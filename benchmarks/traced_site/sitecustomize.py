"""Is imported by each Python of a node whose tasks `benchmarks.hops` follows: its folder is on the path of that."""

from benchmarks import traced

traced.install()
