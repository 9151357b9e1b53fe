"""A node whose packages come as a company lets them: through a proxy, with TLS of its own authority."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import pytest
from booted_nodes import sources as bed_sources
from booted_nodes.fleet import Bed, Fleet
from booted_nodes.image import EXTRA
from tasks_on_nodes.booted import output_of, package

import skyinfra as sky

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-first")]


def test_packages_come_through_a_proxy_and_tls_of_the_company(
    bed: Bed, fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    address, asked = bed.network.address, []
    certificate = tmp_path / "certificate.pem"
    ca = bed_sources.authority(address, certificate)
    repository = tmp_path / "repository"
    bed_sources.debian_repository(repository, "bed-hello")
    with ExitStack() as stack:
        wheels, debian, proxy = (
            stack.enter_context(bed_sources.served(server))
            for server in (
                bed_sources.files(address, bed.packages, certificate),
                bed_sources.files(address, repository),
                bed_sources.proxy(address, asked.append),
            )
        )
        image = sky.Image(
            pip=EXTRA,
            apt=["bed-hello"],
            env={"GREETING": "it's $HOME"},
            run=["bed-hello > /var/lib/skyinfra/hello"],
            wheelhouse=f"https://{wheels}/",
            proxy=f"http://{proxy}",
            ca_certificate=ca,
        )
        made = fleet(bed.declare().model_copy(update={"image": image}))
        (made.head.root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] http://{debian}/ ./\n")
        made.boot()
        with made.connect() as pool:
            for name in EXTRA:
                assert package(name) >> pool == metadata.version(name)
            assert output_of("bed-hello; echo $GREETING; cat /var/lib/skyinfra/hello") >> pool == (
                "bed-hello is here\nit's $HOME\nbed-hello is here\n"
            )
    # Nothing went around the proxy that has a way through it.
    assert {f"CONNECT {wheels}", f"GET {debian}"} <= set(asked)
    assert "CA certificate" in made.head.read("/var/log/skyinfra/boot.jsonl")
