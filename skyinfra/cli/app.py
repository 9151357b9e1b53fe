"""The commands. Each imports its modules when it runs, so that ``skyinfra --help`` stays quick."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer

from skyinfra.cli import execute, forward, nodes, recommend
from skyinfra.cli.jobs import app as jobs_app
from skyinfra.cli.mig import app as mig_app
from skyinfra.cli.options import (
    Commands,
    Fleet,
    InRegion,
    Json,
    Notify,
    OfProviders,
    ScriptCommand,
    Shell,
    StackName,
    Wide,
    complete_accelerators,
    complete_fleets,
    errors_name_options,
    of_fleet,
)
from skyinfra.errors import SkyinfraError

app = typer.Typer(
    cls=Commands,
    help="Infrastructure as code for accelerator fleets.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(mig_app, name="mig")
app.add_typer(jobs_app, name="jobs")
nodes.add_commands(app)
execute.add_commands(app)
recommend.add_commands(app)
forward.add_commands(app)

Yes = Annotated[bool, typer.Option("--auto-approve", help="Go on without asking.")]


def _work_in(folder: Path | None) -> Path | None:
    if folder is not None:
        try:
            os.chdir(folder)
        except OSError as error:
            raise typer.BadParameter(f"{folder}: {error.strerror}") from None
    return folder


def _version(value: bool) -> None:
    if value:
        import skyinfra

        typer.echo(f"skyinfra {skyinfra.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-C", metavar="DIR", callback=_work_in, help="Work as if it were started in this folder."),
    ] = None,
) -> None:
    """Infrastructure as code for accelerator fleets.

    Without a command: where the project of this folder stands, and what to do next.
    """
    if context.invoked_subcommand is None:
        from skyinfra.terminal.standing import show_standing

        show_standing()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the new project.")] = Path(),
    stack: Annotated[str, typer.Option(help="Name of its stack.")] = "quickstart",
    library: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cdktf or cdktn; the one that is installed, and cdktn where both are."),
    ] = None,
    example: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="tour, jobs, gang, notebook, or hcl: without Python, in Terraform's own language."),
    ] = None,
) -> None:
    """Make a project. It declares a pool of simulated nodes, and has a script and a notebook that use them."""
    from skyinfra.cli.init import begin

    begin(folder, stack=stack, library=library, example=example)


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the completion of a shell. --install-completion installs it; it knows stacks, pools, nodes and jobs."""
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="skyinfra", complete_var="_SKYINFRA_COMPLETE", shell=shell.value))


@app.command()
def synth(as_json: Json = False, wide: Wide = False) -> None:
    """Compile the declared stacks to Terraform in cdktf.out."""
    from skyinfra.cli.stacks import show_choices
    from skyinfra.terminal.progress import synthesized
    from skyinfra.terraform.project import Project

    show_choices(synthesized(Project.find()), as_json=as_json)


@app.command()
def plan(
    stack: StackName = None,
    as_json: Json = False,
    wide: Wide = False,
    detailed: Annotated[
        bool, typer.Option("--detailed-exitcode", help="As Terraform has it. 0: no changes; 2: changes; 1: an error.")
    ] = False,
) -> None:
    """Show what a deploy would change, and what the stack costs."""
    from skyinfra.cli.stacks import plan_stack

    try:
        made = plan_stack(stack, as_json=as_json)
    except SkyinfraError as error:
        if detailed:
            error.exit_code = 1
        raise
    if detailed and not made.empty:
        raise typer.Exit(2)


@app.command()
def deploy(
    stack: StackName = None,
    auto_approve: Yes = False,
    replace: Annotated[Optional[list[str]], typer.Option(help="Address of a resource to make anew.")] = None,  # noqa: UP045
    wait: Annotated[bool, typer.Option(help="Until cloud nodes have booted and their slots are ready.")] = True,
    patience: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="For how long to wait.")] = 900,
    as_json: Annotated[bool, typer.Option("--json", help="Print the events as lines of JSON.")] = False,
    wide: Wide = False,
) -> None:
    """Create or change what is declared, and wait for the nodes."""
    from skyinfra.cli.stacks import deploy_stack

    waits = patience if wait else None
    if not deploy_stack(stack, auto_approve=auto_approve, replace=replace or (), patience=waits, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def upgrade(
    fleet: Fleet,
    auto_approve: Yes = False,
    drain: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="For how long running tasks may go on.")] = 600,
) -> None:
    """Bring the runner of a fleet to this version of skyinfra. Jobs wait and go on; running tasks end first."""
    from skyinfra.cli.upgrade import upgrade_fleet

    if not upgrade_fleet(fleet, auto_approve=auto_approve, drain_s=drain):
        raise typer.Exit(1)


