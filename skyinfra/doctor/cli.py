"""The command ``skyinfra-runner doctor``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyinfra.errors.printable import printable
from skyinfra.protocol.findings import Finding

_MARKS = {"ok": "ok", "wrong": "WRONG", "unknown": "?"}


def add(commands: Any) -> None:
    """Adds the command."""
    text = "look at everything that tasks need on this machine, and say what to do; changes nothing"
    parser = commands.add_parser("doctor", help=text, description=f"{text}. Exit code 1 where something is wrong.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="compare with this node configuration, node.json")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Executes the command."""
    from skyinfra.doctor.examine import examine

    findings = examine(options.config)
    if options.json:
        print(json.dumps({"findings": [finding.to_json() for finding in findings]}, indent=2))
    else:
        print(printable(_text(findings)))
    return 1 if any(finding.result == "wrong" for finding in findings) else 0


def _text(findings: Sequence[Finding]) -> str:
    width = max((len(finding.what) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.result]:5}  {finding.what:{width}}  {finding.found}")
        if finding.result != "ok":
            lines.append(f"{'':5}  {'':{width}}  wanted: {finding.wanted}")
        if finding.to_do:
            lines.append(f"{'':5}  {'':{width}}  to do: {finding.to_do}")
    wrong = sum(finding.result == "wrong" for finding in findings)
    lines.append(f"{len(findings)} looked at, {wrong} wrong")
    return "\n".join(lines)
