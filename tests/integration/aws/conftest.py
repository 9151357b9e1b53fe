from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moto_aws.cloud import Cloud, start
from moto_aws.roots import PROVIDER_VERSION, Root, words
from support import missing
from terraform_projects.mirrors import provider_mirror


@pytest.fixture(scope="session")
def provider(terraform_program: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The real hashicorp/aws provider: from a mirror on this machine, else from the registry."""
    root = Root(tmp_path_factory.mktemp("provider"), Cloud("http://127.0.0.1:1", tmp_path_factory.mktemp("x") / "none"))
    root.write({})
    result = root.run("init", "-no-color", "-input=false", check=False)
    if result.returncode != 0:
        mirror = provider_mirror()
        here = mirror and (mirror / "registry.terraform.io" / "hashicorp" / "aws" / PROVIDER_VERSION).is_dir()
        assert not here, result.stderr
        missing(f"hashicorp/aws {PROVIDER_VERSION}, in a mirror or from the registry ({words(result.stderr)[-300:]}),")


@pytest.fixture(scope="session")
def _server(provider: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    process, cloud = start(tmp_path_factory.mktemp("moto"))
    yield cloud
    process.communicate()
    assert process.returncode == 0


@pytest.fixture
def cloud(_server: Cloud) -> Iterator[Cloud]:
    """An AWS with nothing in it but what every account has."""
    _server.reset()
    yield _server


@pytest.fixture
def root(cloud: Cloud, tmp_path: Path) -> Root:
    return Root(tmp_path / "root", cloud)
