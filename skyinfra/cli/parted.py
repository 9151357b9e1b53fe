"""``skyinfra mig export | import``: mig-parted's configurations, and layouts for clusters and from listings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import yaml

from skyinfra import mig
from skyinfra.cli.options import Json
from skyinfra.errors import InvalidField, InvalidLayout, LayoutError, at
from skyinfra.mig.layout import OFF
from skyinfra.terminal import tables
from skyinfra.terminal.layouts import NamedGpu, read_gpu

app = typer.Typer()

# Memory and form at the end of a name of ours, which NVML's names have in other words, or not at all.
_VARIANT = re.compile(r"[-_](\d+gb|nvl|pcie|sxm|superchip|server|workstation|max-q|igpu).*$", re.IGNORECASE)


class ExportFormat(StrEnum):
    """For whom a layout is printed."""

    parted = "mig-parted"
    manager = "mig-manager"
    gres = "gres"
    plugin = "device-plugin"


@app.command()
def export(
    accelerator: Annotated[str, typer.Argument(metavar="ACCELERATOR", help='With its layout: "H100:8/3g.40gb".')],
    label: Annotated[str, typer.Option(help="Name of the configuration, for mig-parted.")] = "skyinfra",
    form: Annotated[ExportFormat, typer.Option("--format", help="For whom.")] = ExportFormat.parted,
) -> None:
    """Print a layout for mig-parted, mig-manager, Slurm or Kubernetes, whose device plugin is that of NVIDIA."""
    named, layouts = _declared(accelerator)
    if form in (ExportFormat.parted, ExportFormat.manager):
        entries, warnings = mig.parted_from_layouts(dict(enumerate(layouts)), named.geometry, len(layouts))
        _warn(warnings)
        text = mig.manager_text(entries, label) if form == ExportFormat.manager else mig.parted_text({label: entries})
    else:
        gpus = [None if layout is None else [place.name for place in mig.parts(layout)] for layout in layouts]
        types = [name for gpu in gpus for name in (gpu if gpu is not None else [_whole_type(named.name)])]
        text = mig.gres_declared(types) if form == ExportFormat.gres else mig.device_plugin(gpus)
    sys.stdout.write(text)


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A configuration file of NVIDIA mig-parted, or a listing.")
    ],
    config: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="Which of the file's configurations; without it, FILE is a listing."),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help='The GPUs of the node, such as "H100:8". Without it nothing is checked.')
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a layout of others as an accelerator string. From mig-parted's file, or `nvidia-smi mig -lgi`."""
    if config is None:
        import_listing(file, accelerator=accelerator, as_json=as_json)
    else:
        import_parted(file, label=config, accelerator=accelerator, as_json=as_json)


def _declared(accelerator: str) -> tuple[NamedGpu, list[mig.Layout | None]]:
    """The accelerator, and the layout of each GPU of a node; None is a whole GPU. Raises InvalidLayout without any."""
    named = read_gpu(accelerator)
    if named.declared is None:
        raise InvalidLayout("there is no layout to export", hint='Write it behind the accelerator: "H100:8/3g.40gb".')
    gpus = named.count or (len(named.declared.layouts) if isinstance(named.declared, mig.PerGpu) else 1)
    return named, [layout or None for layout in mig.resolve(named.declared, named.geometry, gpus)]


def _whole_type(name: str) -> str:
    """Returns the type of a whole GPU for Slurm: a part of the name that AutoDetect=nvml finds."""
    return mig.gres_type(_VARIANT.sub("", name))


def _without_layout(accelerator: str) -> NamedGpu:
    named = read_gpu(accelerator)
    if named.declared is not None:
        raise InvalidLayout("the layout comes from the file", field="--accelerator", given=accelerator)
    return named


def import_listing(file: Path, *, accelerator: str | None, as_json: bool) -> None:
    """Prints the listing of ``nvidia-smi mig -lgi`` as the accelerator string that keeps every partition in place."""
    text = _text(file)
    with at(str(file), InvalidLayout):
        found = mig.read_listing(text)
    if accelerator is None:
        written = {gpu: mig.placed_text(layout) for gpu, layout in found.items()}
        _show(None, written, (), as_json=as_json)
        return
    named = _without_layout(accelerator)
    gpus = named.count or max(found, default=0) + 1
    written = {}
    for gpu, layout in found.items():
        if gpu >= gpus:
            raise InvalidLayout(f"the node has {gpus} GPUs", field=str(file), given=f"GPU {gpu}")
        with at(f"{file}, GPU {gpu}", LayoutError):
            written[gpu] = mig.placed_text(mig.check_listed(layout, named.geometry))
    lost = [gpu for gpu in range(gpus) if gpu not in written]
    warnings = tuple(
        mig.PartedWarning(f"GPU {gpu}", "nothing is listed on it: taken for whole, MIG off") for gpu in lost
    )
    layouts = f"/{_joined([written.get(gpu, OFF) for gpu in range(gpus)])}" if written else ""
    _show(f"{named.name}:{gpus}{layouts}", written, warnings, as_json=as_json)