@app.command()
def destroy(stack: StackName = None, auto_approve: Yes = False) -> None:
    """Remove everything a stack created, after keeping its jobs' logs. It need not be declared any more."""
    from skyinfra.cli.stacks import destroy_stack

    if not destroy_stack(stack, auto_approve=auto_approve):
        raise typer.Exit(1)


@app.command()
def status(stack: StackName = None, as_json: Json = False, wide: Wide = False) -> None:
    """Show fleets, nodes and slots as they are."""
    from skyinfra.cli.status import show_status

    if not show_status(stack, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def manifest(
    fleet: Fleet,
    show_secret: Annotated[
        bool, typer.Option("--show-secret", help="Print it also on a terminal, with the fleet secret.")
    ] = False,
) -> None:
    """Print the manifest of a fleet. Others connect with it: `skyinfra run fleet.json SCRIPT`.

    It holds the fleet secret, which gives code execution on the nodes. A file that it is written to is made readable
    by you alone.
    """
    from skyinfra.cli.status import print_manifest

    print_manifest(fleet, show_secret=show_secret)


@app.command()
def render(
    project: Annotated[Path, typer.Argument(help="The project's folder.")] = Path(),
    stack: Annotated[Optional[str], typer.Option(help="Only of this stack.")] = None,  # noqa: UP045
    out: Annotated[Optional[Path], typer.Option(metavar="DIR", help="Write the files there.")] = None,  # noqa: UP045
    runner: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Write nothing but the runner of this skyinfra, a wheel, and say its hash."),
    ] = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="Show what takes the room in the user data.")] = False,
    form: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--format",
            help="Of the user data: cloud-config, script or container, whatever the provider takes. sbatch or "
            "kubernetes: the pools as jobs of Slurm, or as pods.",
        ),
    ] = None,
    module: Annotated[
        bool,
        typer.Option("--module", help="Write a folder for each pool, with its module, for `terraform apply`."),
    ] = False,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Write what plain Terraform needs: user data and module inputs. Or a pool as a job of Slurm, or as pods."""
    from skyinfra.cli.render import show_render, show_runner

    if runner is not None:
        show_runner(runner, as_json=as_json)
        return
    show_render(project, stack=stack, out=out, sizes=sizes, form=form, module=module, as_json=as_json)


@app.command(
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False},
)
def run(
    fleet: Annotated[str, typer.Argument(metavar="STACK/POOL", help="Where to run.", autocompletion=complete_fleets)],
    script: Annotated[Path, typer.Argument(help="A Python script.")],
    arguments: Annotated[Optional[list[str]], typer.Argument(help="Its arguments.")] = None,  # noqa: UP045
    torchrun: Annotated[bool, typer.Option("--torchrun", help="As ranks of torch.distributed, on many slots.")] = False,
    nodes: Annotated[Optional[int], typer.Option(metavar="N", help="On how many nodes; on all, if not given.")] = None,  # noqa: UP045
    per_node: Annotated[Optional[int], typer.Option(metavar="N", help="Ranks on each node; one on each slot.")] = None,  # noqa: UP045
    max_restarts: Annotated[
        int, typer.Option(metavar="N", help="How often all ranks start again when one failed.")
    ] = 0,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it with the fleet as a job; see `jobs`.")] = False,
    name: Annotated[Optional[str], typer.Option(metavar="NAME", help="In lists, and of the job.")] = None,  # noqa: UP045
    priority: Annotated[int, typer.Option(metavar="N", help="Of the job: higher ones run first.")] = 0,
    replace: Annotated[bool, typer.Option("--replace", help="Forget an ended job of that name.")] = False,
    include: Annotated[Optional[list[Path]], typer.Option(help="A file or folder that goes along.")] = None,  # noqa: UP045
    alone: Annotated[bool, typer.Option("--alone", help="Leave the other files of its folder here.")] = False,
    workdir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="The folder that goes along instead; it runs in a copy of it."),
    ] = None,
    env: Annotated[Optional[list[str]], typer.Option(metavar="NAME[=VALUE]", help="A variable for it.")] = None,  # noqa: UP045
    env_file: Annotated[Optional[Path], typer.Option(help="A file of such lines.")] = None,  # noqa: UP045
    node: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NODE", help="On a slot of this node.", autocompletion=of_fleet("nodes")),
    ] = None,
    profile: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="PROFILE", help="On a slot with this profile.", autocompletion=of_fleet("profiles")),
    ] = None,
    secret: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="NAME[=@FILE]", help="A secret for it: from this shell, the keyring, or FILE."),
    ] = None,
    slots: Annotated[int, typer.Option(metavar="N", help="One process that sees N whole GPUs of one node.")] = 1,
    notify: Notify = None,
    fetch: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="PATTERN", help="Files that it writes, as in a .gitignore: they are brought here."),
    ] = None,
    fetch_to: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Where to, instead of to the script's folder."),
    ] = None,
) -> None:
    """Run a Python script on one slot. With --torchrun as ranks on many slots, all or none.

    The files of its folder go with it, or of the folder above its package, without what Git ignores and what
    .skyinfraignore lists. Its output is streamed and its exit code is ours. What stands behind the script is handed to
    it.
    """
    from skyinfra.cli.run import Goes, check_options, check_single, run_gang, run_on_slot, telling

    check_options(torchrun=torchrun, nodes=nodes, per_node=per_node, max_restarts=max_restarts)
    check_single(slots, name, torchrun=torchrun, detach=detach)
    given = arguments or []
    given = given[1:] if given[:1] == ["--"] else given
    goes = Goes(
        alone,
        tuple(include or ()),
        tuple(env or ()),
        env_file,
        node,
        profile,
        tuple(secret or ()),
        workdir=workdir,
        slots=slots,
        name=name,
        notify=tuple(notify or ()),
        fetch=tuple(fetch or ()),
        fetch_to=fetch_to,
    )
    if detach and torchrun:
        raise typer.BadParameter("--torchrun runs many ranks, and --detach leaves one script with the fleet")
    if detach:
        from skyinfra.cli.jobs import submit_script

        submit_script(fleet, script, given, goes, priority=priority, replace=replace)
        return
    if priority != 0 or replace:
        raise typer.BadParameter("--priority and --replace are those of a job: give --detach as well")
    with telling(goes.targets(), fleet, name or script.name) as ended:
        if not torchrun:
            ended.code = run_on_slot(fleet, script, given, goes)
        else:
            ranks = {"nodes": nodes, "per_node": per_node}
            ended.code = run_gang(fleet, script, given, goes, **ranks, max_restarts=max_restarts)
    raise typer.Exit(ended.code)


@app.command()
def offers(
    accelerator: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="ACCELERATOR",
            help='Such as "H100:8", "A100-40GB" or "H100:8,A100:8", most wanted first.',
            autocompletion=complete_accelerators,
        ),
    ] = None,
    provider: OfProviders = None,
    region: InRegion = None,
    spot: Annotated[bool, typer.Option("--spot", help="Sort by, and limit, the spot price.")] = False,
    max_price: Annotated[Optional[float], typer.Option(metavar="USD", help="Per hour and machine, at most.")] = None,  # noqa: UP045
    count: Annotated[Optional[int], typer.Option(help="How many accelerators, exactly.")] = None,  # noqa: UP045
    memory: Annotated[Optional[float], typer.Option(metavar="GB", help="Of one accelerator, at least.")] = None,  # noqa: UP045
    fraction: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(metavar="SHARE", help="The share of an accelerator that is enough, such as 0.25."),
    ] = None,
    vcpus: Annotated[Optional[int], typer.Option(metavar="N", help="Of the machine, at least.")] = None,  # noqa: UP045
    ram: Annotated[Optional[float], typer.Option(metavar="GIB", help="Of the machine, at least.")] = None,  # noqa: UP045
    legacy: Annotated[bool, typer.Option("--legacy", help="Also what is no longer sold to everybody.")] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Ask the providers: those that answer without a key, or to one in the environment."
        ),
    ] = False,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """List the machines that carry an accelerator, cheapest first. With dated prices; --live asks for those of now."""
    from skyinfra.cli.offers import show_offers
    from skyinfra.offers import ask

    with errors_name_options():
        query = ask(
            accelerator.split(",") if accelerator and "," in accelerator else accelerator,
            provider=provider,
            region=region,
            spot=spot,
            count=count,
            memory_gb=memory,
            fraction=fraction,
            vcpus=vcpus,
            ram_gib=ram,
            max_price=max_price,
            legacy=legacy,
        )
    show_offers(query, as_json=as_json, live=live)


@app.command()
def iam(stack: StackName = None) -> None:
    """Print the IAM policy that deploying a stack on AWS needs. As JSON; planning and destroying need no more."""
    from skyinfra.cli.stacks import synthesize
    from skyinfra.preflight.permissions import policy
    from skyinfra.terminal.tables import print_json

    print_json(policy(synthesize(stack)))


@app.command()
def preflight(stack: StackName = None, as_json: Json = False, wide: Wide = False) -> None:
    """Ask the providers whether this account gets what a stack needs. Creates nothing."""
    from skyinfra.cli.stacks import check, synthesize

    if check(synthesize(stack), as_json=as_json).failed:
        raise typer.Exit(1)
