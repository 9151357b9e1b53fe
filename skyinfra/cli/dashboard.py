"""``skyinfra dashboard``: the pages of the fleet's scheduler, in the browser of this machine."""

from __future__ import annotations

import sys
import time
import webbrowser

_LOOK_S = 1.0


def show(fleet: str, *, port: int, browser: bool) -> None:
    """Prints where the dashboard of *fleet* is, and keeps it there until it is interrupted.

    browser: open it, where a person watches. Raises what `Pool.dashboard` and ``connect`` raise.
    """
    from skyinfra.client import connect

    with connect(fleet) as pool:
        url = pool.dashboard(port)
        sys.stdout.write(f"The dashboard of {pool.manifest.fleet} is at {url} until you press Ctrl-C.\n")
        sys.stdout.flush()
        if browser and sys.stdout.isatty():
            webbrowser.open(url)
        while True:
            time.sleep(_LOOK_S)
