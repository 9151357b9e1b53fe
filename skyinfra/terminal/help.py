"""The commands: where each is defined, its first sentence, what it is for, and two examples that end its help."""

from __future__ import annotations

import re
import sys

from skyinfra.console import colours, console

# Groups of commands; those of a subgroup, such as "mig show", stand in the order of the table.
GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "synth", "plan", "deploy", "scale", "upgrade", "move", "keep", "watch", "destroy", "completion"),
    "Run": ("run", "jobs", "put", "get", "exec", "ssh", "port-forward", "open"),
    "Look": ("status", "cost", "top", "logs", "doctor", "dashboard", "manifest"),
    "Plan": ("recommend", "offers", "capacity", "mig", "preflight", "iam", "render"),
}

# The module of skyinfra/cli that defines each command, and the first sentence of its help; in the order of the help.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("init", "Make a project"),
    "synth": ("stacks", "Compile the declared stacks to Terraform in cdktf.out"),
    "plan": ("stacks", "Show what a deploy would change, and what the stack costs"),
    "deploy": ("stacks", "Create or change what is declared, and wait for the nodes"),
    "scale": ("upgrade", "Change the number of nodes of a pool within its declared range, by a deploy of its stack"),
    "upgrade": ("upgrade", "Bring the runner of a fleet to this version of skyinfra"),
    "move": ("upgrade", "Move a pool with its nodes to another stack, or all pools of a stack to its new name"),
    "keep": ("nodes", "Keep a fleet from being idle for a time from now on"),
    "watch": (
        "watch",
        "Bring fleets back that have lost all of their nodes, at their next place, and their jobs with them",
    ),
    "destroy": ("destroy", "Remove everything a stack created, after keeping its jobs' logs"),
    "completion": ("init", "Print the completion of a shell"),
    "run": ("run", "Run a Python script on one slot"),
    "put": ("execute", "Copy a file or a folder to the nodes, below sky.files() of tasks"),
    "get": (
        "execute",
        "Copy a file or a folder from a node: what tasks wrote below sky.files(), or what was put there",
    ),
    "exec": ("execute", "Run a command on a node, the head unless another is named"),
    "ssh": (
        "execute",
        "Open a shell on a node, the head unless another is named: by ssh, or Session Manager where no port is open",
    ),
    "port-forward": (
        "forward",
        "Lead ports of this machine's loopback to ports of a node's, through the head's one port, until interrupted",
    ),
    "open jupyter": (
        "forward",
        "Run Jupyter on a slot, which is its own until this command ends, and open it in the browser of this machine",
    ),
    "status": ("status", "Show fleets, nodes and slots as they are"),
    "cost": ("status", "Show what fleets have cost so far: hours and money by node, submitter and job"),
    "top": ("nodes", "Show what each slot uses, the task on it and what that has used"),
    "logs": ("nodes", "Show logs of the nodes, or what a task printed"),
    "doctor": ("nodes", "Look for what is wrong on the nodes, and say what to do"),
    "dashboard": ("nodes", "Show the fleet in the browser"),
    "manifest": ("status", "Print the manifest of a fleet"),
    "recommend": ("recommend", "Say how much memory a model needs, and which GPUs carry it"),
    "offers": ("offers", "List the machines that carry an accelerator, cheapest first"),
    "capacity": ("offers", "List the capacity blocks of AWS on sale for a pool, buy one, or wait for it"),
    "preflight": ("stacks", "Ask the providers whether this account gets what a stack needs"),
    "iam": ("stacks", "Print the IAM policy that deploying a stack on AWS needs"),
    "render": ("render", "Write what plain Terraform needs: user data and module inputs"),
    "mig show": ("layouts", "Draw a layout: partitions, memory, SMs, free room"),
    "mig check": ("layouts", "Print the placements of a layout, or why it has none"),
    "mig plan": ("layouts", "Show what another layout does to a running fleet"),
    "mig advise": (
        "layouts",
        "Recommend a fixed layout, from the tasks that ran on a fleet: what they used, how long they waited",
    ),
    "mig pack": ("offers", "Find the cheapest machines that hold so many partitions"),
    "mig profiles": ("layouts", "List the profiles of a GPU"),
    "mig layouts": ("layouts", "List the layouts of a GPU beside which nothing more fits"),
    "mig gallery": ("layouts", "Write a page for each GPU model"),
    "mig export": (
        "parted",
        "Print a layout for mig-parted, mig-manager, Slurm or Kubernetes, whose device plugin is that of NVIDIA",
    ),
    "mig import": ("parted", "Print a layout of others as an accelerator string"),
    "jobs list": ("jobs", "List the jobs that the head keeps"),
    "jobs logs": ("jobs", "Print what a job has printed; of a fleet that is gone, what was kept of it"),
    "jobs keep": (
        "jobs",
        "Copy records and logs of jobs to where the state of the stack is, for after the fleet",
    ),
    "jobs resume": ("jobs", "Run the jobs that had not ended when the fleet before did, as they were kept"),
    "jobs cancel": ("jobs", "Take a job back; one that runs is ended on its slot"),
    "jobs fetch": ("execute", "Bring the files that a script wrote, and that `run --detach --fetch` kept"),
    "jobs give": (
        "jobs",
        "Give a job the secrets and webhooks again that it had: a head that starts anew has forgotten them",
    ),
    "jobs result": ("jobs", "Wait for a job and print its result"),
}

