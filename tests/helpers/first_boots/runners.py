"""Wheels of runners that say hello."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def wheel(folder: Path, name: str = "skyinfra", requirements: str | None = None, needs: str | None = None) -> Path:
    """A runner that says hello; *requirements*: what it brings with hashes; *needs*: what its metadata asks for."""
    info = f"{name}-0.1.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n" + (f"Requires-Dist: {needs}\n" if needs else "")
    files = {
        f"greeting_of_{name}.py": b"def main() -> None:\n    print('hello')\n",
        f"{info}/METADATA": about.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-runner = greeting_of_{name}:main\n".encode(),
    }
    if requirements is not None:
        files[f"{info}/requirements.txt"] = requirements.encode()
    rows = []
    for file, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{file},sha256={digest},{len(data)}\n")
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)
    return path