def _show(
    string: str | None, written: Mapping[int, str | None], warnings: Sequence[mig.PartedWarning], *, as_json: bool
) -> None:
    """Prints the accelerator *string*; where there is none, the layout of each GPU."""
    _warn(warnings)
    if as_json:
        tables.print_document({"accelerator": string, "layouts": written, "warnings": [str(each) for each in warnings]})
    elif string is not None:
        sys.stdout.write(f"{string}\n")
    else:
        sys.stdout.writelines(f"GPU {gpu}: {_said(layout)}\n" for gpu, layout in written.items())


def import_parted(file: Path, *, label: str, accelerator: str | None, as_json: bool) -> None:
    """Prints a configuration; with the accelerator of the node, as an accelerator string with the same meaning."""
    document, tree = _load(file)
    try:
        configs = mig.read_parted(document)
    except InvalidLayout as error:
        raise _located(error, file, tree) from None
    with at("--config", InvalidLayout):
        entries = mig.choose_config(configs, label)
    if accelerator is None:
        _show_entries(entries, as_json=as_json)
        return
    named = _without_layout(accelerator)
    gpus = named.count or 1
    try:
        with at(f"mig-configs.{label}", LayoutError):
            found, warnings = mig.layouts_from_parted(entries, named.geometry, gpus)
    except LayoutError as error:
        raise _located(error, file, tree) from None
    written = {gpu: _written(layout, named.geometry) for gpu, layout in found.items()}
    _show(_string(named.name, gpus, written), written, warnings, as_json=as_json)


def _show_entries(entries: tuple[mig.PartedEntry, ...], *, as_json: bool) -> None:
    """Prints the entries as they are: their GPU is not known, so that nothing is checked."""
    if as_json:
        tables.print_document({"entries": mig.parted_document({"": entries})["mig-configs"][""]})
        return
    for entry in entries:
        gpus = "every GPU" if entry.devices is None else f"GPU {', '.join(map(str, entry.devices))}"
        kind = f" of {', '.join(entry.device_filter)}" if entry.device_filter else ""
        counts = entry.mig_devices or ()
        layout = "+".join(f"{name}*{count}" for name, count in counts if count) if entry.mig_enabled else None
        sys.stdout.write(f"{gpus}{kind}: {_said(layout)}\n")


def _written(layout: mig.Layout | None, geometry: mig.Geometry) -> str | None:
    """Returns the layout as declared; "" is MIG without partitions, None no MIG."""
    return None if layout is None else mig.declared_text(layout, geometry)


def _said(layout: str | None) -> str:
    return "no MIG" if layout is None else layout or "MIG without partitions"


def _string(name: str, gpus: int, written: dict[int, str | None]) -> str | None:
    """Returns the accelerator string; None where a GPU stays as it is, or has MIG without partitions: there is none."""
    texts = [OFF if text is None else text for text in written.values()]
    if len(texts) < gpus or not all(texts):
        return None
    return f"{name}:{gpus}" if set(texts) == {OFF} else f"{name}:{gpus}/{_joined(texts)}"


def _joined(texts: Sequence[str]) -> str:
    """Returns the layout of each GPU, one where they are all the same."""
    return texts[0] if len(set(texts)) == 1 else "|".join(texts)


def _warn(warnings: Iterable[mig.PartedWarning]) -> None:
    for each in warnings:
        tables.say(f"warning: {each}", to_stderr=True)


def _refuse_doubles(node: yaml.Node | None) -> None:
    """Raises YAMLError for a key that is there twice, of which PyYAML would take the last without a word."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
            _refuse_doubles(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_doubles(value)


def _located(error: LayoutError, file: Path, tree: yaml.Node | None) -> LayoutError:
    """Returns the error with the file, and the line of its field, in front of its path."""
    line = _line(tree, error.field or "")
    place = f"{file}, line {line}" if line else str(file)
    error.field = f"{place}, {error.field}" if error.field else place
    return error


def _line(node: yaml.Node | None, path: str) -> int | None:
    """Returns the line of the field *path*, such as ``mig-configs.LABEL[0].devices``; labels may hold dots."""
    if not path and node is not None:
        return int(node.start_mark.line) + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in sorted(node.value, key=lambda pair: -len(str(pair[0].value))):
            name = str(key.value)
            if path == name:
                return int(key.start_mark.line) + 1
            if path.startswith((f"{name}.", f"{name}[")):
                return _line(value, path[len(name) :].removeprefix("."))
    form = re.match(r"\[(\d+)\]\.?", path)
    if form and isinstance(node, yaml.SequenceNode) and int(form[1]) < len(node.value):
        return _line(node.value[int(form[1])], path[form.end() :])
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidField(f"cannot be read: {error.strerror}", field="FILE", given=str(file)) from None
    except UnicodeDecodeError:
        raise InvalidField("is not UTF-8 text", field="FILE", given=str(file)) from None


def _load(file: Path) -> tuple[object, yaml.Node | None]:
    """Returns the document of a file, and its tree, which knows the lines."""
    text = _text(file)
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_doubles(tree)
        return yaml.safe_load(text), tree
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise InvalidLayout(f"not YAML: {getattr(error, 'problem', error)}", field=f"{file}{line}") from None
