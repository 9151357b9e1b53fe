"""The fake driver's binary interface, held against NVIDIA's own nvml.h of two versions."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from fake_nvml import build
from support import ROOT, missing

from skyinfra import mig

FAKE = ROOT / "tests" / "fake_nvml"
NEWEST = "nvidia-nvml-dev"
PACKAGES = (NEWEST, "nvidia-nvml-dev-cu12")

# What 12.9 has not, and the numbers that were smaller then.
NEWER = {"nvmlGpuFabricInfo_v3_t", "nvmlGpuFabricInfo_v3", "nvmlDeviceGetGpuInstanceProfileInfoByIdV"}
GROWN = {
    "NVML_GPM_METRIC_MAX": "210",
    "NVML_GPU_INSTANCE_PROFILE_COUNT": "17",
    "NVML_COMPUTE_INSTANCE_PROFILE_COUNT": "8",
}


def header(package: str) -> Path:
    """The nvml.h that *package* brings."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(file.locate()) for file in files if file.name == "nvml.h"]
    if not found:
        missing(f"nvml.h of PyPI's {package} (extra dev)")
    return found[0]


def compile_with(package: str, folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    if build.compiler() is None:
        missing("a C compiler (gcc)")
    (folder / "held.c").write_text(source)
    command = [
        build.compiler() or "",
        "-std=c11",
        "-Werror",
        f"-I{header(package).parent}",
        f"-I{FAKE}",
        *options,
        "held.c",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def fields(body: str) -> list[str]:
    """The fields that the body of a structure declares, those of structures in it as ``outer.inner``."""
    names: list[str] = []

    def inner(match: re.Match[str]) -> str:
        names.extend(f"{match[2]}.{name}" for name in fields(match[1]))
        return f"int {match[2]};"

    flat = re.sub(r"struct \{([^{}]*)\} (\w+);", inner, body)
    for declared in flat.split(";"):
        names += [
            name for part in declared.split(",") for name in re.findall(r"(\w+(?:\[\])?)(?:\[\d+\]|\[\w+\])?\s*$", part)
        ]
    return names


def measures() -> list[tuple[str, str]]:
    """The numbers of abi.h, as pairs of a name and a C expression for its number."""
    text = re.sub(r"/\*.*?\*/", "", (FAKE / "abi.h").read_text(), flags=re.DOTALL)
    found = []
    for body, structure in re.findall(r"typedef struct \{\n(.*?)\n\} (\w+);", text, re.DOTALL):
        names = fields(body)
        if not any(name.endswith("[]") for name in names):
            found.append((structure, f"sizeof({structure})"))
        for name in names:
            field, one = name.removesuffix("[]"), "[0]" if name.endswith("[]") else ""
            at = f"offsetof({structure}, {field})"
            found.append((f"{structure}.{field}", f"1000 * {at} + sizeof((({structure} *)0)->{field}{one})"))
    numbers = re.findall(r"^    (NVML_\w+) = ", text, re.MULTILINE) + re.findall(
        r"^#define (nvml\w+) ", text, re.MULTILINE
    )
    return found + [(number, number) for number in numbers]


def printed(package: str, folder: Path, include: str, wanted: list[tuple[str, str]]) -> dict[str, str]:
    """The numbers of *wanted* where *include* says what the names mean."""
    lines = [f'printf("%s %llu\\n", "{name}", (unsigned long long)({number}));' for name, number in wanted]
    source = (
        f"#include <stddef.h>\n#include <stdio.h>\n#include {include}\nint main(void) {{\n{chr(10).join(lines)}\n}}\n"
    )
    done = compile_with(package, folder, source, "-o", "held")
    assert done.returncode == 0, done.stderr
    output = subprocess.run([folder / "held"], capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in output.splitlines())


def prototypes() -> dict[str, str]:
    """The functions that the fake exports, each with its parameters."""
    text = (FAKE / "api.c").read_text()
    plain = re.findall(r"^EXPORT (?:nvmlReturn_t |const char \*)(\w+)(\([^()]*\));", text, re.MULTILINE)
    return dict(plain + re.findall(r"^API\((\w+),\s*(\([^()]*\)),", text, re.MULTILINE))


@pytest.mark.parametrize("package", PACKAGES)
def test_structures_and_numbers(package: str, tmp_path: Path) -> None:
    lacking = set() if package == NEWEST else NEWER
    wanted = [(name, number) for name, number in measures() if name.partition(".")[0] not in lacking]
    assert len(wanted) > 150
    ours = printed(package, tmp_path, '"abi.h"', wanted)
    theirs = printed(package, tmp_path, "<nvml.h>", wanted)
    differing = {name: number for name, number in theirs.items() if ours[name] != number}
    assert differing == ({} if package == NEWEST else GROWN)
    assert all(int(ours[name]) >= int(number) for name, number in differing.items())


@pytest.mark.parametrize("package", PACKAGES)
def test_prototypes(package: str, tmp_path: Path, fake_driver: Path) -> None:
    """Declared a second time with other parameters, the compiler refuses a function."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", fake_driver / build.LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    ours = prototypes()
    assert set(ours) == set(re.findall(r" T (nvml\w+)", listed))
    known = {name: parameters for name, parameters in ours.items() if package == NEWEST or name not in NEWER}
    # The first says that the header has the function at all.
    lines = [f"extern __typeof__({name}) {name};" for name in known]
    returned = {"nvmlErrorString": "const char *"}
    lines += [f"{returned.get(name, 'nvmlReturn_t')} {name}{parameters};" for name, parameters in known.items()]
    source = "#define NVML_NO_UNVERSIONED_FUNC_DEFS\n#include <nvml.h>\n" + "\n".join(lines)
    done = compile_with(package, tmp_path, source, "-fsyntax-only", "-Wno-deprecated-declarations")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "prototype", ["nvmlReturn_t nvmlDeviceGetCount_v2(int *count);", "extern __typeof__(nvmlNo) nvmlNo;"]
)
def test_a_wrong_prototype_would_be_found(prototype: str, tmp_path: Path) -> None:
    done = compile_with(
        NEWEST, tmp_path, f"#include <nvml.h>\n{prototype}\n", "-fsyntax-only", "-Wno-deprecated-declarations"
    )
    assert done.returncode == 1
    assert "nvml" in done.stderr


def test_the_numbers_of_profiles_are_those_of_the_header(tmp_path: Path) -> None:
    """skyinfra's own table: which profile answers to which number of NVML's enumeration."""
    suffixes = {"": "", "+me": "_REV1", "+gfx": "_GFX", "-me": "_NO_ME", "+me.all": "_ALL_ME"}
    named = {}
    for model in mig.models():
        geometry = mig.geometry(model)
        for profile in geometry.profiles:
            if profile.nvml_enum is None:
                continue
            plain = profile.attributes or profile.name in mig.plain_profiles(geometry)
            suffix = suffixes[profile.attributes] if plain else "_REV2"
            named[f"NVML_GPU_INSTANCE_PROFILE_{profile.compute_slices}_SLICE{suffix}"] = str(profile.nvml_enum)
    assert printed(NEWEST, tmp_path, "<nvml.h>", [(name, name) for name in named]) == named