EXAMPLES: dict[str, tuple[str, str]] = {
    "init": ("skyinfra init my-project", "skyinfra init my-tour --example tour"),
    "synth": ("skyinfra synth", "skyinfra -C my-project synth --json"),
    "plan": ("skyinfra plan", "skyinfra plan my-stack --detailed-exitcode"),
    "deploy": ("skyinfra deploy", "skyinfra deploy my-stack --auto-approve --json"),
    "scale": ("skyinfra scale my-stack/pool 4", "skyinfra scale my-stack/pool 1 --auto-approve"),
    "upgrade": ("skyinfra upgrade my-stack/pool", "skyinfra upgrade my-stack/pool --drain 60 --auto-approve"),
    "move": ("skyinfra move old-name new-name", "skyinfra move research/train production"),
    "keep": ("skyinfra keep my-stack/pool 2h", "skyinfra keep my-stack/pool 0"),
    "watch": ("skyinfra watch", "skyinfra watch my-stack --lost-after 10m --once --auto-approve"),
    "destroy": ("skyinfra destroy", "skyinfra destroy my-stack --when-idle 30m --auto-approve"),
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
    "status": ("skyinfra status", "skyinfra status my-stack/pool --json"),
    "cost": ("skyinfra cost", "skyinfra cost my-stack/pool --since 7d --json"),
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
    "capacity": ("skyinfra capacity my-stack/gpu --days 2", "skyinfra capacity my-stack/gpu --wait"),
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
    "jobs resume": ("skyinfra jobs resume my-stack/pool", "skyinfra jobs resume my-stack/pool train-20"),
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


def ordered(prefix: str) -> list[str]:
    """Returns the commands of the group *prefix*, empty for the first one, in the order of the tables."""
    if prefix:
        return [path.removeprefix(f"{prefix} ") for path in COMMANDS if path.startswith(f"{prefix} ")]
    return [name for group in GROUPS.values() for name in group]


def epilog(path: str) -> str | None:
    """Returns the last lines of the help of the command *path*: its examples."""
    if path not in EXAMPLES:
        return None
    # The first character keeps the help from joining the lines.
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in EXAMPLES[path])])


# A heading; below one, what a line is about; and what is said beside an option.
_HEADING = re.compile(r"^(?:Usage:|[A-Z]\w*:$|  Examples:$)")
_TERM = re.compile(r"^  \S+(?: \S+)*")
_EXAMPLE = re.compile(r"^ {4}skyinfra .*")
_BESIDE = re.compile(r"\[(?:default:\s[^\]]+|required)\]")


def dressed(text: str) -> str:
    """Prints the help *text* of a command where its stream has colours. Returns what is left to print."""
    if colours(sys.stdout) is None:
        return text
    from rich.text import Text

    shown, listed = Text(), False
    for line in text.splitlines():
        made = Text(line)
        heading = made.highlight_regex(_HEADING, "bold")
        if not heading:
            made.highlight_regex(_EXAMPLE, "cyan")
            if listed:
                made.highlight_regex(_TERM, "cyan")
        listed = bool(line) and (listed or bool(heading)) and not line.startswith("Usage:")
        shown.append(made).append("\n")
    shown.rstrip()
    shown.highlight_regex(_BESIDE, "dim")  # it may go on in the next line
    console().print(shown, soft_wrap=True, end="")
    return ""
