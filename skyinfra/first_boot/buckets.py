"""The operation on folders of buckets; see `operations`. Only nodes of pools that mount some have it.

rclone mounts them: it is in Debian and Ubuntu, speaks to S3 and Cloud Storage with the role of the machine, and writes.
Its copies of files that are not uploaded yet outlive it (https://rclone.org/commands/rclone_mount/, read 2026-11-26).
"""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .programs import Failed, command, output, read, replace


@dataclass(frozen=True)
class _Service:
    """How rclone reaches what stores buckets: its name there, its settings; whose rights it has, and which it needs."""

    remote: str
    settings: dict[str, str]
    whose: str
    rights: str


_SERVICES = {
    "s3": _Service(
        "s3",
        # A file that grows as it is written is sent in parts, of which S3 takes 10,000.
        {"S3_PROVIDER": "AWS", "S3_ENV_AUTH": "1", "S3_NO_CHECK_BUCKET": "1", "S3_CHUNK_SIZE": "32M"},
        "role",
        "s3:ListBucket, s3:GetObject; to write s3:PutObject and s3:DeleteObject",
    ),
    "gs": _Service(
        "gcs",
        # Versions before 1.61 ask the machine without being told to. Buckets with uniform access take no lists of who
        # may do what with an object, and those without need none.
        {"GCS_ENV_AUTH": "1", "GCS_NO_CHECK_BUCKET": "1", "GCS_BUCKET_POLICY_ONLY": "1"},
        "service account",
        "roles/storage.objectViewer; to write roles/storage.objectUser",
    ),
}
_UNIT = """\
[Unit]
Description=skyinfra: {url} at {mount}
Wants=network-online.target
After=network-online.target
Before=skyinfra-runner.service
StartLimitIntervalSec=0
[Service]
Type=notify
Environment={environment}
ExecStartPre=-fusermount3 -uz {mount}
ExecStart=rclone mount {remote} {mount} --allow-other --uid={uid} --gid={gid} --umask=022 --use-server-modtime \
--dir-cache-time=10s {options}
Restart=always
RestartSec=2
OOMScoreAdjust=-900
"""
_OPTIONS = {
    "read": "--read-only",
    "write": "--vfs-cache-mode=off",
    # Where root keeps the copies: tasks see them at the mount alone. Another machine does not have those that are not
    # uploaded, so that a unit that ends waits for them while its rclone runs; rclone does not.
    "cached": """--vfs-cache-mode=full --vfs-cache-max-size={cache_gb}G --cache-dir=/var/cache/{name}
ExecStop=/bin/sh -c "while kill -0 ${{MAINPID}} && grep -rqs 'Dirty.: true' /var/cache/{name}/vfsMeta; do sleep 1; done"
TimeoutStopSec=600""",
}


@dataclass(frozen=True)
class Bucket:
    """The folder *url* of a bucket, as ``s3://NAME/PREFIX``, at *mount*, where *user* is the owner of all files.

    mode: "read"; "write": a file is in the bucket when it is closed; "cached": through copies of up to *cache_gb* on
    the disk. unit: the path of the unit that mounts it.
    """

    url: str
    mount: str
    mode: str
    cache_gb: int
    user: str
    unit: str

    @property
    def _name(self) -> str:
        return Path(self.unit).name

    @property
    def _service(self) -> _Service:
        return _SERVICES[self.url.partition("://")[0]]

    @property
    def _remote(self) -> str:
        return f":{self._service.remote}:{self.url.partition('://')[2]}"

    @property
    def _settings(self) -> dict[str, str]:
        own = {f"RCLONE_{name}": value for name, value in self._service.settings.items()}
        return {"RCLONE_CONFIG": "/dev/null", **own}

    def _active(self) -> bool:
        return output("systemctl", "is-active", self._name) == "active"

    def _lacks_files(self) -> bool:
        """Returns whether there is nothing to read."""
        return self.mode == "read" and not any(Path(self.mount).iterdir())

    def done(self) -> bool:
        same = Path(self.unit).exists() and read(self.unit) == self._text()
        return same and self._active() and os.path.ismount(self.mount) and not self._lacks_files()

    def do(self) -> None:
        if not Path("/dev/fuse").exists():
            command("modprobe", "fuse")
        if not self._active():
            # What is left of a mount whose program was killed: nobody reaches it.
            output("fusermount3", "-uz", self.mount)
            folder = Path(self.mount)
            folder.mkdir(parents=True, exist_ok=True)
            if folder.is_symlink() or os.path.ismount(self.mount) or any(folder.iterdir()):
                raise Failed(f"{self.mount} has files, which {self.url} would hide: mount it elsewhere")
        # Below a prefix that nobody has, so that no long list is fetched.
        self._ask("list", ".skyinfra/", "lsf", "--max-depth=1")
        if self.mode != "read":
            # What cannot be written is said now, and not at the end of the first task.
            name = f".skyinfra-{os.uname().nodename}"
            self._ask("write to", name, "rcat")
            self._ask("delete from", name, "deletefile")
        replace(self.unit, self._text())
        command("systemctl", "daemon-reload")
        try:
            command("systemctl", "restart", self._name)
        except Failed:
            raise Failed(f"rclone: {output('journalctl', '-qn1', '-ocat', '-trclone')}") from None
        if self._lacks_files():
            raise Failed(f"{self.url} has no files: is it written so?")

    def _ask(self, what: str, name: str, *arguments: str) -> None:
        limits = ("--retries=1", "--low-level-retries=2", "--contimeout=10s", "--timeout=30s")
        command = ["rclone", *arguments, f"{self._remote}/{name}", *limits]
        # As the unit has it: no proxy, and no certificates, which it would not read.
        environment = {"PATH": os.environ["PATH"], **self._settings}
        done = subprocess.run(command, env=environment, input=b"skyinfra", stderr=subprocess.PIPE, check=False)
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").split())[-300:]
            if "directory not found" in said:
                said = "there is no such bucket"
            elif "403" in said:
                said += f" (it needs {self._service.rights})"
            raise Failed(f"the {self._service.whose} of this machine cannot {what} {self.url}: {said}")

    def _text(self) -> str:
        owner, name = pwd.getpwnam(self.user), self._name.split(".")[0]
        return _UNIT.format(
            **vars(self),
            remote=self._remote,
            environment=" ".join("=".join(each) for each in self._settings.items()),
            uid=owner.pw_uid,
            gid=owner.pw_gid,
            options=_OPTIONS[self.mode].format(cache_gb=self.cache_gb, name=name),
        )


OPERATIONS = {"bucket": Bucket}
