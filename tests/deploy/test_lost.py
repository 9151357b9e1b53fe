"""What the state of a stack says of its containers decides no program of this machine."""

from __future__ import annotations

from typing import Any

import pytest

import skyinfra as sky
from skyinfra.deploy import missing_nodes

MADE = {"node": "p-0", "labels": {}, "container": "skyinfra-p-1a2b-p-0", "engine": {"ENGINE": "podman", "HOST": ""}}


def test_what_a_container_was_made_with() -> None:
    assert missing_nodes._variables(MADE) == {"ENGINE": "podman", "HOST": "", "CONTAINER": "skyinfra-p-1a2b-p-0"}
    far = {**MADE, "engine": {"ENGINE": "docker", "HOST": "ssh://me@gpu1"}}
    assert missing_nodes._variables(far)["HOST"] == "ssh://me@gpu1"
    here = {**MADE, "engine": {"ENGINE": "podman", "HOST": "unix:///run/my/podman.sock"}}
    assert missing_nodes._variables(here)["HOST"] == "unix:///run/my/podman.sock"


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": {"ENGINE": "/tmp/evil", "HOST": ""}},
        {"engine": {"ENGINE": "docker", "HOST": "", "PATH": "/tmp/evil"}},
        {"engine": {"ENGINE": "docker", "HOST": "", "LD_PRELOAD": "/tmp/evil.so"}},
        {"engine": {"ENGINE": "docker", "HOST": "ssh://-oProxyCommand=touch"}},
        {"engine": {"ENGINE": "docker", "HOST": "ssh://me@-oProxyCommand=touch"}},
        {"engine": {"ENGINE": "docker", "HOST": "--config=/tmp/evil"}},
        {"engine": None},
        {"container": "--privileged"},
        {"container": "$(touch ran)"},
        {"container": ""},
    ],
    ids=str,
)
def test_anything_else_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(sky.InvalidManifest, match="state"):
        missing_nodes._variables({**MADE, **changed})
