"""The files of a node's first boot, and the three forms in which they reach it: one source for all of them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from skyinfra.bootstrap import bundled, places, program, steps
from skyinfra.bootstrap.quoting import quoted
from skyinfra.compiler import Deployment
from skyinfra.errors import InvalidField
from skyinfra.protocol.nodeconfig import SETUP_S, UNHEARD_S, NodeConfig

if TYPE_CHECKING:
    from jinja2 import Environment, Template

Form = Literal["cloud-config", "script", "container"]
FORMS: tuple[Form, ...] = get_args(Form)

# A machine of an elastic pool whose steps still fail that long after its start ends, before there is a runner. Until
# then a person may look at it, and they are done again every half minute. Its group removes what does not run:
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/health-checks-overview.html (2026-11-26).
_FAILED_S = 1800
_BOOT_UNIT, _REPORT_UNIT = "skyinfra-boot.service", "skyinfra-report.service"
_TEMPLATES: dict[Form, str] = {
    "cloud-config": "cloud-config.yaml.j2",
    "script": "startup.sh.j2",
    "container": "container.sh.j2",
}


@dataclass(frozen=True)
class NodeFile:
    """A file on a node. mode: in octal, such as ``0644``."""

    path: str
    mode: str
    content: str


def files(deployment: Deployment, config: NodeConfig) -> list[NodeFile]:
    """Returns every file of a machine that has systemd.

    Of the units only those that there have to be before the runner is; it brings the others (`skyinfra/node/units`).
    """
    started = ["skyinfra-partition.service", "skyinfra-partition.path", "skyinfra-runner.service"]
    started.append("skyinfra-upgrade.path")
    data = deployment.pool.provider.data
    traits = data.traits
    if config.head and traits.layout_channel == "metadata":
        started.append("skyinfra-watch.service")
    if traits.preemption_notice is not None:
        started.append("skyinfra-interrupt.service")
    if not config.scheduler_only:
        started.append("skyinfra-metrics.service")
    composed = steps.compose(deployment, config, units=tuple(started))
    pool = deployment.pool
    mounted = frozenset(name for name, given in (("volumes", pool.volumes), ("buckets", pool.mounts)) if given)
    carried = program.modules(data.boot.delivery, mounted=mounted)
    return [
        NodeFile(
            places.SLICE if config.slice_hosts else places.CONFIG,
            "0644",
            replace(config, folder=places.FOLDER).dumps() + "\n",
        ),
        NodeFile(places.STEPS, "0644", steps.document(composed, config, report_unit=_REPORT_UNIT)),
        *(NodeFile(f"{places.PROGRAM}/{name}", "0644", text) for name, text in carried),
        NodeFile(f"{places.UNITS}/{_BOOT_UNIT}", "0644", _unit(_BOOT_UNIT, _ends_s(config))),
        NodeFile(f"{places.UNITS}/{_REPORT_UNIT}", "0644", _unit(_REPORT_UNIT)),
    ]


def _ends_s(config: NodeConfig) -> int:
    """Returns after how many seconds a machine ends that could not be set up; 0 for never. It has no runner, which
    would end it otherwise."""
    if config.node_idle_seconds:
        return _FAILED_S
    ends = (SETUP_S if config.idle_seconds else 0, config.lifetime_seconds, UNHEARD_S if config.budget else 0)
    return int(min((seconds for seconds in ends if seconds), default=0))


def render(found: Sequence[NodeFile], form: Form, *, config: NodeConfig | None = None) -> str:
    """*found* as one text in that form. A container has no systemd: no units, and no step that starts them.

    config: of the node, where its number follows the work.
    """
    if form == "container":
        found = [_without_units(file) for file in found if not file.path.startswith(places.UNITS)]
    values = {"files": found, "boot_unit": _BOOT_UNIT, "places": places, "config": config}
    return template(_TEMPLATES[form]).render(values)


def read(text: str) -> list[NodeFile]:
    """Returns the files that a cloud-config holds. Raises `InvalidField` for any other text."""
    import yaml  # only for who asks: a synth needs none

    # In C where PyYAML has it: ten times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load(text, loader) if text.startswith("#cloud-config\n") else None  # noqa: S506 - a safe one
    if not isinstance(document, dict) or "write_files" not in document:
        raise InvalidField("these user data are no cloud-config", hint="Only cloud nodes are set up at a first boot.")
    return [NodeFile(file["path"], file["permissions"], file["content"]) for file in document["write_files"]]


def written(text: str) -> dict[str, str]:
    """The files that user data write, by their paths; those of a script too, which cannot be made another form."""
    if not text.startswith("#!"):
        return {file.path: file.content for file in read(text)}
    put = r"^put \d+ (\S+) ((?:'[^']*'|\"'\")+|\S+)$"
    return {path: shlex.split(content)[0] for path, content in re.findall(put, text, re.MULTILINE)}


def _without_units(file: NodeFile) -> NodeFile:
    if file.path != places.STEPS:
        return file
    document = json.loads(file.content)
    document["report_unit"] = None
    document["steps"] = [step for step in document["steps"] if not _of_machine(step)]
    return NodeFile(file.path, file.mode, json.dumps(document, separators=(",", ":")) + "\n")


def _of_machine(step: dict[str, Any]) -> bool:
    """Returns whether *step* needs systemd or disks. A volume of a container is mounted before it starts."""
    disk = step["operation"] == "volume" and step["arguments"]["devices"][0].startswith("/dev/")
    return disk or step["operation"] in ("units", "scratch")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not for nodes that take a node.json

    environment = Environment(  # noqa: S701 - not HTML
        loader=FileSystemLoader(bundled.folder("templates", "node")),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["yaml"] = quoted
    environment.filters["sh"] = shlex.quote
    environment.filters["heredoc"] = heredoc
    environment.filters["pod"] = pod
    return environment


@cache
def _unit(name: str, ends_s: int = 0) -> str:
    """Returns the unit without its comments, for which user data have no room. *ends_s*: so many seconds after its
    start a machine ends that could not be set up; 0 for never."""
    values = {name.lower(): value for name, value in vars(places).items() if isinstance(value, str)}
    text = template(f"{name}.j2").render(values, ends=ends_s)
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def template(name: str) -> Template:
    """Returns the template *name* of templates/node."""
    return _environment().get_template(name)


def pod(text: str) -> str:
    """Returns *text* for `env` and `args` of a container, where Kubernetes replaces ``$(NAME)`` and makes ``$$`` one.

    See kubernetes/kubernetes third_party/forked/golang/expansion/expand.go, read 2026-11-25.
    """
    return text.replace("$", "$$")


def heredoc(text: str) -> str:
    """Returns *text* as it stands in a here-document in which the shell replaces variables."""
    return re.sub(r"[\\$`]", r"\\\g<0>", text)
