"""The commands by what they are for, each with two examples: the order of the help, and its last lines."""

from __future__ import annotations

# Groups of commands; those of a subgroup, such as "mig show", stand in the order of the table.
GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "synth", "plan", "deploy", "upgrade", "destroy", "completion"),
    "Run": ("run", "jobs", "put", "get", "exec", "ssh", "port-forward", "open"),
    "Look": ("status", "top", "logs", "doctor", "dashboard", "manifest"),
    "Plan": ("recommend", "offers", "mig", "preflight", "iam", "render"),
}

EXAMPLES: dict[str, tuple[str, str]] = {
    "init": ("skyinfra init my-project", "skyinfra init my-tour --example tour"),
    "synth": ("skyinfra synth", "skyinfra -C my-project synth --json"),
    "plan": ("skyinfra plan", "skyinfra plan my-stack --detailed-exitcode"),
    "deploy": ("skyinfra deploy", "skyinfra deploy my-stack --auto-approve --json"),
    "upgrade": ("skyinfra upgrade my-stack/pool", "skyinfra upgrade my-stack/pool --drain 60 --auto-approve"),
    "destroy": ("skyinfra destroy", "skyinfra destroy my-stack --auto-approve"),
    "completion": ("skyinfra completion bash >> ~/.bashrc", "skyinfra completion fish"),
    "run": (
        "skyinfra run my-stack/pool train.py --epochs 3",
        "skyinfra run my-stack/pool --torchrun --nodes 2 train.py",
    ),
    "put": ("skyinfra put my-stack/pool data/ inputs", "skyinfra put my-stack/pool vocab.txt --node pool-1"),
    "get": ("skyinfra get my-stack/pool checkpoints --node pool-1", "skyinfra get my-stack/pool out.csv results/"),
    "exec": ("skyinfra exec my-stack/pool -- nvidia-smi", "skyinfra exec my-stack/pool pool-1 -- df -h /"),
    "ssh": ("skyinfra ssh my-stack/pool", "skyinfra ssh my-stack/pool pool-1 --user ubuntu"),
    "port-forward": (
        "skyinfra port-forward my-stack/pool pool-0 8888",
        "skyinfra port-forward my-stack/pool pool-1 9000:6006 8080",
    ),
    "open jupyter": (
        "skyinfra open jupyter my-stack/pool",
        "skyinfra open jupyter my-stack/pool --profile 3g.40gb --no-browser",
    ),
    "status": ("skyinfra status", "skyinfra status my-stack --json"),
    "top": ("skyinfra top my-stack/pool", "skyinfra top my-stack/pool pool-1 --interval 5"),
    "logs": ("skyinfra logs my-stack/pool --follow", "skyinfra logs my-stack/pool pool-1 --boot"),
    "doctor": ("skyinfra doctor my-stack/pool", "skyinfra doctor my-stack/pool pool-1 --json"),
    "dashboard": ("skyinfra dashboard my-stack/pool", "skyinfra dashboard my-stack/pool --port 8787 --no-browser"),
    "manifest": (
        "skyinfra manifest my-stack/pool > fleet.json",
        "skyinfra manifest my-stack/pool | ssh gpu-user@laptop 'umask 077; cat > fleet.json'",
    ),
    "recommend": (
        "skyinfra recommend llama-3-70b --dtype fp8",
        "skyinfra recommend --params 13e9 --task lora --provider aws",
    ),
    "offers": ("skyinfra offers H100:8", "skyinfra offers A100-80GB,H100 --spot --max-price 20 --provider aws"),
    "preflight": ("skyinfra preflight", "skyinfra preflight my-stack --json"),
    "iam": ("skyinfra iam", "skyinfra iam my-stack > policy.json"),
    "render": ("skyinfra render --out rendered", "skyinfra render . --format sbatch --out jobs"),
    "mig show": ('skyinfra mig show H100 "3g.40gb+2g.20gb+1g.10gb*2"', "skyinfra mig show A30 1g.6gb --svg a30.svg"),
    "mig check": ("skyinfra mig check H100 3g.40gb*2", "skyinfra mig check H100:8/3g.40gb --driver 535.161.07"),
    "mig plan": ("skyinfra mig plan my-stack/pool", "skyinfra mig plan my-stack/pool 3g.40gb+1g.10gb*3"),
    "mig advise": ("skyinfra mig advise my-stack/pool", "skyinfra mig advise my-stack/pool --save tasks.csv --json"),
    "mig pack": ('skyinfra mig pack "1g.10gb*20, 3g.40gb*4"', 'skyinfra mig pack ">=18GB*6" --provider aws --spot'),
    "mig profiles": ("skyinfra mig profiles H100", "skyinfra mig profiles A100-40GB --json"),
    "mig layouts": ("skyinfra mig layouts H100", "skyinfra mig layouts A30 --all-profiles"),
    "mig gallery": ("skyinfra mig gallery --out pages", "skyinfra mig gallery --out pages H100 A100-80GB"),
    "mig export": (
        "skyinfra mig export H100:8/3g.40gb --label mixed",
        "skyinfra mig export H100:8/3g.40gb --format gres",
    ),
    "mig import": (
        "skyinfra mig import config.yaml --config all-1g.10gb --accelerator H100:8",
        "skyinfra mig import listing.txt",
    ),
    "jobs list": ("skyinfra jobs my-stack/pool", "skyinfra jobs list my-stack/pool --json"),
    "jobs logs": ("skyinfra jobs logs my-stack/pool train-20", "skyinfra jobs logs my-stack/pool train-20 --follow"),
    "jobs keep": ("skyinfra jobs keep my-stack/pool", "skyinfra -C my-project jobs keep my-stack/pool"),
    "jobs cancel": ("skyinfra jobs cancel my-stack/pool train-20", "skyinfra jobs cancel my-stack/pool 3f9c"),
    "jobs fetch": (
        "skyinfra jobs fetch my-stack/pool train-20 results/",
        "skyinfra jobs fetch my-stack/pool train-20 --pattern '*.csv'",
    ),
    "jobs give": (
        "skyinfra jobs give my-stack/pool train-20",
        "skyinfra jobs give my-stack/pool train-20 --secret HF_TOKEN=@token.txt",
    ),
    "jobs result": (
        "skyinfra jobs result my-stack/pool train-20",
        "skyinfra jobs result my-stack/pool train-20 --output loss.pickle --notify SLACK_URL",
    ),
}


def ordered(prefix: str, names: list[str]) -> list[str]:
    """Returns the commands *names* of the group *prefix*, empty for the first one, in the order of the tables."""
    order = [name for group in GROUPS.values() for name in group]
    if prefix:
        order = [path.removeprefix(f"{prefix} ") for path in EXAMPLES if path.startswith(f"{prefix} ")]
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def grouped(names: list[str]) -> list[tuple[str, list[str]]]:
    """Returns the titles of the groups with the commands *names* in them."""
    found = [(title, [name for name in group if name in names]) for title, group in GROUPS.items()]
    others = [name for name in names if not any(name in group for group in GROUPS.values())]
    return [(title, group) for title, group in [*found, ("Others", others)] if group]


def epilog(path: str) -> str | None:
    """Returns the last lines of the help of the command *path*: its examples."""
    if path not in EXAMPLES:
        return None
    # The first character keeps the help from joining the lines.
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in EXAMPLES[path])])
